"""Memory by algorithm: the formula against what each script holds, against transformers, and
against autograd. The tests of docs/explorer.html compare the page with the formula.
"""

import gc
from types import SimpleNamespace

import algorithms
import pytest
import torch
from models import some_slow, some_wide
from scripts import REVIEWS, SCRIPTS, short_flags
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

import common.logprobs
from common.logprobs import OutputHead, completion_logprobs
from common.prompts import SharedPrompts, shared_states, shares_prompts
from runtime.adapters import add_adapters
from runtime.model import checkpoint_activations, transformer_layers
from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, llama_sizes, memory, parameters
from docs.experiments.lib.measuring import peak, reset_peak

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
FLOAT32 = CONSTANTS["precisions"]["float32"]

GOLD = "tiny/reviews/gold.py:sentiment"
A_RULE = dict(reward_model=None, reward_fn=[GOLD], critic_init="sft")
RUNS = {  # script and flags
    "sft": ("sft", {}),
    "rm": ("rm_bradley_terry", {}),
    "reinforce": ("reinforce", {}),
    "ppo": ("ppo_rlhf", {}),
    "ppo_rule": ("ppo_rlhf", A_RULE),
    "ppo_shared": ("ppo_rlhf", dict(critic_init="policy")),
    "grpo": ("grpo", dict(beta=0.1)),
    "grpo_no_kl": ("grpo", dict(beta=0.0)),
    "grpo_rm": ("grpo", REVIEWS | dict(eval_reward_fn=GOLD, beta=0.1)),
    "dpo": ("dpo", {}),
    "simpo": ("dpo", dict(loss="simpo", beta=2.5)),
    "kto": ("kto", {}),
}


