"""Rounds of DPO: how the experiment makes its pairs, and that docs/dpo.md tells what it gave."""

import json
import re
import sys
from pathlib import Path
from statistics import mean, variance

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "experiments"))
import iterative_dpo
from iterative_dpo import POLICY, REWARD_MODEL, ROUNDS, TABLE_ROWS, Rounds

RESULTS = Path("docs/results/iterative_dpo.json")


def test_the_best_and_the_worst_of_a_group_become_a_pair():
    prompts = ["p"] * 3 + ["q"] * 3 + ["r"] * 3 + ["s"] * 3
    completions = [*"abcdef", "g", "h", "", "", "", ""]
    scores = [0.5, 2.0, -1.0, 3.0, 3.0, 3.0, 1.0, -2.0, -9.0, 0.0, 1.0, 2.0]
    assert iterative_dpo.best_and_worst(prompts, completions, scores, 3) == [
        {"prompt": "p", "chosen": "b", "rejected": "c"},
        {"prompt": "r", "chosen": "g", "rejected": "h"},
    ]


def test_sampled_pairs_are_ranked_as_plain_transformers_rank_them():
    pairs = iterative_dpo.sample_pairs(POLICY, 20, torch.Generator().manual_seed(1))
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

    def sample_pairs(model, num_pairs, rng):
        return [{"prompt": model, "chosen": "a", "rejected": "b"}] * num_pairs

    def main(args):
        calls.append(args)
        return tmp_path / f"run {len(calls)}"

    monkeypatch.setattr(iterative_dpo, "sample_pairs", sample_pairs)
    monkeypatch.setattr(iterative_dpo.dpo, "main", main)
    rounds = Rounds(num_rounds=3, pairs_per_round=2)
    models = iterative_dpo.train_rounds(rounds, seed=7, folder=tmp_path)
    assert models == [str(tmp_path / f"run {i}" / "model") for i in (1, 2, 3)]
    starts = [POLICY, *models[:2]]
    for args, start in zip(calls, starts, strict=True):
        assert (args.model, args.beta, args.epochs, args.seed) == (start, None, 3.0, 7)
        rows = (Path(args.dataset) / "train.jsonl").read_text().splitlines()
        assert [json.loads(row)["prompt"] for row in rows] == [start] * 2
        test_rows = (Path(args.dataset) / "test.jsonl").read_text()
        assert test_rows == Path("tiny/reviews/preferences/test.jsonl").read_text()
    calls.clear()
    iterative_dpo.train_rounds(Rounds(1, 0), seed=7, folder=tmp_path)
    assert calls[0].dataset == "tiny/reviews/preferences"


def test_the_starting_policy_is_measured_with_the_samples_of_dpo_py():
    found = iterative_dpo.measure(POLICY, seed=1)
    of_dpo = json.loads(Path("docs/results/dpo.json").read_text())["numbers"]["(default)"]
    assert found["gold"] == pytest.approx(of_dpo["reward before"][0], abs=1e-4)
    assert found["tokens"] == pytest.approx(of_dpo["tokens before"][0], abs=1e-4)
    for metric in ("KL", "chosen", "rejected", "start's samples"):
        assert found[metric] == 0


