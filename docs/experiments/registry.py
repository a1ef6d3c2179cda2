"""The experiments: every page's, by name."""

from importlib import import_module

# The files of this folder, in the order of the pages.
PAGES = (
    "policy_gradient",
    "kl",
    "one_prompt",
    "sft",
    "rm_bradley_terry",
    "reinforce",
    "ppo_rlhf",
    "grpo",
    "dpo",
    "kto",
    "rewards",
    "results",
    "best_of_n",
    "choosing",
    "stories",
    "pitfalls",
    "exercises",
)
EXPERIMENTS = {
    experiment.name: experiment
    for page in PAGES
    for experiment in import_module(f"docs.experiments.{page}").EXPERIMENTS
}


def all_tables() -> dict[str, dict]:
    """Every table of every experiment, by name."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        tables |= experiment.tables(experiment.results())
    return tables
