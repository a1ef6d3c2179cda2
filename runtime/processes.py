"""The processes that torchrun has started: who this one is, and sums and lists over all. Weights
are sharded in model.py.
"""

import os
import sys
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

RANK = int(os.environ.get("RANK", 0))  # number of this process, set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


def join_processes() -> torch.device:
    """Connect the processes that torchrun has started, if it has; returns this one's device."""
    logging.disable_progress_bar()  # of loading weights, on every rank
    with suppress(AttributeError):  # a notebook's stdout takes every character
        sys.stdout.reconfigure(errors="backslashreplace")
    if torch.cuda.is_available():  # CUDA-only
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # cuDNN attention, an H100's default, recompiles for every length (pytorch PR 155958).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
    if RANK > 0:  # rank 0 alone prints and writes
        sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115
        warnings.simplefilter("ignore")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def leave_processes() -> None:
    """The end of a script under torchrun."""
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        os._exit(0)  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)


def peak_memory_gb() -> float:
    """The largest memory so far in GB (10^9 bytes): allocated on the GPU, else by this process."""
    if torch.cuda.is_available():  # CUDA-only
        return torch.cuda.max_memory_allocated() / 1e9
    with suppress(ImportError):  # Windows does not have it
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    return 0.0


def all_gather(items: list) -> list:
    """The lists of all ranks, concatenated in the order of the ranks."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(lists, items)
    return [item for one_list in lists for item in one_list]


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    return all_gather([value])[0]


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def sums_over_ranks(sums: dict[str, Tensor]) -> dict[str, float]:
    """Scalars by name, each summed over all ranks, in one message and one copy from the GPU."""
    totals = all_reduce_sum(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))
