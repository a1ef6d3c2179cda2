"""A function called quietly, or in a process of its own; and peak memory."""

import contextlib
import io
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def quietly(function: Callable, *arguments: Any) -> Any:
    """What a function returns; what it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*arguments)


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """What a function returns that is called, quietly, in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(quietly, function, *arguments).result()


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
