"""Makes the numbers, tables and figures of the pages, except measurements of speed.

    python -m pip install matplotlib
    python docs/experiments/figures.py                    # all: hours on two cores
    python docs/experiments/figures.py grpo ppo           # some of them
    python docs/experiments/figures.py --redraw           # figures and tables again, without runs
    python docs/experiments/figures.py --redraw frontier stories

An experiment is a list of commands, each run with several seeds. Its numbers and curves go to
docs/results/NAME.json; its figure in docs/figures/ and its tables, which stand on the pages between
the comment lines that name them, are made from these. Runs that runs/figures already holds are
read, not repeated: delete that folder after a change to a script. Single-threaded runs go side by
side.

`stories` is not among them, since it needs a model and data from outside the repository:
`python docs/experiments/stories.py --model FOLDER --data FOLDER`.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from math import hypot
from statistics import mean
from typing import Any

import tyro
from drawing import ALGORITHM_STYLES, GROUND, Style, draw_band, draw_evaluations, panels, save
from paths import RESULTS
from runs import GOLD, GRPO_REVIEWS, QUANTITIES, SEEDS, Experiment, find_run, finished_runs, train
from tables import insert_tables, spread

LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# Preference pairs of the sums.
SUMS = f"--dataset tiny/arithmetic/preferences --eval-reward-fn {LAST_NUMBER}"


def variants(script: str, *flags: str) -> dict[str, str]:
    """Commands of a script, by the flags that are added to it."""
    commands = {}
    for added in flags:
        if added:
            commands[f"`{added}`"] = f"{script} {added}"
        else:
            commands["(default)"] = script
    return commands


def first_and_last(curves: list[list], digits: int = 2) -> str:
    """In words for a figure's description: the means of the first and of the last points."""
    first = mean(curve[0][1] for curve in curves)
    last = mean(curve[-1][1] for curve in curves)
    return f"from {first:.{digits}f} to {last:.{digits}f}".replace("-0.00", "0.00")


def draw_metrics(
    experiment: Experiment,
    figure_name: str,
    algorithm: str,
    titles: dict[str, str],
    xlabel: str = "rollout",
) -> None:
    """A panel for each metric of the default run, with its title: mean and range of the seeds."""
    figure, axes = panels(len(titles))
    courses = []
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        curves = experiment.metric_curves("(default)", metric)
        draw = draw_evaluations if metric.startswith("eval/") else draw_band
        draw(axis, curves, algorithm, *ALGORITHM_STYLES[algorithm])
        axis.set(title=title, xlabel=xlabel)
        axis.margins(y=0.1)
        courses.append(f"{title} {first_and_last(curves)}")
    description = (
        f"Over the {xlabel}, mean and range of {len(SEEDS)} seeds: {'; '.join(courses)} (means of "
        "the first and the last value). Markers without a line are evaluations."
    )
    save(figure, figure_name, f"{algorithm}: {', '.join(titles.values())}", description)


# --- the experiments: tables and figures from numbers and curves; commands further down ---------
# A column of `table_by_seed` is (label, quantity, digits), of `table_by_flags` (quantity, digits).
def sft(experiment: Experiment) -> dict:
    columns = {
        "held-out loss before": ("(default)", "loss before", 3),
        "after": ("(default)", "loss", 3),
    }
    return {"sft": experiment.table_by_seed(columns)}


def draw_sft(experiment: Experiment) -> None:
    titles = {"eval/loss": "held-out loss, nats per token"}
    draw_metrics(experiment, "sft.svg", "SFT", titles, xlabel="optimiser step")


def reward_model(experiment: Experiment) -> dict:
    columns = {
        "loss before": ("(default)", "loss before", 3),
        "loss": ("(default)", "loss", 3),
        "pair accuracy before": ("(default)", "pair accuracy before", 3),
        "pair accuracy": ("(default)", "pair accuracy", 3),
        "calibration error": ("(default)", "calibration error", 3),
    }
    layers = {
        "loss": ("loss", 3),
        "pair accuracy": ("pair accuracy", 3),
        "calibration error": ("calibration error", 3),
    }
    return {
        "reward model": experiment.table_by_seed(columns),
        "reward model layers": experiment.table_by_flags(layers),
    }


