"""How the figures of all pages look.

A figure has one pair of axes, and its title is what a reader should take from it. Most are 336
pixels wide: two stand side by side on a page, on a phone one below the other.

Each algorithm has one colour and one marker on all pages (ALGORITHM_STYLES). Series that are not
algorithms take TEXT, RED or GREY. Every series also has its own marker, so that a figure can be
read without colours. Values logged at every step are lines (`draw_band`); the few evaluations of a
run are markers without a line (`draw_evaluations`).

Each figure has an opaque ground, because no grey can be read on a white page and on GitHub's dark
one. All colours here have a contrast of 4.5 : 1 to it and can be used for text.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot as plt

FIGURES = Path("docs/figures")
THIRD, HALF, WIDE = 2.25, 3.5, 5  # inches: 216, 336 and 480 pixels


class Style(NamedTuple):
    """How a series is drawn; colour and marker as matplotlib names them."""

    colour: str
    marker: str = ""


GROUND = "#ffffff"
TEXT = "#24292f"
GREY = "#5f6872"  # lines and words that stay in the background
RED = "#c4202a"
ALGORITHM_STYLES = {
    "SFT": Style("#7a5f00", "s"),
    "reward model": Style("#4a5a78", "P"),
    "best of n": Style("#8c3b2e", "*"),
    "REINFORCE": Style("#7a3fc0", "p"),
    "PPO": Style("#0b62c4", "o"),
    "GRPO": Style("#b84a00", "^"),
    "DPO": Style("#1a7a3a", "D"),
}
# Runs with a symptom and without one, whatever their algorithm.
HEALTHY, SICK = Style(TEXT, "o"), Style(RED, "x")

matplotlib.rcParams.update(
    {
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": TEXT,
        "ytick.labelcolor": TEXT,
        "font.sans-serif": ["DejaVu Sans", "Arial"],
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GREY,
        "grid.alpha": 0.25,
        "legend.framealpha": 0,
        "figure.constrained_layout.w_pad": 6 / 72,  # 8 pixels of ground around all
        "figure.constrained_layout.h_pad": 6 / 72,
        "axes.unicode_minus": False,  # screen readers and searches know the hyphen
        "svg.fonttype": "none",  # letters, not their outlines
        "svg.hashsalt": "plain",  # the same file in each run
    }
)


def panel(
    title: str,
    xlabel: str,
    ylabel: str = "",
    width: float = HALF,
    height: float = 2.6,
    **settings: Any,
) -> Any:
    """The axes of a new figure of so many inches; settings are those of `axes.set`."""
    _, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    return axis


def plain_log_scale(axis: Any) -> None:
    """A logarithmic y with 0.1, 1, 10 at its ticks; exponents would be too small to read."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axis.minorticks_off()


def band_of(curves: Sequence[Sequence[tuple]]) -> tuple[list, list, list, list]:
    """Of curves, lists of points (x, y): x, and the mean, the lowest and the highest y there."""
    points = [[*zip(*of_step, strict=True)] for of_step in zip(*curves, strict=True)]
    means = [mean(ys) for _, ys in points]
    lowest, highest = [min(ys) for _, ys in points], [max(ys) for _, ys in points]
    return [mean(xs) for xs, _ in points], means, lowest, highest


def draw_band(axis: Any, curves: Sequence[Sequence[tuple]], label: str, style: Style) -> None:
    """The mean over curves, lists of points (x, y), and a band from the lowest to the highest y.

    For what is logged at every step. A few markers tell the lines apart.
    """
    x, means, lowest, highest = band_of(curves)
    axis.fill_between(x, lowest, highest, color=style.colour, alpha=0.2, lw=0)
    axis.plot(
        x,
        means,
        color=style.colour,
        marker=style.marker,
        label=label,
        ms=5,
        markevery=(0.05, 0.18),  # start and spacing as fractions of the axes' diagonal
    )


def draw_evaluations(
    axis: Any, curves: Sequence[Sequence[tuple]], label: str, style: Style
) -> None:
    """The mean of each evaluation as a marker, with a bar from the lowest to the highest y, and the
    single values of the curves as dots on it. No line: nothing was measured in between.
    """
    x, means, lowest, highest = band_of(curves)
    for curve in curves:
        axis.plot(*zip(*curve, strict=True), color=style.colour, marker=".", ms=3, ls="", alpha=0.6)
    axis.vlines(x, lowest, highest, color=style.colour, alpha=0.5, lw=1.2)
    axis.plot(x, means, color=style.colour, marker=style.marker, ms=6, ls="", label=label)


class Metric(NamedTuple):
    """A figure of the default run."""

    metric: str
    title: str
    ylabel: str
    limits: tuple[float, float] | None = None  # of y
    best: float | None = None  # the best possible value, a dashed line


def draw_metrics(
    numbers: Any,
    algorithm: str,
    figures: dict[str, Metric],
    xlabel: str = "rollout",
    width: float = HALF,
) -> dict[str, Any]:
    """A figure for each metric of the default run: mean and range of the seeds."""
    axes = {}
    for name, (metric, title, ylabel, limits, best) in figures.items():
        axis = axes[name] = panel(title, xlabel, ylabel, width)
        draw = draw_evaluations if metric.startswith("eval/") else draw_band
        curves = numbers.metric_curves("(default)", metric)
        draw(axis, curves, algorithm, ALGORITHM_STYLES[algorithm])
        axis.margins(y=0.1)
        axis.locator_params(nbins=5)
        axis.set(ylim=limits)
        if best is not None:
            axis.axhline(best, color=TEXT, ls="--", lw=1.2, label="best possible")
            axis.legend()
    return axes


def description_of(axis: Any) -> str:
    """In words: what is drawn over what, and the first and the last value of each series."""
    series = []
    for line in axis.get_lines():
        first, last = line.get_ydata()[0], line.get_ydata()[-1]
        series.append((line.get_label(), f"from {first:.3g} to {last:.3g}"))
    for bars in axis.containers:
        series.append((bars.get_label(), ", ".join(f"{value:.3g}" for value in bars.datavalues)))
    words = "; ".join(f"{label} {values}" for label, values in series if label[0] != "_")
    return f"{axis.get_ylabel()} over {axis.get_xlabel()}: {words}.".strip()


def save(name: str, axis: Any) -> None:
    """Write the figure to docs/figures/NAME.svg, and close it. A screen reader is told its title,
    and what it shows."""
    path = FIGURES / f"{name}.svg"
    axis.figure.savefig(path, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    plt.close(axis.figure)
    title = " ".join(axis.get_title("left").split())
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", path.read_text(), flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title {name}-desc" ', 1)
    words = (
        f'\\1 <title id="{name}-title">{escape(title)}</title>\n'
        f' <desc id="{name}-desc">{escape(description_of(axis))}</desc>\n'
    )
    svg = re.sub(r"(<svg [^>]*>\n)", words, svg, count=1)
    # A tenth of a point is exact enough for a line.
    svg = re.sub(r' d="[^"]*"', lambda line: re.sub(r"(\.\d)\d+", r"\1", line[0]), svg)
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg))
