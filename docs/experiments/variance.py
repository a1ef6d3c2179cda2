"""The variance of REINFORCE's gradient under each baseline, along a training run: a table and a
figure of docs/reinforce.md (`python docs/experiments/figures.py variance`).

The policy of a moment samples many rollouts; each gives one gradient per baseline. With g the
gradient of a rollout, the noise is E |g - E g|^2 and the signal |E g|^2, both estimated without
bias. Their ratio says how many rollouts must be averaged until the signal stands out.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # of the root
import reinforce
from common.generation import find_stop_ids, generate
from common.logprobs import completion_logprobs

# What is added to each reward, 0 or 1, and the baseline.
CASES = {
    "none": (0, "none"),
    "none, rewards 1 and 2": (1, "none"),
    "batch mean": (0, "batch_mean"),
    "leave one out": (0, "leave_one_out"),
}
REPEATS = 64  # rollouts that are sampled from each policy
SEED = 1  # of training and sampling
MOMENTS = (0, 5, 10, 20, 40, 60)  # rollouts after which to measure


def measure(folder: str) -> tuple[float, dict[str, float], dict[str, float]]:
    """Mean reward, and of each case the noise and the signal."""
    flags, rng = reinforce.Args(), torch.Generator().manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop_ids = find_stop_ids(folder, tokenizer)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with contextlib.redirect_stdout(io.StringIO()):
        data = reinforce.load_rows(flags, "train", tokenizer)
    mean_reward, sums, squares = 0.0, {}, dict.fromkeys(CASES, 0.0)
    for _ in range(REPEATS):
        picked = torch.randint(len(data), [flags.prompts_per_rollout], generator=rng)
        rows = [data[i] for i in picked for _ in range(flags.group_size)]
        prompts = [row["ids"] for row in rows]
        sampled = generate(policy, prompts, flags.max_new_tokens, 1.0, stop_ids, rng)
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        scored = zip(texts, rows, strict=True)
        rewards = torch.tensor([reinforce.reward(text, row["answer"]) for text, row in scored])
        mean_reward += rewards.mean().item() / REPEATS
        pairs = list(zip(prompts, sampled, strict=True))
        logprobs = completion_logprobs(policy, pairs, range(len(pairs)))
        for case, (shift, baseline) in CASES.items():
            advantages = reinforce.baseline_advantages(rewards + shift, flags.group_size, baseline)
            loss = reinforce.policy_gradient_loss(logprobs, advantages, len(pairs))
            grads = torch.autograd.grad(loss, [*policy.parameters()], retain_graph=True)
            grad = torch.cat([part.flatten() for part in grads]).double()
            sums[case] = sums.get(case, 0.0) + grad
            squares[case] += grad.square().sum().item()
    noise, signal = {}, {}
    for case in CASES:
        of_mean = (sums[case] / REPEATS).square().sum().item()
        noise[case] = (squares[case] - REPEATS * of_mean) / (REPEATS - 1)
        signal[case] = of_mean - noise[case] / REPEATS
    return mean_reward, noise, signal


def results() -> dict:
    from drawing import panels, save

    torch.set_num_threads(1)
    rewards, noises, signals, rows = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for moment in MOMENTS:
            model = reinforce.Args.model
            if moment:
                flags = dict(total_rollouts=moment, eval_split="test[:8]", eval_every=1000)
                with contextlib.redirect_stdout(io.StringIO()):
                    run = reinforce.main(reinforce.Args(seed=SEED, output_dir=folder, **flags))
                model = str(run / "model")
            reward, noise, signal = measure(model)
            for kept, value in ((rewards, reward), (noises, noise), (signals, signal)):
                kept.append(value)
            found = [f"{noise[case]:.2f} / {signal[case]:.2f}" for case in CASES]
            rows.append([str(moment), f"{reward:.2f}", *found])
    figure, (axis,) = panels(1, width=5, height=3)
    for case in CASES:
        axis.plot(rewards, [noise[case] for noise in noises], marker="o", ms=4, label=case)
    axis.set(xlabel="mean reward of the policy", ylabel="variance of the gradient", yscale="log")
    axis.legend(title="baseline", fontsize=8, framealpha=0)
    save(figure, Path("docs/reinforce.svg"))
    table = dict(columns=["rollouts", "mean reward", *CASES], rows=rows)
    numbers = dict(moments=MOMENTS, rewards=rewards, noises=noises, signals=signals)
    return dict(tables={"variance": table}, numbers=numbers)