def test_what_the_page_says_of_the_rounds_holds():
    numbers = json.loads(RESULTS.read_text())["numbers"].values()
    page = " ".join(Path("docs/dpo.md").read_text().split())

    def of_seeds(name, num_rounds, metric):
        return [of_seed[name][num_rounds - 1][metric] for of_seed in numbers]

    offline, one_round = of_seeds("offline", 1, "gold"), of_seeds("one round", 1, "gold")
    error = ((variance(offline) + variance(one_round)) / 5) ** 0.5
    errors = (mean(one_round) - mean(offline)) / error
    told = f"a gold reward of {mean(one_round):.2f} instead of {mean(offline):.2f}"
    assert f"{told}, {errors:.1f} standard errors apart" in page
    golds = [mean(of_seeds("three rounds", i, "gold")) for i in (1, 2, 3)]
    assert "gold reward goes from {:.2f} to {:.2f} and {:.2f}".format(*golds) in page
    kls = [mean(of_seeds("three rounds", i, "KL")) for i in (1, 2, 3)]
    assert "the start grows from {:.1f} to {:.1f} and {:.1f} nats".format(*kls) in page
    assert f"{kls[1] / kls[0]:.1f} and {kls[2] / kls[0]:.1f} times as much" in page
    learned = [mean(of_seeds("three rounds", i, "learned")) for i in (1, 2, 3)]
    assert learned == sorted(learned)
    before = mean(of_seed["start"][0]["learned"] for of_seed in numbers)
    assert f"({before:.1f} before training)" in page
    for _, name, i in TABLE_ROWS:
        sides = [mean(of_seeds(name, i, side)) for side in ("chosen", "rejected")]
        start_samples = mean(of_seeds(name, i, "start's samples"))
        assert sides[0] > sides[1] and abs(mean(sides) - start_samples) < 0.3
    assert -round(mean(of_seeds("offline", 1, "chosen"))) == 4
    assert -round(mean(of_seeds("one round", 1, "chosen"))) == 9


def test_the_checks_of_preferences_on_the_page(capsys):
    page = Path("docs/rm_bradley_terry.md").read_text()
    (checks,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    exec(checks, {})
    printed = capsys.readouterr().out
    rows = re.findall(r"differs by (.*): (\d+) pairs, the label agrees in ([\d.]+)", printed)
    assert len(rows) == 4
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
    share, pairs = re.search(r"chosen in ([\d.]+) of (\d+) pairs", printed).groups()
    prose = " ".join(page.split())
    assert f"The longer side is chosen in {share} of the {int(pairs):,} pairs" in prose
    chosen, rejected = map(float, re.search(r"\[(.*), (.*)\]", printed).groups())
    words = f"the chosen sides have {chosen:.1f} words, the rejected ones {rejected:.1f}"
    assert words in " ".join(Path("docs/dpo.md").read_text().split())


def test_the_worked_example_of_the_falling_log_probs():
    """A normally distributed reward: the optimum on a grid, and what the page tells of it."""
    beta = 0.3
    rewards = torch.linspace(-9, 14, 200_001, dtype=torch.float64)
    reference = torch.distributions.Normal(0.0, 1.0).log_prob(rewards).softmax(dim=0)
    log_ratio = rewards / beta - (rewards / beta + reference.log()).logsumexp(dim=0)
    optimum = reference * log_ratio.exp()
    better = 2 * reference * reference.cumsum(dim=0)  # of two samples
    numbers = {
        "\\beta \\log Z = 1 / (2 \\beta) = {:.2f}": (rewards - beta * log_ratio).mean(),
        "1 / \\sqrt{{\\pi}} = {:.2f}": (better * rewards).sum(),
        "(1.67 - 0.56) / 0.3 = {:.1f}$ nats on average": -(better * log_ratio).sum(),
        "falls by {:.1f}. The mean of the two": -((2 * reference - better) * log_ratio).sum(),
        "1 / (2 \\beta^2) = {:.1f}": -(reference * log_ratio).sum(),
        "$1 / \\beta = {:.1f}$ in this example": (optimum * rewards).sum(),
        "one in {:,} has such a reward": round(1 / reference[rewards >= 1 / beta].sum().item(), -2),
    }
    page = " ".join(Path("docs/dpo.md").read_text().split())
    for text, number in numbers.items():
        number = number if isinstance(number, float) else number.item()
        shown = text.format(int(number) if "{:,}" in text else number)
        assert shown in page, shown


def test_the_tables_follow_from_the_numbers():
    made = json.loads(RESULTS.read_text())
    assert made == iterative_dpo.report([*made["numbers"].values()])
    assert {name for _, name, _ in TABLE_ROWS} == {*ROUNDS}
    shown = [row[1] for row in made["tables"]["iterative dpo"]["rows"]]
    assert shown == ["188", "188", "63", "126", "189"]
