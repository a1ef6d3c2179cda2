"""Several processes train what one does, and end together.

The numbers agree to float32 rounding: the processes add up in another order. Metrics are compared
to a relative 1e-4, or an absolute 1e-5 where they are sums that nearly cancel (a loss of the order
1e-3). Weights are compared to 1e-6 in the quadratic mean, and to 2e-4 each: Adam's step is the
learning rate (1e-3 at most) by m / sqrt(v), and where a gradient is nearly 0, its rounding error is
a part of that ratio. Sampled text is the same, unless a random number lies within rounding of a
token's limit; here none does.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scripts import SCRIPTS, short_flags

# Nothing here can be divided evenly by 2 or by 4, and some of 4 processes get no row at all.
SHORT = dict(train_split="train[:20]", epochs=1.3, batch_size=9, total_rollouts=3)
SHORT |= dict(prompts_per_rollout=5, group_size=3, micro_batch_size=2)
SHORT |= dict(eval_split="test[:5]", eval_samples=3)
REVIEWS = dict(
    num_minibatches=2,
    model="tiny/reviews/policy",
    dataset="tiny/reviews/prompts",
    reward_model="tiny/reviews/reward_model",
    reward_fn="tiny/reviews/gold.py:sentiment",
)
MORE = {
    "rm_bradley_terry": dict(center_coef=0.01),
    "reinforce": dict(beta=0.1),
    # An adapted beta must be the same everywhere, and so must the epoch after which it stops.
    "ppo_rlhf": dict(kl_target=0.5, kl_horizon=20.0, target_kl=0.003),
    "grpo": dict(REVIEWS, update_epochs=2, kl_placement="reward"),
    "dpo": dict(nll_coef=0.1),
    "kto": dict(desirable_weight=1.3),
    "dpo-orpo": dict(loss="orpo"),  # without a reference
    "rm_bradley_terry-layers": dict(train_layers=1, activation_checkpointing=True),
    "ppo_rlhf-shared": dict(critic_init="policy", activation_checkpointing=True),
    "grpo-gdpo": dict(
        REVIEWS,
        multi_objective_aggregation="normalize_then_sum",
        importance_sampling_level="sequence",
    ),
}
RUNS = {
    run: short_flags(run.split("-")[0], **SHORT) | MORE.get(run, {})
    for run in [*SCRIPTS, *(run for run in MORE if run not in SCRIPTS)]
}


ROOT = Path(__file__).parent.parent
STARTED = {}  # what `begin` has begun


# A second run of a script is made with 1 and 2 processes only.
KINDS = {name: ["2"] if "-" in name else ["2", "4", "1to2", "2to1"] for name in RUNS}


def script_of(run):
    """Its name; what stands behind a hyphen is another run of the script."""
    return run.split("-")[0]


def flags(name, **more):
    words = []
    for flag, value in (RUNS[name] | dict(eval_every=3, save_every=2) | more).items():
        words += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def torchrun(processes, *command, **options):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*launcher, f"--nproc_per_node={processes}", *map(str, command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def run_together(processes, runs, folder):
    """`tests/helpers/run_together.py` on [name, flags, step] of each run."""
    path = folder / f"runs{processes}.json"
    path.write_text(json.dumps(runs))
    process = torchrun(processes, "tests/helpers/run_together.py", path)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, output[:20_000]
    finished = sum(step is None for _, _, step in runs)
    assert output.count("\nmodel: ") == finished, "one process alone prints"


def started(name, kind, folder):
    return flags(name, output_dir=folder, exp_name=f"{name}-{kind}")


def find(kind, folder):
    for name in of_kind(kind):
        (STARTED["found"][name, kind],) = folder.glob(f"{name}-{kind}__*")


def of_kind(kind):
    return [name for name in RUNS if kind in ("1", *KINDS[name])]


def resumed(kind):
    return [["--resume", str(STARTED["found"][name, kind])] for name in of_kind(kind)]


def begin(folder):
    """Make the runs of one process; returns the job that makes those of several."""
    os.chdir(ROOT)
    assert {script_of(name) for name in RUNS} == SCRIPTS.keys()
    STARTED.update(folder=folder, found={}, done=Future())
    for name in RUNS:
        script = SCRIPTS[script_of(name)]
        script.main(script.parse_args(started(name, "1", folder)))
        if name not in of_kind("1to2"):
            continue
        with pytest.MonkeyPatch.context() as patch:
            save = script.save_checkpoint

            def stop(run_dir, trained, state, save=save):
                save(run_dir, trained, state)
                raise KeyboardInterrupt

            patch.setattr(script, "save_checkpoint", stop)
            with pytest.raises(KeyboardInterrupt):
                script.main(script.parse_args(started(name, "1to2", folder)))
            script.start_run.lock.release()  # as its process, which goes on, would if it ended
    find("1", folder)
    find("1to2", folder)
    stopped, whole, four = (
        [[script_of(name), started(name, kind, folder), step] for name in of_kind(kind)]
        for kind, step in (("2to1", 2), ("2", None), ("4", None))
    )
    names = [script_of(name) for name in of_kind("1to2")]
    resume = [[name, words, None] for name, words in zip(names, resumed("1to2"), strict=True)]

    def job():
        try:
            run_together(2, stopped + whole + resume, folder)
            run_together(4, four, folder)
            STARTED["done"].set_result(None)
        except BaseException as error:
            STARTED["done"].set_exception(error)

    return job


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs: (script, kind) for the kinds 1, 2 and 4 processes, 1 to 2, and 2 to 1."""
    if not STARTED:
        begin(tmp_path_factory.mktemp("runs"))()
    STARTED["done"].result()
    found = STARTED["found"]
    for kind in ("2", "4", "2to1"):
        find(kind, STARTED["folder"])
    for name, words in zip(of_kind("2to1"), resumed("2to1"), strict=True):
        assert not (found[name, "2to1"] / "model").exists()
        script = SCRIPTS[script_of(name)]
        script.main(script.parse_args(words))
    return found


