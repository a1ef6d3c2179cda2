"""A run that is killed and resumed ends with the same bits as one that was never stopped."""

import errno
import json
import os
import signal
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from models import some_wide
from runs import assert_resumes, assert_same_run, keep_earlier_checkpoints, killed_earlier
from runs import metrics_of, read, run_and_resume, start, words, write_splits
from scripts import SPECS

import grpo
import grpo_variants
from runtime.saving import lock_run

EACH = pytest.mark.parametrize("name", SPECS)


def resume(name, run_dir):
    script = SPECS[name].module
    assert script.main(script.parse_args(["--resume", str(run_dir)])) == run_dir


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """The folder of the uninterrupted run of a script."""

    @cache
    def run_of(name):
        script, folder = SPECS[name].module, tmp_path_factory.mktemp(name)
        typed = words(SPECS[name].short_flags | {"output_dir": folder})
        with keep_earlier_checkpoints():
            return script.main(script.parse_args(typed))

    return run_of


@pytest.fixture
def copied(run_of, tmp_path):
    """As a kill would have left it at step 7, with the checkpoint of step 6."""
    return killed_earlier(run_of("grpo"), tmp_path / "run")


# --- to the bit ---------------------------------------------------------------------------------
# Checkpoints are due at steps 2, 4, 6 and 7. Each kill comes after a call in the run that resumes
# where the one before was killed.
KILLS = (
    "replace 1",  # the checkpoint of step 2 has its name
    "truncate 1",  # of the logs one is cut back, others are not
    "save 1",  # that of step 4 is written but has no name, and the logs are two steps ahead
    "replace 2",  # that of step 6 is the third
    "fsync 1",  # the last one is on the disk without a name
)


@pytest.mark.wide
def test_kills_at_five_moments(run_of, tmp_path):
    """Kill, resume, kill, ...: whatever was half written, the end is the same."""
    command = ["grpo.py", *words(SPECS["grpo"].short_flags | {"output_dir": tmp_path / "runs"})]
    for moment in KILLS:
        environment = {"KILL_AFTER": moment}
        process = start(command, tmp_path / "output", environment, before="kills:after_a_call")
        process.join()
        printed = (tmp_path / "output").read_text()
        assert process.exitcode == -signal.SIGKILL, f"{moment}: {printed}"
        (killed,) = tmp_path.glob("runs/*")
        command = ["grpo.py", "--resume", str(killed)]
    resume("grpo", killed)
    assert_same_run(killed, run_of("grpo"))
    (killed / "model.safetensors").unlink()  # killed between its last checkpoint and the model
    resume("grpo", killed)
    assert_same_run(killed, run_of("grpo"))


@pytest.mark.parametrize("name", some_wide(SPECS, fast=["dpo", "grpo"]))
def test_logs_that_are_ahead_of_the_checkpoint_are_cut_back(name, run_of, tmp_path):
    """And the run ends as the whole one, in every script."""
    assert_resumes(SPECS[name].module, run_of(name), tmp_path / "run")


def test_dynamic_sampling_goes_on_in_the_data_where_it_was(tmp_path):
    """A rollout reads as many prompts as it needs: where the data are is in the checkpoint."""
    flags = SPECS["grpo_variants"].short_flags | dict(max_sampling_rounds=3)
    run_dir = run_and_resume(grpo_variants, tmp_path, **flags)
    sampled = [row["prompts/sampled"] for row in metrics_of(run_dir)[1:]]
    assert len({*sampled[:-1]}) > 1
    state = torch.load(run_dir / "checkpoint.earlier", weights_only=True)
    assert state["prompts_read"] == sum(sampled[: state["step"]]) > 0


@EACH
def test_a_change_of_any_column_is_seen(name, tmp_path, monkeypatch):
    script, found = SPECS[name].module, []

    def stop(run_dir, training, state):
        found.append(state["data"])
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "load_checkpoint", stop)
    rows = read(f"{script.Args.dataset}/train.jsonl")[:4]
    for number, value in enumerate("aab"):
        data = write_splits(tmp_path / str(number), [row | {"other": value} for row in rows])
        with pytest.raises(KeyboardInterrupt):
            script.main(script.Args(dataset=data, resume=str(tmp_path)))
    assert found[0] == found[1]
    is_read = name not in ("sft", "rm_bradley_terry", "distill")  # by reward functions
    assert (found[1] != found[2]) == is_read


# --- what may go wrong: once, as these functions are the same in all scripts (test_source.py) -----
def test_a_resume_that_would_be_another_run_is_refused(copied):
    file = copied / "args.json"
    args = json.loads(file.read_text())
    file.write_text(json.dumps(args | {"train_split": "train[1:20]"}))
    with pytest.raises(ValueError, match="its training rows or its models have chan"):
        resume("grpo", copied)
    file.write_text(json.dumps(args))
    whole = (copied / "checkpoint.pt").read_bytes()
    (copied / "checkpoint.pt").write_bytes(whole[:1000])  # cut off, as on a broken disk
    for _ in range(2):
        with pytest.raises(OSError, match=f"{copied}/checkpoint.pt cannot be read"):
            resume("grpo", copied)
        (copied / "checkpoint.pt").unlink(missing_ok=True)


