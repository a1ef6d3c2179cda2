"""Functions of a file that is named by a flag: rewards, environments."""

import os
import sys
import zlib
from collections.abc import Callable
from contextlib import chdir
from copy import deepcopy
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.checks import check_imports
from runtime.processes import RANK, from_rank_0

FILES = {}  # CRC-32 of each file that was loaded, by its name in the flag
CHECKS = {}  # `check_columns` of the file of each function, None without one, by its flag's value
STEP = {"step": 0}  # number of the rollout, for functions with such a parameter


def load_function(flag: str, spec: str) -> Callable | None:
    """The function of path/to/file.py:function, on rank 0, which calls it for all. The file is a
    module, loaded once until it changes: its functions share what it holds, and pickle knows it.
    """
    if RANK > 0:
        return None
    file, _, function = spec.rpartition(":")
    path = os.path.realpath(file)
    name = path.removesuffix(".py").replace(".", "_")  # pickle would import the part before a dot
    version = (path, os.path.getmtime(path)) if path.endswith(".py") else None
    if version != getattr(sys.modules.get(name), "version", None):
        sys.path.append(os.path.dirname(path))  # for modules in its folder
        check_imports(Path(path))
        module_spec = spec_from_file_location(name, path)
        sys.modules[name] = module_from_spec(module_spec)
        module_spec.loader.exec_module(sys.modules[name])
        sys.modules[name].version = version
    if not callable(getattr(sys.modules.get(name), function, None)):
        raise ValueError(f"{flag} {spec}: expected path/to/file.py:function")
    FILES[file] = zlib.crc32(Path(path).read_bytes())
    loaded = getattr(sys.modules[name], function)
    CHECKS[spec] = getattr(sys.modules[name], "check_columns", None)
    set_step(0)

    @wraps(loaded)
    def call(**columns):
        if "step" in signature(loaded).parameters:
            columns = STEP | columns  # a column of that name comes first
        with chdir("."):  # a function that goes elsewhere would take the run's folder with it
            return loaded(**columns)

    return call


def call_reward(function: Callable, columns: dict[str, list]) -> Tensor:
    """A reward function's numbers (B,), on all ranks; rank 0 calls it, with columns of B values."""
    rewards = None
    if RANK == 0:
        # A function may change what it is given.
        copies = {key: [deepcopy(value) for value in column] for key, column in columns.items()}
        name = f"{getattr(function, '__name__', function)} of {function.__module__}"
        try:
            rewards = np.asarray(function(**copies), dtype=np.float64)  # None becomes NaN
        except (Exception, SystemExit) as error:  # an exit would end the run without an error
            raise RuntimeError(f"reward {name}: {type(error).__name__}: {error}") from error
        count = len(columns["completions"])
        if rewards.shape != (count,) or not np.isfinite(rewards).all():
            raise ValueError(f"reward {name}: {count} finite numbers expected: {rewards}")
    return torch.tensor(from_rank_0(rewards))


def set_step(step: int) -> None:
    """The number of the rollout that begins; before the first it is 0."""
    STEP["step"] = step


def check_columns(specs: list[str], prompts: list) -> None:
    """Hand the columns of all training prompts to `check_columns` of the functions' files: a bad
    row ends the run now, not at the rollout that draws it.
    """
    columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
    for check in filter(None, [CHECKS[spec] for spec in specs if RANK == 0]):
        check(**columns)
