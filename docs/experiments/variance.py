"""The variance of REINFORCE's gradient under each baseline, along training runs: two tables and a
figure of docs/reinforce.md (`python docs/experiments/figures.py variance`, 20 minutes).

The policy of a moment samples many rollouts; each gives one gradient per baseline. With g the
gradient of a rollout, the noise is E |g - E g|^2 and the signal |E g|^2, both estimated without
bias. Their ratio says how many rollouts must be averaged until the signal stands out.
"""

import contextlib
import io
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # of the root
import reinforce
from common.generation import find_stop_ids, generate
from common.logprobs import completion_logprobs
from runs import SEEDS, Run

# What is added to each reward, 0 or 1, and the baseline.
CASES = {
    "none": (0, "none"),
    "none, rewards 1 and 2": (1, "none"),
    "batch mean": (0, "batch_mean"),
    "leave one out": (0, "leave_one_out"),
}
REPEATS = 64  # rollouts that are sampled from each policy
MOMENTS = (0, 5, 10, 20, 40, 60)  # rollouts after which to measure


def measure(folder: str, seed: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Mean reward, and of each case the noise and the signal."""
    flags, rng = reinforce.Args(), torch.Generator().manual_seed(seed)
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


def train(folder: str, seed: int, **flags) -> Path:
    with contextlib.redirect_stdout(io.StringIO()):
        return reinforce.main(reinforce.Args(seed=seed, output_dir=folder, **flags))


def along_training(seed: int) -> dict:
    """What is measured with one seed; of each case a number for each of MOMENTS."""
    torch.set_num_threads(1)
    made = dict(rewards=[], noise={case: [] for case in CASES}, signal={case: [] for case in CASES})
    with tempfile.TemporaryDirectory() as folder:
        for moment in MOMENTS:
            model = reinforce.Args.model
            if moment:
                few = dict(total_rollouts=moment, eval_split="test[:8]", eval_every=1000)
                model = str(train(folder, seed, **few) / "model")
            reward, *found = measure(model, seed)
            made["rewards"].append(reward)
            for name, values in zip(("noise", "signal"), found, strict=True):
                for case in CASES:
                    made[name][case].append(values[case])
        rule = reinforce.reward
        with patch.object(reinforce, "reward", lambda text, answer: rule(text, answer) + 1):
            run = Run(train(folder, seed, baseline="none"))
        made["accuracy, rewards 1 and 2"] = run.evaluations[-1]["eval/reward"] - 1
    return made


def results() -> dict:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return report(list(pool.map(along_training, SEEDS)))


def report(made: list[dict]) -> dict:
    """Medians, because a single improbable token can make one variance a hundred times as large."""
    from drawing import COLOURS, panels, save

    noises = {
        case: [sorted(at) for at in zip(*(of["noise"][case] for of in made), strict=True)]
        for case in CASES
    }
    figure, (axis,) = panels(1, width=5, height=3)
    for colour, (case, values) in zip(COLOURS, noises.items(), strict=False):
        lowest, *_, highest = zip(*values, strict=True)
        axis.fill_between(MOMENTS, lowest, highest, color=colour, alpha=0.15, lw=0)
        axis.plot(MOMENTS, [*map(median, values)], color=colour, label=case)
    axis.set(xlabel="rollouts trained", ylabel="variance of the gradient", yscale="log")
    axis.legend(title="baseline", fontsize=8, framealpha=0)
    save(figure, Path("docs/reinforce.svg"))
    rows = []
    for i, moment in enumerate(MOMENTS):
        cells = [(median(at[i]), at[i][0], at[i][-1]) for at in noises.values()]
        signals = [median(of["signal"][case][i] for of in made) for case in CASES]
        reward = mean(of["rewards"][i] for of in made)
        told = ["{:.2f} ({:.2f} to {:.2f})".format(*cell) for cell in cells]
        told.append(f"{min(signals):.2f} to {max(signals):.2f}")
        rows.append([str(moment), f"{reward:.2f}", *told])
    columns = ["rollouts", "mean reward", *CASES, "squared mean"]
    shifted = [of["accuracy, rewards 1 and 2"] for of in made]
    tables = {
        "variance": dict(columns=columns, rows=rows),
        "rewards 1 and 2": dict(
            columns=["seed", *map(str, SEEDS)],
            rows=[["accuracy after 60", *(f"{value:.3f}" for value in shifted)]],
        ),
    }
    return dict(tables=tables, numbers=dict(zip(map(str, SEEDS), made, strict=True)))
