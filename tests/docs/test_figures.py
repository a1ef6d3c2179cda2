"""The figures of the pages: said in words, readable on their ground and on a phone, and made
from the numbers in docs/results."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.textpath import TextPath

from docs.experiments.lib import drawing
from docs.experiments.registry import EXPERIMENTS

pytestmark = pytest.mark.house
FIGURES = sorted(Path("docs/figures").glob("*.svg"))
PAGES = [Path("README.md"), *Path("docs").glob("*.md")]
SVG = "{http://www.w3.org/2000/svg}"
OPACITIES = ("opacity", "fill-opacity")
PAGE, PHONE = (800, 11), (328, 8)  # pixels: the column, and the smallest text
WIDE = ("model_sizes", "post_training")  # their boxes hold words


# --- contrast, as WCAG 2.2 defines it -----------------------------------------------------------
def channels(colour: str) -> list[float]:
    """Red, green and blue of #rrggbb, from 0 to 1."""
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(rgb: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: list[float], ground: list[float]) -> float:
    darker, lighter = sorted([luminance(text), luminance(ground)])
    return (lighter + 0.05) / (darker + 0.05)


# --- reading an SVG -----------------------------------------------------------------------------
class Drawing:
    """The elements of an SVG with what they inherit."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.parse(path).getroot()
        self.parents = {child: parent for parent in self.root.iter() for child in parent}
        hidden = [child for defs in self.root.iter(f"{SVG}defs") for child in defs.iter()]
        self.elements = [element for element in self.root.iter() if element not in hidden]

    def texts(self) -> list[ElementTree.Element]:
        return [element for element in self.elements if element.tag == f"{SVG}text"]

    def property(self, element: ElementTree.Element, name: str, default: str) -> str:
        """Of the element, or else of the nearest one around it; from a style or an attribute."""
        while element is not None:
            declared = style_of(element).get(name, element.get(name))
            if declared is not None:
                return declared
            element = self.parents.get(element)
        return default

    def font_size(self, text: ElementTree.Element) -> float:
        """In the figure's own units."""
        declaration = self.property(text, "font", "") or self.property(text, "font-size", "")
        return float(re.search(r"([\d.]+)(px|$)", declaration)[1])

    def shown_as(self, text: ElementTree.Element) -> tuple[list[float], list[float]]:
        """The colour of a text, and the colour under its middle.

        The areas drawn before a text lie under it; those with an opacity are blended.
        """
        size, words = self.font_size(text), "".join(text.itertext())
        shifts = {"start": 0.3, "middle": 0, "end": -0.3}
        shift = shifts[self.property(text, "text-anchor", "start")]
        x, y = anchor(text)
        x, y = x + shift * size * len(words), y - 0.35 * size
        ground = [0.5, 0.5, 0.5]  # a page of any colour
        for element in self.elements[: self.elements.index(text)]:
            fill = self.property(element, "fill", "#000000")
            if element.tag in (f"{SVG}path", f"{SVG}rect") and fill.startswith("#"):
                opacities = [self.property(element, name, "1") for name in OPACITIES]
                opacity = float(opacities[0]) * float(opacities[1])
                if inside(x, y, corners_of(element)):
                    pairs = zip(channels(fill), ground, strict=True)
                    ground = [opacity * over + (1 - opacity) * under for over, under in pairs]
        return channels(self.property(text, "fill", "#000000")), ground


def style_of(element: ElementTree.Element) -> dict[str, str]:
    """The properties in an element's style attribute."""
    pairs = [part.split(":", 1) for part in element.get("style", "").split(";") if part.strip()]
    return {name.strip(): value.strip() for name, value in pairs}


def corners_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    """Of a rectangle or a path; curves are taken as lines between their end points."""
    if element.tag == f"{SVG}rect":
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        width, height = float(element.get("width")), float(element.get("height"))
        return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    corners = []
    for _, numbers in re.findall(r"([MLQC])([^MLQCz]*)", element.get("d")):
        x, y = [float(number) for number in numbers.split()][-2:]
        corners.append((x, y))
    return corners


def inside(x: float, y: float, corners: list[tuple[float, float]]) -> bool:
    """Whether a ray to the right crosses the outline an odd number of times."""
    crossings = 0
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
        if (y1 > y) != (y2 > y) and x < x1 + (y - y1) * (x2 - x1) / (y2 - y1):
            crossings += 1
    return crossings % 2 == 1


