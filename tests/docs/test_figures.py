"""The figures of the pages are made from the numbers in docs/results."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.experiments.lib import drawing
from docs.experiments.registry import EXPERIMENTS

pytestmark = pytest.mark.docs
SVG = "{http://www.w3.org/2000/svg}"


def words_of(figure: Path) -> list[str]:
    root = ElementTree.parse(figure).getroot()
    named = [f"{SVG}{name}" for name in ("text", "title", "desc")]
    return ["".join(element.itertext()) for element in root.iter() if element.tag in named]


def coordinates_of(figure: Path) -> list[float]:
    """Of all lines and areas."""
    paths = " ".join(re.findall(r' d="([^"]*)"', figure.read_text()))
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", paths)]


DRAWN = [name for name, one in EXPERIMENTS.items() if one.draw or one.figures]


@pytest.mark.parametrize("name", DRAWN)
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
