"""What goes wrong in training, and what mends it: runs on tiny/ with each symptom and without.

`python docs/experiments/figures.py pitfalls` writes the tables of docs/pitfalls.md and draws its
figure: a pair of commands for each symptom, five seeds, half a minute of one core a run.
"""

import re
from dataclasses import dataclass
from statistics import mean

from paths import ROOT
from runs import GRPO_REVIEWS, SEEDS, Run, find_run, finished_runs, train
from subprocesses import run_python

STOPPED = ROOT / "runs" / "pitfalls"  # runs that end with an error, and so have no model


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
# Ends with an error, so its table tells in which rollout.
NAN = ("grpo.py --learning-rate 1", "grpo.py")
# Symptom and metrics whose values in each rollout the page quotes.
QUOTED = {
    "entropy": ("policy/entropy", "reward/mean"),
    "kl": ("objective/kl", "policy/approx_kl"),
}
# Runs whose clip fractions docs/ppo_rlhf.md quotes.
CLIPPED = {
    "PPO, reviews": "ppo_rlhf.py",
    "GRPO, arithmetic": "grpo.py",
    "GRPO, reviews": RUNS["entropy"].healthy,
    "GRPO, reviews, rate 2e-3": RUNS["entropy"].sick,
}
# Symptom, metric, title and label of x for each panel of the figure.
PANELS = (
    ("hacking", "eval/reward", "gold reward", "rollout"),
    ("entropy", "policy/entropy", "entropy, nats per token", "rollout"),
    ("kl", "objective/kl", "KL, nats per completion", "rollout"),
    ("chosen", "policy/logprob_chosen", "log-prob of the chosen", "optimiser step"),
)


def runs_of(command: str) -> list[Run]:
    """A run for each seed, made where there is none yet."""
    runs = []
    for seed in SEEDS:
        if find_run(command, seed) is None:
            train(command, seed)
            finished_runs.cache_clear()
        runs.append(find_run(command, seed))
    return runs


def stopped_run(command: str, seed: int) -> Run:
    """A run that ends with an error: its folder has metrics and no model, and `error.txt`."""
    output_dir = STOPPED / f"{'_'.join(command.split())}__{seed}"
    if not [*output_dir.glob("*/error.txt")]:
        arguments = [*command.split(), "--seed", str(seed), "--output-dir", str(output_dir)]
        process = run_python(arguments, OMP_NUM_THREADS="1")
        error = process.stderr.strip().splitlines()[-1]
        if "gradient norm" not in error:
            raise RuntimeError(f"{' '.join(arguments)} was to stop: {error}")
        newest = max(output_dir.glob("*"))
        (newest / "error.txt").write_text(error)
    (error_file,) = output_dir.glob("*/error.txt")
    return Run(error_file.parent)


def value(rows: list[dict], metric: str) -> float:
    """The mean over the last five steps; of an evaluation the last; or `highest NAME`."""
    highest, _, name = metric.rpartition(" ")
    values = [row[name] for row in rows if name in row]
    if highest:
        return max(values)
    if name.startswith("eval/"):
        return values[-1]
    return mean(values[-5:])


def show(number: float) -> str:
    """Three digits, but no more than two behind the point."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    if abs(number) >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}"


def table(runs_by_command: dict[str, list[Run]], metrics: tuple[str, ...]) -> dict:
    """The sick and the healthy command, a column for each metric, a number for each seed."""
    rows = []
    for name, runs in zip(("sick", "healthy"), runs_by_command.values(), strict=True):
        row = [name]
        for metric in metrics:
            row.append(", ".join(show(value(run.rows, metric)) for run in runs))
        rows.append(row)
    headings = [re.sub(r"(\S+)$", r"`\1`", metric) for metric in metrics]
    return {"columns": ["", *headings], "rows": rows}


def nan_table() -> dict:
    """Where the runs ended, and the gradient's norm there."""
    sick_command, healthy_command = NAN
    last_rollouts, grad_norms = [], []
    for seed in SEEDS:
        error = (stopped_run(sick_command, seed).folder / "error.txt").read_text()
        rollout, grad_norm = re.search(r"in step (\d+): gradient norm (\w+)", error).groups()
        last_rollouts.append(rollout)
        grad_norms.append(grad_norm)
    sick = ["sick", ", ".join(last_rollouts), ", ".join(grad_norms), ", ".join("-" for _ in SEEDS)]
    last_rows = [run.rows[-1] for run in runs_of(healthy_command)]
    healthy = [
        "healthy",
        ", ".join(str(row["step"]) for row in last_rows),
        ", ".join(show(row["policy/grad_norm"]) for row in last_rows),
        ", ".join(show(row["eval/accuracy"]) for row in last_rows),
    ]
    columns = ["", "ends in rollout", "`policy/grad_norm` there", "`eval/accuracy`"]
    return {"columns": columns, "rows": [sick, healthy]}


