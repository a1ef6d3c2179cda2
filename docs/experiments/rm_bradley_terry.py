"""docs/rm_bradley_terry.md: the default run, and runs that train the last layers only."""

from docs.experiments.lib.drawing import draw_metrics
from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants


def tables(numbers: Numbers) -> dict:
    columns = {
        "loss": ("eval/loss", 3),
        "pair accuracy": ("eval/pair_accuracy", 3),
        "calibration error": ("eval/calibration_error", 3),
    }
    return {"rm_bradley_terry": numbers.table_by_label(columns)}


def draw(numbers: Numbers) -> tuple:
    titles = {"eval/pair_accuracy": "held-out pair accuracy", "eval/loss": "held-out loss, nats"}
    return draw_metrics(numbers, "reward model", titles, xlabel="optimiser step")


COMMANDS = variants("rm_bradley_terry.py", "", "--train-layers 1")
EXPERIMENTS = (experiment_of_runs("rm_bradley_terry", COMMANDS, tables, draw),)
