"""How all figures of the pages look: small SVGs, to be read on white and on black."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot as plt

COLOURS = ("#3f8fe0", "#e0752d", "#3fa66b", "#b06fd0", "#d04f5f", "#a08a3a")
GREY = "#808890"
PARTS = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color"
FONTS = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial"], "font.size": 9}
matplotlib.rcParams.update(FONTS | dict.fromkeys(PARTS.split(), GREY) | {"svg.hashsalt": "plain"})
matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLOURS)


def panels(columns: int, width: float = 8, height: float = 2.8, **options: Any) -> tuple:
    """A figure and its axes, always a list."""
    options = dict(figsize=(width, height), layout="constrained", squeeze=False) | options
    figure, axes = plt.subplots(1, columns, **options)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def band(axis: Any, runs: Sequence[Sequence[tuple]], label: str, colour: str) -> None:
    """The mean over runs of points (x, y), and a band from the lowest to the highest y."""
    runs = [[point for point in run if None not in point] for run in runs]
    steps = [*zip(*runs, strict=True)]
    x = [mean(point[0] for point in points) for points in steps]
    y = [[point[1] for point in points] for points in steps]
    axis.fill_between(x, [*map(min, y)], [*map(max, y)], color=colour, alpha=0.25, lw=0)
    axis.plot(x, [*map(mean, y)], color=colour, label=label)


def save(figure: Any, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None, "Creator": None}, transparent=True)
    plt.close(figure)
    # A tenth of a point is exact enough for a path.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), out.read_text())
    out.write_text(re.sub(r"[ \t]+\n", "\n", text))
