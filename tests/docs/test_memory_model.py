"""Memory by algorithm: the formula against transformers, autograd and arithmetic by hand.

The tests of docs/explorer.html compare the page with it.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from common.distributed import checkpoint_activations, transformer_layers
from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, llama_sizes, memory, parameters
from docs.experiments.lib.experiment import saved_results
from docs.experiments.model_sizes import predicted_peak

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
PRECISIONS = CONSTANTS["precisions"]


# Billions, as the cards of the models say.
PUBLISHED = [0.49, 1.54, 3.09, 7.61, 8.03, 14.7, 32.5, 70.6]


@pytest.mark.parametrize(("name", "billions"), [*zip(MODELS, PUBLISHED, strict=True)])
def test_parameters_are_those_of_the_models(name, billions):
    assert parameters(MODELS[name])["policy"] / 1e9 == pytest.approx(billions, rel=0.01)
    model = MODELS[name] | {"layers": 2}
    kind = Qwen2Config if "Qwen2" in name else LlamaConfig
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(kind(**llama_sizes(model)))
    two_layers = parameters(model)
    assert made.num_parameters() == pytest.approx(two_layers["policy"], rel=3e-4)
    body = sum(p.numel() for p in made.model.parameters())
    assert body == pytest.approx(two_layers["backbone"], rel=3e-4)


SMALL = dict(hidden=128, query=128, kv=32, ffn=352, vocab=64, layers=2, tied=True)
ROWS, LENGTH = 2, 24


def kept_bytes(kind, layers, checkpointing=False, train_layers=None):
    """Of all storages that the graph of a forward pass of a `SMALL` model holds on to."""
    heads = dict(num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=layers)
    config = Qwen2Config(vocab_size=64, hidden_size=128, intermediate_size=352, **heads)
    net = AutoModelForCausalLM.from_config(config).eval()
    net = net.bfloat16() if kind == "bfloat16" else net
    if train_layers is not None:
        net.requires_grad_(False)
        for layer in transformer_layers(net)[layers - train_layers :]:
            layer.requires_grad_(True)
    if checkpointing:
        checkpoint_activations(net)
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=kind != "float32"),
    ):
        net.model(input_ids=torch.zeros(ROWS, LENGTH, dtype=torch.long), use_cache=False)
    return sum(sizes.values())


def bytes_of_a_layer(kind):
    """Activations by the formula, and under autocast the copy in bfloat16 of each matrix."""
    each = CONSTANTS["activations"][kind]
    activations = ROWS * LENGTH * sum(each[width] * SMALL[width] for width in each)
    copies = 2 * (parameters(SMALL)["layer"] - 2 * SMALL["hidden"])
    return activations + (copies if kind == "autocast" else 0)


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_activations_are_what_autograd_keeps(kind):
    """Two models that differ by a layer."""
    found = kept_bytes(kind, layers=3) - kept_bytes(kind, layers=2)
    # The rest: a number of each norm and head.
    assert found == pytest.approx(bytes_of_a_layer(kind), rel=0.005)


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_checkpointing_keeps_the_inputs_of_layers(kind):
    found = kept_bytes(kind, 3, checkpointing=True) - kept_bytes(kind, 2, checkpointing=True)
    assert found == ROWS * LENGTH * CONSTANTS["layer_input"][kind] * SMALL["hidden"]


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_nothing_is_kept_below_the_first_trained_layer(kind):
    """The same for 2 trained layers of 2 as of 4, and no copies of weights that are frozen."""
    of_four = kept_bytes(kind, layers=4, train_layers=2)
    assert of_four == kept_bytes(kind, layers=2, train_layers=2)
    one_more = kept_bytes(kind, layers=4, train_layers=3) - of_four
    assert one_more == pytest.approx(bytes_of_a_layer(kind), rel=0.005)


def test_bytes_of_a_parameter():
    """16 if trained, 4 if frozen; with more tokens or rows only the last parts change."""
    model, mixed = MODELS["Qwen2.5-0.5B"], PRECISIONS["mixed"]  # tied: all models of one size
    expected = dict(sft=16, rm=16, reinforce=16, reinforce_kl=20, ppo=40, ppo_rule=36, grpo=20)
    expected |= dict(ppo_shared=24, grpo_no_kl=16, grpo_rm=24, dpo=20, simpo=16, kto=20)
    for name, total in expected.items():
        parts = memory(model, ALGORITHMS[name], mixed, **DEFAULTS)["update"]
        state = sum(parts.values()) - parts["copies"] - parts["activations"]
        assert state / parameters(model)["policy"] == pytest.approx(total)
    assert ALGORITHMS.keys() == expected.keys()


def test_a_model_by_hand():
    """Two layers of width 10, feed-forward 30, 100 words, on one GPU and on two."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    layer = 100 + 100 + 50 + 50 + 3 * 300 + 20
    policy, classifier = 2 * layer + 1_000 + 1_000 + 10, 2 * layer + 1_000 + 10
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2)
    one = memory(model, ALGORITHMS["ppo"], PRECISIONS["mixed"], gpus=1, **run)
    assert one["update"] == {
        "policy": 4 * policy,
        "reference": 4 * policy,
        "critic": 4 * classifier,
        "reward": 4 * classifier,
        "gradients": 4 * (policy + classifier),
        "adamw": 8 * (policy + classifier),
        "copies": 2 * (policy - 1_000),  # the input embeddings are looked up
        "activations": 30 * 2 * (260 + 40 + 20 + 240) + 4 * 100 * 18 + 4 * 1_000,
        "cache": 0,
        "logits": 0,
        "reading": 0,
    }
    # Eight rows of 10 tokens, keys and values of two layers; the logits of a step.
    assert one["sampling"]["cache"] == 8 * 10 * 2 * 2 * 5 * 2
    assert one["sampling"]["logits"] == 8 * 16 * 100 and one["sampling"]["reading"] == 0
    assert one["sampling"]["activations"] == one["sampling"]["gradients"] == 0
    two = memory(model, ALGORITHMS["grpo"], PRECISIONS["mixed"], gpus=2, **run)
    assert two["update"]["policy"] == two["update"]["reference"] == 2 * policy
    assert two["update"]["gradients"] == 2 * policy and two["update"]["adamw"] == 4 * policy
    assert two["update"]["copies"] == 2 * (2_010 + 2 * layer)
    assert two["sampling"]["copies"] == 2 * policy
    assert two["sampling"]["cache"] == one["sampling"]["cache"] / 2
    # With long prompts it is reading them that needs most: two, of groups of two, on each GPU.
    long = memory(model, ALGORITHMS["grpo"], PRECISIONS["mixed"], gpus=2, **run | {"prompt": 999})
    cache = 1_005 * 2 * 2 * 5 * 2
    reading = 2 * 999 * 2 * (60 + 90)
    assert 2 * cache + reading > 4 * (cache + 1_600)
    assert long["sampling"]["cache"] == 2 * cache and long["sampling"]["reading"] == reading
    assert long["sampling"]["logits"] == 0
    pairs = memory(model, ALGORITHMS["dpo"], PRECISIONS["float32"], gpus=1, **run)
    assert pairs.keys() == {"update"} and pairs["update"]["copies"] == 0
    activations = 60 * 2 * (240 + 80 + 40 + 480) + 4 * 100 * 36 + 4 * 1_000
    assert pairs["update"]["activations"] == activations
    # Checkpointing: two layers' inputs, and all of one layer, which is more than the logits.
    run["checkpointing"] = True
    pairs = memory(model, ALGORITHMS["dpo"], PRECISIONS["float32"], gpus=1, **run)
    activations = 60 * (2 * 40 + 240 + 80 + 40 + 480) + 4 * 1_000
    assert pairs["update"]["activations"] == activations
    pairs = memory(model, ALGORITHMS["dpo"], PRECISIONS["mixed"], gpus=2, **run)
    activations = 60 * (2 * 20 + 160 + 40 + 20 + 240) + 4 * 1_000
    assert pairs["update"]["activations"] == activations
    # With one layer's activations below the logits, these count.
    short = memory(model, ALGORITHMS["sft"], PRECISIONS["mixed"], gpus=2, **run | {"prompt": 1})
    large = memory(model | {"vocab": 9_000}, ALGORITHMS["sft"], PRECISIONS["mixed"], gpus=2, **run)
    inputs = 30 * 2 * 20
    assert large["update"]["activations"] == inputs + 4 * 9_000 * 18 + 4 * 90_000
    assert short["update"]["activations"] == 21 * (2 * 20 + 460) + 4 * 1_000


