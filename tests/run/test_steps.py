"""The optimiser of the scripts that train on rows: its steps, and how they are counted."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import algorithms
import pytest
import torch
from reviews import batch_rows
from runs import metrics_of
from scripts import SPECS, WITH_ROLLOUTS
from spies import spy_on

from runtime.processes import peak_memory_gb

EACH = pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].kind == "rows"])


@EACH
def test_steps_are_counted(name, tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count(step=2).__next__)  # 2 seconds a look
    monkeypatch.setattr(SPECS[name].module, "time", clock)
    loaded = spy_on(SPECS[name].module, monkeypatch, SPECS[name].loader)
    flags = dict(train_split="train[:20]", epochs=3.5, eval_every=3)
    before, *steps = metrics_of(algorithms.run(name, tmp_path, **flags))
    # 3.5 x 20 = 70 rows: eight steps of 8, one of 6
    assert [step["step"] for step in steps] == list(range(1, 10))
    assert [row["step"] for row in (before, *steps) if "eval/loss" in row] == [0, 3, 6, 9]
    epochs = [0.4 * n for n in range(1, 9)] + [3.5]
    assert [step["time/epoch"] for step in steps] == pytest.approx(epochs)
    (_, rows), *_ = loaded
    for number, step in enumerate(steps):
        batch = batch_rows(number, 8, 20, seed=1)[: 6 if number == 8 else 8]
        read = sum(SPECS[name].row_tokens(rows[i]) for i in batch)
        assert step["time/tokens_per_second"] == read / 2
        assert 0.1 < step["time/peak_memory_gb"] <= peak_memory_gb()


@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_tokens_of_a_rollout_are_counted(name, tmp_path, monkeypatch):
    looks = []
    clock = SimpleNamespace(perf_counter=lambda: looks.append(0) or len(looks))  # seconds
    monkeypatch.setattr(SPECS[name].module, "time", clock)
    calls = spy_on(SPECS[name].module, monkeypatch, "micro_batches")
    _, row, *_ = metrics_of(algorithms.run(name, tmp_path, eval_split="test[:3]"))
    sequences = next(sequences for (sequences, *_), _ in calls if len(sequences) > 3)
    read = sum(len(prompt + completion) for prompt, completion in sequences)
    assert row["time/tokens_per_second"] == read / (len(looks) - 1)
    assert 0.1 < row["time/peak_memory_gb"] <= peak_memory_gb()


def test_peak_memory(monkeypatch):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    assert peak_memory_gb() == pytest.approx(int(line.split()[1]) * 1024 / 1e9, rel=0.02)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    assert peak_memory_gb() == 3
