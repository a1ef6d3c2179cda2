"""Memory: what Adam keeps, and that a resumed run keeps no second copy of its checkpoint.

How high the memory of a run rises is measured by docs/experiments/cost/memory.py.
"""

import json
import math
import struct
import weakref
from pathlib import Path

import pytest
import torch
from scripts import SCRIPTS, short_flags

from common import logprobs

SHORT = dict(train_split="train[:2]", eval_split="test[:2]", epochs=1.0, batch_size=2)
SHORT |= dict(total_rollouts=1, prompts_per_rollout=2, num_minibatches=1, max_new_tokens=4)


def run(name, output_dir, **flags):
    script = SCRIPTS[name]
    return script.main(script.Args(**{"output_dir": str(output_dir), "eval_every": 9} | flags))


def numbers_in(folder):
    """How many numbers a checkpoint holds, by the header of its file."""
    data = (Path(folder) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return sum(math.prod(entry["shape"]) for key, entry in header.items() if key[:2] != "__")


@pytest.mark.parametrize("name", SCRIPTS)
def test_adam_keeps_two_moments_of_what_is_trained_alone(name, tmp_path):
    """float32 weights, a gradient and two moments: 16 bytes for each parameter that is trained."""
    script = SCRIPTS[name]
    run_dir = run(name, tmp_path, **short_flags(name, **SHORT))
    checkpoint = torch.load(run_dir / "checkpoint_00000001.pt", weights_only=True)
    sizes = {"policy": numbers_in(script.Args.model)}
    if name == "rm_bradley_terry":
        sizes = {"model": sizes["policy"] + 128}  # and a head for the hidden size
    if name == "ppo_rlhf":
        sizes["critic"] = numbers_in(script.Args.reward_model)
    assert sizes.keys() == {"policy", "critic", "model"} & checkpoint.keys()
    for trained, size in sizes.items():
        by_parameter = checkpoint[trained][1]["state"].values()
        moments = [state[key] for state in by_parameter for key in ("exp_avg", "exp_avg_sq")]
        assert sum(moment.numel() for moment in moments) == 2 * size
        assert {moment.dtype for moment in moments} == {torch.float32}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_resumed_run_frees_the_checkpoint_that_it_loaded(name, tmp_path, monkeypatch):
    two_steps = SHORT | dict(epochs=2.0, total_rollouts=2, save_every=1)
    flags = short_flags(name, **two_steps)
    script, loaded, kept = SCRIPTS[name], [], []

    class Killed(Exception):
        pass

    def save_and_die(*arguments):
        save(*arguments)
        raise Killed

    def spy_on_read(*arguments, **options):
        state = read(*arguments, **options)
        model, _ = state["policy" if "policy" in state else "model"]
        loaded.extend(weakref.ref(tensor) for tensor in model.values())
        return state

    def spy_on_log(*arguments, **named):  # first called when a step has been made
        kept.append(sum(tensor() is not None for tensor in loaded))
        return log(*arguments, **named)

    save, read, log = script.save_checkpoint, torch.load, script.log
    monkeypatch.setattr(script, "save_checkpoint", save_and_die)
    with pytest.raises(Killed):
        run(name, tmp_path, **flags)
    monkeypatch.setattr(script, "save_checkpoint", save)
    monkeypatch.setattr(torch, "load", spy_on_read)
    monkeypatch.setattr(script, "log", spy_on_log)
    (run_dir,) = tmp_path.iterdir()
    script.main(script.parse_args(["--resume", str(run_dir)]))
    assert len(loaded) > 10 and kept == [0]


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_nothing_runs_between_a_forward_pass_that_is_trained_and_its_backward_pass(
    name, tmp_path, monkeypatch
):
    """The reference in between would add its memory to that of the policy's activations."""
    events = []
    hidden_states, backward = logprobs.hidden_states.__wrapped__, torch.Tensor.backward

    def spy(model, *arguments):
        events.append(torch.is_grad_enabled())
        return hidden_states(model, *arguments)

    def spy_on_backward(loss, *arguments):
        events.append("backward")
        backward(loss, *arguments)

    monkeypatch.setattr(logprobs.hidden_states, "__wrapped__", spy)
    monkeypatch.setattr(torch.Tensor, "backward", spy_on_backward)
    run(name, tmp_path, **short_flags(name, **SHORT | {"micro_batch_size": 1}))
    trained = [i for i, event in enumerate(events) if event is True]
    assert len(trained) == 2
    assert all(events[i + 1] == "backward" for i in trained)
