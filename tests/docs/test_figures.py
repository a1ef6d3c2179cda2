"""The figures of the pages: said in words, readable on light and dark pages and on a phone, and
made from the numbers in docs/results."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.experiments.lib import drawing
from docs.experiments.registry import NAMES, load

pytestmark = pytest.mark.docs
FIGURES = sorted(Path("docs/figures").glob("*.svg"))
PAGES = [Path("README.md"), *Path("docs").glob("*.md")]
SVG = "{http://www.w3.org/2000/svg}"
PAGE, PHONE = (774, 11), (328, 9)  # pixels: the column, and the smallest text
# GitHub's pages and the site's.
GROUNDS = {"light": ["#ffffff", "#f6f8fa"], "dark": ["#0d1117", "#151b23", "#1e2129"]}


# --- colours ------------------------------------------------------------------------------------
def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: str, ground: str) -> float:
    """As WCAG 2.2 defines it."""
    darker, lighter = sorted([luminance(text), luminance(ground)])
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_may_be_that_of_a_text_on_light_and_dark_pages():
    for light, dark in drawing.DARK.items():
        assert min(contrast(light, ground) for ground in GROUNDS["light"]) >= 4.5, light
        assert min(contrast(dark, ground) for ground in GROUNDS["dark"]) >= 4.5, dark


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_figure_is_transparent_and_has_a_dark_scheme(figure):
    text = figure.read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    used = {*re.findall(r"var\((--\w+)\)", text)}
    assert used
    for scheme in (light[light.index("<style>") :], dark[: dark.index("</style>")]):
        assert used <= {*re.findall(r"(--\w+):", scheme)}
    assert not re.findall(r"(?:fill|stroke)(?:: |=\")#\w+", text)  # the same in both schemes
    width, height = ElementTree.parse(figure).getroot().get("viewBox").split()[2:]
    assert f'width="{width}" height="{height}"' not in text.partition("</style>")[2]


# --- words --------------------------------------------------------------------------------------
def test_the_figures_of_the_pages_exist():
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"figures/(\w+\.svg)", text)) == {figure.name for figure in FIGURES}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_screen_reader_is_told_what_a_figure_shows(figure):
    root = ElementTree.parse(figure).getroot()
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert 10 < len(title.text) <= 90, title.text
    assert len(description.text) > 30 and description.text.endswith("."), description.text


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_text_is_large_enough_on_a_page_and_on_a_phone(figure):
    """A page shows a figure as wide as it is, unless the column is narrower."""
    root = ElementTree.parse(figure).getroot()
    width = float(root.get("viewBox").split()[2])
    natural = width * 96 / 72 if root.get("width").endswith("pt") else width
    sizes = re.findall(
        r"font(?:-size)?[:=] ?\"?(?:bold )?([\d.]+)(?:px)?[ ;\"]", figure.read_text()
    )
    assert sizes
    for column, smallest in (PAGE, PHONE):
        assert min(map(float, sizes)) * min(natural, column) / width >= smallest


# --- drawing again ------------------------------------------------------------------------------
def words_of(figure: Path) -> list[str]:
    root = ElementTree.parse(figure).getroot()
    named = [f"{SVG}{name}" for name in ("text", "title", "desc")]
    return ["".join(element.itertext()) for element in root.iter() if element.tag in named]


def coordinates_of(figure: Path) -> list[float]:
    """Of all lines and areas."""
    paths = " ".join(re.findall(r' d="([^"]*)"', figure.read_text()))
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", paths)]


DRAWN = [name for name in NAMES if load(name).draw or load(name).figures]


@pytest.mark.parametrize("name", DRAWN)
def test_drawing_again_gives_the_same_figures(name, tmp_path, monkeypatch):
    """From docs/results alone. Another matplotlib may move a line by a point or two."""
    figures = drawing.FIGURES
    monkeypatch.setattr(drawing, "FIGURES", tmp_path)
    load(name).redraw()
    assert [*tmp_path.iterdir()]
    for again in tmp_path.iterdir():
        assert again.name.startswith(name)
        assert words_of(again) == words_of(figures / again.name)
        expected = pytest.approx(coordinates_of(figures / again.name), abs=2)
        assert coordinates_of(again) == expected
