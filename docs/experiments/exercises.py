"""Runs of the exercises' scripts with their bugs and without: table and figure of
docs/exercises.md (`python docs/experiments/figures.py exercises`, a quarter of an hour).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from paths import DOCS, ROOT
from tables import spread

sys.path.append(str(DOCS / "exercises"))
from plant import EXERCISES, write_copy

SEEDS = (1, 2, 3, 4, 5)
WAYS = ("healthy", "planted")
COPIES = ROOT / "runs" / "exercises"
Rows = list[dict]  # the metrics of a run, a row for each step


# --- what the page promises --------------------------------------------------------------------
def last(metric: str) -> Callable[[Rows], float]:
    """Its value in the last row that has it."""
    return lambda rows: [row[metric] for row in rows if metric in row][-1]


def last_five(metric: str) -> Callable[[Rows], float]:
    """Its mean over the last five rollouts."""
    return lambda rows: mean(row[metric] for row in rows[-5:])


def highest(metric: str) -> Callable[[Rows], float]:
    return lambda rows: max(row[metric] for row in rows if metric in row)


def average(metric: str) -> Callable[[Rows], float]:
    """Its mean over all rollouts."""
    return lambda rows: mean(row[metric] for row in rows if metric in row)


class Symptom(NamedTuple):
    number: int  # of the exercise
    name: str  # in the table
    quantity: Callable[[Rows], float]  # of a run
    digits: int  # behind the point, in the table


SYMPTOMS = (
    Symptom(1, "highest `objective/kl`", highest("objective/kl"), 1),
    Symptom(1, "`reward/mean`", last_five("reward/mean"), 2),
    Symptom(1, "`eval/reward`", last("eval/reward"), 2),
    Symptom(2, "`policy/approx_kl`", last_five("policy/approx_kl"), 5),
    Symptom(3, "`eval/truncated_fraction`", last("eval/truncated_fraction"), 2),
    Symptom(3, "`eval/length_mean`", last("eval/length_mean"), 1),
    Symptom(4, "largest difference of `objective/loss`", highest("difference"), 3),
    Symptom(4, "last difference of `eval/loss`", last("eval difference"), 3),
    Symptom(5, "highest `objective/kl`", highest("objective/kl"), 1),
    Symptom(5, "highest `policy/grad_norm`", highest("policy/grad_norm"), 1),
    Symptom(6, "`value/loss`, all rollouts", average("value/loss"), 2),
    Symptom(
        6,
        "`value/explained_variance`, all rollouts",
        average("value/explained_variance"),
        2,
    ),
    Symptom(6, "`reward/mean`", last_five("reward/mean"), 2),
)
# What the figure draws of each exercise, and the label of x.
PANELS = {
    1: ("objective/kl", "rollout"),
    2: ("policy/approx_kl", "rollout"),
    3: ("eval/truncated_fraction", "optimiser step"),
    4: ("difference", "optimiser step"),
    5: ("objective/kl", "rollout"),
    6: ("reward/mean", "rollout"),
}
LOGARITHMIC = (2, 5)


# --- making the runs ---------------------------------------------------------------------------
def copy_of(number: int, way: str, copies: Path) -> Path:
    """The folder of a copy, written anew where a script or a bug has changed."""
    exercise = EXERCISES[number]
    name = f"{number}_{way}"
    if way == "healthy" and not exercise.setup:
        name = "healthy"  # the same for all of these
    folder, new_folder = copies / name, copies / f"{name}.new"
    shutil.rmtree(new_folder, ignore_errors=True)
    write_copy(exercise, new_folder, healthy=way == "healthy")
    if sources(folder) == sources(new_folder):
        shutil.rmtree(new_folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        new_folder.rename(folder)
    return folder


def sources(folder: Path) -> dict[str, str]:
    """The programs and settings of a copy that a run depends on."""
    files = [*folder.glob("*.py"), *folder.glob("common/*.py"), *folder.glob("tiny/*/*/*.json")]
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def train(folder: Path, command: str, seed: int) -> Rows:
    """The metrics of a run in a copy, a row for each step; made where it is not there yet."""
    output_dir = folder / "runs" / f"{'_'.join(command.split()).replace('/', '-')}__{seed}"
    if not [*output_dir.glob("*/model")]:
        shutil.rmtree(output_dir, ignore_errors=True)
        flags = ["--seed", str(seed), "--output-dir", str(output_dir)]
        process = subprocess.run(
            [sys.executable, *command.split(), *flags],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if process.returncode != 0:
            sys.exit(f"{command} failed in {folder}:\n{process.stderr[-3000:]}")
    (run_dir,) = output_dir.glob("*")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def differences(first: Rows, second: Rows) -> Rows:
    """How far the losses of two runs, which should agree, lie apart in each step."""
    rows = []
    for one, other in zip(first, second, strict=True):
        row = {"step": one["step"]}
        for name, metric in (("difference", "objective/loss"), ("eval difference", "eval/loss")):
            if metric in one:
                row[name] = abs(one[metric] - other[metric])
        rows.append(row)
    return rows


def all_rows(copies: Path) -> dict[tuple[int, str], list[Rows]]:
    """By exercise and way, the rows of each seed; two commands give those of `differences`."""
    folders = {(n, way): copy_of(n, way, copies) for n, way in product(EXERCISES, WAYS)}
    trainings = {}
    with ThreadPoolExecutor(2) as pool:
        for seed, number, way in product(SEEDS, EXERCISES, WAYS):
            for command in EXERCISES[number].commands:
                run = (folders[number, way], command, seed)  # exercises may share a healthy run
                if run not in trainings:
                    trainings[run] = pool.submit(train, *run)
    rows = {}
    for number, way in product(EXERCISES, WAYS):
        rows[number, way] = []
        for seed in SEEDS:
            runs = [
                trainings[folders[number, way], command, seed].result()
                for command in EXERCISES[number].commands
            ]
            rows[number, way].append(differences(*runs) if len(runs) == 2 else runs[0])
    return rows


# --- what is made of them ----------------------------------------------------------------------
def results(copies: Path = COPIES) -> dict:
    """What docs/results/exercises.json holds."""
    rows = all_rows(copies)
    numbers, table_rows, curves = {}, [], {}
    for symptom in SYMPTOMS:
        cells, of_symptom = [], {}
        for way in WAYS:
            values = [symptom.quantity(of_seed) for of_seed in rows[symptom.number, way]]
            of_symptom[way] = [round(value, 6) for value in values]
            cells.append(spread(values, symptom.digits))
        numbers.setdefault(str(symptom.number), {})[symptom.name] = of_symptom
        table_rows.append([str(symptom.number), symptom.name, *cells])
    for number, (metric, _) in PANELS.items():
        curves[str(number)] = {}
        for way in WAYS:
            curves[str(number)][way] = [
                [[row["step"], round(row[metric], 8)] for row in of_seed if metric in row]
                for of_seed in rows[number, way]
            ]
    table = {"columns": ["exercise", "metric", *WAYS], "rows": table_rows}
    commands = {str(number): exercise.commands for number, exercise in EXERCISES.items()}
    return {
        "tables": {"exercises": table},
        "commands": commands,
        "seeds": SEEDS,
        "numbers": numbers,
        "curves": curves,
    }


def draw(results: dict) -> None:
    """docs/figures/exercises.svg: a panel for each exercise."""
    from drawing import HEALTHY, SICK, draw_band, draw_evaluations, panels, plain_log_scale, save

    figure, axes = panels(3, height=5, rows=2)
    courses = []
    for axis, (number, (metric, xlabel)) in zip(axes, PANELS.items(), strict=True):
        draw_curves = draw_evaluations if metric.startswith("eval/") else draw_band
        title = "difference of the losses" if metric == "difference" else metric
        for way, style in zip(WAYS, (HEALTHY, SICK), strict=True):
            curves = results["curves"][str(number)][way]
            draw_curves(axis, curves, way, *style)
            last_value = mean(curve[-1][1] for curve in curves)
            courses.append(f"{number}, {title}, {way}: {last_value:.2g}")
        axis.set(title=f"{number}: {title}", xlabel=xlabel)
        axis.locator_params(axis="x", integer=True)
        if number in LOGARITHMIC:
            plain_log_scale(axis)
    axes[3].legend(loc="upper right")
    description = (
        "Six panels, one for each exercise, with the mean and the range of the healthy runs and "
        f"of those with the bug. Means of the last values: {'; '.join(courses)}."
    )
    save(figure, "exercises.svg", "A metric of each exercise with its bug and without", description)
