"""What GDPO changes: tiny/arithmetic with two rewards, right answers and a rule on another scale.

    python -m pip install matplotlib
    python docs/experiments/gdpo.py

Prints the advantages of pairs of completions, where rewards are summed first and where each is
normalised first; trains in both ways; prints a column a seed and draws docs/gdpo.svg. 38 runs of
about 30 seconds. Finished runs in the folder --runs are read, not repeated.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib
import torch
import tyro
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo import group_advantages

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"sum_then_normalize": "GRPO", "normalize_then_sum": "GDPO"}
SEEDS = (1, 2, 3, 4, 5)
# A rule beside `last_number`, or none, and the weight of a right answer; that of the rule is 1.
SETTINGS = [
    *[("brevity", 4, SEEDS), ("working", 1, SEEDS), (None, 1, SEEDS)],
    *[("brevity", weight, (1,)) for weight in (1, 2, 8, 16)],
]
# By how much the first of two completions has more of each reward: right answers and brevity.
PAIRS = {
    "right, as long": (1.0, 0.0),
    "as right, 9 characters shorter": (0.0, 9.0),
    "right, 9 characters shorter": (1.0, 9.0),
    "right, 9 characters longer": (1.0, -9.0),
}


@dataclass
class Args:
    runs: Path = Path("runs/gdpo")  # folder of the runs
    out: Path = Path("docs/gdpo.svg")  # picture to write


def combinations(weights: tuple[float, float]) -> None:
    """GDPO's before it is normalised over the batch, which divides all by one number."""
    print(f"advantage of the first of two completions, weights {weights}: GRPO, GDPO")
    for name, pair in PAIRS.items():
        rewards = [torch.tensor([more, 0.0]) for more in pair]
        terms = [weight * values for weight, values in zip(weights, rewards, strict=True)]
        each = [w * group_advantages(values, 2) for w, values in zip(weights, rewards, strict=True)]
        grpo, gdpo = group_advantages(sum(terms), 2)[0], sum(each)[0]
        print(f"    {name:<32}{grpo:+.2f}  {gdpo:+.2f}")


def train(args: Args, rule: str | None, weight: float, way: str, seed: int) -> list[dict]:
    """The metrics of a run, made where there is none yet."""
    name = f"{rule or 'alone'}-{weight}-{way}"
    if not [*args.runs.glob(f"{name}__{seed}__*/model")]:
        command = [sys.executable, "grpo.py", "--seed", seed, "--exp-name", name]
        command += ["--output-dir", args.runs.resolve(), "--multi-objective-aggregation", way]
        command += ["--eval-reward-fn", "last_number", "--reward-fn", "last_number"]
        if rule:
            command += [f"docs/experiments/rules.py:{rule}", "--reward-weights", weight, 1]
        subprocess.run([*map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    run = min(args.runs.glob(f"{name}__{seed}__*/model")).parent
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(curves: dict[str, list[list[dict]]], titles: dict[str, str], out: Path) -> None:
    """A panel a reward: the mean of the seeds, and a band from the lowest to the highest."""
    matplotlib.use("Agg")  # no window
    parts = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color"
    colours = dict.fromkeys(parts.split(), "#808890")  # can be read on white and on black
    fonts = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial"]}
    matplotlib.rcParams.update(fonts | colours | {"svg.hashsalt": "plainrlhf"})
    figure, axes = plt.subplots(1, len(titles), figsize=(8, 2.8), layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for colour, (way, runs) in zip(("#e0752d", "#3f8fe0"), curves.items(), strict=True):
            values = [[row[f"reward/{name}"] for row in rows if row["step"] > 0] for rows in runs]
            seeds = [*zip(*values, strict=True)]  # a rollout's values
            steps = range(1, len(seeds) + 1)
            low, high = map(min, seeds), map(max, seeds)
            axis.fill_between(steps, [*low], [*high], color=colour, alpha=0.3, lw=0)
            axis.plot(steps, [*map(mean, seeds)], color=colour, label=f"{WAYS[way]}: {way}")
        axis.set(title=title, xlabel="rollout")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean of the rollout")
    axes[0].legend(fontsize=8, framealpha=0, loc="center right")
    figure.savefig(out, metadata={"Date": None, "Creator": None}, transparent=True)
    if out.suffix == ".svg":  # a tenth of a point is exact enough, in half the size
        out.write_text(re.sub(r"(\.\d)\d+", r"\1", out.read_text()))


def main(args: Args) -> None:
    combinations((4.0, 1.0))
    print("rewards in the last five rollouts, right answers in the third and, at the end, held-out")
    for rule, weight, seeds in SETTINGS:
        curves = {}
        for way in WAYS:
            curves[way] = [train(args, rule, weight, way, seed) for seed in seeds]
            print(f"{rule or 'no second rule'}, weight of a right answer {weight}, {WAYS[way]}")
            for name in ["last_number"] + [rule] * bool(rule):
                ends = [mean(row[f"reward/{name}"] for row in rows[-5:]) for rows in curves[way]]
                print(f"    {name:<16}", *(f"{end:8.3f}" for end in ends))
            for name, row, key in (
                ("third rollout", 3, "reward/last_number"),
                ("held-out", -1, "eval/accuracy"),
            ):
                print(f"    {name:<16}", *(f"{rows[row][key]:8.3f}" for rows in curves[way]))
        if (rule, weight) == ("brevity", 4):
            titles = {"last_number": "right answers", rule: "brevity: minus the characters"}
            draw(curves, titles, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
