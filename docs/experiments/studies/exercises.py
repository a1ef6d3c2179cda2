"""docs/exercises.md: runs of the exercises' scripts with their bugs and without."""

import re
import tempfile
from pathlib import Path

from docs.exercises.add_bug import EXERCISES, write_copy
from docs.experiments.lib.drawing import HEALTHY, SICK, Lines, Series
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import Run, runs_of

STYLES = {"healthy": HEALTHY, "planted": SICK}


# What the figure of each exercise draws, the label of x, and its title.
PANELS = {
    1: ("eval/truncated_fraction", "optimiser step", "completions never stop"),
    2: ("difference/loss", "optimiser step", "the micro-batch size matters"),
    3: ("reward/mean", "rollout", "the reward rises slowly"),
    4: ("policy/approx_kl", "rollout", "the steps do not shrink"),
    5: ("policy/grad_norm", "rollout", "the gradient jumps and comes back"),
    6: ("eval/pair_accuracy", "optimiser step", "pairs are not told apart"),
    7: ("objective/kl", "rollout", "the KL stays 0"),
    8: ("reward/mean", "rollout", "the policy learns less"),
    9: ("objective/loss", "optimiser step", "the first loss is not ln 2"),
    10: ("eval/margin", "optimiser step", "the margin stays 0"),
}
EVAL_EVERY = {1: 10, 6: 6, 10: 3}  # steps, for the figures: the exercises evaluate less often


def differences(first_run: Run, second_run: Run) -> Run:
    """A run whose metric is how far the losses of two runs, which should agree, differ."""
    losses = [run.values("objective/loss") for run in (first_run, second_run)]
    run = Run(first_run.folder)
    run.metrics = (losses[0] - losses[1]).abs().to_frame("difference/loss")
    return run


def find_runs(wanted: dict[str, str]) -> dict[str, list[Run]]:
    """A run for each seed, by exercise and way; of two commands that of `differences`."""
    found = {}
    for number, exercise in EXERCISES.items():
        commands = exercise.commands
        if number in EVAL_EVERY:
            often = f"--eval-every {EVAL_EVERY[number]}"
            commands = [re.sub(r"--eval-every \d+", often, command) for command in commands]
        for way in STYLES:
            if wanted and f"{number}, {way}" not in wanted:
                continue
            with tempfile.TemporaryDirectory() as copy:
                write_copy(exercise, Path(copy), healthy=way == "healthy")
                runs = [*runs_of(commands, root=Path(copy)).values()]
            if len(runs) == 2:
                runs = [[differences(*of_seed) for of_seed in zip(*runs, strict=True)]]
            (found[f"{number}, {way}"],) = runs
    return found


FIGURES = {}
for number, (metric, xlabel, title) in PANELS.items():
    series = {(f"{number}, {way}", metric): Series(way, style) for way, style in STYLES.items()}
    ylabel = metric.replace("difference/loss", "difference of the losses")
    FIGURES[f"exercises_{number}"] = Lines(
        f"{number}: {title}", ylabel, series, xlabel, log_scale=number in (4, 5)
    )
EXPERIMENTS = (
    Experiment(
        "exercises",
        figures=FIGURES,
        find_runs=find_runs,
    ),
)
