"""A model on its device: types, sharding, adapters, activation checkpointing, whole weights; and
the processes that share it.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

RANK = int(os.environ.get("RANK", 0))  # number of this process, set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model, or a lone head, to the device; under torchrun FSDP shards it, layer by layer.
    Gradients are summed over ranks, not averaged: losses are divided by counts over all ranks.
    """
    if isinstance(model, PreTrainedModel):
        if in_4_bits(model):
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
        unit.set_force_sum_reduction_for_comms(True)  # the only one that gloo knows
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
    matrices -= {model.get_input_embeddings().weight}  # a head tied to it
    for weight in model.parameters():
        bfloat16 = use_bfloat16(device) and weight in matrices and not weight.requires_grad
        if weight.is_floating_point():  # others are in 4 bits
            weight.data = weight.data.to(torch.bfloat16 if bfloat16 else torch.float32)


def in_4_bits(model: torch.nn.Module) -> bool:
    """Whether bitsandbytes has quantised a model (QLoRA, arXiv 2305.14314)."""
    return getattr(model, "is_loaded_in_4bit", False)


def prepare_4_bits(model: PreTrainedModel, device: torch.device) -> None:
    """Products in bfloat16 where `use_bfloat16`, since autocast does not reach them, and a gradient
    in evaluation mode. A ValueError if the weights would have to be trained or sharded.
    """
    is_trained = any(weight.requires_grad for weight in model.parameters())
    if WORLD_SIZE > 1 or (is_trained and not hasattr(model, "peft_config")):
        source = f"--model {model.name_or_path} in 4 bits"
        raise ValueError(f"{source} needs --lora-rank above 0 and a single process")
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
    a way that is right but rounds differently. In float32 if all weights are.
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


def check_size(model: Any, tokenizer: Any, positions: int) -> None:
    """A ValueError if a model is too small for a tokenizer or for texts of so many tokens. LongRoPE
    (Phi-3) rotates all rows of a batch in another way once one is longer than the original length.
    """
    source, config = model.name_or_path, model.config.get_text_config()
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(f"{source}: the tokenizer has more tokens than the embedding")
    limit, reason = getattr(config, "max_position_embeddings", None) or positions, ""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of all layers, or of each type of layers
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            limit = part["original_max_position_embeddings"]
            reason = ", beyond which LongRoPE changes"
    if positions > limit:
        needed = f"the {positions} of the --max flags"
        raise ValueError(f"{source} has fewer positions than {needed}: {limit}{reason}")


def check_learning_rate(args: Any, model: Any) -> None:
    """A warning if a model with over 10M parameters would be trained with the default rate."""
    if args.learning_rate == type(args).learning_rate and model.num_parameters() > 10_000_000:
        warnings.warn("--learning-rate: the default is for tiny models, see --help", stacklevel=2)


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


def add_adapters(model: Any, rank: int, seed: int, stop_id: int | None = None) -> None:
    """LoRA (Hu et al., arXiv 2106.09685): W of each linear layer but the output head is frozen and
    becomes W + 2 B A, with A (rank, d_in) random and B (d_out, rank) 0 at first. Rank 0: none. A
    warning if the frozen embedding cannot tell the token that is to end a completion from others.
    """
    if rank == 0:
        return
    embedding = model.get_input_embeddings().weight
    ends = RANK == 0 and stop_id is not None  # the others have no weights yet
    if ends and (embedding == embedding[stop_id]).all(dim=1).sum() > 1:
        warnings.warn(f"--lora-rank: token {stop_id}, which ends texts, is untrained", stacklevel=2)
    model.requires_grad_(False)
    torch.manual_seed(seed)  # of A
    # Their kernels read this weight themselves, without an adapter.
    is_fused = model.config.model_type in ("falcon_h1", "mamba2", "nemotron_h")
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        target_parameters=[*stacked_experts(model)],
        exclude_modules=["out_proj"] if is_fused else None,
        task_type="SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    inject_adapter_in_model(config, model)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model without its adapters, if it has any, for passes without gradient."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True  # peft's public switch freezes A and B too
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


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


# What a checkpoint has: whole tensors on rank 0, of what is trained alone.
CHECKPOINT_OPTIONS = dcp.StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)


def save_atomically(state: dict, path: Path) -> None:
    """`torch.save` beside the old file, which the new one replaces once it is on the disk."""
    beside = path.with_suffix(".tmp")
    try:
        torch.save(state, beside)
        with open(beside, "rb+") as file:
            os.fsync(file)
    except (OSError, RuntimeError) as error:  # torch does not say that a disk is full
        raise OSError(f"{path} cannot be written, is the disk full? {error}") from error
    os.replace(beside, path)


def merge_adapter(layer: LoraLayer) -> None:
    """W becomes W + 2 B A. peft's own `merge` would round it to 4 bits again, and leaves it to
    chance how B A is sharded.
    """
    weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
    if WORLD_SIZE > 1:
        for factor in (layer.lora_A["default"], layer.lora_B["default"]):
            factor.weight = torch.nn.Parameter(factor.weight.redistribute(placements=[Replicate()]))
    product = layer.get_delta_weight("default")
    if WORLD_SIZE > 1:
        product = product.redistribute(placements=weight.placements)
    weight.data += product
    layer.merged_adapters.append("default")


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """After training: whole weights, for `from_pretrained`. Adapters are merged into them, in
    float32; `adapter/` has these alone, by peft's names, and the heads that were trained.
    """
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if in_4_bits(model):
        for weight in model.parameters():
            if hasattr(weight, "quant_state"):
                weight.quant_state.dtype = torch.float32  # not rounded to the checkpoint's type
        model.dequantize(torch.float32)
        model.is_loaded_in_4bit = False
    if hasattr(model, "peft_config"):
        model = (model.cpu() if WORLD_SIZE == 1 else model).float()  # frozen weights were bfloat16
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                merge_adapter(layer)
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = dcp.get_model_state_dict(model, options=options)  # all ranks
    weights, adapter = {}, {}
    for name, _ in (*model.named_parameters(), *model.named_buffers()):  # a tied weight once
        if name in gathered and "lora_" not in name:
            weights[name.replace(".base_layer", "")] = gathered[name]
        if name in gathered and name in trained:  # beside adapters: A, B and heads
            adapter["base_model.model." + name.replace(".default", "")] = gathered[name]
    if RANK == 0:
        rope = getattr(model.config, "rope_parameters", None) or {}
        if "rope_theta" in rope:  # where transformers 4 and llama.cpp look for it
            model.config.rope_theta = rope["rope_theta"]
        model.save_pretrained(folder, state_dict=weights)
    if RANK == 0 and hasattr(model, "peft_config"):
        model.peft_config["default"].save_pretrained(folder / "adapter")
        save_file(adapter, folder / "adapter" / "adapter_model.safetensors")


# --- processes of torchrun -----------------------------------------------------------------------
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
    """Scalars by name, each summed over all ranks, in one message and one copy from the GPU."""
    totals = all_reduce_sum(torch.stack([*sums.values()])).tolist()
    return dict(zip(sums, totals, strict=True))


def clip_grad_norm(model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradient down to max_norm; returns its norm before that, which must be finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = norm.full_tensor() if WORLD_SIZE > 1 else norm
    if not norm.isfinite():
        raise FloatingPointError(f"gradient norm {norm}: is --learning-rate too high?")
    return norm.item()
