"""Runs of the scripts: made where there are none, and what they have logged."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha1
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame, Series

from docs.experiments.lib.measuring import quietly
from docs.experiments.lib.tables import rounded

RUNS = Path("runs/experiments")
MODEL_OF = re.compile(r"\{(.*)\}")  # in a command: the run whose model is meant
SEEDS = (1, 2, 3, 4, 5)
JOBS = os.cpu_count() or 1  # runs side by side, of one thread each


@dataclass
class Run:
    """What a run has logged."""

    folder: Path

    @cached_property
    def metrics(self) -> DataFrame:
        """A row for each logged step, a column for each metric."""
        return DataFrame(read_jsonl(self.folder / "metrics.jsonl")).set_index("step")

    def values(self, metric: str) -> Series:
        """A metric by the steps at which it was logged."""
        return self.metrics[metric].dropna()

    def samples(self, step: int | None = None) -> list[dict]:
        """Those of the evaluation after so many steps, or of the last one."""
        samples = read_jsonl(self.folder / "samples.jsonl")
        wanted = samples[-1]["step"] if step is None else step
        return [sample for sample in samples if sample["step"] == wanted]


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
    return code_of(path.read_text()) if path.suffix == ".py" else path.read_bytes()


@cache
def code_of(text: str) -> bytes:
    return ast.unparse(ast.parse(text)).encode()


def key_of(command: str, seed: int, root: Path = Path()) -> str:
    """What names a run: its flags as the script resolves them, the code, and what the flags name.

    Two spellings of a command have one key. A change to the script, to `common/`, `runtime/`, or to
    a reward function, model or data set that the command names gives another one, so that no number
    of the old code comes back.
    """
    words = MODEL_OF.sub(lambda other: f"run:{key_of(other[1], seed, root)}", command).split()
    flags = vars(load_script(words[0], root).parse_args([*words[1:], "--seed", str(seed)]))
    del flags["output_dir"]
    key = sha1(json.dumps(flags, sort_keys=True).encode())
    folders = ("common", "runtime")
    paths = [root / words[0]]
    paths += [path for folder in folders for path in sorted((root / folder).glob("*.py"))]
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
    `root` the script is that of another folder.
    """
    output_dir = RUNS / f"{command.partition('.py')[0]}_{key_of(command, seed, root)}"
    for file in output_dir.glob("*/model.safetensors"):
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
    if process.returncode != 0:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{process.stderr[-3000:]}")
    (folder,) = output_dir.iterdir()
    print(f"    {command} --seed {seed}", flush=True)
    return Run(folder)


def runs_of(
    commands: Iterable[str], root: Path = Path(), seeds: tuple[int, ...] | None = None
) -> dict[str, list[Run]]:
    """By command, its runs: one for each seed. Commands of one key are run once."""
    seeds = seeds or SEEDS
    commands = [*dict.fromkeys(commands)]
    needed_first = [other for command in commands for other in MODEL_OF.findall(command)]
    for stage in (needed_first, commands):
        with ThreadPoolExecutor(JOBS) as pool:
            futures, keys = {}, {}
            for command, seed in product(stage, seeds):
                keys[command, seed] = key = key_of(command, seed, root)
                if key not in futures:
                    futures[key] = pool.submit(run_of, command, seed, root)
    runs = {key: future.result() for key, future in futures.items()}
    return {command: [runs[keys[command, seed]] for seed in seeds] for command in commands}


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
