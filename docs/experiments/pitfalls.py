"""docs/pitfalls.md: what goes wrong in training, and what mends it: runs on tiny/ with each symptom
and without.
"""

import re
from typing import NamedTuple

from docs.experiments.lib.drawing import (
    GREY,
    HEALTHY,
    SICK,
    Band,
    band_of,
    draw_band,
    panel,
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
PANELS = (  # the figures: symptom, metric, title, labels of x and y
    (
        "entropy",
        "policy/entropy",
        "GRPO, rate 2e-3: entropy falls to 0",
        "rollout",
        "entropy, nats per token",
    ),
    (
        "kl",
        "objective/kl",
        "GRPO, rate 2e-3: the KL explodes",
        "rollout",
        "KL, nats per completion",
    ),
    (
        "chosen",
        "policy/logprob_chosen",
        "DPO, rate 2e-3: the chosen falls too",
        "optimiser step",
        "log-prob of the chosen",
    ),
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


def draw(results: dict) -> dict:
    axes = {}
    for name, _, title, xlabel, ylabel in PANELS:
        axis = axes[f"pitfalls_{name}"] = panel(title, xlabel, ylabel)
        for way, style in (("sick", SICK), ("healthy", HEALTHY)):
            draw_band(axis, Band(**results["curves"][name][way]), way, style)
        axis.legend(loc="best")
    plain_log_scale(axes["pitfalls_kl"])
    healthy = Band(**results["curves"]["kl"]["healthy"])
    peak, x = max(zip(healthy.mean, healthy.x, strict=True))
    axes["pitfalls_kl"].annotate(
        "one of five seeds",
        (x, peak),
        xytext=(x + 2, 0.25),
        arrowprops=dict(arrowstyle="-", color=GREY),
    )
    return axes


EXPERIMENTS = (Experiment("pitfalls", tables, measure, draw, COMMANDS),)
