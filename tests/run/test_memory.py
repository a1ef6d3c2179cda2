"""Memory: what a resumed run frees, and layers that are computed once more."""

import weakref

import algorithms
import pytest
import torch
from models import some_wide
from runs import keep_earlier_checkpoints, killed_earlier
from safetensors.torch import load_file
from scripts import SPECS, short_flags
from spies import spy_on

import runtime.model


def run(name, output_dir, **flags):
    two_steps = short_flags(name, epochs=0.5, total_rollouts=2, max_new_tokens=4, save_every=1)
    return algorithms.run(name, output_dir, **two_steps | flags)


@pytest.fixture(scope="module", params=some_wide(SPECS, fast=["dpo", "ppo_rlhf"]))
def plain(request, tmp_path_factory):
    """A script's name, and the folder of its run."""
    with keep_earlier_checkpoints():
        return request.param, run(request.param, tmp_path_factory.mktemp("plain"))


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
    recomputed = spy_on(runtime.model, monkeypatch, "checkpoint")
    for on in (False, True):
        run_dir = run(name, tmp_path, activation_checkpointing=on)
        assert bool(recomputed) == on
    expected, found = (load_file(x / "model.safetensors") for x in (plain_dir, run_dir))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
