"""What a GPU would take, on a CPU: its types and cache together, and its demands on devices.

Two simulations, because neither shows all. (1) bfloat16 autocast and the static cache, on the CPU:
the types. (2) A device made of CPU memory (`simulated_gpu.py`): that tensors meet on one device.
"""

import json
import math

import pytest
import torch
import simulated_graph
from gpu_types import take_gpu_types
from models import STATIC, family_model, some_slow, some_wide, tiny_model
from runs import metrics_of, torchrun, words
from safetensors.torch import load_file
from scripts import REVIEWS, SCRIPTS, short_flags
from simulated_gpu import SIM, SimulatedGPU
from spies import spy_on

import common.generation
import common.logprobs
from common.generation import SameTypeStaticCache, generate
from common.logprobs import completion_logprobs

SHORT = dict(train_split="train[:16]", epochs=1.0, batch_size=8, total_rollouts=2)
SHORT |= dict(prompts_per_rollout=4, group_size=3, micro_batch_size=4, max_new_tokens=8)
SHORT |= dict(num_minibatches=2, eval_split="test[:5]", eval_every=1, save_every=1)
MORE = {"grpo": REVIEWS}
RUNS = {name: short_flags(name, **SHORT) | MORE.get(name, {}) for name in SCRIPTS}


def check(run_dir):
    """A run that trained, evaluated and saved in float32; its metrics."""
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    weights = load_file(run_dir / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    return rows


# --- 1. types -------------------------------------------------------------------------------------
# One that samples and reads a reward model, and one that reads rows.
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_training_in_bfloat16_with_the_static_cache(name, tmp_path, monkeypatch):
    script = SCRIPTS[name]
    plain = check(script.main(script.Args(output_dir=str(tmp_path), **RUNS[name])))
    take_gpu_types(monkeypatch, script)
    updates = spy_on(SameTypeStaticCache, monkeypatch, "update")
    run_dir = script.main(script.Args(output_dir=str(tmp_path), **RUNS[name]))
    rows = check(run_dir)
    # bfloat16 keeps 8 bits: losses agree to about a hundredth, sampled entropies to a tenth.
    loss, step = ("eval/loss", 0) if "eval/loss" in rows[0] else ("policy/entropy", 1)
    assert rows[step][loss] == pytest.approx(plain[step][loss], rel=0.1)
    rounding = abs(rows[1]["policy/grad_norm"] / plain[1]["policy/grad_norm"] - 1)
    assert 1e-4 < rounding < 0.3
    if hasattr(script, "generate"):  # rotated keys come in float32
        trial = {(torch.float32, torch.float32)}  # of the cache, once per model
        taken = {(keys.dtype, values.dtype) for (_, keys, values, *_), _ in updates}
        assert taken - trial == {(torch.float32, torch.bfloat16)}
        assert all(keys.dtype == values.dtype for _, (keys, values) in updates)  # as they are kept


@pytest.mark.wide
def test_sharded_training_in_bfloat16(tmp_path):
    """The sum of gradients over ranks is not rounded to bfloat16: gpu_types.py looks."""
    commands = [
        [f"{name}.py", *words(RUNS[name] | {"output_dir": tmp_path / name})]
        for name in ("grpo", "dpo")
    ]
    command = ["tests/support/shards.py", *map(json.dumps, commands)]
    statuses = torchrun(2, command, tmp_path / "output", "gpu_types:compute_in_bfloat16")
    assert statuses == [0, 0], (tmp_path / "output.0").read_text()[-3000:]
    for name in ("grpo", "dpo"):
        (run_dir,) = (tmp_path / name).iterdir()
        check(run_dir)


def sharp_model(architecture, **overrides):
    """Its largest logits are near 20: rounded to bfloat16, they are multiples of 1/8."""
    model = tiny_model(architecture, tie_word_embeddings=False, **overrides)
    model.lm_head.weight.data *= 2
    return model


def record_hidden_states(model):
    """The last hidden states (B, L, d) of all passes from now on."""
    states = []
    model.base_model.register_forward_hook(
        lambda module, args, output: states.append(output.last_hidden_state.detach())
    )
    return states


def exact_logits(hidden, model):
    """The head's product in float32, of a hidden state and weights in bfloat16."""
    return hidden.bfloat16().float() @ model.lm_head.weight.detach().bfloat16().float().T


def test_logits_that_are_trained_on_are_not_rounded_to_bfloat16(monkeypatch):
    take_gpu_types(monkeypatch)
    model, pair = sharp_model("llama"), ([1, 5, 7], [*range(2, 42)])
    completion_logprobs(model, [pair], range(1))  # the check of the head
    states = record_hidden_states(model)
    found = completion_logprobs(model, [pair], range(1))[0]
    (hidden,) = states
    logits = exact_logits(hidden[0, 2:], model)
    assert 16 < logits.max() < 32
    tokens = torch.tensor(pair[1])[:, None]
    expected, rounded = (
        x.log_softmax(dim=1).gather(1, tokens)[:, 0] for x in (logits, logits.bfloat16().float())
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - rounded).abs().max() > 1e-3


@pytest.mark.parametrize(("architecture", "cap"), [("llama", None), ("gemma2", 30.0)])
def test_logits_that_are_sampled_from_are_not_rounded_to_bfloat16(architecture, cap, monkeypatch):
    take_gpu_types(monkeypatch)
    model = sharp_model(architecture, **({"final_logit_softcapping": cap} if cap else {}))
    complete_until([], model, [[1, 5, 2]], max_new_tokens=2)  # the trial of the cache
    states = record_hidden_states(model)
    calls = spy_on(common.generation, monkeypatch, "sample_tokens")
    complete_until([], model, [[1, 5, 2], [7], [9, 4, 4, 8, 6]], max_new_tokens=12)
    sampled_from = [logits for (logits, *_), _ in calls]
    assert len(states) == len(sampled_from) == 12
    for hidden, found in zip(states, sampled_from, strict=True):
        expected = exact_logits(hidden[:, -1], model)
        if cap:  # once, by the model itself
            expected = cap * torch.tanh(expected / cap)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert (found - found.bfloat16()).abs().max() > 1e-3
    assert 16 < torch.cat(sampled_from).max() < 32
    assert "forward" not in vars(model.lm_head)  # outside of `generate` nothing is changed


# --- the CUDA graph and its fallback --------------------------------------------------------------
def complete_until(stop_ids, model, rows, max_new_tokens=40):
    """`generate` with the same random numbers at each call."""
    options = dict(max_new_tokens=max_new_tokens, temperature=1.0, stop_ids=stop_ids)
    return generate(model, rows, **options, rng=torch.Generator().manual_seed(0))[0]


@pytest.fixture
def graph(monkeypatch):
    """Steps are captured as on a GPU, by a simulated graph; a list with an entry per graph."""
    monkeypatch.setattr(common.generation, "capture", simulated_graph.capture)
    monkeypatch.setattr(common.generation, "GRAPH_DEVICES", ("cpu", "sim", "cuda"))
    return spy_on(common.generation, monkeypatch, "capture")


def complete_and_drop(model):
    """Completions of which half end early, so that steps of fewer rows are captured too."""
    rows = [[1, 5, 2], [7], [9, 4, 4, 8, 6], [7], [2, 2], [4, 1], [8], [5, 5, 9, 1]]
    return complete_until([3, 13, 23, 33, 43], model, rows, max_new_tokens=16)


def complete_uncaptured(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.generation, "capture", lambda step: step)
        return complete_and_drop(model)


# Families whose own code reads a value back in each step, or copies a number to the device.
READ_BACK = ["Mpt", "XGLM"]
COPY_IN = ["Falcon", "GPTNeo"]


@pytest.mark.parametrize("name", some_slow(READ_BACK + COPY_IN, fast=["Mpt", "Falcon"]))
def test_families_that_cannot_be_captured_are_said_to_be_slow(name, graph):
    model = family_model(name)
    expected = complete_uncaptured(model)
    with SimulatedGPU(), pytest.warns(UserWarning, match="slow, without a CUDA graph"):
        assert complete_and_drop(model.to(SIM)) == expected


# Of the experts of a mixture transformers counts integers, with an operation that CPUs lack.
EXPERTS = "GraniteMoe MiniMaxM2 Mixtral Olmoe Qwen2Moe Qwen3Moe DeepseekV2 DeepseekV3".split()
DENSE = [name for name in STATIC if name not in EXPERTS + READ_BACK + COPY_IN]


@pytest.mark.filterwarnings("error:generate. slow")
# Rotary and absolute positions, and layers between the model and its decoder.
@pytest.mark.parametrize("name", some_slow(DENSE, fast=["GPT2", "Llama", "Mllama"]))
def test_a_captured_step_stays_on_its_device(name, graph):
    model = family_model(name)
    expected = complete_uncaptured(model)
    with SimulatedGPU():
        assert complete_and_drop(model.to(SIM)) == expected
    assert graph, "no step was captured"


# --- 2. devices -----------------------------------------------------------------------------------
# The other scripts put what these do on the device: models, rows, a rollout, pairs.
WIDE = ["dpo", "ppo_rlhf"]
SLOW = [name for name in SCRIPTS if name not in WIDE]


@pytest.mark.parametrize("name", some_wide(WIDE, fast=[]) + some_slow(SLOW, fast=[]))
def test_training_on_another_device_is_that_of_the_cpu(name, tmp_path, monkeypatch):
    """Sampling, training, evaluating, saving, and resuming from a checkpoint."""
    script = SCRIPTS[name]
    flags = dict(RUNS[name], output_dir=str(tmp_path))
    cpu = script.main(script.Args(**flags, exp_name="cpu"))
    monkeypatch.setattr(script, "join_processes", lambda: SIM)
    monkeypatch.setattr(common.generation, "GRAPH_DEVICES", ("cpu", "sim", "cuda"))
    monkeypatch.setattr(common.generation, "capture", lambda step: step)
    save = script.save_checkpoint

    def stop(run_dir, training, state):
        save(run_dir, training, state)
        raise KeyboardInterrupt

    with SimulatedGPU():
        with monkeypatch.context() as patch:
            patch.setattr(script, "save_checkpoint", stop)
            with pytest.raises(KeyboardInterrupt):
                script.main(script.Args(**flags, exp_name="sim"))
        (sim,) = tmp_path.glob("sim__*")
        script.main(script.parse_args(["--resume", str(sim)]))
    for ours, theirs in zip(check(sim), check(cpu), strict=True):
        for key in ours:
            if not key.startswith("time/"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key
