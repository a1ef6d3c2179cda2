"""What goes wrong in training, and what mends it: runs on tiny/ with each symptom and without.

`python docs/experiments/figures.py pitfalls` writes the tables of docs/pitfalls.md and draws its
figure: a pair of commands for each symptom, three seeds, half a minute of one core a run.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent))
from runs import Run, find, finished, train
from tables import ROOT

SEEDS = (1, 2, 3)
STOPPED = ROOT / "runs" / "pitfalls"  # runs that end with an error, and so have no model
GRPO_REVIEWS = (
    "grpo.py --model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--prompts-per-rollout 16 --total-rollouts 30"
)


@dataclass(frozen=True)
class Symptom:
    sick: str  # the command that has the symptom
    healthy: str  # the command that has not
    metrics: tuple[str, ...]  # means of the last five steps, or those of the last evaluation


RUNS = {
    "hacking": Symptom(
        "ppo_rlhf.py --eval-every 2 --beta 1e-9",
        "ppo_rlhf.py --eval-every 2",
        ("reward/mean", "eval/reward", "objective/kl"),
    ),
}
# Symptom, metric, and words for each panel of the figure.
PANELS = (("hacking", "eval/reward", "gold reward", "rollout"),)


def run(command: str, seed: int) -> Run:
    """A run of the command, made where there is none yet."""
    if not find(command, seed):
        train(command, seed)
        finished.cache_clear()
    return find(command, seed)


def stopped(command: str, seed: int) -> Run:
    """A run that ends with an error: its folder has metrics and no model, and `error.txt`."""
    out = STOPPED / f"{'_'.join(command.split())}__{seed}"
    if not [*out.glob("*/error.txt")]:
        words = [sys.executable, *command.split(), "--seed", str(seed), "--output-dir", str(out)]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        ended = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
        error = ended.stderr.strip().splitlines()[-1]
        if "no step was taken" not in error:
            raise RuntimeError(f"{' '.join(words)} was to stop: {error}")
        max(out.glob("*")).joinpath("error.txt").write_text(error.partition("; stopped run")[0])
    return Run(next(out.glob("*/error.txt")).parent)


def value(rows: list[dict], metric: str) -> float | None:
    """Its mean over the last five steps or, of an evaluation, the last; None if there is none."""
    found = [row[metric] for row in rows if metric in row]
    return mean(found[-1:] if metric.startswith("eval/") else found[-5:]) if found else None


def show(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.2f}"


def table(runs: dict[str, list[Run]], metrics: tuple[str, ...]) -> dict:
    """A row for each command, a column for each metric, a number for each seed."""
    rows = [
        [f"`{command}`", *(", ".join(show(value(run.rows, m)) for run in some) for m in metrics)]
        for command, some in runs.items()
    ]
    return {"columns": ["command", *(f"`{metric}`" for metric in metrics)], "rows": rows}


def draw(runs: dict[str, dict[str, list[Run]]]) -> None:
    from drawing import COLOURS, band, panels, save

    figure, axes = panels(len(PANELS), width=10, height=2.6)
    for axis, (name, metric, title, x) in zip(axes, PANELS, strict=True):
        ways = zip(("sick", "healthy"), COLOURS[1::-1], runs[name].values(), strict=True)
        for way, colour, some in ways:
            curves = [[(r["step"], r[metric]) for r in run.rows if metric in r] for run in some]
            band(axis, curves, way, colour)
        axis.set(title=title, xlabel=x)
    axes[0].legend(fontsize=8, framealpha=0)
    save(figure, ROOT / "docs" / "pitfalls.svg")


def results() -> dict:
    tables, numbers, runs = {}, {}, {}
    for name, symptom in RUNS.items():
        commands = (symptom.sick, symptom.healthy)
        runs[name] = {command: [run(command, seed) for seed in SEEDS] for command in commands}
        tables[f"pitfalls {name}"] = table(runs[name], symptom.metrics)
        numbers[name] = {
            command: {m: [round(value(run.rows, m), 4) for run in some] for m in symptom.metrics}
            for command, some in runs[name].items()
        }
    draw(runs)
    return {"tables": tables, "numbers": numbers}
