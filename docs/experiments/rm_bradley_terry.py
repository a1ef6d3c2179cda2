"""docs/rm_bradley_terry.md: the default run, and runs that train the last layers only."""

from pathlib import Path
from statistics import mean

from docs.experiments.lib.drawing import Metric, draw_metrics
from docs.experiments.lib.runs import Numbers, experiment_of_runs, read_jsonl, variants
from tiny.reviews import gold


def tables(numbers: Numbers) -> dict:
    columns = {
        "loss": ("eval/loss", 3),
        "pair accuracy": ("eval/pair_accuracy", 3),
        "calibration error": ("eval/calibration_error", 3),
    }
    return {"rm_bradley_terry": numbers.table(columns)}


def draw(numbers: Numbers) -> dict:
    """Beside the judge who labelled the pairs."""
    pairs = read_jsonl(Path("tiny/reviews/preferences/test.jsonl"))
    accuracy = Metric(
        "eval/pair_accuracy",
        "It nears the judge's own accuracy",
        "held-out pair accuracy",
        limits=(0.4, 1),
        best=mean(gold.score(pair["chosen"]) > gold.score(pair["rejected"]) for pair in pairs),
    )
    figures = {"rm_bradley_terry_accuracy": accuracy}
    return draw_metrics(numbers, "reward model", figures, "optimiser step")


COMMANDS = variants("rm_bradley_terry.py", "", "--train-layers 1")
EXPERIMENTS = (experiment_of_runs("rm_bradley_terry", COMMANDS, tables, draw),)