def live_storages():
    """Bytes of all tensors, by address."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [each.untyped_storage() for each in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


CASES = [(algorithm, 0) for algorithm in ALGORITHMS]
CASES += [(algorithm, 8) for algorithm in ("rm", "ppo", "ppo_shared", "grpo_rm", "dpo", "kto")]
FAST = [("sft", 0), ("rm", 0)]
# A case per script that the formula knows, and adapters with and without a critic.
WIDE = [("reinforce", 0), ("ppo", 0), ("ppo", 8), ("grpo_rm", 8), ("dpo", 8), ("kto", 8)]
SLOW = [case for case in CASES if case not in FAST + WIDE]


@pytest.mark.parametrize("case", some_wide(FAST + WIDE, fast=FAST) + some_slow(SLOW, fast=[]))
def test_a_script_holds_what_the_formula_says(case, tmp_path):
    """Weights, gradients and moments of all its models, after an optimiser step."""
    algorithm, lora_rank = case
    name, flags = RUNS[algorithm]
    gc.collect()  # an earlier run's models, or their addresses would be taken again
    before, held = live_storages(), []

    def note(*_):
        now = live_storages()
        held.append(sum(size for address, size in now.items() if address not in before))

    # Before a step all gradients exist; after it the moments do, and before a second one both.
    hooks = [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    flags = short_flags(name, prompts_per_rollout=2, num_minibatches=2, max_new_tokens=4) | flags
    algorithms.run(name, tmp_path, lora_rank=lora_rank, **flags)
    for hook in hooks:
        hook.remove()
    config = AutoConfig.from_pretrained(flags.get("model", SCRIPTS[name].Args.model))
    model = dict(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query=config.num_attention_heads * config.head_dim,
        kv=config.num_key_value_heads * config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
    )
    work = DEFAULTS | {"lora_rank": lora_rank}
    parts = memory(model, ALGORITHMS[algorithm], FLOAT32, **work)["update"]
    core = sum(parts.values()) - parts["copies"] - parts["activations"]
    assert max(held) == pytest.approx(core, rel=0.005)


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
        add_adapters(made, lora_rank=16, seed=0)
    trained = made.num_parameters(only_trainable=True)
    assert trained == 2 * parameters(model, lora_rank=16)["adapters"]


SMALL = dict(hidden=128, query=128, kv=32, ffn=352, vocab=64, layers=2, tied=True)
ROWS, LENGTH = 2, 24


def kept_bytes(kind, layers, checkpointing=False, train_layers=None, lora_rank=0, batch=None):
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
        if batch:
            assert shares_prompts(net)
            shared_states(net, SharedPrompts(batch, net.device))
        else:
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
    """Two models that differ by a layer; with checkpointing that is its input."""
    two, three = (kept_bytes(kind, layers, lora_rank=lora_rank) for layers in (2, 3))
    # The rest: a number of each norm and head.
    assert three - two == pytest.approx(bytes_of_a_layer(kind, lora_rank), rel=0.005)
    two, three = (kept_bytes(kind, layers, True, lora_rank=lora_rank) for layers in (2, 3))
    assert three - two == ROWS * LENGTH * CONSTANTS["layer_input"][kind] * SMALL["hidden"]


@pytest.mark.parametrize(("prompt", "completion"), [(20, 12), (12, 20)])
def test_rows_of_one_prompt_keep_what_the_formula_says(prompt, completion):
    """A group of three, whose prompt is read once: two models that differ by a layer."""
    batch = [([*range(prompt)], [i] * completion + [0]) for i in range(3)]  # the last is not read

    def predicted(layers):
        work = DEFAULTS | dict(micro_batch=3, prompt=prompt, completion=completion, group=3)
        model = SMALL | dict(layers=layers)
        return memory(model, ALGORITHMS["grpo"], FLOAT32, **work)["update"]["activations"]

    two, three = (kept_bytes("float32", layers, batch=batch) for layers in (2, 3))
    assert three - two == pytest.approx(predicted(3) - predicted(2), rel=0.005)


@pytest.mark.parametrize("kind", CONSTANTS["activations"])
def test_nothing_is_kept_below_the_first_trained_layer(kind):
    """The same for 2 trained layers of 2 as of 4, and no copies of weights that are frozen."""
    of_four = kept_bytes(kind, layers=4, train_layers=2)
    assert of_four == kept_bytes(kind, layers=2, train_layers=2)
    one_more = kept_bytes(kind, layers=4, train_layers=3) - of_four
    assert one_more == pytest.approx(bytes_of_a_layer(kind), rel=0.005)


@pytest.mark.wide
@pytest.mark.parametrize(("hidden", "vocab", "lora_rank"), [(8, 2**15, 1), (1024, 2**15, 0)])
def test_the_head_needs_the_logits_of_a_chunk(hidden, vocab, lora_rank, monkeypatch):
    """Frozen under adapters, and trained, where its gradient is as large."""
    states = torch.randn(512, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=lora_rank == 0)
    head = OutputHead(weight, weight.detach(), None, scale=1.0, cap=None)
    monkeypatch.setattr(common.logprobs, "output_head", lambda model: head)

    def first_states(model, batch):
        return states[: len(batch)], torch.arange(len(batch)), torch.zeros(len(batch)).long()

    monkeypatch.setattr(common.logprobs, "completion_states", first_states)

    def forward_and_backward(number):
        model, sequences = SimpleNamespace(device="cpu"), [([1], [0])] * number
        both = completion_logprobs(model, sequences, range(number), entropy=True)
        both[0].sum().backward()

    forward_and_backward(8)  # what is made once
    weight.grad = None
    before = reset_peak()
    forward_and_backward(len(states))
    model = dict(hidden=hidden, layers=0, query=0, kv=0, ffn=0, vocab=vocab, tied=False)
    work = DEFAULTS | dict(prompt=0, completion=len(states), lora_rank=lora_rank)
    predicted = memory(model, ALGORITHMS["grpo"], FLOAT32, **work)["update"]["activations"]
    assert peak() - before == pytest.approx(predicted, rel=0.1)
