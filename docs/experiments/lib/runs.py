"""Runs of the scripts: made where there are none, and read."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha1
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
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
MODEL_OF = re.compile(r"\{(.*)\}")  # in a command: the run whose model is meant
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
def load_script(name: str, root: Path) -> Any:
    """The module of a script in folder `root`, which may be a copy that differs from ours."""
    spec = spec_from_file_location(f"{name} in {root.resolve()}", root / name)
    if spec.name not in sys.modules:
        module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(module)
    return sys.modules[spec.name]


def content_of(path: Path) -> bytes:
    """What a file holds, or the files of a folder; of Python all but comments and layout."""
    if path.is_dir():
        return b"".join(content_of(file) for file in sorted(path.rglob("*")) if file.is_file())
    if path.suffix == ".py":
        return ast.unparse(ast.parse(path.read_text())).encode()
    return path.read_bytes()


def key_of(command: str, seed: int, root: Path = Path()) -> str:
    """What names a run: its flags as the script resolves them, the code, and what the flags name.

    Two spellings of a command have one key. A change to the script, to `common/`, or to a reward
    function, model or data set that the command names gives another one, so that no number of the
    old code comes back.
    """
    words = MODEL_OF.sub(lambda other: f"run:{key_of(other[1], seed, root)}", command).split()
    flags = vars(load_script(words[0], root).parse_args([*words[1:], "--seed", str(seed)]))
    del flags["output_dir"]
    key = sha1(json.dumps(flags, sort_keys=True).encode())
    paths = [root / words[0], *sorted((root / "common").glob("*.py"))]
    for value in flags.values():
        for word in value if isinstance(value, list) else [value]:
            file = word.partition(":")[0] if isinstance(word, str) else ""  # path.py:function
            if file and (root / file).exists():
                paths.append(root / file)
    for path in paths:
        key.update(content_of(path))
    return key.hexdigest()[:12]


def run_of(command: str, seed: int, root: Path = Path()) -> Run:
    """The run of a command with a seed, made on one thread if there is none yet.

    A command may name the model of another run with the same seed: `{command of that run}`. With
    `root` the script is that of another folder. A run that stops with an error is kept with its
    message in error.txt if the error is that of a gradient norm.
    """
    output_dir = RUNS / f"{command.partition('.py')[0]}_{key_of(command, seed, root)}"
    for pattern in ("*/model.safetensors", "*/error.txt"):
        for file in output_dir.glob(pattern):
            return Run(file.parent)
    shutil.rmtree(output_dir, ignore_errors=True)  # a run that was interrupted

    def folder_of(other: re.Match) -> str:
        return str(run_of(other[1], seed, root).folder.resolve())

    arguments = MODEL_OF.sub(folder_of, command).split()
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
    """By command, its runs: one for each seed. Commands of one key are run once."""
    commands = [*dict.fromkeys(commands)]
    needed_first = [other for command in commands for other in MODEL_OF.findall(command)]
    for stage in (needed_first, commands):
        with ThreadPoolExecutor(JOBS) as pool:
            futures, keys = {}, {}
            for command, seed in product(stage, SEEDS):
                keys[command, seed] = key = key_of(command, seed, root)
                if key not in futures:
                    futures[key] = pool.submit(run_of, command, seed, root)
    runs = {key: future.result() for key, future in futures.items()}
    return {command: [runs[keys[command, seed]] for seed in SEEDS] for command in commands}


def runs_by_label(commands: dict[str, str]) -> dict[str, list[Run]]:
    """By label, the runs of its command."""
    runs = runs_of(commands.values())
    return {label: runs[command] for label, command in commands.items()}


def train(script: Any, **flags: Any) -> Run:
    """A run of a script in this process, which prints nothing."""
    return Run(quietly(script.main, script.Args(**flags)))


def for_each_seed(function: Callable[[int], dict[str, dict]]) -> dict[str, dict[str, list]]:
    """By label and metric, for each seed what a function of the seed returns for them. It is called
    in processes of one thread each.
    """
    with ProcessPoolExecutor(
        JOBS, get_context("spawn"), initializer=torch.set_num_threads, initargs=[1]
    ) as pool:
        of_seeds = [*pool.map(function, SEEDS)]
    numbers = {}
    for label, metrics in of_seeds[0].items():
        numbers[label] = {name: [of_seed[label][name] for of_seed in of_seeds] for name in metrics}
    return rounded(numbers)


# --- what is read off a run --------------------------------------------------------------------
def value(rows: list[dict], metric: str) -> float:
    """A run's value of a metric: the last one for `eval/NAME`, else the mean of the last five. Also
    of `first NAME`, `highest NAME`, `average NAME` and `NAME at STEP`.
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


