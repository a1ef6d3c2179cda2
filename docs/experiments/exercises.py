"""docs/exercises.md: runs of the exercises' scripts with their bugs and without."""

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
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import RUNS, curve, runs_of, value
from docs.experiments.lib.tables import rounded, spread

WAYS = ("healthy", "planted")
Rows = list[dict]  # the metrics of a run, a row for each step


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
    Symptom(5, "highest `objective/kl`", "highest objective/kl", 1),
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
    5: ("objective/kl", "rollout", "the KL jumps and comes back"),
    6: ("reward/mean", "rollout", "the policy learns less"),
    7: ("reward/mean", "rollout", "the reward rises slowly"),
    8: ("eval/pair_accuracy", "optimiser step", "pairs are not told apart"),
    9: ("objective/loss", "optimiser step", "the first loss is not ln 2"),
    10: ("eval/margin", "optimiser step", "the margin stays 0"),
}
COMMANDS = {
    f"{number}.{i}": command
    for number, exercise in EXERCISES.items()
    for i, command in enumerate(exercise.commands, start=1)
}


def copy_of(number: int, way: str) -> Path:
    """The folder of a copy, written if there is none."""
    exercise = EXERCISES[number]
    name = f"{number}_{way}"
    if way == "healthy" and not exercise.setup:
        name = "healthy"  # the same for all of these
    folder = RUNS / "exercises" / name
    if not folder.exists():
        write_copy(exercise, folder, healthy=way == "healthy")
    return folder


def differences(first: Rows, second: Rows) -> Rows:
    """How far the losses of two runs, which should agree, lie apart in each step."""
    rows = []
    for one, other in zip(first, second, strict=True):
        if "objective/loss" in one:
            difference = abs(one["objective/loss"] - other["objective/loss"])
            rows.append({"step": one["step"], "difference/loss": difference})
    return rows


def rows_of(number: int, way: str) -> list[Rows]:
    """The rows of each seed; two commands give those of `differences`."""
    runs = runs_of(EXERCISES[number].commands, root=copy_of(number, way))
    if len(runs) == 1:
        (only_command,) = runs.values()
        return [run.rows for run in only_command]
    pairs = zip(*runs.values(), strict=True)
    return [differences(one.rows, other.rows) for one, other in pairs]


def measure() -> dict:
    numbers, curves = {}, {}
    for number in EXERCISES:
        numbers[str(number)], curves[str(number)] = {}, {}
        for way in WAYS:
            rows = rows_of(number, way)
            metric = PANELS[number][0]
            curves[str(number)][way] = [curve(of_seed, metric) for of_seed in rows]
            for symptom in SYMPTOMS:
                if symptom.number == number:
                    values = [value(of_seed, symptom.metric) for of_seed in rows]
                    numbers[str(number)].setdefault(symptom.name, {})[way] = values
    return {"numbers": rounded(numbers, 8), "curves": rounded(curves, 8)}


def tables(results: dict) -> dict:
    rows = []
    for symptom in SYMPTOMS:
        of_symptom = results["numbers"][str(symptom.number)][symptom.name]
        cells = [spread(of_symptom[way], symptom.digits) for way in WAYS]
        rows.append([str(symptom.number), symptom.name, *cells])
    return {"exercises": {"columns": ["exercise", "metric", *WAYS], "rows": rows}}


def draw(results: dict) -> dict:
    """A figure for each exercise."""
    axes = {}
    for number, (metric, xlabel, title) in PANELS.items():
        ylabel = metric.replace("difference/loss", "difference of the losses")
        axis = panel(f"{number}: {title}", xlabel, ylabel, height=2.5)
        draw_curves = draw_evaluations if metric.startswith("eval/") else draw_band
        for way, style in zip(WAYS, (HEALTHY, SICK), strict=True):
            draw_curves(axis, results["curves"][str(number)][way], way, style)
        axis.locator_params(axis="x", integer=True)
        if number in (2, 5):
            plain_log_scale(axis)
        axis.figure.legend(loc="outside lower center", ncols=2)
        axes[f"exercises_{number}"] = axis
    return axes


EXPERIMENTS = (Experiment("exercises", tables, measure, draw, COMMANDS),)
