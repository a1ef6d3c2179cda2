"""What an experiment is, and the one way to make it or to draw it again."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.experiments.lib import drawing

RESULTS = Path("docs/results")


@dataclass
class Experiment:
    """What makes docs/results/NAME.json, docs/figures/NAME*.svg and the tables of the pages.

    `measure()` returns what the JSON file holds: numbers, not tables. Tables and figures are made
    from these numbers alone, so that headings and looks can be changed without new runs. Without
    `measure` there is no file, and `tables` and `draw` compute what they need.
    """

    name: str
    # by the name on the page, which is NAME or begins with it
    tables: Callable[[dict], dict[str, dict]]
    measure: Callable[[], dict] | None = None
    # the axes of each figure, by the figure's name, which is NAME or begins with it
    draw: Callable[[dict], dict[str, Any]] | None = None
    # the commands of its runs, by label; they are kept in the file
    commands: dict[str, str] = field(default_factory=dict)

    def make(self) -> None:
        """Measure, and draw the figures."""
        if self.measure:
            results = {"commands": self.commands} | self.measure()
            (RESULTS / f"{self.name}.json").write_text(json.dumps(results, indent=1) + "\n")
        self.redraw()

    def redraw(self) -> None:
        """Draw the figures from what was measured."""
        if self.draw:
            for name, axis in self.draw(self.results()).items():
                drawing.save(name, axis)

    def results(self) -> dict:
        """What was measured."""
        return saved_results(self.name) if self.measure else {}


def saved_results(name: str) -> dict:
    """What docs/results/NAME.json holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())
