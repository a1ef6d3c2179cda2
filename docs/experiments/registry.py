"""The experiments: every page's, by name."""

from docs.experiments import (
    best_of_n,
    choosing,
    dpo,
    exercises,
    grpo,
    kl,
    kto,
    one_prompt,
    pitfalls,
    policy_gradient,
    ppo_rlhf,
    reinforce,
    results,
    rewards,
    rm_bradley_terry,
    sft,
    stories,
)

PAGES = (
    policy_gradient,
    kl,
    one_prompt,
    sft,
    rm_bradley_terry,
    reinforce,
    ppo_rlhf,
    grpo,
    dpo,
    kto,
    rewards,
    results,
    best_of_n,
    choosing,
    stories,
    pitfalls,
    exercises,
)
EXPERIMENTS = {experiment.name: experiment for page in PAGES for experiment in page.EXPERIMENTS}


def all_tables() -> dict[str, dict]:
    """Every table of every experiment, by name."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        tables |= experiment.tables(experiment.results())
    return tables
