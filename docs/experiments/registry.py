"""The experiments by name: the declared ones, and those of each file of studies/."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from docs.experiments import declared
from docs.experiments.lib.experiment import Experiment

FILES = sorted(Path(__file__).with_name("studies").glob("*.py"))
STUDIES = [import_module(f"docs.experiments.studies.{file.stem}") for file in FILES]
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for file in (declared, *STUDIES) for experiment in file.EXPERIMENTS
}


def tables_of(names: Iterable[str]) -> dict[str, dict]:
    """Every table of these experiments, by name."""
    tables = {}
    for name in names:
        tables |= EXPERIMENTS[name].make_tables()
    return tables
