"""Memory by algorithm: the formula against transformers, autograd and arithmetic by hand.

The tests of docs/explorer.html compare the page with it.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from common.distributed import checkpoint_activations, transformer_layers
from common.logprobs import add_adapters
from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, llama_sizes, memory, parameters
from docs.experiments.lib.experiment import saved_results
from docs.experiments.model_sizes import RANK, REAL_RUNS, TOO_LARGE, predicted_peak

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
    with torch.device("meta"):
        add_adapters(made, rank=16, seed=0)
    trained = made.num_parameters(only_trainable=True)
    assert trained == 2 * parameters(model, lora_rank=16)["adapters"]


SMALL = dict(hidden=128, query=128, kv=32, ffn=352, vocab=64, layers=2, tied=True)
ROWS, LENGTH = 2, 24


def kept_bytes(kind, layers, checkpointing=False, train_layers=None, lora_rank=0):
    """Of all storages that the graph of a forward pass of a `SMALL` model holds on to."""
    heads = dict(num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=layers)
    config = Qwen2Config(vocab_size=64, hidden_size=128, intermediate_size=352, **heads)
    net = AutoModelForCausalLM.from_config(config).eval()
    add_adapters(net, lora_rank, seed=0)
    net = net.bfloat16() if kind == "bfloat16" else net
    for module in net.model.layers.modules():
        is_frozen = isinstance(module, torch.nn.Linear) and not module.weight.requires_grad
        if is_frozen and kind == "autocast":  # as on a GPU
            module.weight.data = module.weight.data.bfloat16()
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


def bytes_of_a_layer(kind, lora_rank=0):
    """Activations by the formula, and under autocast the copy in bfloat16 of what is trained."""
    each = CONSTANTS["lora_activations" if lora_rank else "activations"][kind]
    number = 4 if kind == "float32" else 2
    per_token = sum(each[width] * SMALL[width] for width in each) + 7 * lora_rank * number
    copies = 2 * parameters(SMALL, lora_rank)["adapters" if lora_rank else "matrices"]
    return ROWS * LENGTH * per_token + (copies if kind == "autocast" else 0)


@pytest.mark.parametrize("lora_rank", [0, 16])
@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_activations_are_what_autograd_keeps(kind, lora_rank):
    """Two models that differ by a layer."""
    two, three = (kept_bytes(kind, layers, lora_rank=lora_rank) for layers in (2, 3))
    # The rest: a number of each norm and head.
    assert three - two == pytest.approx(bytes_of_a_layer(kind, lora_rank), rel=0.005)


@pytest.mark.parametrize("lora_rank", [0, 16])
@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_checkpointing_keeps_the_inputs_of_layers(kind, lora_rank):
    two, three = (kept_bytes(kind, layers, True, lora_rank=lora_rank) for layers in (2, 3))
    assert three - two == ROWS * LENGTH * CONSTANTS["layer_input"][kind] * SMALL["hidden"]


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_nothing_is_kept_below_the_first_trained_layer(kind):
    """The same for 2 trained layers of 2 as of 4, and no copies of weights that are frozen."""
    of_four = kept_bytes(kind, layers=4, train_layers=2)
    assert of_four == kept_bytes(kind, layers=2, train_layers=2)
    one_more = kept_bytes(kind, layers=4, train_layers=3) - of_four
    assert one_more == pytest.approx(bytes_of_a_layer(kind), rel=0.005)


def test_bytes_of_a_parameter():
    """16 if trained, 4 if frozen, 2 if of a matrix that is stored in bfloat16."""
    model = MODELS["Qwen2.5-0.5B"]  # tied: all models of one size
    weights, matrices = parameters(model)["policy"], 24 * parameters(model)["matrices"]
    expected = dict(sft=(1, 0), rm=(1, 0), reinforce=(1, 0), reinforce_kl=(1, 1), ppo=(2, 2))
    expected |= dict(ppo_rule=(2, 1), ppo_shared=(1, 2), grpo=(1, 1), grpo_no_kl=(1, 0))
    expected |= dict(grpo_rm=(1, 2), dpo=(1, 1), simpo=(1, 0), kto=(1, 1))
    for name, (trained, frozen) in expected.items():
        for compute_bytes in PRECISIONS.values():
            parts = memory(model, ALGORITHMS[name], compute_bytes, **DEFAULTS)["update"]
            state = sum(parts.values()) - parts["copies"] - parts["activations"]
            stored = 4 * weights - (4 - compute_bytes) * matrices
            assert state == 16 * weights * trained + stored * frozen
    assert ALGORITHMS.keys() == expected.keys()


def test_bytes_of_a_parameter_with_adapters():
    """The models that are frozen, by algorithm; no reference, one backbone of critic and reward."""
    model, adapters = (
        MODELS["Qwen2.5-0.5B"],
        24 * parameters(MODELS["Qwen2.5-0.5B"], 16)["adapters"],
    )
    weights, matrices = parameters(model)["policy"], 24 * parameters(model)["matrices"]
    assert adapters == 24 * 16 * (4 * 896 + 2 * (896 + 128) + 3 * (896 + 4_864))
    expected = dict.fromkeys(ALGORITHMS, (1, 1))  # adapted, all models
    expected |= dict(ppo=(2, 2), ppo_rule=(2, 2), ppo_shared=(1, 2), grpo_rm=(1, 2))
    work = DEFAULTS | {"lora_rank": 16}
    for name, (adapted, models) in expected.items():
        for compute_bytes in PRECISIONS.values():
            parts = memory(model, ALGORITHMS[name], compute_bytes, **work)["update"]
            state = sum(parts.values()) - parts["copies"] - parts["activations"]
            stored = 4 * weights - (4 - compute_bytes) * matrices
            assert state == 16 * adapters * adapted + stored * models
            assert parts["reference"] == 0


def test_a_model_by_hand():
    """Two layers of width 10, feed-forward 30, 100 words, on one GPU and on two."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    layer = 100 + 100 + 50 + 50 + 3 * 300 + 20
    policy, classifier = 2 * layer + 1_000 + 1_000 + 10, 2 * layer + 1_000 + 10
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2)
    one = memory(model, ALGORITHMS["ppo"], PRECISIONS["mixed"], gpus=1, **run)
    assert one["update"] == {
        "policy": 4 * policy,
        "reference": 4 * policy - 2 * (2 * 1_200 + 1_000),  # matrices of layers, and the head
        "critic": 4 * classifier,
        "reward": 4 * classifier - 2 * 2 * 1_200,
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
    assert two["update"]["policy"] == 2 * policy
    assert two["update"]["reference"] == one["update"]["reference"] / 2
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
    assert pairs["update"]["copies"] == 0
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
    # Few tokens: the embeddings' gradient, beside that of a head tied to them, is more.
    few = run | {"prompt": 1, "completion": 1, "gpus": 1}
    for name, tied, size in (("sft", True, 8), ("rm", True, 4), ("rm", False, 4)):
        large = model | {"vocab": 9_000, "tied": tied}
        found = memory(large, ALGORITHMS[name], PRECISIONS["mixed"], **few)
        assert found["update"]["activations"] == size * 90_000


def test_adapters_by_hand():
    """The same model with adapters of rank 3: 18 numbers for each unit of a matrix's two widths."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    layer = 100 + 100 + 50 + 50 + 3 * 300 + 20
    adapters = 2 * 3 * (20 + 20 + 15 + 15 + 3 * 40)
    policy, classifier = 2 * layer + 1_000 + 1_000 + 10, 2 * layer + 1_000 + 10
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2, lora_rank=3)
    one = memory(model, ALGORITHMS["ppo"], PRECISIONS["mixed"], gpus=1, **run)
    assert {part: size for part, size in one["update"].items() if size} == {
        "policy": 4 * policy - 2 * (2 * 1_200 + 1_000) + 4 * adapters,
        "critic": 4 * classifier - 2 * 2 * 1_200 + 4 * adapters,  # and reward model
        "gradients": 4 * 2 * adapters,
        "adamw": 8 * 2 * adapters,
        "copies": 2 * adapters,
        "activations": 30 * 2 * (180 + 60 + 20 + 240 + 7 * 3 * 2) + 4 * 100 * 18,
    }
    assert one["sampling"]["copies"] == 2 * adapters
    tied = memory(model | {"tied": True}, ALGORITHMS["sft"], PRECISIONS["mixed"], gpus=1, **run)
    assert tied["update"]["copies"] == tied["sampling"]["copies"] == 2 * (adapters + 1_000)
    assert tied["update"]["policy"] == 4 * (policy - 1_000 + adapters) - 2 * 2 * 1_200
    two = memory(model, ALGORITHMS["grpo_rm"], PRECISIONS["mixed"], gpus=2, **run)
    assert two["update"]["policy"] == one["update"]["policy"] / 2
    assert two["update"]["reward"] == (4 * classifier - 2 * 2 * 1_200) / 2
    assert two["update"]["adamw"] == 8 * adapters / 2
    assert two["update"]["copies"] == 2 * (2_010 + 2 * layer + adapters)
    assert two["sampling"]["copies"] == 2 * (policy + adapters)
    reward = memory(model, ALGORITHMS["rm"], PRECISIONS["float32"], gpus=1, train_layers=1, **run)
    assert {part: size for part, size in reward["update"].items() if size} == {
        "reward": 4 * (classifier + adapters),
        "gradients": 4 * adapters,
        "adamw": 8 * adapters,
        "activations": 60 * 2 * (160 + 80 + 40 + 480 + 7 * 3 * 4),
    }


def test_what_an_evaluation_samples_by_hand():
    """SFT 8 completions, DPO 500, each of a prompt of its own, shared among the GPUs."""
    model = dict(hidden=10, layers=2, query=10, kv=5, ffn=30, vocab=100, tied=False)
    run = dict(micro_batch=3, prompt=4, completion=6, rollout=8, group=2)
    row, policy = 10 * 2 * 2 * 5 * 2, parameters(model)["policy"]
    for name, gpus, batch, rows in (
        ("sft", 1, 256, 8),
        ("sft", 16, 256, 1),
        ("sft", 1, 3, 3),
        ("dpo", 1, 256, 256),
        ("kto", 4, 256, 125),
    ):
        work = run | {"gpus": gpus, "generation_batch": batch}
        found = memory(model, ALGORITHMS[name], PRECISIONS["mixed"], **work)["sampling"]
        assert found["cache"] == rows * row and found["logits"] == rows * 16 * 100
        assert found["gradients"] == found["activations"] == 0
        assert gpus == 1 or found["copies"] == 2 * policy
    assert memory(model, ALGORITHMS["rm"], 2, gpus=2, **run).keys() == {"update"}


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
        "reward": 4 * classifier - 2 * 1_200,  # the matrices of the frozen layer
        "gradients": 4 * layer,
        "adamw": 8 * layer,
        "copies": 2 * layer,
        "activations": 60 * (260 + 40 + 20 + 240),
    }
    head = memory(model, ALGORITHMS["rm"], PRECISIONS["mixed"], train_layers=0, **run)["update"]
    assert sum(head.values()) == 4 * classifier - 2 * 2 * 1_200
    policy = [
        memory(model, ALGORITHMS["sft"], PRECISIONS["mixed"], train_layers=n, **run)
        for n in (None, 1)
    ]
    assert policy[0] == policy[1]


def test_the_measured_peaks_are_near_the_computed_ones():
    numbers = saved_results("real_size")["numbers"]
    assert numbers.keys() == REAL_RUNS.keys()
    for name, run in numbers.items():
        for lora_rank in (0, RANK):
            assert (f"rank {lora_rank}" in run) == ((name, lora_rank) not in TOO_LARGE)
            if (name, lora_rank) not in TOO_LARGE:
                predicted = predicted_peak(name, run["length"], lora_rank)
                assert 0.94 < run[f"rank {lora_rank}"] / predicted < 1.06
