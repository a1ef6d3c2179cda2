"""`--track` logs into a run of its own, and nothing is logged without it."""

import json

import pytest
import wandb
from scripts import SCRIPTS, short_flags

SHORT = dict(epochs=0.01, total_rollouts=1, prompts_per_rollout=2, group_size=2, num_minibatches=1)
SHORT |= dict(eval_split="test[:2]", eval_samples=2, train_split="train[:32]", batch_size=16)


@pytest.fixture
def logged(monkeypatch, tmp_path):
    """What is logged to each run of wandb, by its id; offline, in a folder of the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    calls, finished = {}, []
    log, finish = wandb.Run.log, wandb.Run.finish

    def spy_on_log(self, data, *args, **options):
        calls.setdefault(self.id, []).append(data)
        return log(self, data, *args, **options)

    def spy_on_finish(self, *args, **options):
        finished.append(self.id)
        return finish(self, *args, **options)

    monkeypatch.setattr(wandb.Run, "log", spy_on_log)
    monkeypatch.setattr(wandb.Run, "finish", spy_on_finish)
    return calls, finished


def run(name, tmp_path, **flags):
    script = SCRIPTS[name]
    return script.main(script.Args(output_dir=str(tmp_path), **short_flags(name, **SHORT), **flags))


def test_each_tracked_run_is_one_of_its_own(logged, tmp_path):
    """Two in one process, beside a run of the user's, which gets nothing and stays open."""
    calls, finished = logged
    users_own = wandb.init(project="own")
    first, second = (run("sft", tmp_path / "runs", track=True) for _ in range(2))
    assert set(calls) == set(finished) == {first.name, second.name}
    for run_dir in (first, second):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert calls[run_dir.name] == [{k: v for k, v in s.items() if k != "step"} for s in steps]
    users_own.finish()


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_the_flag_nothing_is_logged(name, logged, tmp_path):
    calls, _ = logged
    users_own = wandb.init(project="own")
    run(name, tmp_path / "runs")
    assert calls == {}
    users_own.finish()
