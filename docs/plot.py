"""Plot metrics of runs over their steps: `python docs/plot.py RUN_DIR ... --out docs/grpo.svg`."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro
from matplotlib import pyplot as plt


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""
    out: Path = Path("docs/grpo.svg")
    """Picture to write."""
    metrics: tuple[str, ...] = ("reward/mean", "completions/length_mean", "policy/entropy")
    """One panel each."""
    label: str = "seed"
    """Flag whose value tells the runs apart."""


def main(args: Args) -> None:
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plainrlhf"})
    size = (11 / 3 * len(args.metrics), 3)
    figure, axes = plt.subplots(1, len(args.metrics), figsize=size, layout="constrained")
    for number, run in enumerate(args.runs):
        value = json.loads((run / "args.json").read_text())[args.label]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for axis, name in zip(axes, args.metrics, strict=True):
            points = [(row["step"], row[name]) for row in rows if name in row]
            style = {"lw": 1, "color": f"C{number}", "label": f"{args.label} {value}"}
            axis.plot(*zip(*points, strict=True), **style)
    for axis, name in zip(axes, args.metrics, strict=True):
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
