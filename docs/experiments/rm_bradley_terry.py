"""docs/rm_bradley_terry.md: the default run, and runs that train the last layers only."""

from math import exp, log1p
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
    return {"rm_bradley_terry": numbers.table_by_label(columns)}


def draw(numbers: Numbers) -> dict:
    """Beside the judge itself, whose preferences are drawn with sigmoid(4 (difference of gold))."""
    pairs = read_jsonl(Path("tiny/reviews/preferences/test.jsonl"))
    margins = [4 * (gold.score(pair["chosen"]) - gold.score(pair["rejected"])) for pair in pairs]
    best_accuracy = mean(margin > 0 for margin in margins)
    best_loss = mean(log1p(exp(-margin)) for margin in margins)
    figures = {
        "rm_bradley_terry_accuracy": Metric(
            "eval/pair_accuracy",
            "It nears the judge's own accuracy",
            "held-out pair accuracy",
            (0.4, 1),
            best_accuracy,
        ),
        "rm_bradley_terry_loss": Metric(
            "eval/loss", "and the judge's own loss", "held-out loss, nats", (0, None), best_loss
        ),
    }
    return draw_metrics(numbers, "reward model", figures, "optimiser step")


COMMANDS = variants("rm_bradley_terry.py", "", "--train-layers 1")
EXPERIMENTS = (experiment_of_runs("rm_bradley_terry", COMMANDS, tables, draw),)
