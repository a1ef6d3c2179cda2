"""Ranks, sharding, precision, activation checkpointing."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

RANK = int(os.environ.get("RANK", 0))  # number of this process, set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


def join_processes() -> torch.device:
    """Connect the processes that torchrun has started, if it has; returns this one's device."""
    logging.disable_progress_bar()  # of loading weights, on every rank
    if torch.cuda.is_available():  # CUDA-only
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
    if RANK > 0:  # rank 0 alone prints and writes
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def leave_processes() -> None:
    """The end of a script under torchrun."""
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        os._exit(0)  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)


def all_gather(items: list) -> list:
    """The lists of all ranks, concatenated in the order of the ranks."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(lists, items)
    return [item for one_list in lists for item in one_list]


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def sums_over_ranks(sums: dict[str, Tensor]) -> dict[str, float]:
    """Named numbers (), each summed over all ranks, in one message and one copy from the GPU."""
    totals = all_reduce_sum(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model, or a lone head, to the device; under torchrun FSDP shards it, layer by layer.
    Gradients are summed over ranks, not averaged: losses are divided by counts over all ranks.
    """
    if isinstance(model, PreTrainedModel):
        # torch gives the embedding at padding_idx no gradient; where pad == eos that is the EOS.
        model.get_input_embeddings().padding_idx = None
        set_types(model, device)
    if WORLD_SIZE == 1:
        return model.to(device)
    layers = getattr(model, "_no_split_modules", None) or ()
    # FSDP wants inner modules before those that contain them.
    units = [module for module in reversed([*model.modules()]) if type(module).__name__ in layers]
    heads = [module for module in model.children() if isinstance(module, torch.nn.Linear)]
    units += [model.base_model, *heads] if hasattr(model, "score") else [model]
    for unit in units:
        receive_weights(unit, device)
        # A head of scores, a Linear, stays in float32: near scores are equal in bfloat16.
        bfloat16 = use_bfloat16(device) and not isinstance(unit, torch.nn.Linear)
        precision = MixedPrecisionPolicy(torch.bfloat16 if bfloat16 else None, torch.float32)
        fully_shard(unit, mp_policy=precision, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # the only one that gloo knows
    return model.to(device)


def receive_weights(unit: torch.nn.Module, device: torch.device) -> None:
    """Rank 0 has read the weights. The others, whose models are on the meta device and take no
    memory, receive those of this unit that are not sharded yet.
    """
    received = {}  # by identity: a tied weight stays tied
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if tensor not in received:
                    whole = torch.empty_like(tensor, device=device, requires_grad=False)
                    if RANK == 0:
                        whole.copy_(tensor.detach())
                    torch.distributed.broadcast(whole, src=0)
                    if isinstance(tensor, torch.nn.Parameter):
                        whole = torch.nn.Parameter(whole, tensor.requires_grad)
                    received[tensor] = whole
                tensors[name] = received[tensor]


def set_types(model: PreTrainedModel, device: torch.device) -> None:
    """float32 weights, whatever the checkpoint has. CUDA-only: bfloat16 for frozen matrices, which
    autocast would cast before each product: the same bits in half the memory. Not for embeddings,
    a head tied to them, or a head of scores.
    """
    frozen_matrices = set()
    if use_bfloat16(device):
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        modules = [module for layer in layers for module in layer.modules()]
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            modules.append(head)
        for module in modules:
            if isinstance(module, torch.nn.Linear | Conv1D) and not module.weight.requires_grad:
                frozen_matrices.add(module.weight)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16 if weight in frozen_matrices else torch.float32)


def gather_weights(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After training: whole weights, on rank 0, by their names in the checkpoint, a tied one once.
    Adapters are merged into them, in float32; the second dictionary has these alone, by peft's
    names, and the heads that were trained.
    """
    options = dict(full_state_dict=True, cpu_offload=True)
    adapter = {}
    if hasattr(model, "peft_config"):
        only_trained = dcp.StateDictOptions(**options, ignore_frozen_params=True)
        trained = dcp.get_model_state_dict(model, options=only_trained)
        for name, weight in model.named_parameters():
            if weight.requires_grad and name in trained:
                adapter["base_model.model." + name.replace(".default", "")] = trained[name]
        model = (model.cpu() if WORLD_SIZE == 1 else model).float()  # frozen weights were bfloat16
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.merge()
    gathered = dcp.get_model_state_dict(model, options=dcp.StateDictOptions(**options))
    weights = {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        if name in gathered and "lora_" not in name:
            weights[name.replace(".base_layer", "")] = gathered[name]
    return weights, adapter


def forward_method(function: Callable) -> Callable:
    """Decorator: FSDP gathers a sharded model's weights around `function(model, ...)`, as it does
    around `model(...)`. It may call another one's `__wrapped__` only: no gathering within another.
    """
    name = function.__name__

    @wraps(function)
    def gathered(model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, FSDPModule) and not hasattr(model, name):
            setattr(model, name, partial(function, model))
            register_fsdp_forward_method(model, name)
        method = getattr(model, name, partial(function, model))
        return method(*args, **kwargs)

    return gathered


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """A sharded model with whole weights, gathered once, and without FSDP's hooks.
    Ranks finish after different numbers of tokens, so none may wait for another between two tokens.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [(unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    for unit in units:
        unit.unshard()
        unit._forward_pre_hooks, unit._forward_hooks = {}, {}
    yield  # an error here ends the process
    for unit, (pre_hooks, forward_hooks) in zip(units, hooks, strict=True):
        unit._forward_pre_hooks, unit._forward_hooks = pre_hooks, forward_hooks
        unit.reshard()


def clip_grad_norm(model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradient down to max_norm; returns its norm before that, which must be finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm {norm}: is --learning-rate too high?")
    return norm


def use_bfloat16(device: torch.device) -> bool:
    """CUDA-only: where matrix products are computed in bfloat16; weights stay float32. Not on cards
    that only emulate it (T4, V100, RTX 20): emulated, it is slower than float32.
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products where `use_bfloat16`; log-softmax, losses and scores are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


def transformer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, from the first to the last; a ValueError if none is known."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"the layers of {type(model).__name__} are not known")
    return layers


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest once more: less
    memory for about a third more time (Chen et al., arXiv 1604.06174). The switch that models of
    transformers have for it works in training mode alone, where dropout is on.
    """
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in transformer_layers(model):
        layer.forward = partial(recomputed, layer.forward)
