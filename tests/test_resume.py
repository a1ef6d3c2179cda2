"""A run that is killed and resumed ends with the same bits as one that was never stopped."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from background import Background
from scripts import SCRIPTS, short_flags

import dpo

# Short, and the offline ones into a second epoch, so that reference log-probs are used again.
SHORT = dict(train_split="train[:150]", epochs=1.7, eval_split="test[:8]", eval_samples=2)
SHORT |= dict(total_rollouts=8, prompts_per_rollout=8, group_size=4, num_minibatches=2)
SHORT |= dict(update_epochs=2, eval_every=3, save_every=2)
MORE = {
    "reinforce": dict(beta=0.1),
    "ppo_rlhf": dict(kl_target=0.5, kl_horizon=20.0),  # beta is adapted, and part of the state
}
RUNS = {name: short_flags(name, **SHORT) | MORE.get(name, {}) for name in SCRIPTS}
STEPS = 8


def flags(name, output_dir):
    return [
        word
        for flag, value in (RUNS[name] | {"output_dir": output_dir}).items()
        for word in (f"--{flag.replace('_', '-')}", str(value))
    ]


def contents(run_dir):
    """All that a run leaves, but for what a clock says."""
    logs = []
    for log in ("metrics.jsonl", "samples.jsonl"):
        for line in (run_dir / log).read_text().splitlines():
            row = json.loads(line)
            logs.append({k: v for k, v in row.items() if not k.startswith("time/")})
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    del state["logs"]  # their sizes
    return logs, state, (run_dir / "model" / "model.safetensors").read_bytes()


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, tmp_path_factory):
    """A script's name, and the folder of its uninterrupted run."""
    os.chdir(Path(__file__).parent.parent)
    script = SCRIPTS[request.param]
    out = tmp_path_factory.mktemp("whole")
    return request.param, script.main(script.parse_args(flags(request.param, out)))


def kill(folder):
    """Folders of a run of each script that was killed at a random step; all run at once."""
    found, ends = {}, {}
    for name in SCRIPTS:
        ends[name] = random.randint(3, STEPS - 1)  # logged lines; the first checkpoint is at step 2
        print(name, "is killed after", ends[name], "lines")
    commands = json.dumps([[f"{name}.py", *flags(name, str(folder / name))] for name in ends])
    words = [sys.executable, "tests/helpers/forked.py", commands, str(folder)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        ids = {name: int(process.stdout.readline()) for name in ends}
        deadline = time.time() + 300
        while found.keys() != ends.keys() and time.time() < deadline:
            for name in ends.keys() - found.keys():
                logs = list(folder.glob(f"{name}/*/metrics.jsonl"))
                if logs and len(logs[0].read_text().splitlines()) > ends[name]:
                    os.kill(ids[name], signal.SIGKILL)
                    found[name] = logs[0].parent
            time.sleep(0.002)
        statuses = [int(line) for line in process.stdout]
    assert statuses == [-signal.SIGKILL] * len(ends), "a run ended before it was killed"
    return found


begin = Background(kill)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    return begin.result(tmp_path_factory)


def test_kill_at_a_random_step_and_resume(whole, killed):
    name, run_dir = whole
    assert not (killed[name] / "model").exists()
    script = SCRIPTS[name]
    script.main(script.parse_args(["--resume", str(killed[name])]))
    for found, expected in zip(contents(killed[name]), contents(run_dir), strict=True):
        assert same(found, expected)


def test_resuming_a_finished_run_writes_the_same_model(whole, capsys):
    name, run_dir = whole
    before = contents(run_dir)
    script = SCRIPTS[name]
    script.main(script.parse_args(["--resume", str(run_dir)]))
    assert all(map(same, contents(run_dir), before))
    assert f"model: {run_dir}" in capsys.readouterr().out


def test_a_save_that_dies_leaves_the_last_checkpoint(whole, monkeypatch):
    name, run_dir = whole
    path = run_dir / "checkpoint.pt"
    before = path.read_bytes()

    def die(state, path):
        path.write_bytes(b"half a")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        SCRIPTS[name].save_checkpoint(run_dir, {}, {"step": 99})
    assert path.read_bytes() == before


def test_flags_typed_beside_resume_override_those_of_the_run(whole):
    """Flags of the run hold, the script's defaults do not; what is typed overrides both."""
    name, run_dir = whole
    parse, resume = SCRIPTS[name].parse_args, ["--resume", str(run_dir)]
    assert json.loads((run_dir / "args.json").read_text())["save_every"] == 2
    assert SCRIPTS[name].Args.save_every != 2
    assert parse(resume).save_every == 2
    assert parse([*resume, "--save-every", "7"]).save_every == 7


def test_a_resume_that_fails_leaves_the_runs_flags(whole):
    name, run_dir = whole
    before = (run_dir / "args.json").read_text()
    other = {"tiny/arithmetic/policy", "tiny/reviews/policy"} - {SCRIPTS[name].Args.model}
    resume = ["--resume", str(run_dir), "--model", sorted(other)[-1]]
    with pytest.raises(
        (SCRIPTS[name].InputError, RuntimeError)
    ):  # other shapes, or another tokenizer
        SCRIPTS[name].main(SCRIPTS[name].parse_args(resume))
    assert (run_dir / "args.json").read_text() == before


def test_a_finished_run_can_be_extended(tmp_path):
    """Its end is a checkpoint like any other; the schedule is that of the longer run."""
    script = SCRIPTS["grpo"]
    words = flags("grpo", tmp_path)
    run_dir = script.main(script.parse_args([*words, "--total-rollouts", "2"]))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    rates = [json.loads(line)["policy/learning_rate"] for line in lines]
    assert rates == [5e-4, 2.5e-4]
    resume = ["--resume", str(run_dir), "--total-rollouts", "4"]
    assert script.main(script.parse_args(resume)) == run_dir
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["policy/learning_rate"] for row in rows[3:]] == [2.5e-4, 1.25e-4]
    assert json.loads((run_dir / "args.json").read_text())["total_rollouts"] == 4


