"""docs/pitfalls.md: what goes wrong in training, and what mends it: runs on tiny/ with each symptom
and without.
"""

import re
from typing import NamedTuple

from docs.experiments.lib.drawing import (
    HEALTHY,
    SICK,
    Band,
    band_of,
    draw_band,
    draw_evaluations,
    panels,
    plain_log_scale,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import GRPO_REVIEWS, Run, runs_of, value
from docs.experiments.lib.tables import rounded


class Symptom(NamedTuple):
    sick: str  # the command that has the symptom
    healthy: str  # the command that has not
    metrics: tuple[str, ...]  # see `value`


RUNS = {
    "hacking": Symptom(
        "ppo_rlhf.py --eval-every 2 --beta 1e-9",
        "ppo_rlhf.py --eval-every 2",
        ("reward/mean", "eval/reward", "objective/kl"),
    ),
    "entropy": Symptom(
        f"{GRPO_REVIEWS} --beta 0 --learning-rate 2e-3 --lr-schedule constant_with_warmup",
        f"{GRPO_REVIEWS} --beta 0.2 --kl-placement reward",
        ("policy/entropy", "highest reward/mean", "reward/mean", "eval/reward"),
    ),
    "length": Symptom(
        "dpo.py --beta 0.1",
        "dpo.py --loss ipo --beta 1",
        ("eval/length_mean", "eval/pair_accuracy", "eval/reward"),
    ),
    "kl": Symptom(
        f"{GRPO_REVIEWS} --beta 0.0001 --learning-rate 2e-3",
        f"{GRPO_REVIEWS} --beta 0.2 --kl-placement reward",
        ("objective/kl", "reward/mean", "eval/reward"),
    ),
    "zero": Symptom(
        "grpo.py --beta 0 --total-rollouts 15 --model tiny/arithmetic/base",
        "grpo.py --beta 0 --total-rollouts 15",
        ("reward/zero_variance_groups", "reward/std", "reward/mean", "eval/accuracy"),
    ),
    "critic": Symptom(
        "ppo_rlhf.py --critic-learning-rate 1e-6",
        "ppo_rlhf.py",
        ("value/explained_variance", "value/loss", "reward/mean", "eval/reward"),
    ),
    "chosen": Symptom(
        "dpo.py --beta 0.1 --learning-rate 2e-3 --epochs 2",
        "dpo.py --beta 0.1 --learning-rate 2e-3 --epochs 2 --nll-coef 0.5",
        ("policy/logprob_chosen", "eval/pair_accuracy", "eval/kl", "eval/reward"),
    ),
}
COMMANDS = {
    f"{name}, {way}": getattr(symptom, way)
    for name, symptom in RUNS.items()
    for way in ("sick", "healthy")
}
PANELS = (  # of the figure: symptom, metric, title, label of x
    ("hacking", "eval/reward", "gold reward", "rollout"),
    ("entropy", "policy/entropy", "entropy, nats per token", "rollout"),
    ("kl", "objective/kl", "KL, nats per completion", "rollout"),
    ("chosen", "policy/logprob_chosen", "log-prob of the chosen", "optimiser step"),
)


def show(number: float) -> str:
    """Three digits, but no more than two behind the point."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    if abs(number) >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}"


# --- measuring ---------------------------------------------------------------------------------
def measure() -> dict:
    runs = runs_of(COMMANDS.values())
    numbers = {}
    for name, symptom in RUNS.items():
        numbers[name] = {}
        for command in (symptom.sick, symptom.healthy):
            numbers[name][command] = {}
            for metric in symptom.metrics:
                values = [value(run.rows, metric) for run in runs[command]]
                numbers[name][command][metric] = values
    return {"numbers": rounded(numbers, 6), "curves": rounded(panel_curves(runs))}


def panel_curves(runs: dict[str, list[Run]]) -> dict[str, dict]:
    """What the figure draws, by symptom: x, and the mean, lowest and highest y of the seeds."""
    curves = {}
    for name, metric, *_ in PANELS:
        commands = {"sick": RUNS[name].sick, "healthy": RUNS[name].healthy}
        curves[name] = {}
        for way, command in commands.items():
            band = band_of([run.curve("step", metric) for run in runs[command]])
            curves[name][way] = band._asdict()
    return curves


# --- tables and figure -------------------------------------------------------------------------
def tables(results: dict) -> dict:
    """The sick and the healthy command, a column for each metric, a number for each seed."""
    made = {}
    for name, commands in results["numbers"].items():
        rows = []
        for way, metrics in zip(("sick", "healthy"), commands.values(), strict=True):
            cells = [", ".join(map(show, values)) for values in metrics.values()]
            rows.append([way, *cells])
        headings = [re.sub(r"(\S+)$", r"`\1`", metric) for metric in RUNS[name].metrics]
        made[f"pitfalls {name}"] = {"columns": ["", *headings], "rows": rows}
    return made


def draw(results: dict) -> tuple:
    figure, axes = panels(2, height=5, rows=2)
    courses = []
    for axis, (symptom, metric, title, xlabel) in zip(axes, PANELS, strict=True):
        draw_curve = draw_evaluations if metric.startswith("eval/") else draw_band
        for name, style in (("sick", SICK), ("healthy", HEALTHY)):
            band = Band(**results["curves"][symptom][name])
            draw_curve(axis, band, name, style)
            courses.append(f"{title} {name} from {show(band.mean[0])} to {show(band.mean[-1])}")
        axis.set(title=title, xlabel=xlabel)
        if symptom == "kl":
            plain_log_scale(axis)
        else:
            axis.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
    axes[0].legend(loc="lower left")
    description = (
        "Four panels, each with the mean and the range of five sick and of five healthy runs. "
        f"Means of the first and the last value: {'; '.join(courses)}."
    )
    return figure, "Four metrics of sick and healthy runs", description


EXPERIMENTS = (Experiment("pitfalls", tables, measure, draw, COMMANDS),)
