"""docs/first_gpu_run.py reports what its commands gave; docs/first_gpu_run.md predicts what the
tests of learning demand."""

import hashlib
import json
import runpy
from pathlib import Path

import pytest
from runs import metrics_of
from scripts import SCRIPTS

from docs import first_gpu_run
from docs.experiments.cost.memory_model import shape

pytestmark = pytest.mark.docs


def test_it_predicts_what_the_tests_demand():
    tests = runpy.run_path("tests/learning/test_learning.py")
    demanded = {case[:2]: case[2] for case in tests["QUICK"] + tests["SLOW"]}
    commands = Path("docs/first_gpu_run.md").read_text().split("```")[1].strip().splitlines()
    for line in commands[:-1]:
        metric, least, most, script, *words = line.split()
        bounds = demanded[script, " ".join(words)][metric]
        assert (float(least), float(most)) == bounds, line
    assert {line.split()[3] for line in commands} == {f"{name}.py" for name in SCRIPTS}


def test_the_report(tmp_path, capsys, monkeypatch):
    few = "--total-rollouts 1 --prompts-per-rollout 2 --eval-rows 2 --max-new-tokens 4"
    page = tmp_path / "page.md"
    page.write_text(f"```\neval/loss 0 9 none.py\neval/accuracy -1 0.5 grpo.py {few}\n```")
    monkeypatch.setattr(first_gpu_run, "PAGE", page)
    monkeypatch.setattr(first_gpu_run, "SIZES", shape(64, 2, 64, 64, 64, 100, True))
    first_gpu_run.main(output_dir=tmp_path)
    failed, found = json.loads(capsys.readouterr().out)["runs"]
    assert failed["exit"] != 0 and "none.py" in failed["said"]
    (log,) = tmp_path.glob("*/1/*/metrics.jsonl")
    before, after = metrics_of(log.parent)
    assert found["exit"] == 0 and found["as_predicted"]
    assert found["said"] == ["a rollout has no advantages: equal rewards in each group"]
    assert found["sha256"] == hashlib.sha256(log.read_bytes()).hexdigest()
    assert found["eval/accuracy"] == [[0, before["eval/accuracy"]], [1, after["eval/accuracy"]]]
    assert found["tokens_per_second"] == after["time/tokens_per_second"]
    assert found["peak_memory_gb"] == after["time/peak_memory_gb"]
    for least, most in (("-1", "-0.5"), ("0.5", "1")):  # the accuracy is 0
        outside = first_gpu_run.run(log.parents[1], "eval/accuracy", least, most, "-c", "")
        assert not outside["as_predicted"]
