"""A model and its tokenizer, loaded; a model on its device: its types, FSDP, 4 bits, activation
checkpointing.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from runtime.checks import check_4_bits, check_model, check_source, check_template_kwargs
from runtime.checks import check_tokenizer
from runtime.processes import RANK, WORLD_SIZE


def load_tokenizer(source: str, chat_template_kwargs: str = "{}") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Its chat template gets the values of a JSON object."""
    check_source(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    check_template_kwargs(tokenizer, chat_template_kwargs)
    values = json.loads(chat_template_kwargs)
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return tokenizer


def load_model(
    kind: Any, source: str, tokenizer: Any, positions: int, new_head: bool = False
) -> Any:
    """A model of a class such as AutoModelForCausalLM, from a folder or the hub, checked against
    the tokenizer and lengths. It stays in eval mode: no dropout. With `new_head` a classifier of
    one label; `head_is_new` says whether its head was not in the checkpoint.
    """
    check_tokenizer(source, tokenizer)
    where = None if RANK == 0 else "meta"  # one process reads the weights, see `shard`
    labels = {"num_labels": 1} if new_head else {}
    model, info = kind.from_pretrained(source, device_map=where, output_loading_info=True, **labels)
    check_model(model, info, tokenizer, positions, new_head)
    model.head_is_new = "score.weight" in info["missing_keys"]
    print(f"{source}: {model.num_parameters():,} parameters")
    return model


def find_rate(model: Any, given: float | None, lora_rank: int, tiny: float, real: float) -> float:
    """The learning rate that is given. If none is: `tiny` for a model below 10M parameters, and for
    a larger one `real`, or ten times that for adapters (docs/choosing.md); the default is printed.
    """
    if given is not None:
        return given
    num_parameters = model.num_parameters()
    rate = tiny
    if num_parameters >= 10_000_000:
        rate = round(10 * real, 10) if lora_rank > 0 else real  # 10 * 1e-6 is 9.99...e-06
    default = f"the default for {num_parameters:,} parameters"
    print(f"{model.name_or_path}: learning rate {rate}, {default}")
    return rate


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model, or a lone head, to the device; under torchrun FSDP shards it, layer by layer.
    Gradients are summed over ranks, not averaged: losses are divided by counts over all ranks.
    """
    if isinstance(model, PreTrainedModel):
        check_4_bits(model)
        prepare_4_bits(model, device)
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
        # A head of scores, a Linear, stays in float32: close scores would round to one bfloat16.
        bfloat16 = use_bfloat16(device) and not isinstance(unit, torch.nn.Linear)
        precision = MixedPrecisionPolicy(torch.bfloat16 if bfloat16 else None, torch.float32)
        fully_shard(unit, mp_policy=precision, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    return model.to(device)


def receive_weights(unit: torch.nn.Module, device: torch.device) -> None:
    """Rank 0 has read the weights; the others, with models on the meta device, receive them."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if isinstance(tensor, DTensor):  # a part that is sharded already
            continue
        whole = tensor.detach().to(device) if RANK == 0 else torch.empty_like(tensor, device=device)
        torch.distributed.broadcast(whole, src=0)
        whole = whole.detach()  # a fresh object: broadcast may still refer to the old one
        if isinstance(tensor, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, whole)  # the same object: a tied weight stays tied


def set_types(model: PreTrainedModel, device: torch.device) -> None:
    """float32 weights, whatever the checkpoint has. CUDA-only: bfloat16 for frozen matrices, which
    autocast would cast before each product: the same bits in half the memory.
    """
    modules = [module for name, module in model.named_modules() if name != "score"]
    matrices = {module.weight for module in modules if isinstance(module, torch.nn.Linear | Conv1D)}
    matrices |= {*stacked_experts(model).values()}
    matrices -= {model.get_input_embeddings().weight}  # it may be a tied head's too
    for weight in model.parameters():
        bfloat16 = use_bfloat16(device) and weight in matrices and not weight.requires_grad
        is_quantised = hasattr(weight, "quant_state")  # its codes may be stored as floats
        if weight.is_floating_point() and not is_quantised:
            weight.data = weight.data.to(torch.bfloat16 if bfloat16 else torch.float32)


def prepare_4_bits(model: PreTrainedModel, device: torch.device) -> None:
    """For layers of bitsandbytes (QLoRA, arXiv 2305.14314): products in bfloat16 where
    `use_bfloat16`, since autocast does not reach them, and a gradient in evaluation mode.
    """
    for module in model.modules():
        if hasattr(module, "compute_type_is_set"):
            module.compute_dtype = torch.bfloat16 if use_bfloat16(device) else torch.float32
            module.compute_type_is_set = True
            # On a CPU evaluation mode repacks the weights, for products without a gradient.
            module.training = True


def stacked_experts(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The matrices of a mixture of experts that are one tensor, by name; convolutions are not."""
    stacked = {name: weight for name, weight in model.named_parameters() if weight.dim() == 3}
    return {name: stacked[name] for name in stacked if not name.endswith("weight")}


def use_bfloat16(device: torch.device) -> bool:
    """CUDA-only: where matrix products are computed in bfloat16; weights stay float32. Not on cards
    that only emulate it (T4, V100, RTX 20): emulated, it is slower than float32.
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products where `use_bfloat16`; log-softmax, losses and scores are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


@torch.no_grad()
def failure_of(model: Any, attempt: Callable, exact: Callable, rounded: Callable) -> str | None:
    """What is wrong with an attempt to compute the `exact` numbers of a model in another way, if
    anything. It may be off by a little, or three times as far as `rounded`, which computes them in
    a way that is right but rounds differently. All in float32 if all weights are in float32.
    """
    # On a GPU the matrices of a frozen model are in bfloat16: `set_types`.
    types = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    in_float32 = all(dtype.itemsize >= 4 for dtype in types)
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=not in_float32):
            expected = exact()
            if not expected.isfinite().all():
                return "some of its numbers are not finite: are its weights?"
            noise, distance = (rounded() - expected).norm(), (attempt() - expected).norm()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a model that cannot do it fails in its own way
        return repr(error)
    limit = max(3 * noise, (1e-5 if in_float32 else 5e-2) * expected.norm())
    return None if distance <= limit else f"it changes numbers by {distance / expected.norm():.1%}"


def backbone(model: Any) -> torch.nn.Module:
    """All but the head. Llama 4 and Mllama are their own base model."""
    return model.get_decoder().model if model.base_model is model else model.base_model


def transformer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, from the first to the last; a ValueError if none is known."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"the layers of {type(model).__name__} are not known")
    return layers


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest again (Chen et
    al., arXiv 1604.06174). The switch of transformers acts in training mode alone, with dropout.
    """
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in transformer_layers(model):
        layer.forward = partial(recomputed, layer.forward)


def forward_method(function: Callable) -> Callable:
    """Decorator: FSDP gathers a sharded model's weights around `function(model, ...)`, as it does
    around `model(...)`. Such a function called by another finds them gathered: FSDP cannot nest it.
    """

    @wraps(function)
    def gathered(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, FSDPModule) or hasattr(model, "gathered"):
            return function(model, *args, **kwargs)
        # Bound here, since FSDP would walk through arguments: all token ids of a rollout.
        model.gathered = partial(function, model, *args, **kwargs)
        register_fsdp_forward_method(model, "gathered")
        result = model.gathered()
        del model.gathered
        return result

    return gathered


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """A sharded model with whole weights, gathered once, and without FSDP's hooks. Ranks stop at
    different tokens, so no collective may run between tokens.
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
    norm = norm.full_tensor() if WORLD_SIZE > 1 else norm
    if not norm.isfinite():
        raise FloatingPointError(f"gradient norm {norm}: is --learning-rate too high?")
    return norm.item()
