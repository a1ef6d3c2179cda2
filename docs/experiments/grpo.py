"""docs/grpo.md: the default run and variants of it."""

from docs.experiments.lib.drawing import THIRD, Metric, draw_metrics
from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants

COMMANDS = variants(
    "grpo.py",
    "",
    "--beta 0",
    "--scale-rewards none",
    "--loss-norm token",
    "--loss-norm constant",
    "--group-size 2 --prompts-per-rollout 128",
    "--group-size 32 --prompts-per-rollout 8",
    "--num-minibatches 1 --learning-rate 1e-3",
    "--num-minibatches 8",
)


def tables(numbers: Numbers) -> dict:
    columns = {"accuracy": ("eval/accuracy", 3), "tokens": ("eval/length_mean", 1)}
    return {"grpo": numbers.table(columns)}


def draw(numbers: Numbers) -> dict:
    figures = {
        "grpo_accuracy": Metric("eval/accuracy", "Accuracy above 0.9", "held-out accuracy", (0, 1)),
        "grpo_length": Metric("completions/length_mean", "Length grows to 12", "tokens"),
        "grpo_entropy": Metric("policy/entropy", "Entropy falls", "nats per token"),
    }
    return draw_metrics(numbers, "GRPO", figures, width=THIRD)


EXPERIMENTS = (experiment_of_runs("grpo", COMMANDS, tables, draw),)
