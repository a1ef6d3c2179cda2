"""docs/rewards.md: GRPO with a reward for shown working alone."""

from docs.experiments.lib.drawing import draw_metrics
from docs.experiments.lib.runs import LAST_NUMBER, Numbers, experiment_of_runs


def tables(numbers: Numbers) -> dict:
    columns = {
        "working shown, first rollout": ("(default)", "first rewards/shown", 2),
        "last five": ("(default)", "rewards/shown", 2),
        "accuracy before": ("(default)", "first eval/accuracy", 3),
        "accuracy": ("(default)", "eval/accuracy", 3),
    }
    return {"rewards": numbers.table_by_seed(columns)}


def draw(numbers: Numbers) -> tuple:
    titles = {"rewards/shown": "working shown", "eval/accuracy": "held-out accuracy"}
    return draw_metrics(numbers, "GRPO", titles)


COMMAND = f"grpo.py --reward-fn docs/rewards/formats.py:shown --eval-reward-fn {LAST_NUMBER}"
EXPERIMENTS = (experiment_of_runs("rewards", {"(default)": COMMAND}, tables, draw),)
