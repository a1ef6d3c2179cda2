"""An accelerator made of CPU memory, which refuses what a GPU refuses: tensors of two devices.

    with SimulatedGPU():
        model.to(SIM)

A tensor of SIM holds a CPU tensor. Each operation checks that its tensors live on one device, as
CUDA does (which lets numbers, that is tensors without dimensions, and index tensors of the CPU
through), and then runs on the CPU. NumPy, safetensors and pickle find no memory behind such a
tensor: bring it to the CPU first. Types are not checked here.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Module:
    """What PyTorch asks of the module of a device."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


_setup_privateuseone_for_python_backend("sim", backend_module=Module())
SIM = torch.device("sim", 0)


class SimTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        layout = dict(strides=held.stride(), storage_offset=held.storage_offset())
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), dtype=held.dtype, device=SIM, **layout
        )

    def __init__(self, held):
        self.held = held

    def tolist(self):
        return self.held.tolist()

    def __reduce_ex__(self, protocol):
        raise TypeError("can't pickle a sim tensor; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def check_devices(func, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if func in INDEXING:
        indices, tensors = tree_leaves(args[1]), [args[0], *args[2:3]]
        if isinstance(args[0], SimTensor):
            indices = []  # of either device
        tensors += [x for x in indices if isinstance(x, torch.Tensor)]
    kinds = {isinstance(x, SimTensor) for x in tensors if isinstance(x, SimTensor) or x.dim() > 0}
    if len(kinds) == 2 and func not in MOVES and func.namespace == "aten":
        raise RuntimeError(f"{func}: expected all tensors on one device, found sim and cpu")


def run(func, args, kwargs):
    check_devices(func, args, kwargs)
    sims = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SimTensor)]
    target = kwargs.get("device")
    on_sim = bool(sims) if target is None else torch.device(target).type == "sim"
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args_held, kwargs = tree_map_only(SimTensor, lambda x: x.held, (args, kwargs))
    output = func(*args_held, **kwargs)
    if func is aten.copy_.default:
        return args[0]

    def wrap(tensor):
        # What an operation in place returns is the tensor that it was given.
        same = [x for x in sims if x.held is tensor or x is tensor]
        return same[0] if same else SimTensor(tensor)

    return tree_map_only(torch.Tensor, wrap, output) if on_sim else output


class SimulatedGPU(TorchDispatchMode):
    """Lets `.to(SIM)` and `device=SIM` work within it."""

    def __enter__(self):
        # A moved parameter must stay one object, so that tied weights stay tied.
        torch.__future__.set_swap_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch.__future__.set_swap_module_params_on_conversion(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def copy_from(source, target, non_blocking=False):
    getattr(target, "held", target).copy_(getattr(source, "held", source))
    return target


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.empty(size, dtype=dtype, device="cpu"))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


library = torch.library.Library("aten", "IMPL")
library.impl("empty.memory_format", empty, "PrivateUse1")
library.impl("empty_strided", empty_strided, "PrivateUse1")
library.impl("_copy_from", copy_from, "PrivateUse1")
