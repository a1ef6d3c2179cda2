"""docs/ppo_rlhf.md: the default run, variants of it, and a learned reward that is exploited."""

from math import hypot
from statistics import mean
from typing import Any

from docs.experiments.lib.drawing import Style, panels
from docs.experiments.lib.runs import Numbers, experiment_of_runs, variants

COMMANDS = variants(
    "ppo_rlhf.py",
    "",
    "--no-whiten-advantages",
    "--vf-clip-coef None",
    "--critic-init sft",
    "--critic-init scratch",
    "--critic-init policy",
    "--gae-lambda 1",
    "--num-minibatches 1",
)


def tables(numbers: Numbers) -> dict:
    columns = {
        "gold": ("eval/reward", 2),
        "KL": ("KL of samples", 1),
        "explained variance": ("value/explained_variance", 2),
    }
    return {"ppo_rlhf": numbers.table_by_label(columns)}


# --- reward_hacking ----------------------------------------------------------------------------
HACKING = {
    # At 0 no reference is loaded and no KL measured; 1e-9 subtracts next to nothing.
    "1e-9": "ppo_rlhf.py --eval-every 2 --beta 1e-9",
    "0.05": "ppo_rlhf.py --eval-every 2 --beta 0.05",
    "0.2": "ppo_rlhf.py --eval-every 2",
}
BETA_STYLES = {  # shades of PPO's colour, a marker and a line for each beta
    "1e-9": Style("#0a3a75", "X", "--"),
    "0.05": Style("#0b62c4", "s", "-."),
    "0.2": Style("#1f86e0", "o", "-"),
}


def hacking_tables(numbers: Numbers) -> dict:
    columns = {
        "learned": ("reward/mean", 2),
        "gold": ("eval/reward", 2),
        "KL": ("objective/kl", 1),
    }
    table = numbers.table_by_label(columns, heading="`--beta`")
    table["columns"].append("a review near the mean, seed 1 (its gold)")
    for row in table["rows"]:
        sample = numbers.typical_sample(row[0])
        row.append(f"`{sample['completion']}` ({sample['reward']:.2f})")
    return {"reward_hacking": table}


def draw_hacking(numbers: Numbers) -> tuple:
    titles = {"reward/mean": "learned reward", "eval/reward": "gold reward, held out"}
    figure, axes = panels(2, height=3.6, sharex=True)
    ends = {}
    for axis, (metric, title) in zip(axes, titles.items(), strict=True):
        for label, style in BETA_STYLES.items():
            curves = numbers.metric_curves(label, metric, "objective/kl", evaluations=True)
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
    return figure, "PPO: learned and gold reward against the KL", description


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


EXPERIMENTS = (
    experiment_of_runs("ppo_rlhf", COMMANDS, tables),
    experiment_of_runs("reward_hacking", HACKING, hacking_tables, draw_hacking),
)
