"""Best of n and rejection sampling: formulas by enumeration, a round by its files."""

import json
import math
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import mean

import pytest
from runs import read

from docs.experiments.studies import best_of_n


def best_of_n_policy(policy, rewards, n):
    """Of completions with these probabilities and rewards: draw n, the first of the best wins."""
    chosen = [0.0] * len(policy)
    for draw in product(range(len(policy)), repeat=n):
        best = max(draw, key=lambda i: rewards[i])
        chosen[best] += math.prod(policy[i] for i in draw)
    return chosen


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


# --- the formulas -------------------------------------------------------------------------------
def test_kl_of_best_of_n_is_below_its_bound_and_nears_it_without_ties():
    for n in (2, 3, 4):
        policy = [0.35, 0.25, 0.4]  # the first two tie, and the first one drawn is kept
        assert kl(best_of_n_policy(policy, [1, 1, 0], n), policy) < 0.8 * best_of_n.kl_bound(n)
    many = 200  # completions of equal probability, of which no two have the same reward
    cumulative = [(i / many) ** 4 for i in range(many + 1)]
    best = [high - low for low, high in pairwise(cumulative)]
    assert kl(best, [1 / many] * many) == pytest.approx(best_of_n.kl_bound(4), abs=0.01)
    assert kl(best, [1 / many] * many) < best_of_n.kl_bound(4)
    assert best_of_n.kl_bound(1) == 0


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_expected_best_is_the_mean_over_all_subsets(n):
    scores, values = [0.3, -1.0, 2.5, 0.9, 0.1], [10.0, 20.0, 30.0, 40.0, 50.0]
    bests = [max(subset, key=lambda i: scores[i]) for subset in combinations(range(5), n)]
    expected = mean(values[i] for i in bests)
    assert best_of_n.expected_best(scores, values, n) == pytest.approx(expected)


def test_a_round_trains_on_correct_samples_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(best_of_n, "BUDGET", 256)
    plan = best_of_n.Plan(num_rounds=2)
    measured = best_of_n.rejection_sampling(plan, seed=1, folder=tmp_path)
    rows = []
    for round_index in range(2):
        rows += read(tmp_path / f"round_{round_index}" / "train.jsonl")
    assert measured["kept"] == len(rows) and 0 < len(rows) < 256
    for row in rows:
        right = sum(int(digit) for digit in row["prompt"].strip("=").split("+")) % 10
        assert row["completion"].endswith(f"#{right}")
    first, second = sorted(tmp_path.glob("sft__*"))
    start = json.loads((second / "args.json").read_text())["model"]
    assert Path(start) == first
