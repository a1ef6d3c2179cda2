"""The experiments: every page's, by name."""

from importlib import import_module
from pathlib import Path

PAGES = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))
EXPERIMENTS = {
    experiment.name: experiment
    for page in PAGES
    if page != "registry"
    for experiment in import_module(f"docs.experiments.{page}").EXPERIMENTS
}


def all_tables() -> dict[str, dict]:
    """Every table of every experiment, by name."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        tables |= experiment.tables(experiment.results())
    return tables