def typical_sample(run: Run) -> dict:
    """Of the last evaluation, the sample whose reward is nearest to the mean."""
    mean_reward = mean(sample["reward"] for sample in run.samples)
    typical = min(run.samples, key=lambda sample: abs(sample["reward"] - mean_reward))
    return {name: typical[name] for name in ("completion", "reward")}


# What is not logged.
MEASURED = {
    "grammatical": grammar,
    "KL of samples": kl_of_samples,
    "typical sample": typical_sample,
}
# Of the runs on the reviews that have a reference.
REVIEW_COLUMNS = {
    "gold": ("eval/reward", 2),
    "KL": ("KL of samples", 1),
    "grammatical": ("grammatical", 2),
    "tokens": ("eval/length_mean", 1),
}


@dataclass
class Numbers:
    """What tables and figures ask of an experiment, by label and metric, for each seed.

    With `runs`, a list with a run for each seed, they are read from these and recorded. Without,
    they are those recorded in docs/results/NAME.json.
    """

    commands: dict[str, str]
    numbers: dict[str, dict[str, list]] = field(default_factory=dict)
    curves: dict[str, dict[str, list[list]]] = field(default_factory=dict)
    runs: dict[str, list[Run]] | None = None

    def values(self, label: str, metric: str) -> list:
        """One for each seed; metrics of runs are those of `value` and of `MEASURED`."""
        recorded = self.numbers.setdefault(label, {})
        if metric not in recorded:
            measure = MEASURED.get(metric, lambda run: value(run.rows, metric))
            recorded[metric] = rounded([measure(run) for run in self.runs[label]])
        return recorded[metric]

    def spreads(self, label: str, digits: dict[str, int]) -> list[str]:
        """Mean (lowest to highest) of the seeds, for each metric with so many digits."""
        return [spread(self.values(label, metric), number) for metric, number in digits.items()]

    def metric_curves(self, label: str, metric: str, evaluations: bool = False) -> list[list]:
        """Points (step, metric) for each seed, where it was logged; or at evaluations only."""
        recorded = self.curves.setdefault(label, {})
        if metric not in recorded:
            recorded[metric] = []
            for run in self.runs[label]:
                rows = run.evaluations if evaluations else run.rows
                points = [(row["step"], row[metric]) for row in rows if metric in row]
                recorded[metric].append(rounded(points))
        return recorded[metric]

    def table(
        self,
        columns: dict[str, tuple[str, int]],
        heading: str = "flags",
        labels: Iterable[str] | None = None,
    ) -> dict:
        """A row for each label, by default all; columns are (metric, digits) by heading."""
        rows = []
        for label in labels or self.commands or self.numbers:
            cells = []
            for metric, digits in columns.values():
                cells.append(spread(self.values(label, metric), digits))
            rows.append([label, *cells])
        return {"columns": [heading, *columns], "rows": rows}


def experiment_of_runs(
    name: str,
    commands: dict[str, str],
    tables: Callable[[Numbers], dict],
    draw: Callable[[Numbers], dict[str, Any]] | None = None,
    measure_seed: Callable[[int], dict[str, dict]] | None = None,
    find_runs: Callable[[dict[str, str]], dict[str, list[Run]]] = runs_by_label,
) -> Experiment:
    """An experiment whose numbers are read off the runs of these commands, by label; and those that
    `measure_seed(seed)` returns, by label and metric.
    """

    def measure() -> dict:
        numbers = Numbers(commands, runs=find_runs(commands))
        if measure_seed:
            numbers.numbers = for_each_seed(measure_seed)
        tables(numbers)  # what they ask for is recorded
        if draw:
            draw(numbers)
        return {"numbers": numbers.numbers, "curves": numbers.curves}

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
