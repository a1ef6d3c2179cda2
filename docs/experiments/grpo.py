"""docs/grpo.md: the default run, variants of it, and GDPO beside GRPO."""

import torch

from docs.experiments.lib.drawing import (
    ALGORITHM_STYLES,
    draw_band,
    draw_metrics,
    first_and_last,
    panels,
)
from docs.experiments.lib.runs import LAST_NUMBER, Numbers, experiment_of_runs, variants
from grpo import group_advantages

COMMANDS = {
    "(default)": "grpo.py",
    "greedy": "grpo.py --model {grpo.py} --eval-temperature 0 --total-rollouts 1",
}
VARIANTS = variants(
    "grpo.py",
    "",
    "--beta 0",
    "--no-scale-rewards",
    "--loss-norm token",
    "--loss-norm constant",
    "--group-size 2 --prompts-per-rollout 128",
    "--group-size 4 --prompts-per-rollout 64",
    "--group-size 16 --prompts-per-rollout 16",
    "--group-size 32 --prompts-per-rollout 8",
    "--num-minibatches 1 --learning-rate 1e-3",
    "--num-minibatches 8",
    "--beta 0 --clip-coef-high 0.28 --loss-norm token --mask-truncated",
    "--beta 0 --loss-norm constant --no-scale-rewards",
)


def tables(numbers: Numbers) -> dict:
    columns = {
        "accuracy before": ("(default)", "first eval/accuracy", 3),
        "after": ("(default)", "eval/accuracy", 3),
        "greedy, after": ("greedy", "first eval/accuracy", 3),
        "tokens before": ("(default)", "first eval/length_mean", 1),
        "tokens after": ("(default)", "eval/length_mean", 1),
        "KL, nats per completion": ("(default)", "objective/kl", 1),
    }
    return {"grpo": numbers.table_by_seed(columns)}


def draw(numbers: Numbers) -> tuple:
    titles = {
        "eval/accuracy": "held-out accuracy",
        "completions/length_mean": "tokens per completion",
        "policy/entropy": "entropy, nats per token",
    }
    return draw_metrics(numbers, "GRPO", titles)


def variants_tables(numbers: Numbers) -> dict:
    columns = {"accuracy": ("eval/accuracy", 3), "tokens": ("eval/length_mean", 1)}
    return {"grpo_variants": numbers.table_by_label(columns)}


# --- gdpo --------------------------------------------------------------------------------------
def gdpo_commands() -> dict[str, str]:
    """GRPO and GDPO of right answers and a second rule, with several weights."""
    reward_flags = {}
    for weight in (1, 2, 4, 8, 16):
        reward_flags[f"brevity {weight} : 1"] = (
            f"{LAST_NUMBER} docs/experiments/rules.py:brevity --reward-weights {weight} 1"
        )
    reward_flags["working 1 : 1"] = (
        f"{LAST_NUMBER} docs/experiments/rules.py:working --reward-weights 1 1"
    )
    reward_flags["none "] = LAST_NUMBER
    commands = {}
    for setting, flags in reward_flags.items():
        base = f"grpo.py --reward-fn {flags} --eval-reward-fn {LAST_NUMBER}"
        base += " --multi-objective-aggregation"
        commands[f"{setting}, GRPO"] = f"{base} sum_then_normalize"
        commands[f"{setting}, GDPO"] = f"{base} normalize_then_sum"
    return commands


def gdpo_tables(numbers: Numbers) -> dict:
    rows = []
    for label in numbers.commands:
        setting, _, algorithm = label.rpartition(", ")
        if algorithm == "GDPO":
            continue  # it stands in the row of its GRPO
        rule, _, weights = setting.partition(" ")
        labels = [f"{setting}, GRPO", f"{setting}, GDPO"]
        row = [rule, weights]
        row += [numbers.spread(label, "eval/accuracy", 2) for label in labels]
        if rule == "none":
            row += ["", ""]
        else:
            row += [numbers.spread(label, f"rewards/{rule}", 1) for label in labels]
        row += [numbers.spread(label, "rewards/last_number at 3", 2) for label in labels]
        rows.append(row)
    columns = ["rule", "weights, right : rule", "right: GRPO", "GDPO", "rule: GRPO", "GDPO"]
    columns += ["right in the third rollout: GRPO", "GDPO"]
    return {"gdpo advantages": advantages_table(), "gdpo": {"columns": columns, "rows": rows}}


def draw_gdpo(numbers: Numbers) -> tuple:
    titles = {"rewards/last_number": "right answers", "rewards/brevity": "minus the characters"}
    figure, axes = panels(2)
    courses = []
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for algorithm in ("GRPO", "GDPO"):
            curves = numbers.metric_curves(f"brevity 4 : 1, {algorithm}", metric)
            draw_band(axis, curves, algorithm, ALGORITHM_STYLES[algorithm])
            courses.append(f"{title} {first_and_last(curves)} by {algorithm}")
        axis.set(title=title, xlabel="rollout")
    axes[0].legend(loc="center right")
    description = (
        "GRPO and GDPO with the rewards right answer and brevity, weights 4 and 1. Two panels over "
        f"the rollout, mean and range of {len(numbers.seeds)} seeds. Means of the first and the "
        f"last value: {'; '.join(courses)}."
    )
    return figure, "GRPO and GDPO: right answers and brevity", description


def advantages_table() -> dict:
    """Advantages of the first of two completions, by what sets it apart from the second."""
    right_weight, brevity_weight = 4, 1
    cases = {  # right or not, and characters fewer, each minus that of the second completion
        "right, and as long": (1, 0),
        "as right, and 9 characters shorter": (0, 9),
        "right, and 9 characters shorter": (1, 9),
        "right, and 9 characters longer": (1, -9),
    }
    rows = []
    for name, (right, shorter) in cases.items():
        right_rewards = torch.tensor([float(right), 0.0])
        brevity_rewards = torch.tensor([float(shorter), 0.0])
        weighted_sum = right_weight * right_rewards + brevity_weight * brevity_rewards
        grpo_advantage = group_advantages(weighted_sum, 2)[0]
        gdpo_advantage = (
            right_weight * group_advantages(right_rewards, 2)[0]
            + brevity_weight * group_advantages(brevity_rewards, 2)[0]
        )
        row = [name, f"{weighted_sum[0]:+.0f}", f"{grpo_advantage:+.2f}", f"{gdpo_advantage:+.2f}"]
        rows.append(row)
    columns = ["the first completion is", "weighted sum, first minus second", "GRPO", "GDPO"]
    return {"columns": columns, "rows": rows}


EXPERIMENTS = (
    experiment_of_runs("grpo", COMMANDS, tables, draw),
    experiment_of_runs("grpo_variants", VARIANTS, variants_tables),
    experiment_of_runs("gdpo", gdpo_commands(), gdpo_tables, draw_gdpo),
)
