"""How the figures of all pages look.

    figure, (left, right) = panels(2)
    draw_band(left, curves, "GRPO", ALGORITHM_STYLES["GRPO"])
    return figure, "a few words", "What the figure shows, for readers who cannot see it."

Each algorithm has one colour and one marker on all pages (ALGORITHM_STYLES). Series that are not
algorithms take the muted COLOURS. Every series also has its own marker or line style, so that a
figure can be read without colours. Values logged in every step are lines (`draw_band`); the few
evaluations of a run are markers without a line (`draw_evaluations`).

No grey has a contrast of 4.5 : 1 both to a white page and to GitHub's dark one (#0d1117), so each
figure has an opaque ground. All colours here have 4.5 : 1 to it and can be used for text.
Figures are 8 inches (576 pt) wide, so 9 pt become 12 pixels where a page shows them at 800.
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


class Style(NamedTuple):
    """How a series is drawn; colour, marker and line as matplotlib names them."""

    colour: str
    marker: str = ""
    line: str = "-"


GROUND = "#ffffff"
TEXT = "#24292f"
GREY = "#5f6872"  # lines and words that stay in the background
COLOURS = ("#24292f", "#c4202a", "#5f6872", "#5c4630", "#3d4f7d", "#6b3a5b")
ALGORITHM_STYLES = {
    "SFT": Style("#7a5f00", "s"),
    "reward model": Style("#4a5a78", "P"),
    "best of n": Style("#8c3b2e", "*"),
    "REINFORCE": Style("#7a3fc0", "p"),
    "PPO": Style("#0b62c4", "o"),
    "GRPO": Style("#b84a00", "^"),
    "GDPO": Style("#b5256b", "v"),
    "DPO": Style("#1a7a3a", "D"),
    "KTO": Style("#00727c", "X"),
}
# Runs with a symptom and without one, whatever their algorithm.
HEALTHY, SICK = Style(COLOURS[0], "o"), Style(COLOURS[1], "x", "--")

matplotlib.rcParams.update(
    {
        "figure.facecolor": GROUND,
        "axes.facecolor": GROUND,
        "savefig.facecolor": GROUND,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": GREY,
        "axes.titlecolor": TEXT,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": TEXT,
        "ytick.labelcolor": TEXT,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "font.sans-serif": ["DejaVu Sans", "Arial"],
        "font.size": 9,
        "axes.titlesize": 10,
        "legend.fontsize": 9,
        "legend.framealpha": 0,
        "axes.unicode_minus": False,  # screen readers and searches know the hyphen
        "svg.fonttype": "none",  # letters, not their outlines
        "svg.hashsalt": "plain",  # the same file in each run
    }
)


def panels(
    columns: int, width: float = 8, height: float = 2.8, sharex: bool = False, rows: int = 1
) -> tuple[Any, list]:
    """A figure of so many inches, and its axes, row by row."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", sharex=sharex, squeeze=False
    )
    for axis in axes.flat:
        axis.grid(color=GREY, alpha=0.25)
        axis.set_axisbelow(True)
    return figure, list(axes.flat)


def plain_log_scale(axis: Any) -> None:
    """A logarithmic y with 0.1, 1, 10 at its ticks; exponents would be too small to read."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
    axis.minorticks_off()


class Band(NamedTuple):
    """Of several runs: x, and the mean, the lowest and the highest y there."""

    x: list[float]
    mean: list[float]
    lowest: list[float]
    highest: list[float]


def band_of(curves: Sequence[Sequence[tuple]]) -> Band:
    """The band over curves, lists of points (x, y)."""
    band = Band([], [], [], [])
    for points in zip(*curves, strict=True):  # those of one step, of each curve
        y_values = [y for _, y in points]
        band.x.append(mean(x for x, _ in points))
        band.mean.append(mean(y_values))
        band.lowest.append(min(y_values))
        band.highest.append(max(y_values))
    return band


def draw_band(
    axis: Any, curves: Sequence[Sequence[tuple]] | Band, label: str, style: Style
) -> None:
    """The mean over curves, lists of points (x, y), and a band from the lowest to the highest y.

    For what is logged in every step. A few markers tell the lines apart.
    """
    band = curves if isinstance(curves, Band) else band_of(curves)
    axis.fill_between(band.x, band.lowest, band.highest, color=style.colour, alpha=0.2, lw=0)
    axis.plot(
        band.x,
        band.mean,
        color=style.colour,
        marker=style.marker,
        ls=style.line,
        label=label,
        ms=5,
        markevery=(0.05, 0.18),  # the first marker, and their distance; 1: the axes' diagonal
    )


def draw_evaluations(
    axis: Any, curves: Sequence[Sequence[tuple]] | Band, label: str, style: Style
) -> None:
    """The mean of each evaluation as a marker, with a bar from the lowest to the highest y, and the
    single values of the curves as dots on it. No line: nothing was measured in between.
    """
    band, colour = curves, style.colour
    if not isinstance(curves, Band):
        band = band_of(curves)
        for curve in curves:
            xs, ys = zip(*curve, strict=True)
            axis.plot(xs, ys, color=colour, marker=".", ms=3, ls="", alpha=0.6)
    axis.vlines(band.x, band.lowest, band.highest, color=colour, alpha=0.5, lw=1.2)
    axis.plot(band.x, band.mean, color=colour, marker=style.marker, ms=6, ls="", label=label)


def first_and_last(curves: Sequence[Sequence[tuple]], digits: int = 2) -> str:
    """In words for a figure's description: the means of the first and of the last points."""
    first = mean(curve[0][1] for curve in curves)
    last = mean(curve[-1][1] for curve in curves)
    return f"from {first:.{digits}f} to {last:.{digits}f}".replace("-0.00", "0.00")


def draw_metrics(
    numbers: Any, algorithm: str, titles: dict[str, str], xlabel: str = "rollout"
) -> tuple[Any, str, str]:
    """A panel for each metric of the default run, with its title: mean and range of the seeds."""
    figure, axes = panels(len(titles))
    courses = []
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        curves = numbers.metric_curves("(default)", metric)
        draw = draw_evaluations if metric.startswith("eval/") else draw_band
        draw(axis, curves, algorithm, ALGORITHM_STYLES[algorithm])
        axis.set(title=title, xlabel=xlabel)
        axis.margins(y=0.1)
        courses.append(f"{title} {first_and_last(curves)}")
    seeds = len(numbers.seeds)
    description = (
        f"Over the {xlabel}, mean and range of {seeds} seeds: {'; '.join(courses)} (means of "
        "the first and the last value). Markers without a line are evaluations."
    )
    return figure, f"{algorithm}: {', '.join(titles.values())}", description


def save(name: str, figure: Any, title: str, description: str) -> None:
    """Write the figure to docs/figures/NAME.svg, and close it.

    Title and description are what a screen reader says: a title of a few words; then, in a sentence
    or two, what is drawn over what, and what one sees.
    """
    path = FIGURES / f"{name}.svg"
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    svg = path.read_text()
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title {name}-desc" ', 1)
    svg = re.sub(
        r"(<svg [^>]*>)\n",
        lambda opening: (
            f'{opening[1]}\n <title id="{name}-title">{escape(title)}</title>\n'
            f' <desc id="{name}-desc">{escape(description)}</desc>\n'
        ),
        svg,
        count=1,
    )
    # A tenth of a point is exact enough for a line.
    svg = re.sub(r' d="[^"]*"', lambda line: re.sub(r"(\.\d)\d+", r"\1", line[0]), svg)
    svg = re.sub(r"[ \t]+\n", "\n", svg)
    path.write_text(svg)
