"""docs/best_of_n.md, docs/evaluation.md and the experiment: formulas by enumeration, numbers by the
result files."""

import json
import math
import re
import sys
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import mean

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "experiments"))
import best_of_n

import sft
from common.logprobs import encode_pair

PAGE = " ".join(Path("docs/best_of_n.md").read_text().split())
EVALUATION = Path("docs/evaluation.md").read_text()
RESULTS = Path("docs/results/best_of_n.json")


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


def test_kl_of_best_of_n_with_a_rule():
    policy = [0.2, 0.15, 0.4, 0.25]  # the first two are right
    for n in (1, 2, 3, 4):
        best = best_of_n_policy(policy, [1, 1, 0, 0], n)
        assert best_of_n.right_kl(0.35, n) == pytest.approx(kl(best, policy), abs=1e-12)
    assert best_of_n.right_kl(0.35, 500) == pytest.approx(-math.log(0.35))
    assert best_of_n.right_kl(0.0, 4) == best_of_n.right_kl(1.0, 4) == 0


def test_the_worked_example():
    p, n = 0.35, 4
    q = 1 - (1 - p) ** n
    first, second = q * math.log(q / p), (1 - q) * math.log((1 - q) / (1 - p))
    assert f"$q = {q:.3f}$, the KL is ${first:.2f} - {-second:.2f} = {first + second:.2f}$" in PAGE
    assert f"the bound {best_of_n.kl_bound(n):.2f}" in PAGE
    assert f"at most {best_of_n.kl_bound(256):.1f} nats" in PAGE


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_expected_best_is_the_mean_over_all_subsets(n):
    scores, values = [0.3, -1.0, 2.5, 0.9, 0.1], [10.0, 20.0, 30.0, 40.0, 50.0]
    bests = [max(subset, key=lambda i: scores[i]) for subset in combinations(range(5), n)]
    expected = mean(values[i] for i in bests)
    assert best_of_n.expected_best(scores, values, n) == pytest.approx(expected)


def test_expected_best_of_a_rule_is_pass_at_n():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    for n in (1, 2, 3):
        pass_at_n = 1 - math.comb(4, n) / math.comb(6, n)
        assert best_of_n.expected_best(rewards, rewards, n) == pytest.approx(pass_at_n)


def test_majority():
    answers = [1.0, 2.0, 2.0, None, 3.0, 3.0, 2.0, 2.0]
    assert best_of_n.majority_is_right(answers, 2.0, 1) == 4 / 8
    assert best_of_n.majority_is_right(answers, 2.0, 4) == 1 / 2  # 3 and 2 twice each: the first
    assert best_of_n.majority_is_right(answers, 2.0, 8) == 1


def test_ties():
    assert best_of_n.tie_probability([1.0, 1.0, 2.0, 3.0]) == pytest.approx(1 / 6)
    assert best_of_n.tie_probability([1.0, 2.0]) == 0


# --- rejection sampling -------------------------------------------------------------------------
def test_select_keeps_the_right_or_the_best_of_each_prompt():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    assert best_of_n.select(rewards, 3, has_rule=True) == [1, 4, 5]
    assert best_of_n.select(torch.tensor([0.5, -1, 0, -3, -2, -1]), 3, has_rule=False) == [0, 5]


def test_a_round_trains_on_right_samples_alone(tmp_path):
    plan = best_of_n.Plan(best_of_n.SUMS, budget=256, num_rounds=2, num_samples=4)
    measured = best_of_n.rejection_sampling(plan, seed=1, folder=tmp_path)
    rows = []
    for round_index in range(2):
        text = (tmp_path / f"round_{round_index}" / "train.jsonl").read_text()
        rows += [json.loads(line) for line in text.splitlines()]
    assert measured["kept"] == len(rows)
    for row in rows:
        right = sum(int(digit) for digit in row["prompt"].strip("=").split("+")) % 10
        assert row["completion"].endswith(f"#{right}")
    first, second = sorted(tmp_path.glob("sft__*"))
    start = json.loads((second / "args.json").read_text())["model"]
    assert Path(start) == first / "model"
    assert measured["KL"] > 0


@pytest.mark.parametrize("task", ["arithmetic", "reviews"])
def test_a_completion_keeps_the_space_that_parts_it_from_its_prompt(task):
    tokenizer, stop_ids = sft.load_tokenizer(f"tiny/{task}/policy")
    for line in Path(f"tiny/{task}/sft/test.jsonl").read_text().splitlines()[:20]:
        row = json.loads(line)
        ids = encode_pair(tokenizer, row["prompt"], row["completion"], stop_ids)
        assert best_of_n.text_after_prompt(tokenizer, *ids) == row["completion"]


def test_every_plan_samples_its_budget():
    assert best_of_n.SUM_BUDGET == 15_360
    assert best_of_n.REVIEW_BUDGET == 3_840
    for plan in (best_of_n.SUM_PLANS | best_of_n.REVIEW_PLANS).values():
        assert plan.budget % (plan.num_rounds * plan.num_samples) == 0


