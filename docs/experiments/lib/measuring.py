"""What the programs that measure time and memory share: a process of its own, a clock, peak memory,
models with random weights, and short runs of the scripts."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


def quietly(function: Callable, *arguments: Any) -> Any:
    """What a function returns; what it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*arguments)


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """What a function returns that is called, quietly, in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(quietly, function, *arguments).result()


@contextlib.contextmanager
def noted_steps(note: Callable[[], Any]) -> Iterator[list]:
    """A list of what `note()` gives after each step of the first optimiser; PPO has two."""
    optimizers, notes = [], []

    def after_step(optimizer: Any, *_: Any) -> None:
        if type(optimizer).__name__ == "AdamW":  # accelerate wraps it in an optimiser of its own
            optimizers.append(optimizer)
            if optimizer is optimizers[0]:
                notes.append(note())

    hook = register_optimizer_step_post_hook(after_step)
    yield notes
    hook.remove()


# --- memory ---------------------------------------------------------------------------
def resident(name: str) -> int:
    """Bytes: VmRSS is resident now, VmHWM the most since the last `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def reset_peak() -> int:
    """Bytes in use now; peaks are counted from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak() -> int:
    """The most bytes in use since `reset_peak`."""
    return resident("VmHWM")


# --- models ------------------------------------------------------------------------------------
def large_models(script: Any, folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    """Flags that put random models, made in the folder, in the place of tiny ones."""
    flags = {}
    for flag in ("model", "reward_model"):
        source = getattr(script.Args, flag, None)
        if source:
            config = AutoConfig.from_pretrained(source, dtype="float32", **sizes)
            auto_class = AutoModelForCausalLM
            if "Classification" in config.architectures[0]:
                auto_class = AutoModelForSequenceClassification
                config.num_labels = 1
            flags[flag] = str(folder / flag)
            auto_class.from_config(config).save_pretrained(flags[flag])
            AutoTokenizer.from_pretrained(source).save_pretrained(flags[flag])
    return flags


# --- short runs of the scripts -----------------------------------------------------------------
def two_steps(script: Any, micro_batch_size: int) -> dict[str, Any]:
    """Flags for two optimiser steps of two micro-batches: the second meets the gradients of the
    first."""
    fields = vars(script.Args())
    rows = 4 * micro_batch_size  # pairs, sequences or completions of both steps
    flags = {"micro_batch_size": micro_batch_size, "eval_split": "test[:4]"}
    if "total_rollouts" not in fields:
        return flags | {"train_split": f"train[:{rows}]", "epochs": 1.0, "batch_size": rows // 2}
    flags |= {"total_rollouts": 1, "prompts_per_rollout": rows // fields.get("group_size", 1)}
    if "num_minibatches" in fields:
        flags["num_minibatches"] = 2
    else:  # a rollout is one step, of all its completions
        flags["total_rollouts"] = 2
    if "update_epochs" in fields:
        flags["update_epochs"] = 1
    return flags
