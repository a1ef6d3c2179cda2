"""Memory: what a resumed run frees."""

import weakref

import algorithms
import pytest
import torch
from models import some_wide
from runs import keep_earlier_checkpoints, killed_earlier
from scripts import SPECS, short_flags


@pytest.mark.parametrize("name", some_wide(SPECS, fast=["dpo", "ppo_rlhf"]))
def test_a_resumed_run_frees_the_checkpoint_that_it_loaded(name, tmp_path, monkeypatch):
    two_steps = short_flags(name, epochs=0.5, total_rollouts=2, max_new_tokens=4, save_every=1)
    with keep_earlier_checkpoints():
        run_dir = algorithms.run(name, tmp_path, **two_steps)
    copy = killed_earlier(run_dir, tmp_path / "copy")
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
