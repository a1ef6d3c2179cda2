"""docs/kto.md: the default run, and equal weights."""

from docs.experiments.lib.runs import REVIEW_COLUMNS, Numbers, experiment_of_runs, variants

COMMANDS = variants("kto.py", "", "--desirable-weight 1")


def tables(numbers: Numbers) -> dict:
    return {"kto": numbers.table(REVIEW_COLUMNS)}


EXPERIMENTS = (experiment_of_runs("kto", COMMANDS, tables),)
