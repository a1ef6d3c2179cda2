"""PPO against a learned reward, with and without a KL: learned and gold reward against the KL.

    python -m pip install matplotlib
    python docs/experiments/reward_hacking.py        # 15 runs of half a minute

Draws docs/reward_hacking.svg, and prints the rewards at the end of each run and one review that it
wrote. Runs that --runs holds already are read, not repeated.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib
import tyro
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
# With 0 no reference is loaded and no KL measured; 1e-9 takes nothing that counts off a reward.
BETAS, SEEDS = (1e-9, 0.05, 0.2), (1, 2, 3, 4, 5)


@dataclass
class Args:
    runs: Path = Path("runs/reward_hacking")  # folder of the runs
    out: Path = Path("docs/reward_hacking.svg")  # picture to write


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def find_runs(folder: Path) -> dict[tuple[float, int], Path]:
    """Whole runs by beta and seed."""
    found = {}
    for path in folder.glob("*/model"):
        flags = json.loads((path.parent / "args.json").read_text())
        found[flags["beta"], flags["seed"]] = path.parent
    return found


def main(args: Args) -> None:
    for beta in BETAS:
        for seed in SEEDS:
            if (beta, seed) not in find_runs(args.runs):
                flags = f"--beta {beta} --seed {seed} --eval-every 2 --output-dir {args.runs}"
                command = [sys.executable, "ppo_rlhf.py", *flags.split()]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = find_runs(args.runs)
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plainrlhf"})
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharex=True)
    metrics = {"reward/mean": "learned reward", "eval/reward": "gold reward, held out"}
    headings = ["beta", "seed", "learned reward", "gold reward", "KL", "one of its reviews"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for color, beta in zip(("C3", "C1", "C0"), BETAS, strict=True):
        runs = [read(found[beta, seed], "metrics.jsonl")[1:] for seed in SEEDS]
        runs = [[row for row in rows if "eval/reward" in row] for rows in runs]
        for axis, metric in zip(axes, metrics, strict=True):
            for rows in runs:
                points = [(row["objective/kl"], row[metric]) for row in rows]
                axis.plot(*zip(*points, strict=True), color=color, lw=0.6, alpha=0.5)
            steps = zip(*runs, strict=True)  # the mean of both axes over the seeds
            points = [
                [mean(row[m] for row in rows) for m in ("objective/kl", metric)] for rows in steps
            ]
            axis.plot(
                *zip(*points, strict=True), color=color, lw=2, label=f"beta {round(beta, 3):g}"
            )
        for seed, rows in zip(SEEDS, runs, strict=True):
            review = read(found[beta, seed], "samples.jsonl")[-1]["completion"]
            numbers = (rows[-1][name] for name in (*metrics, "objective/kl"))
            columns = " | ".join(f"{number:.2f}" for number in numbers)
            print(f"| {round(beta, 3):g} | {seed} | {columns} | `{review}` |")
    for axis, title in zip(axes, metrics.values(), strict=True):
        axis.set(title=title, xlabel="KL to the starting policy, nats per completion")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
