"""Runs of the scripts: made where there are none, and read."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha1
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from common.tokens import encode
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.measuring import quietly
from docs.experiments.lib.tables import rounded, spread
from tiny.reviews.gold import grammatical

RUNS = Path("runs/experiments")
SEEDS = (1, 2, 3, 4, 5)
JOBS = os.cpu_count() or 1  # runs side by side, of one thread each
LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# GRPO on the reviews, with the learned reward, and evaluated by the gold reward.
GRPO_REVIEWS = (
    "grpo.py --model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    "--reward-model tiny/reviews/reward_model --eval-reward-fn tiny/reviews/gold.py:sentiment "
    "--prompts-per-rollout 16 --total-rollouts 30"
)


@dataclass
class Run:
    """What a run has logged."""

    folder: Path

    @cached_property
    def rows(self) -> list[dict]:
        """A row for each logged step."""
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict]:
        """The rows of evaluations."""
        return [row for row in self.rows if any(name.startswith("eval/") for name in row)]

    @property
    def samples(self) -> list[dict]:
        """Those of the last evaluation."""
        samples = read_jsonl(self.folder / "samples.jsonl")
        return [sample for sample in samples if sample["step"] == samples[-1]["step"]]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- making runs -------------------------------------------------------------------------------
def run_of(command: str, seed: int, root: Path = Path()) -> Run:
    """The run of a command with a seed, made on one thread if there is none yet.

    A command may name the model of another run with the same seed: `{command of that run}`. Runs
    are found by their command: delete `RUNS` after a change to a script. A run that stops with an
    error is kept with its message in error.txt if the error is that of a gradient norm.
    """
    digest = sha1(f"{command} --seed {seed}".encode()).hexdigest()[:12]
    output_dir = root / RUNS / f"{command.partition('.py')[0]}_{digest}"
    for pattern in ("*/model.safetensors", "*/error.txt"):
        for file in output_dir.glob(pattern):
            return Run(file.parent)
    shutil.rmtree(output_dir, ignore_errors=True)  # a run that was interrupted

    def folder_of(other: re.Match) -> str:
        return str(run_of(other[1], seed, root).folder.resolve())

    arguments = re.sub(r"\{(.*)\}", folder_of, command).split()
    arguments += ["--seed", str(seed), "--output-dir", str(output_dir.resolve())]
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    error = process.stderr.strip().splitlines()[-1:]
    if process.returncode != 0 and "gradient norm" not in "".join(error):
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{process.stderr[-3000:]}")
    (folder,) = output_dir.iterdir()
    if process.returncode != 0:
        (folder / "error.txt").write_text(error[0])
    print(f"    {command} --seed {seed}", flush=True)
    return Run(folder)


def runs_of(commands: Iterable[str], root: Path = Path()) -> dict[str, list[Run]]:
    """By command, its runs: one for each seed."""
    commands = dict.fromkeys(commands)
    needed_first = [other for command in commands for other in re.findall(r"\{(.*)\}", command)]
    for stage in (dict.fromkeys(needed_first), commands):
        with ThreadPoolExecutor(JOBS) as pool:
            futures = {
                command: [pool.submit(run_of, command, seed, root) for seed in SEEDS]
                for command in stage
            }
    return {command: [future.result() for future in futures[command]] for command in commands}


def train(script: Any, **flags: Any) -> Run:
    """A run of a script in this process, which prints nothing."""
    return Run(quietly(script.main, script.Args(**flags)))


def for_each_seed(function: Callable[[int], dict]) -> dict[str, dict]:
    """By seed what a function returns for it, called in processes of one thread each."""
    with ProcessPoolExecutor(
        JOBS, get_context("spawn"), initializer=torch.set_num_threads, initargs=[1]
    ) as pool:
        return dict(zip(map(str, SEEDS), pool.map(function, SEEDS), strict=True))


# --- what is read off a run --------------------------------------------------------------------
def value(rows: list[dict], metric: str) -> float:
    """A number of a run from its logged rows: of `eval/NAME` the last value, of another metric the
    mean of the last five; or `first NAME`, `highest NAME`, `average NAME`, `NAME at STEP`.
    """
    words = metric.split()
    (name,) = [word for word in words if "/" in word]
    values = [row[name] for row in rows if name in row]
    if words[0] == "first":
        return values[0]
    if words[0] == "highest":
        return max(values)
    if words[0] == "average":
        return mean(values)
    if words[-1] != name:
        return next(row[name] for row in rows if row["step"] == int(words[-1]))
    if name.startswith("eval/"):
        return values[-1]
    return mean(values[-5:])


def curve(rows: list[dict], metric: str) -> list[tuple]:
    """Points (step, metric), where it was logged."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