def test_the_generation_batch_bounds_what_sampling_takes():
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    run = dict(gpus=1, micro_batch=3, prompt=4, completion=6, rollout=9, group=2)
    caches = {}
    for batch in (1, 4, 64):
        moments = memory(
            model, ALGORITHMS["grpo"], PRECISIONS["mixed"], **run, generation_batch=batch
        )
        caches[batch] = moments["sampling"]["cache"]
    row = 10 * 2 * 2 * 5 * 2
    assert caches == {1: row, 4: 4 * row, 64: 10 * row}  # five whole groups


def test_frozen_layers_of_a_reward_model_by_hand():
    """As above, one layer of two trained; a policy has no such flag."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    layer, classifier = 1_220, 2 * 1_220 + 1_000 + 10
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2, gpus=1)
    frozen = memory(model, ALGORITHMS["rm"], PRECISIONS["mixed"], train_layers=1, **run)["update"]
    assert {part: size for part, size in frozen.items() if size} == {
        "reward": 4 * classifier,
        "gradients": 4 * layer,
        "adamw": 8 * layer,
        "copies": 2 * layer,
        "activations": 60 * (260 + 40 + 20 + 240),
    }
    head = memory(model, ALGORITHMS["rm"], PRECISIONS["mixed"], train_layers=0, **run)["update"]
    assert sum(head.values()) == 4 * classifier
    policy = [
        memory(model, ALGORITHMS["sft"], PRECISIONS["mixed"], train_layers=n, **run)
        for n in (None, 1)
    ]
    assert policy[0] == policy[1]


def test_the_measured_peaks_are_near_the_computed_ones():
    for algorithm, run in saved_results("real_size")["numbers"].items():
        assert 0.9 < run["measured"] / predicted_peak(algorithm, run["length"]) < 1.1
