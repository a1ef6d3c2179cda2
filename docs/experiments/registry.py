"""The experiments, by name: the declared ones, and those of studies/."""

from importlib import import_module
from pathlib import Path

from docs.experiments import declared

STUDIES = [
    import_module(f"docs.experiments.studies.{file.stem}")
    for file in sorted(Path(__file__).parent.glob("studies/[a-z]*.py"))
]
EXPERIMENTS = {
    experiment.name: experiment for file in (declared, *STUDIES) for experiment in file.EXPERIMENTS
}


def all_tables() -> dict[str, dict]:
    """Every table of every experiment, by name."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        tables |= experiment.make_tables()
    return tables
