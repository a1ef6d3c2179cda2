"""docs/rewards.md: GRPO with a reward for shown working alone."""

from docs.experiments.lib.drawing import (
    ALGORITHM_STYLES,
    HEALTHY,
    draw_band,
    draw_evaluations,
    panel,
)
from docs.experiments.lib.runs import LAST_NUMBER, Numbers, experiment_of_runs


def draw(numbers: Numbers) -> dict:
    title = "The form at once, the sum later"
    axis = panel(title, "rollout", "fraction of completions", ylim=(0, 1.03))
    shown = numbers.metric_curves("(default)", "rewards/shown")
    correct = numbers.metric_curves("(default)", "eval/accuracy")
    draw_band(axis, shown, "working shown", ALGORITHM_STYLES["GRPO"])
    draw_evaluations(axis, correct, "correct, held out", HEALTHY)
    axis.legend(loc="lower right")
    return {"rewards": axis}


COMMAND = f"grpo.py --reward-fn docs/rewards/formats.py:shown --eval-reward-fn {LAST_NUMBER}"
EXPERIMENTS = (experiment_of_runs("rewards", {"(default)": COMMAND}, lambda _: {}, draw),)
