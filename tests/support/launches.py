"""Kernel launches, and the waits of the processor for the device, counted without a GPU.

A GPU runs kernels one after another while Python launches the next ones ahead of it. Where Python
waits for the device, to read a value or to copy something there, it is ahead of nothing. Both are
counted on the device of `simulated_gpu.py`. An operation of PyTorch counts as one launch unless it
is a view; on a GPU some are several kernels.
"""

import contextlib
import traceback
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from simulated_gpu import SimTensor, SimulatedGPU
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
OUR_FOLDERS = (ROOT, ROOT / "common")
NO_KERNEL = "empty empty_like empty_strided new_empty _unsafe_view detach alias".split()
# Operations that hand a value, or a shape that depends on values, to the processor.
READS = "_local_scalar_dense nonzero masked_select equal is_nonzero _unique2 unique_dim".split()
READS += ["unique_consecutive", "lift_fresh"]  # the last ends `torch.tensor(..., device=device)`


class LaunchCounter(TorchDispatchMode):
    """Counts launches by operation, and keeps our frames of each wait."""

    def __init__(self):
        super().__init__()
        self.launches = Counter()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if any(isinstance(leaf, SimTensor) for leaf in tree_leaves((args, kwargs, output))):
            if not function.is_view and name not in NO_KERNEL:
                self.launches[name] += 1
            if is_wait(name, args, kwargs, output):
                self.note_wait()
        return output

    def note_wait(self):
        frames = traceback.extract_stack()
        self.waits.append([f for f in frames if Path(f.filename).parent in OUR_FOLDERS])


def is_wait(name, args, kwargs, output):
    """Whether the processor waits: it reads a value, or copies without `non_blocking`."""
    if name in READS:
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype == torch.bool or index.device.type == "cpu" for index in indices)
    if name == "_to_copy":
        is_moved = args[0].device.type != output.device.type
        return is_moved and not (kwargs.get("non_blocking") and output.device.type != "cpu")
    if name == "copy_":
        is_moved = args[0].device.type != args[1].device.type and args[1].dim() > 0
        return is_moved and args[2:] != (True,)
    return False


@contextlib.contextmanager
def counted():
    """Counts what runs within it; tensors of `SIM` can be made there."""
    counter = LaunchCounter()
    to_list = SimTensor.tolist

    def tolist(tensor):
        counter.note_wait()
        return to_list(tensor)

    with SimulatedGPU(), counter, patch.object(SimTensor, "tolist", tolist):
        yield counter
