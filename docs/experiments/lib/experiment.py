"""What an experiment is, and the one way to make it or to draw it again.

It declares its commands and what is kept of their runs: the columns of its tables, the curves of
its figures, and other metrics. docs/results/NAME.json holds these numbers, and tables and figures
are made from them alone, so that headings and looks can be changed without new runs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.experiments.lib import drawing
from docs.experiments.lib.drawing import Lines
from docs.experiments.lib.metrics import Metric
from docs.experiments.lib.runs import Run, for_each_seed, runs_of
from docs.experiments.lib.tables import rounded, spread

RESULTS = Path("docs/results")
CURVE_DIGITS = 4  # significant ones: a figure is drawn to a tenth of a point


@dataclass
class Table:
    """A row for each label, with mean (lowest to highest) of the seeds for each metric."""

    columns: dict[str, tuple[Metric, int]]  # by heading: a metric, and digits behind the point
    rows: dict[str, tuple[str, ...]] | None = None  # by label the first cells; None: all labels
    heading: tuple[str, ...] = ("flags",)  # of the first cells

    def make(self, numbers: dict, labels: list[str]) -> dict:
        made = []
        for label, cells in (self.rows or {label: (label,) for label in labels}).items():
            columns = self.columns.values()
            spreads = [spread(numbers[label][metric.name], digits) for metric, digits in columns]
            made.append([*cells, *spreads])
        return {"columns": [*self.heading, *self.columns], "rows": made}


@dataclass
class Experiment:
    """What makes docs/results/NAME.json, docs/figures/NAME*.svg and tables of the pages."""

    name: str
    commands: dict[str, str] = field(default_factory=dict)  # by label
    tables: dict[str, Table] = field(default_factory=dict)  # by their name on the page
    figures: dict[str, Lines] = field(default_factory=dict)  # by NAME or NAME_...
    metrics: dict[str, list[Metric]] = field(default_factory=dict)  # other ones to keep, by label
    # What a seed is worth by label and metric; or everything that is measured.
    measure_seed: Callable[[int], dict[str, dict]] | None = None
    measure_all: Callable[[], dict] | None = None
    find_runs: Callable[[dict[str, str]], dict[str, list[Run]]] | None = None  # by label
    # Tables and axes, by name, of what docs/results/NAME.json holds.
    more_tables: Callable[[dict], dict[str, dict]] | None = None
    draw: Callable[[dict], dict[str, Any]] | None = None
    seeds: tuple[int, ...] | None = None  # of its commands; None: five

    def keeps_results(self) -> bool:
        return bool(self.commands or self.measure_seed or self.measure_all or self.find_runs)

    def measure(self, labels: set[str] | None = None) -> dict:
        """What is kept of the runs; with labels of these alone."""
        if self.measure_all:
            return {"numbers": self.measure_all()}
        commands = {label: self.commands.get(label, "") for label in labels or self.commands}
        if self.find_runs:
            runs = self.find_runs(commands)
        else:
            by_command = runs_of(commands.values(), seeds=self.seeds)
            runs = {label: by_command[command] for label, command in commands.items()}
        numbers = for_each_seed(self.measure_seed) if self.measure_seed and not labels else {}
        for label, metric in self.kept_metrics():
            if label in runs and metric.of_run:
                found = rounded([metric.of_run(run) for run in runs[label]])
                numbers.setdefault(label, {})[metric.name] = found
        curves = {}
        for label, metric in self.kept_curves():
            if label in runs:
                points = [[*run.values(metric).items()] for run in runs[label]]
                curves.setdefault(label, {})[metric] = rounded(points, CURVE_DIGITS)
        return {"numbers": numbers, "curves": curves}

    def kept_metrics(self) -> list[tuple[str, Metric]]:
        kept = [(label, metric) for label in self.metrics for metric in self.metrics[label]]
        for table in self.tables.values():
            for label in table.rows or self.commands:
                kept += [(label, metric) for metric, _ in table.columns.values()]
        return kept

    def kept_curves(self) -> list[tuple[str, str]]:
        return [key for figure in self.figures.values() for key in figure.series]

    def make(self, labels: tuple[str, ...] = ()) -> None:
        """Measure, and draw the figures. With labels their runs alone are made, and what is known
        of the others stays."""
        if self.keeps_results():
            results = {"commands": self.commands} | self.measure({*labels})
            if labels:
                kept = self.results()
                for name in ("numbers", "curves"):
                    results[name] = kept[name] | {
                        label: kept[name].get(label, {}) | found
                        for label, found in results[name].items()
                    }
            (RESULTS / f"{self.name}.json").write_text(as_json(results) + "\n")
        self.redraw()

    def redraw(self) -> None:
        """Draw the figures from what was measured."""
        results = self.results()
        for name, figure in self.figures.items():
            drawing.save(name, drawing.draw_lines(figure, results["curves"]))
        for name, axis in (self.draw(results) if self.draw else {}).items():
            drawing.save(name, axis)

    def results(self) -> dict:
        """What was measured."""
        return saved_results(self.name) if self.keeps_results() else {}

    def make_tables(self) -> dict[str, dict]:
        results = self.results()
        made = self.more_tables(results) if self.more_tables else {}
        for name, table in self.tables.items():
            made[name] = table.make(results["numbers"], [*(self.commands or results["numbers"])])
        return made


def as_json(value: object, margin: str = "\n") -> str:
    """JSON: a metric is a line with its numbers of all runs; of curves each is a line."""
    inner = f"{margin} "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(name)}: {as_json(item, inner)}" for name, item in value.items()]
        return "{" + inner + f",{inner}".join(entries) + margin + "}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[" + inner + f",{inner}".join(map(json.dumps, value)) + margin + "]"
    return json.dumps(value)


def saved_results(name: str) -> dict:
    """What docs/results/NAME.json holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def saved_numbers(name: str, label: str, metric: str) -> list:
    return saved_results(name)["numbers"][label][metric]


def variants(script: str, *flags: str) -> dict[str, str]:
    """Commands of a script, by the flags that are added to it."""
    return {f"`{added}`": f"{script} {added}" for added in flags}
