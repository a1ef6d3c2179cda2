"""The scripts learn what the README says, run as it says: no flags but the seed."""

import json
import os
import subprocess
import sys

import pytest


def learn(script, tmp_path, seed):
    """First and last evaluation of a default run."""
    command = [sys.executable, script, "--output-dir", str(tmp_path), "--seed", str(seed)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["OMP_WAIT_POLICY"] = "passive"  # spinning threads stall each other
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    (run_dir,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    return evaluations[0], evaluations[-1], done.stdout


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_learns_the_demonstrations(seed, tmp_path):
    first, last, _ = learn("sft.py", tmp_path, seed)
    assert first["eval/loss"] > 2.5  # about log 18
    # The demonstrations have 0.43 nats a token in them; a model that cannot add stays above 0.85.
    assert last["eval/loss"] < 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_learns_to_show_its_working(seed, tmp_path):
    first, last, printed = learn("grpo.py", tmp_path, seed)
    assert 0.25 < first["eval/accuracy"] < 0.42
    assert first["eval/length_mean"] < 8.5
    assert last["eval/accuracy"] >= 0.9
    assert 11.5 < last["eval/length_mean"] < 13
    assert f"held-out accuracy: {first['eval/accuracy']:.3f} -> " in printed
    assert "before: " in printed
    assert "after: " in printed