def anchor(text: ElementTree.Element) -> tuple[float, float]:
    """Where a text stands: its x and y, or for a turned one its translation."""
    translation = re.search(r"translate\(([-\d.]+)[ ,]([-\d.]+)\)", text.get("transform", ""))
    if translation:
        return float(translation[1]), float(translation[2])
    return float(text.get("x")), float(text.get("y"))


def turned(text: ElementTree.Element) -> bool:
    """Whether it is read from the bottom upwards."""
    return "rotate(-90" in text.get("transform", "")


# --- tests --------------------------------------------------------------------------------------
def test_the_figures_of_the_pages_exist():
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"figures/(\w+\.svg)", text)) == {figure.name for figure in FIGURES}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_a_screen_reader_is_told_what_a_figure_shows(figure):
    root = Drawing(figure).root
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert 10 < len(title.text) <= 90, title.text
    assert len(description.text) > 30 and description.text.endswith("."), description.text


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_text_has_a_contrast_of_4_5_to_its_ground(figure):
    drawing = Drawing(figure)
    assert drawing.texts()
    for text in drawing.texts():
        colour, ground = drawing.shown_as(text)
        assert contrast(colour, ground) >= 4.5, "".join(text.itertext())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_text_is_large_enough_on_a_page_and_on_a_phone(figure):
    """A page shows a figure as wide as it is, unless the column is narrower."""
    drawing = Drawing(figure)
    _, _, width, _ = map(float, drawing.root.get("viewBox").split())
    natural = width * 96 / 72 if drawing.root.get("width").endswith("pt") else width
    for text in drawing.texts():
        for part in text.iter():  # exponents too
            for column, smallest in (PAGE, PHONE)[: 1 if figure.stem in WIDE else 2]:
                pixels = drawing.font_size(part) * min(natural, column) / width
                assert pixels >= smallest, "".join(text.itertext())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_text_stays_inside_its_figure(figure):
    """As wide as in the font that draws it, which is wider than a browser's."""
    drawing = Drawing(figure)
    _, _, width, height = map(float, drawing.root.get("viewBox").split())
    for text in drawing.texts():
        words, size = "".join(text.itertext()), drawing.font_size(text)
        weight = "bold" if "bold" in drawing.property(text, "font", "") else "normal"
        length = TextPath((0, 0), words, size, prop={"weight": weight}).get_extents().width
        starts = {"start": 0, "middle": -length / 2, "end": -length}
        start = starts[drawing.property(text, "text-anchor", "start")]
        x, y = anchor(text)
        position, room = (height - y, height) if turned(text) else (x, width)
        assert position + start >= 0, words
        assert position + start + length <= room, words


def words_of(figure: Path) -> list[str]:
    drawing = Drawing(figure)
    texts = [*drawing.texts(), drawing.root.find(f"{SVG}title"), drawing.root.find(f"{SVG}desc")]
    return ["".join(text.itertext()) for text in texts]


def coordinates_of(figure: Path) -> list[float]:
    """Of all lines and areas."""
    paths = " ".join(re.findall(r' d="([^"]*)"', figure.read_text()))
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", paths)]


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if EXPERIMENTS[name].draw])
def test_drawing_again_gives_the_same_figures(name, tmp_path, monkeypatch):
    """From docs/results alone. Another matplotlib may move a line by a point or two."""
    figures = drawing.FIGURES
    monkeypatch.setattr(drawing, "FIGURES", tmp_path)
    EXPERIMENTS[name].redraw()
    assert [*tmp_path.iterdir()]
    for again in tmp_path.iterdir():
        assert again.name.startswith(name)
        assert words_of(again) == words_of(figures / again.name)
        expected = pytest.approx(coordinates_of(figures / again.name), abs=2)
        assert coordinates_of(again) == expected


def test_each_algorithm_has_its_own_colour_and_marker():
    styles = drawing.ALGORITHM_STYLES.values()
    assert len({style.colour for style in styles}) == len(styles)
    assert len({style.marker for style in styles}) == len(styles)
    assert not {style.colour for style in styles} & {drawing.TEXT, drawing.RED, drawing.GREY}


def test_every_colour_may_be_that_of_a_text():
    colours = [drawing.TEXT, drawing.RED, drawing.GREY]
    colours += [style.colour for style in drawing.ALGORITHM_STYLES.values()]
    for colour in colours:
        assert contrast(channels(colour), channels(drawing.GROUND)) >= 4.5, colour