def draw_reward_model(experiment: Experiment) -> None:
    titles = {"eval/pair_accuracy": "held-out pair accuracy", "eval/loss": "held-out loss, nats"}
    name = "rm_bradley_terry.svg"
    draw_metrics(experiment, name, "reward model", titles, xlabel="optimiser step")


def reinforce(experiment: Experiment) -> dict:
    columns = {
        "accuracy before": ("reward before", 3),
        "after 20 rollouts": ("reward after 20", 3),
        "after 60": ("reward", 3),
    }
    return {"reinforce": experiment.table_by_flags(columns)}


def grpo(experiment: Experiment) -> dict:
    columns = {
        "accuracy before": ("(default)", "accuracy before", 3),
        "after": ("(default)", "accuracy", 3),
        "greedy, after": ("greedy", "accuracy before", 3),
        "tokens before": ("(default)", "tokens before", 1),
        "tokens after": ("(default)", "tokens", 1),
        "KL, nats per completion": ("(default)", "KL, last five rollouts", 1),
    }
    return {"grpo": experiment.table_by_seed(columns)}


def draw_grpo(experiment: Experiment) -> None:
    titles = {
        "eval/accuracy": "held-out accuracy",
        "completions/length_mean": "tokens per completion",
        "policy/entropy": "entropy, nats per token",
    }
    draw_metrics(experiment, "grpo.svg", "GRPO", titles)


def grpo_variants(experiment: Experiment) -> dict:
    columns = {"accuracy": ("accuracy", 3), "tokens": ("tokens", 1)}
    return {"grpo variants": experiment.table_by_flags(columns)}


def ppo(experiment: Experiment) -> dict:
    review_columns = {
        "gold before": ("(default)", "reward before", 2),
        "gold": ("(default)", "reward", 2),
        "learned": ("(default)", "learned reward", 2),
        "grammatical": ("(default)", "grammatical", 2),
        "KL": ("(default)", "KL, last five rollouts", 1),
        "`--beta 0`: gold": ("`--beta 0`", "reward", 2),
        "`--beta 0`: learned": ("`--beta 0`", "learned reward", 2),
        "`--beta 0`: grammatical": ("`--beta 0`", "grammatical", 2),
    }
    sum_columns = {
        "accuracy before": ("sums", "accuracy before", 3),
        "accuracy": ("sums", "accuracy", 3),
        "explained variance": ("sums", "explained variance", 2),
    }
    return {
        "ppo": experiment.table_by_seed(review_columns),
        "ppo sums": experiment.table_by_seed(sum_columns),
    }


def ppo_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
        "first `explained_variance`": ("first explained variance", 2),
        "at the end": ("explained variance", 2),
    }
    return {"ppo variants": experiment.table_by_flags(columns)}


def reward_hacking(experiment: Experiment) -> dict:
    columns = {
        "learned": ("learned reward", 2),
        "gold": ("reward", 2),
        "KL": ("KL, last five rollouts", 1),
    }
    table = experiment.table_by_flags(columns)
    table["columns"][0] = "`--beta`"
    table["columns"].append("a review near the mean, seed 1 (its gold)")
    for row, label in zip(table["rows"], experiment.labels, strict=True):
        sample = experiment.typical_sample(label)
        row.append(f"`{sample['completion']}` ({sample['reward']:.2f})")
    return {"reward hacking": table}


# Shades of PPO's colour, a marker and a line for each beta.
BETA_STYLES = {
    "1e-9": Style("#0a3a75", "X", "--"),
    "0.05": Style("#0b62c4", "s", "-."),
    "0.2": Style("#1f86e0", "o", "-"),
}


