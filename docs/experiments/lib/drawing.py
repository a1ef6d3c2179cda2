"""How the figures of all pages look.

A figure has one pair of axes, and its title is what a reader should take from it. Most are 336
pixels wide: two stand side by side on a page, on a phone one below the other. None is wider than
422, so that its text has 9 pixels where a phone shows it on 328.

Each algorithm has one colour and one marker on all pages, and so have the gold reward and the runs
with a symptom and without. A series can be told from the others by its marker alone.

Figures have no ground of their own. Each colour has a value for light pages and one for dark ones,
both with a contrast of 4.5 : 1, and the SVG chooses by `prefers-color-scheme`.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no window
from matplotlib import pyplot as plt
from pandas import DataFrame

plt.style.use(Path(__file__).parent / "plain.mplstyle")
FIGURES = Path("docs/figures")
COLOUR = r"((?:fill|stroke)(?:: |=\"))(#\w{6})"  # in an SVG of matplotlib
THIRD, HALF, WIDE = 2.25, 3.5, 4.4  # inches: 216, 336 and 422 pixels


class Style(NamedTuple):
    """How a series is drawn; colour and marker as matplotlib names them."""

    colour: str
    marker: str = ""


TEXT = "#24292f"
GREY = "#5f6872"  # lines and words that stay in the background
RED = "#c4202a"
GREEN = "#1a7a3a"
ALGORITHM_STYLES = {
    "SFT": Style("#00707a", "s"),
    "reward model": Style("#4a5a78", "P"),
    "REINFORCE": Style("#7a3fc0", "p"),
    "PPO": Style("#0b62c4", "o"),
    "GRPO": Style("#b84a00", "^"),
    "DPO": Style(GREEN, "D"),
}
GOLD = Style("#8a6100", "h")  # the gold reward, whatever was trained
HEALTHY, SICK = Style(TEXT, "o"), Style(RED, "x")  # whatever the algorithm
DARK = {  # by the colour on light pages
    TEXT: "#e6edf3",
    GREY: "#9198a1",
    RED: "#ff7b72",
    GREEN: "#3fb950",
    "#00707a": "#39c5cf",
    "#4a5a78": "#a5b4d4",
    "#7a3fc0": "#bc8cff",
    "#0b62c4": "#58a6ff",
    "#b84a00": "#ff9b50",
    "#8a6100": "#d9b23c",
}


# --- axes --------------------------------------------------------------------------------------
def panel(
    title: str,
    xlabel: str,
    ylabel: str = "",
    width: float = HALF,
    height: float = 2.6,
    **settings: Any,
) -> Any:
    """The axes of a new figure of so many inches; settings are those of `axes.set`."""
    _, axis = plt.subplots(figsize=(width, height))
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    return axis


def draw_curves(axis: Any, curves: Sequence[Sequence[tuple]], label: str, style: Style) -> None:
    """The mean over curves, lists of points (x, y), and a band from the lowest to the highest y."""
    points = DataFrame({seed: dict(curve) for seed, curve in enumerate(curves)}).sort_index()
    x, colour = points.index.to_numpy(), style.colour
    axis.fill_between(x, points.min(axis=1), points.max(axis=1), color=colour, alpha=0.2, lw=0)
    # A marker at each point, or where there are many at some of them.
    every = 1 if len(x) <= 25 else (0.05, 0.18)
    means = points.mean(axis=1).to_numpy()
    axis.plot(x, means, color=colour, marker=style.marker, label=label, ms=4.5, markevery=every)


class Series(NamedTuple):
    name: str  # in the legend
    style: Style


class Lines(NamedTuple):
    """A figure of metrics over training: mean and range of the seeds."""

    title: str
    ylabel: str
    series: dict[tuple[str, str], Series]  # by label and metric
    xlabel: str = "rollout"
    limits: tuple[float | None, float | None] | None = None  # of y
    best: float | None = None  # the best possible value, a dashed line
    width: float = HALF
    log_scale: bool = False


def draw_lines(figure: Lines, all_curves: dict) -> Any:
    height = 2.6 if len(figure.series) == 1 else 2.9  # with a legend
    axis = panel(figure.title, figure.xlabel, figure.ylabel, figure.width, height)
    for (label, metric), series in figure.series.items():
        draw_curves(axis, all_curves[label][metric], series.name, series.style)
    axis.locator_params(nbins=5, integer=figure.xlabel == "rollout", axis="x")
    if figure.best is not None:
        axis.axhline(figure.best, color=TEXT, ls="--", lw=1.2, label="best possible")
    if figure.log_scale:
        axis.set_yscale("log")
        # 0.1, 1, 10 at its ticks; exponents would be too small to read.
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axis.minorticks_off()
    else:
        axis.locator_params(nbins=5, axis="y")
    axis.set(ylim=figure.limits)
    if len(figure.series) > 1:
        axis.figure.legend(loc="outside lower center", ncols=2)
    elif figure.best is not None:
        axis.legend()
    return axis


# --- files -------------------------------------------------------------------------------------
def description_of(axis: Any) -> str:
    """In words: what is drawn over what, and the first and the last value of each series."""
    series = []
    for line in axis.get_lines():
        first, last = line.get_ydata()[0], line.get_ydata()[-1]
        series.append((line.get_label(), f"from {first:.3g} to {last:.3g}"))
    for bars in axis.containers:
        series.append((bars.get_label(), ", ".join(f"{value:.3g}" for value in bars.datavalues)))
    words = "; ".join(f"{label} {values}" for label, values in series if label[0] != "_")
    texts = [" ".join(text.get_text().split()) for text in axis.figure.texts]
    return f"{axis.get_ylabel()} over {axis.get_xlabel()}: {'; '.join([words, *texts])}.".strip()


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
        f' <title id="{name}-title">{escape(title)}</title>\n'
        f' <desc id="{name}-desc">{escape(description_of(axis))}</desc>\n'
        f" <style>{scheme_style(svg)}</style>\n"
    )
    svg = re.sub(r"(<svg [^>]*>\n)", lambda opening: opening[1] + words, svg, count=1)
    svg = re.sub(COLOUR, lambda use: f"{use[1]}var(--c{use[2][1:]})", svg)
    # A tenth of a point is exact enough for a line.
    svg = re.sub(r' d="[^"]*"', lambda line: re.sub(r"(\.\d)\d+", r"\1", line[0]), svg)
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg))


def scheme_style(svg: str) -> str:
    """The colours of a drawing on light pages, and on dark ones, as properties by their names."""
    used = sorted({colour for _, colour in re.findall(COLOUR, svg)})
    light = " ".join(f"--c{colour[1:]}: {colour};" for colour in used)
    dark = " ".join(f"--c{colour[1:]}: {DARK.get(colour, colour)};" for colour in used)
    return f"svg {{{light}}} @media (prefers-color-scheme: dark) {{svg {{{dark}}}}}"