def grammar(run: Run) -> float:
    """The fraction of the sampled sentences that are grammatical."""
    return mean(grammatical([], [sample["completion"] for sample in run.samples]))


def kl_of_samples(run: Run) -> float:
    """KL(policy || starting policy), nats per completion: k1 over the last evaluation's samples."""
    start = sampling.load_policy(json.loads((run.folder / "args.json").read_text())["model"])
    policy = sampling.load_policy(run.folder)
    sequences = []
    for sample in run.samples:
        ids = start.tokenizer(sample["completion"], add_special_tokens=False).input_ids
        ids += [start.tokenizer.eos_token_id] * (sample["length"] - len(ids))
        sequences.append((encode(start.tokenizer, sample["prompt"]), ids))
    return sampling.mean_log_ratio(policy, start, sequences)


# What is not logged.
MEASURED = {"grammatical": grammar, "KL of samples": kl_of_samples}


@dataclass
class Numbers:
    """What tables and figures ask of the runs of an experiment, by the label of their command.

    With `runs`, a list with a run for each seed, numbers, curves and samples are read from them and
    recorded. Without, they are those recorded in docs/results/NAME.json.
    """

    commands: dict[str, str]
    seeds: Sequence[int]
    numbers: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    curves: dict[str, dict[str, list[list]]] = field(default_factory=dict)
    samples: dict[str, dict] = field(default_factory=dict)
    runs: dict[str, list[Run]] | None = None

    def values(self, label: str, metric: str) -> list[float]:
        """A number for each seed; metrics are those of `value` and of `MEASURED`."""
        recorded = self.numbers.setdefault(label, {})
        if metric not in recorded:
            measure = MEASURED.get(metric, lambda run: value(run.rows, metric))
            recorded[metric] = rounded([measure(run) for run in self.runs[label]], 6)
        return recorded[metric]

    def spread(self, label: str, metric: str, digits: int) -> str:
        """Mean (lowest to highest) of the seeds."""
        return spread(self.values(label, metric), digits)

    def metric_curves(self, label: str, metric: str, evaluations: bool = False) -> list[list]:
        """Points (step, metric) for each seed, where it was logged; or at evaluations only."""
        recorded, name = self.curves.setdefault(label, {}), f"{metric} over step"
        if name not in recorded:
            recorded[name] = []
            for run in self.runs[label]:
                rows = run.evaluations if evaluations else run.rows
                recorded[name].append(rounded(curve(rows, metric)))
        return recorded[name]

    def typical_sample(self, label: str) -> dict:
        """Of the first seed's last evaluation, the sample whose reward is nearest to the mean."""
        if label not in self.samples:
            samples = self.runs[label][0].samples
            mean_reward = mean(sample["reward"] for sample in samples)
            typical = min(samples, key=lambda sample: abs(sample["reward"] - mean_reward))
            self.samples[label] = {name: typical[name] for name in ("completion", "reward")}
        return self.samples[label]

    def table_by_label(self, columns: dict[str, tuple[str, int]], heading: str = "flags") -> dict:
        """A row for each command; columns are (metric, digits) by heading."""
        rows = []
        for label in self.commands:
            cells = [self.spread(label, metric, digits) for metric, digits in columns.values()]
            rows.append([label, *cells])
        return {"columns": [heading, *columns], "rows": rows}


def experiment_of_runs(
    name: str,
    commands: dict[str, str],
    tables: Callable[[Numbers], dict],
    draw: Callable[[Numbers], dict[str, Any]] | None = None,
) -> Experiment:
    """An experiment whose numbers are read off the runs of these commands, by label."""

    def measure() -> dict:
        runs = runs_of(commands.values())
        numbers = Numbers(
            commands, SEEDS, runs={label: runs[commands[label]] for label in commands}
        )
        tables(numbers)  # what they ask for is recorded
        if draw:
            draw(numbers)
        results = {"seeds": SEEDS, "numbers": numbers.numbers, "curves": numbers.curves}
        if numbers.samples:
            results["samples"] = numbers.samples
        return results

    return Experiment(
        name,
        tables=lambda results: tables(Numbers(**results)),
        measure=measure,
        draw=draw and (lambda results: draw(Numbers(**results))),
        commands=commands,
    )


def variants(script: str, *flags: str) -> dict[str, str]:
    """Commands of a script, by the flags that are added to it."""
    commands = {}
    for added in flags:
        label = f"`{added}`" if added else "(default)"
        commands[label] = f"{script} {added}".strip()
    return commands