# --- the results --------------------------------------------------------------------------------
def test_the_tables_follow_from_the_numbers():
    made = json.loads(RESULTS.read_text())
    seeds = [made["numbers"][str(seed)] for seed in best_of_n.SEEDS]
    table = made["tables"]["best of n sums"]["rows"]
    for i, (n, row) in enumerate(zip(best_of_n.SUM_SIZES, table, strict=True)):
        accuracies = [of_seed["sums"]["best of n"][i] for of_seed in seeds]
        assert row[:2] == [str(n), f"{math.log(n) - 1 + 1 / n:.2f}"]
        assert row[3].startswith(f"{mean(accuracies):.3f}")
    table = made["tables"]["rejection sampling sums"]["rows"]
    for label, row in zip(best_of_n.SUM_PLANS, table, strict=False):
        accuracies = [of_seed["training"][label]["accuracy"] for of_seed in seeds]
        assert row[0] == label
        assert row[3].startswith(f"{mean(accuracies):.3f} ({min(accuracies):.3f} to ")
    grpo = json.loads(Path("docs/results/grpo.json").read_text())["tables"]["grpo"]
    accuracies = [float(row[grpo["columns"].index("after")]) for row in grpo["rows"]]
    assert table[-1][3].startswith(f"{mean(accuracies):.3f} ")


def test_what_the_page_says_of_the_runs_holds():
    made = json.loads(RESULTS.read_text())["numbers"].values()

    def of_seeds(kind, label, quantity):
        return [of_seed[kind][label][quantity] for of_seed in made]

    one_round, four_rounds, fewer_steps = (
        of_seeds("training", label, "accuracy") for label in best_of_n.SUM_PLANS
    )
    grpo = json.loads(Path("docs/results/grpo.json").read_text())["numbers"]["(default)"]
    assert min(fewer_steps) > max(grpo["accuracy"]) > max(one_round)
    told = f"{mean(four_rounds):.3f} against {mean(grpo['accuracy']):.3f}"
    assert f"{told}, and {mean(fewer_steps):.3f} with as many optimiser steps" in PAGE
    assert f"One round reaches {mean(one_round):.2f}" in PAGE
    variants = json.loads(Path("docs/results/grpo_variants.json").read_text())["numbers"]
    best = max(mean(of_variant["accuracy"]) for of_variant in variants.values())
    assert f"variant on [GRPO's page](grpo.md#what-matters) has {best:.3f}" in PAGE
    reinforce = json.loads(Path("docs/results/reinforce.json").read_text())["numbers"]
    means = {label: mean(of_label["reward"]) for label, of_label in reinforce.items()}
    assert f"ends at {means['`--baseline leave_one_out`']:.3f}. A likely reason" in PAGE
    assert f"which does so too, ends at {means['`--baseline none`']:.3f}" in PAGE
    assert f"0.95^8 = {0.95**8:.2f}" in PAGE
    # The mean gold reward rises with n.
    golds = [mean(values) for values in zip(*(of["reviews"]["gold"] for of in made), strict=True)]
    assert golds == sorted(golds)
    assert f"{mean(of['sums']['majority'][-1] for of in made):.3f}" in PAGE
    assert all(of["reviews"]["ties"] == 1e-4 for of in made)  # "1 of 10,000 pairs"
    assert math.exp(11) == pytest.approx(60_000, rel=0.01)


# --- evaluation.md ------------------------------------------------------------------------------
def test_standard_errors_on_the_page():
    (table,) = re.findall(r"\| n \| p = 0\.5 .*?\n\n", EVALUATION, re.DOTALL)
    heading, _, *rows = table.strip().splitlines()
    accuracies = [float(p) for p in re.findall(r"p = ([\d.]+)", heading)]
    assert len(rows) == 4
    for row in rows:
        count, *errors = [cell.strip() for cell in row.strip("|").split("|")]
        n = int(count.split()[0].replace(",", ""))
        assert errors == [f"{math.sqrt(p * (1 - p) / n):.3f}" for p in accuracies]
    assert f"this is {math.sqrt(2 * 0.95 * 0.05 / 500):.3f}" in EVALUATION
    assert f"0.01^2 = {round(8 * 0.95 * 0.05 / 0.01**2):,}$" in EVALUATION


def test_numbers_of_reward_hacking_on_the_page():
    numbers = json.loads(Path("docs/results/reward_hacking.json").read_text())["numbers"]
    text = " ".join(EVALUATION.split())
    for label, told in (
        ("1e-9", "without a KL the learned reward ends at {} and the gold reward at {}"),
        ("0.2", "the learned reward ends at {} and the gold reward at {}."),
    ):
        learned, gold = (mean(numbers[label][name]) for name in ("learned reward", "reward"))
        assert told.format(f"{learned:.2f}", f"{gold:.2f}") in text
    accuracies = json.loads(Path("docs/results/grpo.json").read_text())["numbers"]
    sampled, greedy = (accuracies["(default)"]["accuracy"], accuracies["greedy"]["accuracy before"])
    assert f"[{min(sampled):.3f} to {max(sampled):.3f}](grpo.md#results)" in text
    assert set(greedy) == {1.0}


def test_the_win_rate_on_the_page(tmp_path):
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", EVALUATION, re.DOTALL)
    exec(code, names)
    for run, rewards in {"ours": [1, 0, 3, 2], "theirs": [0, 0, 1, 4]}.items():
        (tmp_path / run).mkdir()
        rows = [{"step": 0, "reward": 9}, *({"step": 5, "reward": r} for r in rewards)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / run / "samples.jsonl").write_text(lines)
    rate, error = names["win_rate"](tmp_path / "ours", tmp_path / "theirs")
    assert rate == (1 + 0.5 + 1 + 0) / 4
    squares = [(win - rate) ** 2 for win in (1, 0.5, 1, 0)]
    assert error == pytest.approx(math.sqrt(sum(squares) / 3 / 4))