def draw_reward_hacking(experiment: Experiment) -> None:
    titles = {"reward/mean": "learned reward", "eval/reward": "gold reward, held out"}
    figure, axes = panels(2, height=3.6, sharex=True)
    ends = {}
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for label, style in BETA_STYLES.items():
            curves = experiment.evaluation_curves(label, metric, x="objective/kl")
            kls, rewards = mean_path(curves)
            ends[label, metric] = rewards[-1]
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=style.colour, lw=0.6, alpha=0.35)
            draw_path(axis, kls, rewards, f"beta {label}", style)
        axis.set(title=title, xlabel="KL to the starting policy, nats per completion")
    legend_title = "arrows: forward in time\nlarge marker: rollout 30"
    axes[0].legend(loc="lower right", handlelength=3, title=legend_title)
    last = [
        f"{label} ends at {ends[label, 'reward/mean']:.1f} learned and "
        f"{ends[label, 'eval/reward']:.2f} gold"
        for label in BETA_STYLES
    ]
    description = (
        "Two panels over the KL to the starting policy: the learned reward that PPO trains on, and "
        "the gold reward. A line for each of three beta goes through the evaluations of a run, "
        "every second rollout; its arrows point forward in time, the marker of its end is large. "
        f"Thin lines are single seeds. Beta {'; '.join(last)}."
    )
    save(figure, "reward_hacking.svg", "PPO: learned and gold reward against the KL", description)


def mean_path(curves: list[list]) -> tuple[list[float], list[float]]:
    """Mean x and mean y of each evaluation, over the seeds."""
    evaluations = [*zip(*curves, strict=True)]
    xs = [mean(x for x, _ in points) for points in evaluations]
    ys = [mean(y for _, y in points) for points in evaluations]
    return xs, ys


def draw_path(axis: Any, xs: list[float], ys: list[float], label: str, style: Style) -> None:
    """A line through evaluations in the order of time, with arrows on its longest parts."""
    colour, marker, line = style
    axis.plot(xs, ys, color=colour, ls=line, lw=1.6, marker=marker, ms=3.5, label=label)
    axis.plot(xs[-1:], ys[-1:], color=colour, marker=marker, ms=9, ls="")
    width, height = max(xs) - min(xs), max(ys) - min(ys)

    def length(i: int) -> float:
        return hypot((xs[i + 1] - xs[i]) / width, (ys[i + 1] - ys[i]) / height)

    for i in sorted(range(len(xs) - 1), key=length)[-3:]:
        two_thirds = (xs[i] + 0.67 * (xs[i + 1] - xs[i]), ys[i] + 0.67 * (ys[i + 1] - ys[i]))
        arrow = dict(arrowstyle="-|>,head_width=0.35", color=colour, mutation_scale=16, lw=0)
        axis.annotate("", xytext=(xs[i], ys[i]), xy=two_thirds, arrowprops=arrow)


@dataclass
class Family:
    """An algorithm, which is run with several beta."""

    command: str  # before the beta
    betas: Sequence[float]


FRONTIER = {
    "PPO, KL in the reward": Family("ppo_rlhf.py --beta", (1e-9, 0.05, 0.1, 0.2, 0.5)),
    "PPO, KL in the loss": Family("ppo_rlhf.py --kl-placement loss --beta", (0.2, 0.5, 1)),
    "GRPO, KL in the reward": Family(
        f"{GRPO_REVIEWS} --kl-placement reward --beta", (0.1, 0.2, 0.5)
    ),
    "GRPO, KL in the loss": Family(f"{GRPO_REVIEWS} --beta", (0.1, 0.2, 0.5, 1)),
    "DPO": Family("dpo.py --beta", (0.1, 0.3, 1)),
}


def frontier_commands() -> dict[str, str]:
    commands = {}
    for name, family in FRONTIER.items():
        for beta in family.betas:
            commands[f"{name}, beta {beta}"] = f"{family.command} {beta}"
    return commands


def shown(beta: float) -> str:
    """1e-9 where Python writes 1e-09."""
    return str(beta).replace("e-0", "e-")


def frontier(experiment: Experiment) -> dict:
    rows = []
    for name, family in FRONTIER.items():
        for beta in family.betas:
            label = f"{name}, beta {beta}"
            row = [name, shown(beta)]
            row.append(experiment.spread(label, "reward", 2))
            row.append(experiment.spread(label, "KL of samples", 1))
            row.append(experiment.spread(label, "grammatical", 2))
            rows.append(row)
    columns = ["algorithm", "`--beta`", "gold", "KL, nats per completion", "grammatical"]
    return {"frontier": {"columns": columns, "rows": rows}}


