"""--activation-checkpointing: the same numbers with fewer activations in memory."""

import pytest
import torch
from models import APART, FREE, VOCAB, family_model, tiny_model
from safetensors.torch import load_file
from scripts import SCRIPTS, short_flags
from torch.autograd.graph import saved_tensors_hooks

import common.distributed
from common.distributed import checkpoint_activations, transformer_layers
from common.generation import generate
from common.logprobs import completion_logprobs

SEQUENCES = [([1, 2, 3], [4, 5, 6, 7, 8]), ([9, 3], [4, 4])]
# A plain decoder, query norms, two kinds of attention, learned positions, dropout within a layer,
# a mixture of experts, recurrent layers.
FAMILIES = "Llama Qwen3 Gemma3 GPT2 OPT Mixtral Qwen3Next Mamba".split()


def names_of(family):
    return [n for n in [*FREE, *APART] if n.split("For")[0].removesuffix("LMHeadModel") == family]


def gradients(model):
    model.zero_grad()
    logprobs, entropies = completion_logprobs(model, SEQUENCES, [0, 1], 1.3, entropy=True)
    (logprobs.sum() + entropies.sum()).backward()
    return [logprobs.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


def samples(model):
    rng = torch.Generator().manual_seed(0)
    options = dict(max_new_tokens=6, temperature=1.0, stop_ids=[], rng=rng)
    return generate(model, [[1, 2, 3], [4, 5]], **options)


@pytest.mark.parametrize("name", [names_of(family)[0] for family in FAMILIES])
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


def test_a_layers_input_is_all_that_is_kept_of_it():
    """Bytes that the forward pass saves for the backward pass, by the number of layers."""
    rows = [(torch.arange(40).tolist(), torch.arange(40).tolist())] * 4

    def kept(num_layers, checkpointed):
        model = tiny_model("llama", num_hidden_layers=num_layers, vocab_size=VOCAB)
        if checkpointed:
            checkpoint_activations(model)
        tensors = {}

        def pack(tensor):
            tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            completion_logprobs(model, rows, range(4))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {key: t.untyped_storage().nbytes() for key, t in tensors.items()}
        return sum(size for key, size in sizes.items() if key not in weights)

    one_input = 4 * 80 * tiny_model("llama").config.hidden_size * 4  # rows, tokens, floats
    assert kept(6, True) - kept(2, True) == 4 * one_input
    assert kept(6, False) - kept(2, False) > 5 * (kept(6, True) - kept(2, True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_trains_the_same_weights_with_it(name, tmp_path, monkeypatch):
    script, recomputed = SCRIPTS[name], []
    checkpoint = common.distributed.checkpoint

    def spy(*args, **kwargs):
        recomputed.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(common.distributed, "checkpoint", spy)
    flags = dict(train_split="train[:4]", eval_split="test[:2]", epochs=1.0, batch_size=2)
    flags |= dict(total_rollouts=2, prompts_per_rollout=2, num_minibatches=1, max_new_tokens=4)
    flags = short_flags(name, **flags)
    weights = []
    for enabled in (False, True):
        recomputed.clear()
        args = script.Args(
            output_dir=str(tmp_path), eval_every=9, activation_checkpointing=enabled, **flags
        )
        weights.append(load_file(script.main(args) / "model.safetensors"))
        assert bool(recomputed) == enabled
    plain, checkpointed = weights
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[key], checkpointed[key]) for key in plain)


def test_a_model_whose_layers_are_not_known_is_refused():
    with pytest.raises(ValueError, match="the layers of Linear are not known"):
        checkpoint_activations(torch.nn.Linear(2, 2))
