"""A CUDA graph made of recorded CPU operations, in the place of `common.generation.capture`.

Capturing records the operations of a step and leaves memory as it was; replaying runs them again on
the same memory. So a number or a branch that Python would bake into a graph shows as wrong tokens,
and what a capturing stream refuses is refused: reading a value back, shapes that depend on values,
and, with the tensors of `simulated_gpu.py`, copies between the two devices.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
REFUSED = (
    aten._local_scalar_dense.default,  # .item(), bool(tensor), a tensor as a Python index
    aten.nonzero.default,
    aten.masked_select.default,
)
READ_BACK = (torch.Tensor.tolist, torch.Tensor.numpy)  # which call no operation


def memory(tensor):
    return getattr(tensor, "held", tensor).untyped_storage()  # of a SimTensor: what it holds


def leaves_its_device(function, args, kwargs):
    if function is aten.copy_.default:
        return args[0].device != args[1].device
    if function is aten._to_copy.default:
        return torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    # What `torch.tensor(..., device=...)` ends with, after a copy that is seen by nobody.
    return function is aten.lift_fresh.default and args[0].device.type != "cpu"


def refuse(function):
    raise RuntimeError(f"{function}: not permitted when stream is capturing")


class Reader(TorchFunctionMode):
    """Refuses what hands values to Python without an operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READ_BACK:
            refuse(function)
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []  # (function, args, kwargs, output)
        self.before = {}  # memory that is written to, and a copy of what it held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        indices = tree_leaves(args[1]) if function is aten.index.Tensor else []
        by_mask = any(index.dtype == torch.bool for index in indices if index is not None)
        if function in REFUSED or by_mask or leaves_its_device(function, args, kwargs):
            refuse(function)
        for argument, schema in zip(args, function._schema.arguments, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for tensor in tree_leaves(argument):
                    copy = (memory(tensor), memory(tensor).clone())
                    self.before.setdefault(memory(tensor)._cdata, copy)
        output = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, output))
        return output


def capture(step):
    try:
        with Recorder() as recorder, Reader():
            output = step()
    finally:  # capturing runs nothing, nor does the part of a step before what is refused
        for written, before in recorder.before.values():
            written.copy_(before)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # its casts are among the recorded operations
    def replay():
        for function, args, kwargs, recorded in recorder.operations:
            outputs = tree_leaves(function(*args, **kwargs))
            for place, value in zip(tree_leaves(recorded), outputs, strict=True):
                is_new = torch.is_tensor(place) and memory(place)._cdata != memory(value)._cdata
                if is_new:
                    place.copy_(value)  # later operations read from here
        return output

    return replay
