"""Memory: what Adam keeps, what a resumed run frees, and layers that are computed once more.

How high the memory of a run rises is measured by docs/experiments/cost/memory.py.
"""

import weakref

import pytest
import torch
from runs import keep_earlier_checkpoints, killed_earlier
from safetensors.torch import load_file
from scripts import SPECS, short_flags

import common.model
from common import logprobs

TWO_STEPS = dict(train_split="train[:2]", eval_split="test[:2]", epochs=2.0, batch_size=2)
TWO_STEPS |= dict(total_rollouts=2, prompts_per_rollout=2, num_minibatches=1, max_new_tokens=4)
TWO_STEPS |= dict(eval_every=9, save_every=1)


def run(name, output_dir, **flags):
    script = SPECS[name].module
    flags = short_flags(name, **TWO_STEPS) | flags
    return script.main(script.Args(output_dir=str(output_dir), **flags))


@pytest.fixture(scope="module", params=SPECS)
def plain(request, tmp_path_factory):
    """A script's name, and the folder of its run."""
    with pytest.MonkeyPatch.context() as patch:
        keep_earlier_checkpoints(patch)
        return request.param, run(request.param, tmp_path_factory.mktemp("plain"))


def test_adam_keeps_two_moments_of_what_is_trained_alone(plain):
    """float32 weights, a gradient and two moments: 16 bytes for each parameter that is trained."""
    name, run_dir = plain
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    for trained in SPECS[name].models:
        weights, moments = checkpoint[trained]
        kept = [state[key] for state in moments["state"].values() for key in state if key != "step"]
        assert sum(x.numel() for x in kept) == 2 * sum(x.numel() for x in weights.values())
        assert {x.dtype for x in kept} == {x.dtype for x in weights.values()} == {torch.float32}
    # The first one is that of the run's folder, with all its weights.
    saved = load_file(run_dir / "model.safetensors")
    assert {*saved} <= {*checkpoint[SPECS[name].models[0]][0]}


def test_a_resumed_run_frees_the_checkpoint_that_it_loaded(plain, tmp_path, monkeypatch):
    name, run_dir = plain
    copy = killed_earlier(run_dir, tmp_path / "run")
    script, loaded, kept = SPECS[name].module, [], []
    read, log = torch.load, script.log

    def spy_on_read(*arguments, **options):
        state = read(*arguments, **options)
        model, _ = state["policy" if "policy" in state else "model"]
        loaded.extend(weakref.ref(tensor) for tensor in model.values())
        return state

    def spy_on_log(*arguments, **named):  # first called when a step has been made
        kept.append(sum(tensor() is not None for tensor in loaded))
        return log(*arguments, **named)

    monkeypatch.setattr(torch, "load", spy_on_read)
    monkeypatch.setattr(script, "log", spy_on_log)
    script.main(script.parse_args(["--resume", str(copy)]))
    assert len(loaded) > 10 and kept == [0]


def test_activation_checkpointing_trains_the_same_weights(plain, tmp_path, monkeypatch):
    name, plain_dir = plain
    recomputed, checkpoint = [], common.model.checkpoint

    def spy(*args, **kwargs):
        recomputed.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(common.model, "checkpoint", spy)
    for on in (False, True):
        run_dir = run(name, tmp_path, activation_checkpointing=on)
        assert bool(recomputed) == on
    expected, found = (load_file(x / "model.safetensors") for x in (plain_dir, run_dir))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


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
    run(name, tmp_path, epochs=1.0, micro_batch_size=1)
    trained = [i for i, event in enumerate(events) if event is True]
    assert len(trained) == 2
    assert all(events[i + 1] == "backward" for i in trained)
