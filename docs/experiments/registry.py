"""The experiments, by name: the declared ones, and those of studies/, loaded when asked for."""

from collections.abc import Iterable
from importlib import import_module

from docs.experiments import declared
from docs.experiments.lib.experiment import Experiment

DECLARED = {experiment.name: experiment for experiment in declared.EXPERIMENTS}
STUDIES = {  # by file the names of its experiments
    "beside_trl": ["beside_trl"],
    "best_of_n": ["best_of_n"],
    "distill": ["distill_divergence", "distill_noise", "distill"],
    "exercises": ["exercises"],
    "grpo_tools": ["real_tools", "grpo_tools"],
    "hints": ["hints", "hints_real", "hints_grpo"],
    "kl": ["kl"],
    "lora": ["lora"],
    "model_sizes": ["model_sizes", "real_size"],
    "one_prompt": ["one_prompt"],
    "readme": ["readme"],
    "real": ["real_digit", "real", "real_seeds"],
    "recipes": ["recipes"],
    "results": ["frontier", "overview"],
    "sampler": ["sampler"],
    "shown_working": ["shown_working"],
}
STUDY_OF = {name: file for file, names in STUDIES.items() for name in names}
NAMES = [*DECLARED, *STUDY_OF]


def load(name: str) -> Experiment:
    if name in DECLARED:
        return DECLARED[name]
    study = import_module(f"docs.experiments.studies.{STUDY_OF[name]}")
    return {experiment.name: experiment for experiment in study.EXPERIMENTS}[name]


def tables_of(names: Iterable[str]) -> dict[str, dict]:
    """Every table of these experiments, by name."""
    tables = {}
    for name in names:
        tables |= load(name).make_tables()
    return tables
