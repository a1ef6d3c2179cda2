"""Rounds of DPO: how the experiment makes its pairs, starts a round and measures."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dpo
from docs.experiments.lib import sampling
from docs.experiments.lib.metrics import first
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl
from docs.experiments.studies import iterative_dpo as experiment
from docs.experiments.studies.iterative_dpo import POLICY, REWARD_MODEL, Rounds


def test_the_best_and_the_worst_of_a_group_become_a_pair():
    prompts = ["p"] * 3 + ["q"] * 3 + ["r"] * 3 + ["s"] * 3
    completions = [*"abcdef", "g", "h", "", "", "", ""]
    scores = [0.5, 2.0, -1.0, 3.0, 3.0, 3.0, 1.0, -2.0, -9.0, 0.0, 1.0, 2.0]
    assert experiment.best_and_worst(prompts, completions, scores, 3) == [
        {"prompt": "p", "chosen": "b", "rejected": "c"},
        {"prompt": "r", "chosen": "g", "rejected": "h"},
    ]


def test_sampled_pairs_are_ranked_as_plain_transformers_rank_them():
    reward_fn = sampling.load_reward_model(REWARD_MODEL)
    pairs = experiment.sample_pairs(POLICY, reward_fn, 20, torch.Generator().manual_seed(1))
    lines = Path("tiny/reviews/prompts/train.jsonl").read_text().splitlines()
    assert {pair["prompt"] for pair in pairs} <= {json.loads(line)["prompt"] for line in lines}
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL, dtype=torch.float32)

    def scores(side):
        texts = [pair["prompt"] + pair[side] + "<eos>" for pair in pairs]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        return logits[:, 0]

    margins = scores("chosen") - scores("rejected")
    assert len(pairs) >= 19 and margins.min() > 0
    assert margins.mean() > 2  # the best and the worst of four, not two of them


def test_each_round_starts_from_the_last_rounds_model_and_from_its_samples(monkeypatch, tmp_path):
    calls = []

    def sample_pairs(model, reward_fn, num_pairs, rng):
        return [{"prompt": model, "chosen": "a", "rejected": "b"}] * num_pairs

    def train(script, **flags):
        calls.append(flags)
        return Run(tmp_path / f"run {len(calls)}")

    monkeypatch.setattr(experiment, "sample_pairs", sample_pairs)
    monkeypatch.setattr(experiment, "train", train)
    rounds = Rounds(number=3, num_pairs=2, beta=0.9)
    models = experiment.train_rounds(rounds, None, seed=7, folder=tmp_path)
    assert models == [str(tmp_path / f"run {i}") for i in (1, 2, 3)]
    starts = [POLICY, *models[:2]]
    for flags, start in zip(calls, starts, strict=True):
        assert (flags["model"], flags["seed"]) == (start, 7)
        assert not flags.keys() & {"epochs", "learning_rate"}  # the default ones
        assert flags["beta"] == 0.9
        rows = (Path(flags["dataset"]) / "train.jsonl").read_text().splitlines()
        assert [json.loads(row)["prompt"] for row in rows] == [start] * 2
        test_rows = (Path(flags["dataset"]) / "test.jsonl").read_text()
        assert test_rows == Path("tiny/reviews/preferences/test.jsonl").read_text()
    calls.clear()
    experiment.train_rounds(Rounds(number=1, num_pairs=None), None, seed=7, folder=tmp_path)
    assert calls[0]["dataset"] == "tiny/reviews/preferences"


def test_the_starting_policy_is_measured_with_the_samples_of_dpo_py(monkeypatch, tmp_path):
    rows = read_jsonl(experiment.TEST_PAIRS)[:40]
    write_jsonl(tmp_path / "test.jsonl", rows)
    monkeypatch.setattr(experiment, "TEST_PAIRS", tmp_path / "test.jsonl")
    found = experiment.evaluate(POLICY, sampling.load_reward_model(REWARD_MODEL), seed=1)
    flags = dict(train_split="train[:32]", eval_split="test[:40]", epochs=1.0)
    run = train(dpo, output_dir=str(tmp_path), **flags)
    assert found["gold"] == pytest.approx(first("eval/reward").of_run(run))
    assert found["KL"] == 0
