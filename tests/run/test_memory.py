"""Memory: what Adam keeps, and that a resumed run keeps no second copy of its checkpoint.

How high the memory of a run rises is measured by docs/experiments/cost/memory.py.
"""

import weakref

import pytest
import torch
from safetensors.torch import load_file
from scripts import SPECS, short_flags

from common import logprobs

SHORT = dict(train_split="train[:2]", eval_split="test[:2]", epochs=1.0, batch_size=2)
SHORT |= dict(total_rollouts=1, prompts_per_rollout=2, num_minibatches=1, max_new_tokens=4)


def run(name, output_dir, **flags):
    script = SPECS[name].module
    return script.main(script.Args(**{"output_dir": str(output_dir), "eval_every": 9} | flags))


@pytest.mark.parametrize("name", SPECS)
def test_adam_keeps_two_moments_of_what_is_trained_alone(name, tmp_path):
    """float32 weights, a gradient and two moments: 16 bytes for each parameter that is trained."""
    run_dir = run(name, tmp_path, **short_flags(name, **SHORT))
    checkpoint = torch.load(run_dir / "checkpoint_00000001.pt", weights_only=True)
    for trained in SPECS[name].models:
        weights, moments = checkpoint[trained]
        kept = [state[key] for state in moments["state"].values() for key in state if key != "step"]
        assert sum(x.numel() for x in kept) == 2 * sum(x.numel() for x in weights.values())
        assert {x.dtype for x in kept} == {x.dtype for x in weights.values()} == {torch.float32}
    # The first one is that of the run's folder, with all its weights.
    saved = load_file(run_dir / "model.safetensors")
    assert {*saved} <= {*checkpoint[SPECS[name].models[0]][0]}


@pytest.mark.parametrize("name", SPECS)
def test_a_resumed_run_frees_the_checkpoint_that_it_loaded(name, tmp_path, monkeypatch):
    two_steps = SHORT | dict(epochs=2.0, total_rollouts=2, save_every=1)
    flags = short_flags(name, **two_steps)
    script, loaded, kept = SPECS[name].module, [], []

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
