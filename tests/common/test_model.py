"""Sharding, types, activation checkpointing, the clip. What several processes do is in
tests/run/test_processes.py, what a GPU does in test_gpu_path.py.
"""

import pytest
import torch
from gpu_types import take_gpu_types
from models import family_model, tiny_model
from transformers import AutoModelForSequenceClassification

import runtime.model
from common.generation import generate
from common.logprobs import completion_logprobs
from runtime.adapters import add_adapters
from runtime.model import checkpoint_activations, clip_grad_norm, shard, transformer_layers

CPU = torch.device("cpu")
SEQUENCES = [([1, 2, 3], [4, 5, 6, 7, 8]), ([9, 3], [4, 4])]


# --- sharding and types -------------------------------------------------------------------------
@pytest.fixture
def sharded_units(monkeypatch):
    """What `shard` gives to FSDP where there are two processes: a list of (unit, types)."""
    units = []
    monkeypatch.setattr(runtime.model, "WORLD_SIZE", 2)
    monkeypatch.setattr(runtime.model, "receive_weights", lambda unit, device: None)

    def fully_shard(unit, mp_policy, **options):
        units.append((unit, (mp_policy.param_dtype, mp_policy.reduce_dtype)))
        for name in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms"):
            object.__setattr__(unit, name, lambda value: None)

    monkeypatch.setattr(runtime.model, "fully_shard", fully_shard)
    return units


def test_layers_within_layers_are_sharded_first(sharded_units):
    """FSDP refuses a layer within one that it has; Mamba names two that are nested."""
    model = tiny_model("llama")
    model._no_split_modules = {"LlamaDecoderLayer", "LlamaMLP"}
    shard(model, CPU)
    units = [unit for unit, _ in sharded_units]
    assert len(units) == 2 * model.config.num_hidden_layers + 1
    for index, unit in enumerate(units):
        assert not set(units[index + 1 :]) & {part for part in unit.modules() if part is not unit}


@pytest.mark.parametrize("low", [False, True])
def test_gradients_are_reduced_in_float32_and_scores_computed_in_it(
    low, sharded_units, monkeypatch
):
    if low:
        take_gpu_types(monkeypatch)
    name = "tiny/reviews/reward_model"
    model = shard(AutoModelForSequenceClassification.from_pretrained(name), CPU)
    types = dict(sharded_units)
    assert model not in types  # its head is a unit of its own
    assert types.pop(model.score) == (None, torch.float32)
    assert {*types.values()} == {(torch.bfloat16 if low else None, torch.float32)}
    assert model.base_model in types and len(types) == 1 + len(model.base_model.layers)


def test_weights_are_float32_and_frozen_matrices_bfloat16_on_a_gpu(monkeypatch):
    take_gpu_types(monkeypatch)
    for tied in (False, True):
        model = tiny_model("llama", tie_word_embeddings=tied).bfloat16()
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(False)
        model.model.norm.weight.requires_grad_(False)
        model.lm_head.weight.requires_grad_(False)
        shard(model, CPU)
        found = {n for n, w in model.named_parameters() if w.dtype == torch.bfloat16}
        frozen = {"model.layers.0.self_attn.q_proj.weight"}
        if not tied:  # the embedding is one of rows, and no product; nor is a norm
            frozen.add("lm_head.weight")
        assert found == frozen


def test_frozen_experts_are_bfloat16_on_a_gpu(monkeypatch):
    found = []
    for is_gpu in (False, True):
        model = family_model("Qwen3Moe").requires_grad_(False)
        if is_gpu:
            take_gpu_types(monkeypatch)
        shard(model, CPU)
        found.append(completion_logprobs(model, SEQUENCES, torch.arange(2)))
    experts = [w for n, w in model.named_parameters() if ".experts." in n]
    assert experts and {weight.dtype for weight in experts} == {torch.bfloat16}
    assert 0 < (found[0] - found[1]).abs().max() < 0.3


def test_mamba_gets_adapters_where_its_kernels_allow(monkeypatch):
    model = family_model("Mamba2")
    add_adapters(model, 4, 1)
    adapted = {n.split(".")[-4] for n, w in model.named_parameters() if "lora_A" in n}
    assert adapted == {"in_proj"}  # peft refuses `out_proj`


@pytest.mark.parametrize("is_real", [True, False])
def test_cards_that_only_emulate_bfloat16_compute_in_float32(monkeypatch, is_real):
    """T4, V100, RTX 20: they say yes to bfloat16 if emulation counts."""

    def is_bf16_supported(including_emulation=True):
        return including_emulation or is_real

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert runtime.model.use_bfloat16(torch.device("cuda", 0)) == is_real
    assert not runtime.model.use_bfloat16(CPU)


def test_a_gradient_is_clipped_and_must_be_finite():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_grad_norm(model, 1.0) == 5.0
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))
    model.weight.grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="is --learning-rate too high"):
        clip_grad_norm(model, 1.0)


# --- activation checkpointing: the same numbers with fewer activations in memory ----------------
def gradients(model):
    model.zero_grad()
    logprobs, entropies = completion_logprobs(model, SEQUENCES, [0, 1], 1.3, entropy=True)
    (logprobs.sum() + entropies.sum()).backward()
    return [logprobs.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def samples(model):
    rng = torch.Generator().manual_seed(0)
    options = dict(max_new_tokens=6, temperature=1.0, stop_ids=[], rng=rng)
    return generate(model, [[1, 2, 3], [4, 5]], **options)[0]


# A plain decoder, two kinds of attention, dropout within a layer, experts, recurrent layers.
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2", "Mixtral", "Qwen3Next"])
def test_gradients_and_samples_are_the_same(name):
    model = family_model(name)
    expected, sampled = gradients(model), samples(model)
    checkpoint_activations(model)
    for found, value in zip(gradients(model), expected, strict=True):
        assert torch.equal(found, value)
    assert samples(model) == sampled


def test_layers_run_again_in_the_backward_pass_and_only_there():
    model = tiny_model("llama")
    completion_logprobs(model, SEQUENCES, [0])  # the first call tries the output head
    calls = []
    for layer in transformer_layers(model):
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    num_layers = len(transformer_layers(model))
    checkpoint_activations(model)
    with torch.no_grad():
        completion_logprobs(model, SEQUENCES, [0, 1])
    assert len(calls) == num_layers
    logprobs = completion_logprobs(model, SEQUENCES, [0, 1])
    assert len(calls) == 2 * num_layers
    logprobs.sum().backward()
    assert len(calls) == 3 * num_layers