def test_a_resumed_run_maps_no_checkpoint(copied, monkeypatch):
    """The place on the disk of a file that is mapped stays taken after it is replaced."""
    seen = []
    monkeypatch.setattr(grpo, "save_model", lambda *_: seen.append(maps.read_text()))
    maps = Path("/proc/self/maps")
    resume("grpo", copied)
    assert torch.cuda.is_available() or f"{copied}/checkpoint.pt" not in seen[0]


def test_a_run_is_written_by_one_process(tmp_path, monkeypatch):
    """A second one is refused before it reads or cuts anything; its own lock it may take again."""
    run_dir = grpo.open_run(grpo.Args(output_dir=str(tmp_path)))
    lock_run(run_dir)
    process = start(["grpo.py", "--resume", str(run_dir)], tmp_path / "output")
    process.join()
    printed = (tmp_path / "output").read_text()
    assert process.exitcode == 1
    assert printed.endswith(f"--resume {run_dir}: another process is still at this run\n")
    lock_run(run_dir)
    monkeypatch.setattr("fcntl.lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    with pytest.warns(UserWarning, match="no second process is refused: .*No locks"):
        lock_run(run_dir)
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.warns(UserWarning, match="no second process is refused: import of fcntl"):
        lock_run(run_dir)


def test_a_log_that_was_shortened_is_not_filled_up_nor_another_file_cut(copied):
    (copied / "metrics.jsonl").write_text("")
    (copied / "notes.jsonl").write_text("the user's\n")
    resume("grpo", copied)
    assert (copied / "notes.jsonl").read_text() == "the user's\n"
    assert [row["step"] for row in metrics_of(copied)] == [7]


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(copied, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(file.name) or fsync(file))
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append(b) or replace(a, b))
    resume("grpo", copied)
    assert [*map(str, calls)] == [str(copied / f"checkpoint.{end}") for end in ("tmp", "pt")]


def test_a_checkpoint_of_another_model_is_refused(copied):
    """torch would go on with the weights that the model has."""
    saved = torch.load(copied / "checkpoint.pt", weights_only=True)
    weights, moments = saved["policy"]
    moments["state"] = {f"encoder.{name}": state for name, state in moments["state"].items()}
    saved["policy"] = {f"encoder.{name}": weight for name, weight in weights.items()}, moments
    torch.save(saved, copied / "checkpoint.pt")
    with pytest.raises(ValueError, match=f"--resume {copied}: its weights are not those of its --"):
        resume("grpo", copied)


@pytest.mark.parametrize("warmup", some_wide([6, 7], fast=[7]))
def test_in_the_critics_warm_up_and_at_its_end(warmup, tmp_path):
    """The checkpoint of step 6 is resumed: there the policy's optimiser begins afresh, or later."""
    flags = dict(critic_warmup_rollouts=warmup, total_rollouts=8, save_every=6)
    run_and_resume(SPECS["ppo_rlhf"].module, tmp_path, **SPECS["ppo_rlhf"].short_flags | flags)


@pytest.mark.parametrize("flag", ["reward_fn", "environment"])
def test_a_changed_reward_function_or_environment_is_named(flag, tmp_path, recwarn):
    """And the run goes on: it may have been mended."""
    file, script = tmp_path / "rules.py", SPECS["grpo_tools"].module
    file.write_text(Path("tests/support/turns.py").read_text())
    flags = SPECS["grpo_tools"].short_flags | dict(total_rollouts=1, output_dir=str(tmp_path))
    function = flags[flag].partition(":")[2]
    run_dir = script.main(script.Args(**flags | {flag: f"{file}:{function}"}))
    resume("grpo_tools", run_dir)
    assert not [w for w in recwarn if "has changed" in str(w.message)]
    file.write_text(file.read_text() + "# mended\n")
    with pytest.warns(UserWarning, match=f"--resume {run_dir}: {file} has changed since"):
        resume("grpo_tools", run_dir)


def test_a_full_disk_is_said_to_be_one(copied, monkeypatch):
    def full(state, path):
        path.write_bytes(b"704 bytes")
        raise RuntimeError("unexpected pos 704 vs 598")  # torch's words

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=f"{copied}/checkpoint.pt cannot be written, is the disk ful"):
        resume("grpo", copied)
    assert not (copied / "checkpoint.tmp").exists()  # it would keep the disk full


FAILING = """
calls = []
def rule(prompts, completions, **columns):
    calls.append(1)
    if len(calls) == 6:
        raise ValueError("no answer from the judge")
    return [0.0] * len(prompts)
"""


@pytest.mark.wide
def test_a_reward_function_that_fails_in_a_rollout(tmp_path):
    """It is called at the start and in each step: this call is that of the fifth rollout."""
    (tmp_path / "failing.py").write_text(FAILING)
    flags = SPECS["grpo"].short_flags | dict(eval_every=9, output_dir=tmp_path / "runs")
    flags["reward_fn"] = f"{tmp_path}/failing.py:rule"
    process = start(["grpo.py", *words(flags)], tmp_path / "output")
    process.join()
    printed = (tmp_path / "output").read_text()
    (run_dir,) = tmp_path.glob("runs/*")
    assert f"after its first checkpoint --resume {run_dir} continues it" in printed
    assert "4/7 [" in printed and "5/7 [" not in printed  # the progress bar
    assert "ValueError: no answer from the judge" in printed
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"] == 4
