"""What goes wrong in training, and what mends it: runs on tiny/ with each symptom and without.

`python docs/experiments/figures.py pitfalls` writes the tables of docs/pitfalls.md and draws its
figure: a pair of commands for each symptom, five seeds, half a minute of one core a run.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent))
from runs import Run, find, finished, train
from tables import ROOT

SEEDS = (1, 2, 3, 4, 5)
STOPPED = ROOT / "runs" / "pitfalls"  # runs that end with an error, and so have no model
REVIEWS = (
    "grpo.py --model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--reward-model tiny/reviews/reward_model --eval-reward-fn tiny/reviews/gold.py:sentiment "
    "--prompts-per-rollout 16 --total-rollouts 30"
)


@dataclass(frozen=True)
class Symptom:
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
        f"{REVIEWS} --beta 0 --learning-rate 2e-3 --lr-schedule constant_with_warmup",
        f"{REVIEWS} --beta 0.2 --kl-placement reward",
        ("policy/entropy", "highest reward/mean", "reward/mean", "eval/reward"),
    ),
    "length": Symptom(
        "dpo.py --beta 0.1",
        "dpo.py --loss ipo --beta 1",
        ("eval/length_mean", "eval/pair_accuracy", "eval/reward"),
    ),
    "kl": Symptom(
        f"{REVIEWS} --beta 0.0001 --learning-rate 2e-3",
        f"{REVIEWS} --beta 0.2 --kl-placement reward",
        ("objective/kl", "reward/mean", "eval/reward"),
    ),
    "zero": Symptom(
        "grpo.py --beta 0 --total-rollouts 15 --model tiny/arithmetic/base "
        "--group-size 2 --prompts-per-rollout 128",
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
# Ends with an error, so it is told in rollouts.
NAN = ("grpo.py --learning-rate 1", "grpo.py")
# Symptom, metric, and words for each panel of the figure.
PANELS = (
    ("hacking", "eval/reward", "gold reward", "rollout"),
    ("entropy", "policy/entropy", "entropy, nats per token", "rollout"),
    ("kl", "objective/kl", "KL, nats per completion", "rollout"),
    ("chosen", "policy/logprob_chosen", "log-prob of the chosen", "optimiser step"),
)


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


def value(rows: list[dict], metric: str) -> float:
    """The mean over the last five steps; of an evaluation the last; or `highest NAME`."""
    highest, _, name = metric.rpartition(" ")
    found = [row[name] for row in rows if name in row]
    return max(found) if highest else mean(found[-1:] if "eval/" in name else found[-5:])


def show(number: float) -> str:
    return f"{number:.{0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2}f}"


def table(runs: dict[str, list[Run]], metrics: tuple[str, ...]) -> dict:
    """The sick and the healthy command, a column for each metric, a number for each seed."""
    rows = [
        [way, *(", ".join(show(value(run.rows, metric)) for run in some) for metric in metrics)]
        for way, some in zip(("sick", "healthy"), runs.values(), strict=True)
    ]
    names = [re.sub(r"(\S+)$", r"`\1`", metric) for metric in metrics]
    return {"columns": ["", *names], "rows": rows}


def nan_table() -> dict:
    """Where the runs ended, and the gradient's norm there."""
    found = {"sick": [], "healthy": []}
    for seed in SEEDS:
        error = (stopped(NAN[0], seed).folder / "error.txt").read_text()
        end = re.search(r"rollout (\d+): .* gradient norm (\w+)", error)
        found["sick"].append((*end.groups(), "-"))
        last = run(NAN[1], seed).rows[-1]
        measured = (show(last[metric]) for metric in ("policy/grad_norm", "eval/accuracy"))
        found["healthy"].append((str(last["step"]), *measured))
    rows = [[way, *map(", ".join, zip(*cells, strict=True))] for way, cells in found.items()]
    columns = ["", "ends in rollout", "`policy/grad_norm` there", "`eval/accuracy`"]
    return {"columns": columns, "rows": rows}


def draw(runs: dict[str, dict[str, list[Run]]]) -> None:
    from drawing import COLOURS, band, panels, save

    figure, axes = panels(len(PANELS), width=10, height=2.6)
    for axis, (name, metric, title, x) in zip(axes, PANELS, strict=True):
        ways = zip(("sick", "healthy"), COLOURS[1::-1], runs[name].values(), strict=True)
        for way, colour, some in ways:
            curves = [[(r["step"], r[metric]) for r in run.rows if metric in r] for run in some]
            band(axis, curves, way, colour)
        axis.set(title=title, xlabel=x)
        if name == "kl":
            axis.set_yscale("log")
        else:
            axis.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
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
    tables["pitfalls nan"] = nan_table()
    draw(runs)
    return {"tables": tables, "numbers": numbers}
