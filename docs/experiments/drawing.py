"""How all figures of the pages look: small SVGs, to be read on white and on black."""

import re
from collections.abc import Sequence
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot as plt
from paths import FIGURES

COLOURS = ("#3f8fe0", "#e0752d", "#3fa66b", "#b06fd0", "#d04f5f", "#a08a3a")
GREY = "#808890"
matplotlib.rcParams.update(
    {
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "axes.titlecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "font.sans-serif": ["DejaVu Sans", "Arial"],
        "font.size": 9,
        "legend.fontsize": 8,
        "legend.framealpha": 0,
        "svg.fonttype": "none",  # letters, not their outlines
        "svg.hashsalt": "plain",  # the same file in each run
    }
)


def panels(
    columns: int, width: float = 8, height: float = 2.8, sharex: bool = False
) -> tuple[Any, list]:
    """A figure of so many inches, and its axes, side by side."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), layout="constrained", sharex=sharex, squeeze=False
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def draw_band(axis: Any, curves: Sequence[Sequence[tuple]], label: str, colour: str) -> None:
    """The mean over curves, lists of points (x, y), and a band from the lowest to the highest y."""
    x_means, y_means, y_lowest, y_highest = [], [], [], []
    for points in zip(*curves, strict=True):  # those of one step, of each curve
        y_values = [y for _, y in points]
        x_means.append(mean(x for x, _ in points))
        y_means.append(mean(y_values))
        y_lowest.append(min(y_values))
        y_highest.append(max(y_values))
    axis.fill_between(x_means, y_lowest, y_highest, color=colour, alpha=0.25, lw=0)
    axis.plot(x_means, y_means, color=colour, label=label)


def save(figure: Any, name: str) -> None:
    """Write the figure to docs/figures/NAME, and close it."""
    path = FIGURES / name
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
    plt.close(figure)
    svg = path.read_text()
    # A tenth of a point is exact enough for a line.
    svg = re.sub(r' d="[^"]*"', lambda line: re.sub(r"(\.\d)\d+", r"\1", line[0]), svg)
    svg = re.sub(r"[ \t]+\n", "\n", svg)
    path.write_text(svg)
