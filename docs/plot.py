"""Plot accuracy and length of GRPO runs: `python docs/plot.py RUN_DIR ... --out docs/grpo.svg`."""

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


def main(args: Args) -> None:
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plainrlhf"})
    panels = {
        "reward/mean": "fraction of right answers in the rollout",
        "completions/length_mean": "tokens a completion",
        "policy/entropy": "entropy, nats a token",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3), layout="constrained")
    for run in args.runs:
        seed = json.loads((run / "args.json").read_text())["seed"]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
        for axis, name in zip(axes, panels, strict=True):
            axis.plot(
                [r["step"] for r in rows], [r[name] for r in rows], lw=1, label=f"seed {seed}"
            )
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        axis.set(
            title=title, xlabel="rollout", ylim=(0, 1.02) if name == "reward/mean" else (0, None)
        )
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