# Where a beta stands beside its point, in points to the right and up; else 6, 5.
BETA_OFFSETS = {
    ("PPO, KL in the reward", 0.5): (-20, 6),
    ("PPO, KL in the loss", 0.5): (-20, 6),
    ("PPO, KL in the loss", 1): (-12, 6),
    ("GRPO, KL in the reward", 0.1): (-28, 1),
    ("GRPO, KL in the reward", 0.2): (-17, -15),
    ("GRPO, KL in the reward", 0.5): (-24, -2),
    ("GRPO, KL in the loss", 0.1): (-17, -14),
    ("GRPO, KL in the loss", 0.5): (-20, 7),
    ("GRPO, KL in the loss", 1): (-12, 7),
    ("DPO", 1): (-3, -17),
}


def draw_frontier(experiment: Experiment) -> None:
    """Two panels, one above the other, with a gap in the axis between them."""
    figure, axes = panels(1, height=5.2, rows=2, sharex=True)
    upper, lower = axes
    upper.get_gridspec().set_height_ratios([3, 1])
    best = {}
    for name, family in FRONTIER.items():
        algorithm, _, placement = name.partition(", ")
        colour, marker, line = ALGORITHM_STYLES[algorithm]
        fill = colour
        if placement == "KL in the loss":
            fill, line = GROUND, "--"
        mean_kls, mean_golds = [], []
        for beta in family.betas:
            label = f"{name}, beta {beta}"
            kls = experiment.values(label, "KL of samples")
            golds = experiment.values(label, "reward")
            mean_kls.append(mean(kls))
            mean_golds.append(mean(golds))
            for axis in axes:
                axis.plot(kls, golds, color=colour, marker=".", ms=3.5, ls="", alpha=0.7)
        best[name] = max(zip(mean_golds, mean_kls, map(shown, family.betas), strict=True))
        for axis in axes:
            axis.plot(
                mean_kls,
                mean_golds,
                color=colour,
                marker=marker,
                ms=7,
                mfc=fill,
                ls=line,
                lw=1.2,
                label=name,
            )
        for beta, kl, gold in zip(family.betas, mean_kls, mean_golds, strict=True):
            upper_or_lower = upper if gold > 0.2 else lower
            upper_or_lower.annotate(
                shown(beta),
                (kl, gold),
                xytext=BETA_OFFSETS.get((name, beta), (6, 5)),
                textcoords="offset points",
                color=colour,
            )
    upper.spines.bottom.set_visible(False)
    lower.spines.top.set_visible(False)
    upper.tick_params(axis="x", length=0)
    upper.set(ylim=(0.28, 0.95), ylabel="gold reward, held out", xscale="log")
    upper.set(title="The number at a point is its beta; small dots are single seeds")
    lower.set(ylim=(-0.8, 0.2), yticks=[-0.5, 0])
    lower.set(xlabel="KL to the starting policy, nats per completion")
    lower.set_xticks([0.3, 1, 3, 10, 30], labels=["0.3", "1", "3", "10", "30"])
    lower.minorticks_off()
    lower.legend(loc="lower left")
    peaks = [
        f"{name}: {gold:.2f} at {kl:.1f} nats with beta {beta}"
        for name, (gold, kl, beta) in best.items()
    ]
    description = (
        "Gold reward over the KL to the starting policy on a logarithmic axis; a marker for the "
        "mean of five seeds of each beta, joined by a line for each algorithm. The gold reward "
        f"first rises with the KL and then falls. Its highest means are: {'; '.join(peaks)}."
    )
    save(figure, "frontier.svg", "Gold reward against KL for PPO, GRPO and DPO", description)


def dpo(experiment: Experiment) -> dict:
    review_columns = {
        "pair accuracy": ("(default)", "pair accuracy", 3),
        "loss": ("(default)", "loss", 3),
        "gold before": ("(default)", "reward before", 2),
        "gold": ("(default)", "reward", 2),
        "grammatical": ("(default)", "grammatical", 2),
        "KL": ("(default)", "eval KL", 1),
        "tokens before": ("(default)", "tokens before", 1),
        "tokens": ("(default)", "tokens", 1),
    }
    sum_columns = {
        "accuracy before": ("sums", "accuracy before", 3),
        "accuracy": ("sums", "accuracy", 3),
        "KL": ("sums", "eval KL", 1),
    }
    return {
        "dpo": experiment.table_by_seed(review_columns),
        "dpo sums": experiment.table_by_seed(sum_columns),
    }


