"""docs/grpo.md: the default run and variants of it, and the advantages of GRPO and GDPO."""

import torch

from docs.experiments.lib.drawing import THIRD, Metric, draw_metrics
from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants
from grpo import group_advantages

COMMANDS = variants(
    "grpo.py",
    "",
    "--beta 0",
    "--no-scale-rewards",
    "--loss-norm token",
    "--loss-norm constant",
    "--group-size 2 --prompts-per-rollout 128",
    "--group-size 32 --prompts-per-rollout 8",
    "--num-minibatches 1 --learning-rate 1e-3",
    "--num-minibatches 8",
    "--beta 0 --clip-coef-high 0.28 --loss-norm token --mask-truncated",
    "--beta 0 --loss-norm constant --no-scale-rewards",
)


def tables(numbers: Numbers) -> dict:
    columns = {"accuracy": ("eval/accuracy", 3), "tokens": ("eval/length_mean", 1)}
    return {"grpo": numbers.table_by_label(columns), "grpo gdpo": advantages_table()}


def draw(numbers: Numbers) -> dict:
    figures = {
        "grpo_accuracy": Metric("eval/accuracy", "Accuracy above 0.9", "held-out accuracy", (0, 1)),
        "grpo_length": Metric("completions/length_mean", "Length grows to 12", "tokens"),
        "grpo_entropy": Metric("policy/entropy", "Entropy falls", "nats per token"),
    }
    return draw_metrics(numbers, "GRPO", figures, width=THIRD)


def advantages_table() -> dict:
    """Advantages of the first of two completions, by what sets it apart from the second."""
    correct_weight, brevity_weight = 4, 1
    cases = {  # correct or not, and characters fewer, each minus that of the second completion
        "correct, and as long": (1, 0),
        "equally correct, and 9 characters shorter": (0, 9),
        "correct, and 9 characters shorter": (1, 9),
        "correct, and 9 characters longer": (1, -9),
    }
    rows = []
    for name, (correct, shorter) in cases.items():
        correct_rewards = torch.tensor([float(correct), 0.0])
        brevity_rewards = torch.tensor([float(shorter), 0.0])
        weighted_sum = correct_weight * correct_rewards + brevity_weight * brevity_rewards
        grpo_advantage = group_advantages(weighted_sum, 2)[0]
        gdpo_advantage = (
            correct_weight * group_advantages(correct_rewards, 2)[0]
            + brevity_weight * group_advantages(brevity_rewards, 2)[0]
        )
        row = [name, f"{weighted_sum[0]:+.0f}", f"{grpo_advantage:+.2f}", f"{gdpo_advantage:+.2f}"]
        rows.append(row)
    columns = ["the first completion is", "weighted sum, first minus second", "GRPO", "GDPO"]
    return {"columns": columns, "rows": rows}


EXPERIMENTS = (experiment_of_runs("grpo", COMMANDS, tables, draw),)