def read(path):
    """Rows of a log, but for what a clock says."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    clocks = re.compile("time/.*second.*")
    return [{k: v for k, v in row.items() if not clocks.fullmatch(k)} for row in rows]


def compare(found, expected, where):
    """The same to rounding: numbers, weights, and what holds them."""
    if isinstance(found, tuple | list):  # Adam's betas come back as a list
        found, expected = list(found), list(expected)
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            compare(found[key], expected[key], f"{where} {key}")
    elif isinstance(found, list):
        assert len(found) == len(expected), where
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(a, b, f"{where} {index}")
    elif torch.is_tensor(found):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4, msg=lambda m: where + m)
        assert (found - expected).double().square().mean().sqrt() < 1e-6, where
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(("name", "kind"), [(n, kind) for n in RUNS for kind in KINDS[n]])
def test_the_number_of_processes_does_not_change_the_training(runs, name, kind):
    one, several = runs[name, "1"], runs[name, kind]
    for log in ("metrics.jsonl", "samples.jsonl"):
        expected = read(one / log)
        assert len(expected) > 3
        compare(read(several / log), expected, log)
    for path in (one / "model").iterdir():
        other = several / "model" / path.name
        if path.suffix == ".safetensors":
            compare(load_file(other), load_file(path), path.name)
        elif path.suffix == ".json":
            compare(*(json.loads(file.read_text()) for file in (other, path)), path.name)
        else:
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_does_not_tell_how_many_wrote_it(runs, name):
    one, *others = (
        torch.load(runs[name, kind] / "checkpoint.pt", weights_only=True)
        for kind in ("1", *KINDS[name])
    )
    for other in others:
        for state in (one, other):
            state.pop("logs", None)  # their sizes: a clock's figures differ in length
        compare(other, one, "checkpoint")


def test_processes_finish_their_rollouts_at_different_lengths(runs):
    """The case that must not hang is in the runs above."""
    longest = []
    for name in ("ppo_rlhf", "grpo", "dpo", "kto"):
        samples = read(runs[name, "2"] / "samples.jsonl")
        for step in {sample["step"] for sample in samples}:
            lengths = [sample["length"] for sample in samples if sample["step"] == step]
            half = len(lengths) // 2  # of an odd number the second process samples one more
            longest.append((max(lengths[:half]), max(lengths[half:])))
    assert len(longest) > 4
    assert sum(first != second for first, second in longest) > len(longest) // 2


def test_a_script_as_it_is_under_torchrun(runs, tmp_path):
    """Without what `run_together.py` does to it: processes meet, part and leave one folder."""
    process = torchrun(2, "sft.py", *flags("sft", output_dir=tmp_path))
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, output[:20_000]
    (run_dir,) = tmp_path.iterdir()
    assert output.count("\nmodel: ") == 1
    compare(read(run_dir / "metrics.jsonl"), read(runs["sft", "1"] / "metrics.jsonl"), "metrics")


# --- a process that dies --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_ends_the_job(tmp_path):
    process = torchrun(
        2, "grpo.py", "--output-dir", tmp_path, "--eval-rows", 4, start_new_session=True
    )
    try:
        deadline = time.time() + 100
        while time.time() < deadline:
            logs = list(tmp_path.glob("*/metrics.jsonl"))
            if logs and len(logs[0].read_text().splitlines()) > 2:
                break
            time.sleep(0.1)
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        ranks = [int(child) for child in Path(children).read_text().split()]
        ranks = [
            child for child in ranks if "grpo.py" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in output
    assert not list(tmp_path.glob("*/model"))


def test_an_error_in_one_process_ends_the_job_and_is_shown(tmp_path):
    """A rule is called by one process; the others wait for what it says."""
    rule = tmp_path / "rule.py"
    rule.write_text("def fails(prompts, completions, **columns): return [None] * len(prompts)\n")
    words = ["--reward-fn", f"{rule}:fails", "--output-dir", tmp_path, "--eval-rows", 4]
    process = torchrun(2, "grpo.py", *words)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode != 0
    message = "error: reward function fails must return a list of 4 numbers: it returned None for"
    assert output.count(message) == 1