def draw_dpo(experiment: Experiment) -> None:
    titles = {
        "eval/pair_accuracy": "held-out pair accuracy",
        "eval/reward": "gold reward",
        "eval/kl": "KL, nats per completion",
    }
    draw_metrics(experiment, "dpo.svg", "DPO", titles, xlabel="optimiser step")


def dpo_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
        "tokens": ("tokens", 1),
    }
    return {"dpo variants": experiment.table_by_flags(columns)}


def simpo_and_orpo(experiment: Experiment) -> dict:
    """Losses without a reference, so without a KL."""
    columns = {
        "gold": ("reward", 2),
        "grammatical": ("grammatical", 2),
        "pair accuracy": ("pair accuracy", 3),
        "tokens": ("tokens", 1),
    }
    return {"simpo and orpo": experiment.table_by_flags(columns)}


def orpo_commands() -> dict[str, str]:
    from_base = (
        f"dpo.py --loss orpo --beta {{}} --model tiny/arithmetic/base {SUMS} --max-new-tokens 24 "
        "--learning-rate 1e-3 --epochs 12"
    )
    return {
        "SFT on the chosen": from_base.format(1e-9),
        "ORPO, beta 0.5": from_base.format(0.5),
        "ORPO, beta 1": from_base.format(1),
        "that SFT, then DPO": f"dpo.py --model {{SFT on the chosen}} {SUMS} --max-new-tokens 24",
    }


def orpo(experiment: Experiment) -> dict:
    columns = {"accuracy before": ("SFT on the chosen", "accuracy before", 3)}
    for label in experiment.labels:
        columns[label] = (label, "accuracy", 3)
    return {"orpo": experiment.table_by_seed(columns)}


def kto(experiment: Experiment) -> dict:
    tables = {}
    for name, label in {"kto": "(default)", "kto pairs": "pairs"}.items():
        columns = {
            "loss before": (label, "loss before", 3),
            "loss": (label, "loss", 3),
            "gold before": (label, "reward before", 2),
            "gold": (label, "reward", 2),
            "grammatical": (label, "grammatical", 2),
            "KL": (label, "eval KL", 1),
            "highest KL": (label, "highest KL", 1),
            "tokens before": (label, "tokens before", 1),
            "tokens": (label, "tokens", 1),
        }
        tables[name] = experiment.table_by_seed(columns)
    return tables


