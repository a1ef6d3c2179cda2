"""LoRA: adapters of a model, and the merging of them into its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from runtime.model import stacked_experts
from runtime.processes import WORLD_SIZE


def add_adapters(model: Any, rank: int, seed: int) -> None:
    """LoRA (Hu et al., arXiv 2106.09685): W of each linear layer but the output head is frozen and
    becomes W + 2 B A, with A (rank, d_in) random and B (d_out, rank) 0 at first. Rank 0: none.
    """
    if rank == 0:
        return
    from peft import LoraConfig, inject_adapter_in_model  # here, as it loads bitsandbytes

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


def adapter_layers(model: Any) -> list:
    """The layers with adapters, peft's `LoraLayer`s."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model without its adapters, if it has any, for passes without gradient."""
    layers = adapter_layers(model)
    for layer in layers:
        layer._disable_adapters = True  # peft's public switch freezes A and B too
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_adapter(layer: Any) -> None:
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
