"""docs/kto.md: the default run, and equal weights."""

from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants

COMMANDS = variants("kto.py", "", "--desirable-weight 1")


def tables(numbers: Numbers) -> dict:
    columns = {
        "gold": ("eval/reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
        "tokens": ("eval/length_mean", 1),
    }
    return {"kto": numbers.table_by_label(columns)}


EXPERIMENTS = (experiment_of_runs("kto", COMMANDS, tables),)
