"""LoRA: adapters of a model. A run leaves merged weights, and its adapter alone in `adapter/` (see
saving.py). A next run with --lora-rank takes the weights apart again: `start` is the adapter that
it found, frozen, and `default` the copy that it trains, which alone is merged at the end. A run
without --lora-rank trains the merged weights.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate
from transformers.utils import logging

from runtime.model import stacked_experts
from runtime.processes import RANK, WORLD_SIZE, from_rank_0


def add_adapters(model: Any, lora_rank: int, seed: int, any_rank: bool = False) -> None:
    """LoRA (Hu et al., arXiv 2106.09685): W of each linear layer but the output head is frozen and
    becomes W + 2 B A, with A (rank, d_in) random and B (d_out, rank) 0 at first. `lora_rank` 0 adds
    none. If an earlier run has left an adapter, training goes on with a copy of it: its rank has to
    be the same, but for `any_rank`, as in a critic, which goes on from a reward model's.
    """
    if lora_rank == 0:
        return
    from peft import LoraConfig, inject_adapter_in_model  # here, as it loads bitsandbytes

    # Their kernels read this weight themselves, without an adapter.
    is_fused = model.config.model_type in ("falcon_h1", "mamba2", "nemotron_h")
    config = unmerge(model) or LoraConfig(
        r=lora_rank,
        lora_alpha=2 * lora_rank,
        target_modules="all-linear",
        target_parameters=[*stacked_experts(model)],
        exclude_modules=["out_proj"] if is_fused else None,
        base_model_name_or_path=model.name_or_path,
    )
    if config.r != lora_rank and not any_rank:
        folder = f"{model.name_or_path}/adapter"
        found = f"{folder} has rank {config.r}: use that, or remove the folder for a new adapter"
        raise ValueError(f"--lora-rank {lora_rank}: {found}")
    config.task_type = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    model.requires_grad_(False)
    torch.manual_seed(seed)  # of A
    inject_adapter_in_model(config, model)
    for layer in adapter_layers(model):
        for factor in (layer.lora_A, layer.lora_B):
            if "start" in factor:
                factor["default"] = deepcopy(factor["start"])
        layer.set_adapter("default")  # it alone is active, and trained


def freeze(model: Any, merged: bool = False) -> Any:
    """The model, not to be trained. The adapter that an earlier run has left stays apart from its
    base, unless `merged`, for the reference of a policy that trains merged weights.
    """
    if not merged:
        unmerge(model)
    return model.requires_grad_(False)


def base_of(source: str) -> str | None:
    """The model below the adapter that a run has left in its folder, if it has left one."""
    file = Path(source, "adapter/adapter_config.json")
    return json.loads(file.read_text())["base_model_name_or_path"] if file.is_file() else None


def unmerge(model: Any) -> Any:
    """Take a run's merged weights apart, in place: adapted layers become those of its base, with
    the frozen adapter `start` beside them. On a GPU frozen matrices are in bfloat16, which would
    round off a part of what was merged into them. Returns the adapter's LoraConfig; None if the run
    has left no adapter, or if its base is not there or gives other weights: these stay merged.
    """
    source, base_name, problem = model.name_or_path, base_of(model.name_or_path), None
    if base_name is None:
        return None
    from peft import LoraConfig, inject_adapter_in_model

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a base without a head of scores: the model has it
    try:
        base = type(model).from_pretrained(base_name, device_map=None if RANK == 0 else "meta")
        config = LoraConfig.from_pretrained(f"{source}/adapter")
        config.modules_to_save = None  # a head, which the model has
        inject_adapter_in_model(config, base, "start")
        adapted = adapter_layers(base)
        layers = {name: layer for name, layer in base.named_modules() if layer in adapted}
        if RANK == 0:
            weights = load_file(f"{source}/adapter/adapter_model.safetensors")
            for name, weight in base.named_parameters():
                if "lora_" in name:
                    saved = weights["base_model.model." + name.replace(".start", "")]
                    weight.data = saved.to(weight.device, torch.float32)
            if not are_merged(layers, model):
                for layer in adapted:  # a run on a GPU has trained over a rounded base
                    matrix(layer).data = matrix(layer).data.bfloat16()
                if not are_merged(layers, model):
                    raise ValueError("the run's weights are not base and adapter")
    except Exception as error:  # any library's, if the base cannot be found
        problem = f"{type(error).__name__}: {error}"
    logging.set_verbosity(verbosity)
    if problem := from_rank_0(problem):
        loss = "its merged weights are taken, and a GPU rounds off a part of what it learned"
        warnings.warn(f"{source}: no adapter over {base_name}: {loss}: {problem}", stacklevel=3)
        return None
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    if getattr(base, "is_loaded_in_4bit", False):
        model.is_loaded_in_4bit, model.hf_quantizer = True, base.hf_quantizer
    print(f"{source}: its adapter of rank {config.r} over {base_name}")
    return config


def are_merged(layers: dict[str, Any], model: Any) -> bool:
    """Whether W + 2 B A of the first and last layer is the model's weight, to a relative 1e-4."""
    for name in ([*layers][0], [*layers][-1]):  # noqa: RUF015
        layer, module = layers[name], model.get_submodule(name.replace(".base_layer", ""))
        weight, merged = matrix(layer), getattr(module, getattr(layer, "parameter_name", "weight"))
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            state = copy(weight.quant_state)
            state.dtype = torch.float32  # as in `save_weights`
            weight = dequantize_4bit(weight.data, state)
        difference = weight.float() + layer.get_delta_weight("start") - merged.to(weight.device)
        if not difference.norm() <= 1e-4 * merged.norm():  # or NaN
            return False
    return True


def adapter_layers(model: Any) -> list:
    """The layers, peft's `LoraLayer`s, with adapters that are trained."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def matrix(layer: Any) -> torch.nn.Parameter:
    """W of a layer with adapters."""
    return layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight


@contextmanager
def as_at_start(model: Any) -> Iterator[None]:
    """The model as it was before training, for passes without gradient: with the adapter of an
    earlier run, if there is one, else without its adapters. A frozen model is as it was anyway.
    """
    layers = adapter_layers(model)
    for layer in layers:  # peft's public switches freeze A and B too
        layer._active_adapter, layer._disable_adapters = "start", "start" not in layer.lora_A
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = "default", False


def merge_adapter(layer: Any) -> None:
    """W becomes W + 2 B A. peft's own `merge` would round it to 4 bits again, and may shard
    B A unlike W.
    """
    weight = matrix(layer)
    if WORLD_SIZE > 1:
        for factor in (layer.lora_A["default"], layer.lora_B["default"]):
            factor.weight = torch.nn.Parameter(factor.weight.redistribute(placements=[Replicate()]))
    product = layer.get_delta_weight("default")
    if WORLD_SIZE > 1:
        product = product.redistribute(placements=weight.placements)
    weight.data += product
    layer.merged_adapters.append("default")