def quoted_values(runs_by_command: dict[str, list[Run]], metrics: tuple[str, ...]) -> dict:
    """By command and metric, a list for each seed: the values in rollouts 1, 2, ..."""
    values = {}
    for command, runs in runs_by_command.items():
        values[command] = {}
        for metric in metrics:
            values[command][metric] = [
                [float(f"{row[metric]:.4g}") for row in run.rows if metric in row] for run in runs
            ]
    return values


def clip_fractions(command: str) -> dict[str, list[float]]:
    """A number for each seed: of the first rollout, and the highest and the mean of the others."""
    fractions = {"first": [], "highest later": [], "mean later": []}
    for run in runs_of(command):
        first, *later = [
            row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
            for row in run.rows
            if "policy/clip_fraction_low" in row
        ]
        fractions["first"].append(round(first, 4))
        fractions["highest later"].append(round(max(later), 4))
        fractions["mean later"].append(round(mean(later), 4))
    return fractions


def panel_curves(runs: dict[str, dict[str, list[Run]]]) -> dict[str, dict]:
    """What the figure draws, by symptom: x, and the mean, lowest and highest y of the seeds."""
    from drawing import band_of

    curves = {}
    for symptom, metric, *_ in PANELS:
        curves[symptom] = {}
        for name, symptom_runs in zip(("sick", "healthy"), runs[symptom].values(), strict=True):
            band = band_of([run.curve("step", metric) for run in symptom_runs])
            rounded = {key: [round(y, 4) for y in ys] for key, ys in band._asdict().items()}
            curves[symptom][name] = rounded
    return curves


def draw(results: dict) -> None:
    """docs/figures/pitfalls.svg."""
    from drawing import (
        HEALTHY,
        SICK,
        Band,
        draw_band,
        draw_evaluations,
        panels,
        plain_log_scale,
        save,
    )

    figure, axes = panels(2, height=5, rows=2)
    courses = []
    for axis, (symptom, metric, title, xlabel) in zip(axes, PANELS, strict=True):
        draw_curve = draw_evaluations if metric.startswith("eval/") else draw_band
        for name, style in (("sick", SICK), ("healthy", HEALTHY)):
            band = Band(**results["curves"][symptom][name])
            draw_curve(axis, band, name, *style)
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
    save(figure, "pitfalls.svg", "Four metrics of sick and healthy runs", description)


def results() -> dict:
    """What docs/results/pitfalls.json holds."""
    tables, numbers, all_runs = {}, {}, {}
    for name, symptom in RUNS.items():
        runs_by_command = {
            symptom.sick: runs_of(symptom.sick),
            symptom.healthy: runs_of(symptom.healthy),
        }
        tables[f"pitfalls {name}"] = table(runs_by_command, symptom.metrics)
        numbers[name] = {}
        for command, runs in runs_by_command.items():
            numbers[name][command] = {}
            for metric in symptom.metrics:
                values = [round(value(run.rows, metric), 4) for run in runs]
                numbers[name][command][metric] = values
        all_runs[name] = runs_by_command
    tables["pitfalls nan"] = nan_table()
    return {
        "tables": tables,
        "numbers": numbers,
        "curves": panel_curves(all_runs),
        "rollouts": {name: quoted_values(all_runs[name], QUOTED[name]) for name in QUOTED},
        "clip fractions": {label: clip_fractions(command) for label, command in CLIPPED.items()},
    }