@pytest.mark.parametrize("name", ["rm_bradley_terry", "dpo"])
def test_a_weight_decay_typed_beside_resume_is_taken(name, tmp_path):
    """The optimiser's state holds the old one."""
    script = SCRIPTS[name]
    run_dir = script.main(script.parse_args([*flags(name, tmp_path), "--epochs", "0.2"]))
    words = ["--resume", str(run_dir), "--epochs", "0.4", "--weight-decay", "0.3"]
    script.main(script.parse_args(words))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    (group,) = state["model" if name[:2] == "rm" else "policy"]["optim_state_dict"]["param_groups"]
    assert group["weight_decay"] == 0.3


def test_runs_never_share_a_folder(tmp_path, monkeypatch):
    clock = itertools.count(time.time_ns(), 10**6)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))  # a whole number of ms apart
    for script in SCRIPTS.values():
        args = script.Args(output_dir=str(tmp_path), exp_name="x")
        folders = {script.start_run(args)[0] for _ in range(3)}
        assert len(folders) == 3


# --- what a resume refuses, and what it mends ----------------------------------------------------


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of a finished run: the script, and the folder."""
    name, run_dir = whole
    return SCRIPTS[name], Path(shutil.copytree(run_dir, tmp_path / "run"))


@pytest.mark.parametrize("flag", ["model", "dataset", "seed"])
def test_what_defines_a_run_cannot_be_changed(finished, flag):
    script, run_dir = finished
    other = {"model": "tiny/reviews/reward_model", "dataset": "tiny", "seed": "7"}[flag]
    args = script.parse_args(["--resume", str(run_dir), f"--{flag}", other])
    for name in ("model", "dataset", "seed"):  # what the message says is looked at first
        if name != flag:
            assert getattr(args, name) == getattr(script.Args, name)
    before = (run_dir / "args.json").read_text()
    with pytest.raises(script.InputError):
        script.main(args)
    with pytest.raises(script.InputError, match=f"--{flag} cannot be changed, it was "):
        script.load_checkpoint(args, run_dir, {}, {"data": 0}, total_steps=STEPS)
    assert (run_dir / "args.json").read_text() == before


def test_a_run_cannot_end_before_its_checkpoint(finished):
    script, run_dir = finished
    shorter = ["--epochs", "0.4"]
    if hasattr(script.Args, "total_rollouts"):
        shorter = ["--total-rollouts", "2"]
    before = (run_dir / "args.json").read_text()
    with pytest.raises(script.InputError, match=r"its checkpoint is at step 8, .* end at 2$"):
        script.main(script.parse_args(["--resume", str(run_dir), *shorter]))
    assert (run_dir / "args.json").read_text() == before


def test_logs_that_were_shortened_or_deleted_do_not_stop_a_resume(finished, capsys):
    script, run_dir = finished
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:2]))
    (run_dir / "samples.jsonl").unlink()
    script.main(script.parse_args(["--resume", str(run_dir)]))
    printed = capsys.readouterr().out
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert f"{run_dir / name} has lost lines since the checkpoint" in printed
    assert (run_dir / "metrics.jsonl").read_text() == "".join(lines[:2])


@pytest.mark.parametrize("whole", ["sft", "grpo"], indirect=True)  # of a process each: seconds
def test_two_processes_cannot_work_on_one_run(finished):
    script, run_dir = finished
    words = [sys.executable, f"{script.__name__}.py", "--resume", str(run_dir)]
    with FileLock(run_dir / ".lock"):
        second = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert second.returncode == 1
    assert "another process is at work on it" in second.stderr.splitlines()[-1]


# --- the checkpoint before the last: one script, as save_checkpoint is the same in all -----------

# What is logged of steps 1 and 2 is the same in a run that ends there.
FOUR_STEPS = dict(train_split="train[:16]", batch_size=4, epochs=1.0, save_every=1)
FOUR_STEPS |= dict(eval_split="test[:2]", eval_every=2, max_new_tokens=2, learning_rate=5e-4)
FOUR_STEPS |= dict(lr_schedule="constant_with_warmup", warmup_ratio=0.0)


def run_dpo(output_dir, **more):
    return dpo.main(dpo.Args(output_dir=str(output_dir), **FOUR_STEPS | more))


def resume_dpo(run_dir, *words):
    return dpo.main(dpo.parse_args(["--resume", str(run_dir), *words]))


def assert_same_run(run_dir, other_dir):
    for found, expected in zip(contents(run_dir), contents(other_dir), strict=True):
        assert same(found, expected)


def step_and_largest_weight(path):
    checkpoint = torch.load(path, weights_only=True)
    weights = checkpoint["policy"]["model_state_dict"].values()
    return checkpoint["step"], max(weight.abs().max().item() for weight in weights)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    os.chdir(Path(__file__).parent.parent)
    return run_dpo(tmp_path_factory.mktemp("four"))


def test_a_run_that_diverges_can_go_on_from_its_previous_checkpoint(four_steps, tmp_path):
    run_dir = run_dpo(tmp_path, epochs=0.5)
    # Step 3 throws the weights away and is saved; step 4 finds that out.
    with pytest.raises(dpo.InputError, match=r"step 4: .* checkpoint\.previous\.pt, if any"):
        resume_dpo(run_dir, "--epochs", "1", "--learning-rate", "1e18")
    step, largest = step_and_largest_weight(run_dir / "checkpoint.pt")
    assert step == 3 and largest > 1e15
    step, largest = step_and_largest_weight(run_dir / "checkpoint.previous.pt")
    assert step == 2 and largest < 10
    os.replace(run_dir / "checkpoint.previous.pt", run_dir / "checkpoint.pt")
    resume_dpo(run_dir, "--learning-rate", "5e-4")
    assert_same_run(run_dir, four_steps)


def test_a_kill_between_the_two_renamings_of_a_save(four_steps, tmp_path, monkeypatch):
    rename = os.replace

    def die_in_the_second_save(source, target):
        has_previous = Path(target).with_name("checkpoint.previous.pt").exists()
        if Path(target).name == "checkpoint.pt" and has_previous:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", die_in_the_second_save)
        run_dpo(tmp_path)
    (run_dir,) = tmp_path.iterdir()
    assert [path.name for path in run_dir.glob("checkpoint*")] == ["checkpoint.previous.pt"]
    (run_dir / "checkpoint.tmp").write_bytes(b"a kill gives no time to delete it")
    resume_dpo(run_dir)
    assert_same_run(run_dir, four_steps)
    assert not (run_dir / "checkpoint.tmp").exists()
    assert step_and_largest_weight(run_dir / "checkpoint.previous.pt")[0] == 3
