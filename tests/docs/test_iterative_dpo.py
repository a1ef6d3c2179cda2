"""Rounds of DPO: how the experiment makes its pairs, starts a round and measures."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dpo
from docs.experiments.lib import sampling
from docs.experiments.lib.metrics import last
from docs.experiments.lib.runs import Run, read_jsonl, train
from docs.experiments.studies import iterative_dpo as experiment
from docs.experiments.studies.iterative_dpo import POLICY, REWARD_MODEL, Rounds


def plain_scores(texts):
    """Of whole texts that end, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(REWARD_MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL, dtype=torch.float32)
    batch = tokenizer([text + "<eos>" for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits[:, 0] - model.config.score_mean


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
    train_prompts = {row["prompt"] for row in read_jsonl(experiment.TRAIN_PROMPTS)}
    assert {pair["prompt"] for pair in pairs} <= train_prompts
    chosen, rejected = (
        plain_scores([pair["prompt"] + pair[side] for pair in pairs])
        for side in ("chosen", "rejected")
    )
    margins = chosen - rejected
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
    runs = experiment.train_rounds(rounds, None, seed=7, folder=tmp_path)
    assert runs == [Run(tmp_path / f"run {i}") for i in (1, 2, 3)]
    starts = [POLICY, *(str(run.folder) for run in runs[:2])]
    for flags, start in zip(calls, starts, strict=True):
        assert (flags["model"], flags["seed"]) == (start, 7)
        assert not flags.keys() & {"epochs", "learning_rate"}  # the default ones
        assert flags["beta"] == 0.9
        rows = read_jsonl(Path(flags["dataset"]) / "train.jsonl")
        assert [row["prompt"] for row in rows] == [start] * 2
        test_rows = (Path(flags["dataset"]) / "test.jsonl").read_text()
        assert test_rows == Path("tiny/reviews/preferences/test.jsonl").read_text()


def test_a_round_is_measured_on_its_samples_and_by_its_distance_from_the_start(tmp_path):
    flags = dict(train_split="train[:64]", eval_split="test[:20]", epochs=1.0, micro_batch_size=8)
    before = train(dpo, output_dir=str(tmp_path), learning_rate=2e-3, **flags)
    model = str(before.folder)
    run = train(dpo, output_dir=str(tmp_path), learning_rate=1e-12, model=model, **flags)
    found = experiment.evaluate(run, sampling.load_reward_model(REWARD_MODEL))
    assert found["gold"] == last("eval/reward").of_run(run)
    # This round's reference is the last round's model, from which it has hardly moved.
    assert abs(last("eval/kl").of_run(run)) < 1e-4 < found["KL"]
    scores = plain_scores([f"{one['prompt']} {one['completion']}" for one in run.samples()])
    assert found["learned"] == pytest.approx(scores.mean().item(), abs=1e-4)
