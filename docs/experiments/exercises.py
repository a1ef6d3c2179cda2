"""docs/exercises.md: runs of the exercises' scripts with their bugs and without."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from docs.exercises.plant import EXERCISES, write_copy
from docs.experiments.lib.drawing import (
    HEALTHY,
    SICK,
    draw_band,
    draw_evaluations,
    panel,
    plain_log_scale,
)
from docs.experiments.lib.runs import Numbers, Run, experiment_of_runs, runs_of

WAYS = ("healthy", "planted")


class Symptom(NamedTuple):
    number: int  # of the exercise
    name: str  # in the table
    metric: str  # see `value`
    digits: int  # behind the point, in the table


SYMPTOMS = (
    Symptom(1, "highest `objective/kl`", "highest objective/kl", 1),
    Symptom(1, "`reward/mean`", "reward/mean", 2),
    Symptom(1, "`eval/reward`", "eval/reward", 2),
    Symptom(2, "`policy/approx_kl`", "policy/approx_kl", 5),
    Symptom(3, "`eval/truncated_fraction`", "eval/truncated_fraction", 2),
    Symptom(4, "largest difference of `objective/loss`", "highest difference/loss", 3),
    Symptom(5, "highest `objective/loss`", "highest objective/loss", 2),
    Symptom(5, "highest `policy/grad_norm`", "highest policy/grad_norm", 1),
    Symptom(6, "`value/explained_variance`, all rollouts", "average value/explained_variance", 2),
    Symptom(6, "`reward/mean`", "reward/mean", 2),
    Symptom(7, "`reward/mean`", "reward/mean", 2),
    Symptom(7, "`policy/grad_norm`, all rollouts", "average policy/grad_norm", 1),
    Symptom(8, "`eval/pair_accuracy`", "eval/pair_accuracy", 2),
    Symptom(9, "first `objective/loss`", "first objective/loss", 2),
    Symptom(9, "`eval/pair_accuracy`", "eval/pair_accuracy", 2),
    Symptom(10, "`eval/margin`", "eval/margin", 2),
    Symptom(10, "`eval/kl`", "eval/kl", 1),
)
# What the figure of each exercise draws, the label of x, and its title.
PANELS = {
    1: ("objective/kl", "rollout", "the KL stays 0"),
    2: ("policy/approx_kl", "rollout", "the steps do not shrink"),
    3: ("eval/truncated_fraction", "optimiser step", "completions never stop"),
    4: ("difference/loss", "optimiser step", "the micro-batch size matters"),
    5: ("policy/grad_norm", "rollout", "the gradient jumps and comes back"),
    6: ("reward/mean", "rollout", "the policy learns less"),
    7: ("reward/mean", "rollout", "the reward rises slowly"),
    8: ("eval/pair_accuracy", "optimiser step", "pairs are not told apart"),
    9: ("objective/loss", "optimiser step", "the first loss is not ln 2"),
    10: ("eval/margin", "optimiser step", "the margin stays 0"),
}


def differences(first: Run, second: Run) -> Run:
    """A run whose rows are how far the losses of two runs, which should agree, differ."""
    run = Run(first.folder)
    run.rows = []
    for one, other in zip(first.rows, second.rows, strict=True):
        if "objective/loss" in one:
            difference = abs(one["objective/loss"] - other["objective/loss"])
            run.rows.append({"step": one["step"], "difference/loss": difference})
    return run


def find_runs(_: dict[str, str]) -> dict[str, list[Run]]:
    """A run for each seed, by exercise and way; of two commands that of `differences`."""
    found = {}
    for number, exercise in EXERCISES.items():
        for way in WAYS:
            with tempfile.TemporaryDirectory() as copy:
                write_copy(exercise, Path(copy), healthy=way == "healthy")
                runs = [*runs_of(exercise.commands, root=Path(copy)).values()]
            if len(runs) == 2:
                runs = [[differences(*of_seed) for of_seed in zip(*runs, strict=True)]]
            (found[f"{number}, {way}"],) = runs
    return found


def tables(numbers: Numbers) -> dict:
    rows = []
    for number, name, metric, digits in SYMPTOMS:
        cells = [numbers.spreads(f"{number}, {way}", {metric: digits})[0] for way in WAYS]
        rows.append([str(number), name, *cells])
    return {"exercises": {"columns": ["exercise", "metric", *WAYS], "rows": rows}}


def draw(numbers: Numbers) -> dict:
    """A figure for each exercise."""
    axes = {}
    for number, (metric, xlabel, title) in PANELS.items():
        ylabel = metric.replace("difference/loss", "difference of the losses")
        axis = panel(f"{number}: {title}", xlabel, ylabel, height=2.5)
        draw_curves = draw_evaluations if metric.startswith("eval/") else draw_band
        for way, style in zip(WAYS, (HEALTHY, SICK), strict=True):
            draw_curves(axis, numbers.metric_curves(f"{number}, {way}", metric), way, style)
        axis.locator_params(axis="x", integer=True)
        if number in (2, 5):
            plain_log_scale(axis)
        axis.figure.legend(loc="outside lower center", ncols=2)
        axes[f"exercises_{number}"] = axis
    return axes


EXPERIMENTS = (experiment_of_runs("exercises", {}, tables, draw, find_runs=find_runs),)
