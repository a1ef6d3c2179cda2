"""The variance of REINFORCE's gradient under each baseline, along a training run:
`python docs/experiments/variance.py` prints the table of docs/reinforce.md and draws its figure.

The policy of a moment samples many rollouts; each gives one gradient per baseline. With g the
gradient of a rollout, the noise is E |g - E g|^2 and the signal |E g|^2, both estimated without
bias. Their ratio says how many rollouts must be averaged until the signal stands out.
"""

import contextlib
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import tyro
from matplotlib import pyplot as plt
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


@dataclass
class Args:
    repeats: int = 64  # rollouts that are sampled from each policy
    seed: int = 1  # of training and sampling
    moments: tuple[int, ...] = (0, 5, 10, 20, 40, 60)  # rollouts after which to measure
    out: Path = Path("docs/reinforce.svg")  # picture to write


def measure(folder: str, args: Args) -> tuple[float, dict[str, float], dict[str, float]]:
    """Mean reward, and of each case the noise and the signal."""
    flags, rng = reinforce.Args(), torch.Generator().manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop_ids = find_stop_ids(folder, tokenizer)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with contextlib.redirect_stdout(io.StringIO()):
        data = reinforce.load_rows(flags, "train", tokenizer)
    mean_reward, sums, squares = 0.0, {}, dict.fromkeys(CASES, 0.0)
    for _ in range(args.repeats):
        picked = torch.randint(len(data), [flags.prompts_per_rollout], generator=rng)
        rows = [data[i] for i in picked for _ in range(flags.group_size)]
        prompts = [row["ids"] for row in rows]
        sampled = generate(policy, prompts, flags.max_new_tokens, 1.0, stop_ids, rng)
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        scored = zip(texts, rows, strict=True)
        rewards = torch.tensor([reinforce.reward(text, row["answer"]) for text, row in scored])
        mean_reward += rewards.mean().item() / args.repeats
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
        of_mean = (sums[case] / args.repeats).square().sum().item()
        noise[case] = (squares[case] - args.repeats * of_mean) / (args.repeats - 1)
        signal[case] = of_mean - noise[case] / args.repeats
    return mean_reward, noise, signal


def main(args: Args) -> None:
    rewards, noises = [], []
    print("| rollouts | mean reward |", *(f"{case}: noise / signal |" for case in CASES))
    print("|" + "---|" * (2 + len(CASES)))
    with tempfile.TemporaryDirectory() as folder:
        for moment in args.moments:
            model = reinforce.Args.model
            if moment:
                flags = dict(total_rollouts=moment, eval_split="test[:8]", eval_every=1000)
                with contextlib.redirect_stdout(io.StringIO()):
                    run = reinforce.main(reinforce.Args(seed=args.seed, output_dir=folder, **flags))
                model = str(run / "model")
            reward, noise, signal = measure(model, args)
            rewards.append(reward)
            noises.append(noise)
            found = [f"{noise[case]:.2f} / {signal[case]:.2f} |" for case in CASES]
            print(f"| {moment} | {reward:.2f} |", *found, flush=True)
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plainrlhf"})
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for case in CASES:
        axis.plot(rewards, [noise[case] for noise in noises], marker="o", ms=4, label=case)
    axis.set(xlabel="mean reward of the policy", ylabel="variance of the gradient", yscale="log")
    axis.legend(title="baseline", fontsize=8)
    axis.grid(alpha=0.3)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