def kto_variants(experiment: Experiment) -> dict:
    columns = {
        "gold": ("reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
    }
    return {"kto variants": experiment.table_by_flags(columns)}


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


def gdpo(experiment: Experiment) -> dict:
    rows = []
    for label in experiment.labels:
        setting, _, algorithm = label.rpartition(", ")
        if algorithm == "GDPO":
            continue  # it stands in the row of its GRPO
        rule, _, weights = setting.partition(" ")
        labels = [f"{setting}, GRPO", f"{setting}, GDPO"]
        row = [rule, weights]
        row += [experiment.spread(label, "accuracy", 2) for label in labels]
        if rule in QUANTITIES:
            row += [experiment.spread(label, rule, 1) for label in labels]
        else:
            row += ["", ""]
        row += [experiment.spread(label, "right in the third rollout", 2) for label in labels]
        rows.append(row)
    columns = ["rule", "weights, right : rule", "right: GRPO", "GDPO", "rule: GRPO", "GDPO"]
    columns += ["right in the third rollout: GRPO", "GDPO"]
    return {"gdpo advantages": gdpo_advantages_table(), "gdpo": {"columns": columns, "rows": rows}}


def draw_gdpo(experiment: Experiment) -> None:
    titles = {"reward/last_number": "right answers", "reward/brevity": "minus the characters"}
    figure, axes = panels(2)
    courses = []
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for algorithm in ("GRPO", "GDPO"):
            curves = experiment.metric_curves(f"brevity 4 : 1, {algorithm}", metric)
            draw_band(axis, curves, algorithm, *ALGORITHM_STYLES[algorithm])
            courses.append(f"{title} {first_and_last(curves)} by {algorithm}")
        axis.set(title=title, xlabel="rollout")
    axes[0].legend(loc="center right")
    description = (
        "GRPO and GDPO with the rewards right answer and brevity, weights 4 and 1. Two panels over "
        f"the rollout, mean and range of {len(SEEDS)} seeds. Means of the first and the last "
        f"value: {'; '.join(courses)}."
    )
    save(figure, "gdpo.svg", "GRPO and GDPO: right answers and brevity", description)


def gdpo_advantages_table() -> dict:
    """Advantages of the first of two completions, by what sets it apart from the second."""
    import torch

    from grpo import group_advantages

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


def format_reward(experiment: Experiment) -> dict:
    columns = {
        "working shown, first rollout": ("(default)", "first shown", 2),
        "last five": ("(default)", "shown", 2),
        "accuracy before": ("(default)", "accuracy before", 3),
        "accuracy": ("(default)", "accuracy", 3),
    }
    return {"format reward": experiment.table_by_seed(columns)}


def draw_format_reward(experiment: Experiment) -> None:
    titles = {"reward/shown": "working shown", "eval/accuracy": "held-out accuracy"}
    draw_metrics(experiment, "rewards.svg", "GRPO", titles)


# --- the experiments: their commands -----------------------------------------------------------
# By label; and the function that makes the tables. A command may name the model of another run of
# the same experiment and seed: {its label}.
EXPERIMENTS: dict[str, tuple[dict[str, str], Callable[[Experiment], dict]]] = {
    "sft": ({"(default)": "sft.py"}, sft),
    "reward_model": (
        variants("rm_bradley_terry.py", "", "--train-layers 1", "--train-layers 0"),
        reward_model,
    ),
    "grpo": (
        {
            "(default)": "grpo.py",
            "greedy": "grpo.py --model {(default)} --eval-temperature 0 --total-rollouts 1",
        },
        grpo,
    ),
    "ppo": (
        {
            "(default)": "ppo_rlhf.py",
            "`--beta 0`": "ppo_rlhf.py --beta 0",
            "sums": "ppo_rlhf.py --model tiny/arithmetic/policy --dataset tiny/arithmetic/prompts "
            f"--reward-model None --reward-fn {LAST_NUMBER} --eval-reward-fn None "
            "--critic-init sft --max-new-tokens 24 --total-rollouts 40 --beta 0.04",
        },
        ppo,
    ),
    "dpo": (
        {
            "(default)": "dpo.py",
            "sums": f"dpo.py --model tiny/arithmetic/policy {SUMS} --max-new-tokens 24",
        },
        dpo,
    ),
    "kto": (
        {
            "(default)": "kto.py --eval-every 100",
            "pairs": "kto.py --eval-every 100 --dataset tiny/reviews/preferences "
            f"--eval-reward-fn ./{GOLD}",
        },
        kto,
    ),
    "reinforce": (
        variants(
            "reinforce.py",
            "--baseline none",
            "--baseline batch_mean",
            "--baseline leave_one_out",
        ),
        reinforce,
    ),
    "reward_hacking": (
        # At 0 no reference is loaded and no KL measured; 1e-9 subtracts next to nothing.
        {
            "1e-9": "ppo_rlhf.py --beta 1e-9 --eval-every 2",
            "0.05": "ppo_rlhf.py --beta 0.05 --eval-every 2",
            "0.2": "ppo_rlhf.py --beta 0.2 --eval-every 2",
        },
        reward_hacking,
    ),
    "frontier": (frontier_commands(), frontier),
    "grpo_variants": (
        variants(
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
        ),
        grpo_variants,
    ),
    "ppo_variants": (
        variants(
            "ppo_rlhf.py",
            "",
            "--no-whiten-advantages",
            "--vf-clip-coef None",
            "--critic-init sft",
            "--critic-init scratch",
            "--critic-init policy",
            "--gae-lambda 1",
            "--num-minibatches 1",
        ),
        ppo_variants,
    ),
    "dpo_variants": (
        variants(
            "dpo.py",
            "",
            "--loss ipo --beta 1",
            "--nll-coef 0.2",
            "--label-smoothing 0.1",
        ),
        dpo_variants,
    ),
    "simpo_and_orpo": (
        variants(
            "dpo.py",
            "--loss simpo --beta 5 --gamma 0.5",
            "--loss simpo --beta 5 --gamma 0",
            "--loss simpo --beta 5 --gamma 2",
            "--loss simpo --beta 2 --gamma 0.5",
            "--loss simpo --beta 5 --gamma 0.5 --nll-coef 0.2",
            "--loss orpo --beta 5",
            "--loss orpo --beta 1",
            "--loss orpo --beta 1e-9",
        ),
        simpo_and_orpo,
    ),
    "orpo": (orpo_commands(), orpo),
    "format_reward": (
        {
            "(default)": "grpo.py --reward-fn docs/rewards/formats.py:shown "
            f"--eval-reward-fn {LAST_NUMBER}"
        },
        format_reward,
    ),
    "kto_variants": (
        variants(
            "kto.py",
            "",
            "--desirable-weight 1",
            "--desirable-weight 1 --beta 0.3",
        ),
        kto_variants,
    ),
    "gdpo": (gdpo_commands(), gdpo),
}
DRAWINGS: dict[str, Callable[[Experiment], None]] = {
    "sft": draw_sft,
    "reward_model": draw_reward_model,
    "grpo": draw_grpo,
    "dpo": draw_dpo,
    "reward_hacking": draw_reward_hacking,
    "frontier": draw_frontier,
    "format_reward": draw_format_reward,
    "gdpo": draw_gdpo,
}
# Programs of their own: `results()` gives what docs/results/NAME.json holds, and `draw(results)`,
# where there is one, draws their figures from that.
MODULES = (
    "theory",
    "choosing",
    "real_size",
    "variance",
    "pitfalls",
    "shown_working",
    "one_prompt",
    "iterative_dpo",
    "best_of_n",
    "exercises",
)


def overview() -> dict:
    """All algorithms on one metric, from the numbers of the other experiments."""

    def saved_spread(experiment: str, label: str, quantity: str, digits: int) -> str:
        return spread(saved(experiment)["numbers"][label][quantity], digits)

    def gold(experiment: str, label: str) -> str:
        return saved_spread(experiment, label, "reward", digits=2)

    def kl(experiment: str, label: str) -> str:
        return saved_spread(experiment, label, "KL of samples", digits=1)

    def accuracy(experiment: str, label: str, quantity: str = "accuracy") -> str:
        return saved_spread(experiment, label, quantity, digits=3)

    simpo, orpo = "`--loss simpo --beta 5 --gamma 0.5`", "`--loss orpo --beta 5`"
    rows = [
        [
            "[PPO](ppo_rlhf.md)",
            gold("frontier", "PPO, KL in the reward, beta 0.2"),
            kl("frontier", "PPO, KL in the reward, beta 0.2"),
            accuracy("ppo", "sums"),
            "reward model; rule",
        ],
        [
            "[REINFORCE](reinforce.md), leave one out",
            "",
            "",
            accuracy("reinforce", "`--baseline leave_one_out`", "reward"),
            "rule",
        ],
        [
            "[GRPO](grpo.md), KL in the loss",
            gold("frontier", "GRPO, KL in the loss, beta 0.2"),
            kl("frontier", "GRPO, KL in the loss, beta 0.2"),
            accuracy("grpo", "(default)"),
            "reward model; rule",
        ],
        [
            "GRPO, KL in the reward",
            gold("frontier", "GRPO, KL in the reward, beta 0.2"),
            kl("frontier", "GRPO, KL in the reward, beta 0.2"),
            "",
            "reward model",
        ],
        [
            "[DPO](dpo.md)",
            gold("frontier", "DPO, beta 0.3"),
            kl("frontier", "DPO, beta 0.3"),
            accuracy("dpo", "sums"),
            "pairs; right and wrong samples",
        ],
        ["[SimPO](dpo.md#simpo-and-orpo)", gold("simpo_and_orpo", simpo), "", "", "pairs"],
        [
            "[ORPO](dpo.md#simpo-and-orpo)",
            gold("simpo_and_orpo", orpo),
            "",
            f"{accuracy('orpo', 'ORPO, beta 0.5')}, from an untrained model",
            "pairs; right and wrong samples",
        ],
        [
            "[KTO](kto.md)",
            gold("kto_variants", "(default)"),
            kl("kto_variants", "(default)"),
            "",
            "labelled completions",
        ],
    ]
    columns = ["", "review task: gold reward", "KL, nats per completion"]
    columns += ["arithmetic task: accuracy", "learns from"]
    return {"tables": {"overview": {"columns": columns, "rows": rows}}}


# --- making them -------------------------------------------------------------------------------
@dataclass
class Args:
    names: tyro.conf.Positional[tuple[str, ...]] = (*EXPERIMENTS, *MODULES, "overview")
    """Experiments; all if none is named."""
    jobs: int = 2
    """Runs side by side."""
    redraw: bool = False
    """Make figures and tables from docs/results/NAME.json alone; no runs."""


def with_models(command: str, seed: int, commands: dict[str, str]) -> str:
    """The command, with the folders of other runs' models in the place of their labels."""
    for label, other_command in commands.items():
        if f"{{{label}}}" in command:
            run = find_run(other_command, seed)
            command = command.replace(f"{{{label}}}", f"{run.folder}/model")
    return command


def make_runs(commands: dict[str, str], jobs: int) -> None:
    """Those runs of an experiment that are not there yet."""
    from_given_model = [command for command in commands.values() if "{" not in command]
    from_another_run = [command for command in commands.values() if "{" in command]
    for stage in (from_given_model, from_another_run):
        with ThreadPoolExecutor(jobs) as pool:
            trainings = []
            for command in stage:
                for seed in SEEDS:
                    full_command = with_models(command, seed, commands)
                    if find_run(full_command, seed) is None:
                        trainings.append(pool.submit(train, full_command, seed))
            for training in trainings:
                training.result()  # raises what the training raised
        finished_runs.cache_clear()


def make(name: str, jobs: int) -> None:
    """Make the runs of an experiment, and from these its results."""
    commands, _ = EXPERIMENTS[name]
    make_runs(commands, jobs)
    runs = {}
    for label, command in commands.items():
        runs[label] = [find_run(with_models(command, seed, commands), seed) for seed in SEEDS]
    report(name, Experiment([*commands], runs))


def remake(name: str) -> None:
    """Make tables and figures again from docs/results/NAME.json."""
    if name in EXPERIMENTS:
        report(name, saved_experiment(name))
    elif name == "overview":
        write(name, overview())
    elif (RESULTS / f"{name}.json").exists():
        draw(name)


def saved(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def saved_experiment(name: str) -> Experiment:
    """The numbers and curves of runs made earlier."""
    commands, _ = EXPERIMENTS[name]
    results = saved(name)
    return Experiment(
        [*commands],
        numbers=results["numbers"],
        curves=results["curves"],
        samples=results.get("samples", {}),
    )


def report(name: str, experiment: Experiment) -> None:
    """Tables and figure of an experiment."""
    commands, tables_of = EXPERIMENTS[name]
    results = {"tables": tables_of(experiment), "commands": commands, "seeds": SEEDS}
    if name in DRAWINGS:
        DRAWINGS[name](experiment)  # records the curves
    results |= {"numbers": experiment.numbers, "curves": experiment.curves}
    if experiment.samples:
        results["samples"] = experiment.samples
    write(name, results)


def draw(name: str) -> None:
    """The figures of an experiment or a module, if it has any, from docs/results/NAME.json."""
    if name in DRAWINGS:
        DRAWINGS[name](saved_experiment(name))
    elif name not in EXPERIMENTS and name != "overview":
        module = import_module(name)
        if hasattr(module, "draw"):
            module.draw(saved(name))


def write(name: str, results: dict) -> None:
    """To docs/results/NAME.json, and the tables onto the pages."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    insert_tables()


def main(args: Args) -> None:
    for name in args.names:
        print(name, flush=True)
        if args.redraw:
            remake(name)
        elif name == "overview":
            write(name, overview())
        elif name in MODULES:
            write(name, import_module(name).results())
            draw(name)
        else:
            make(name, args.jobs)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
