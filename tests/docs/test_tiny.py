"""The embedded tasks: the data is what tiny/README.md says, and the gold reward is right."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
import torch

from docs.experiments.lib.sampling import load_policy, sample
from tiny.arithmetic.reward import last_number
from tiny.calculator.calculator import calculator, right
from tiny.reviews.gold import grammatical, score, sentiment


def rows(path):
    return [json.loads(line) for line in (Path("tiny") / path).read_text().splitlines()]


def test_arithmetic_answers_are_right_and_held_out_prompts_are_new():
    train, test = rows("arithmetic/prompts/train.jsonl"), rows("arithmetic/prompts/test.jsonl")
    for row in train + test:
        assert int(row["answer"]) == sum(map(int, re.findall(r"\d", row["prompt"]))) % 10
    seen = {row["prompt"] for row in train + rows("arithmetic/sft/train.jsonl")}
    held_out = test + rows("arithmetic/sft/test.jsonl")
    assert not seen & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == len(held_out) == 1000


def test_arithmetic_demonstrations_are_half_guesses_and_slip_one_time_in_ten():
    demonstrations = rows("arithmetic/sft/train.jsonl")
    shown = [row for row in demonstrations if not row["completion"].startswith("#")]
    assert len(shown) / len(demonstrations) == pytest.approx(0.5, abs=0.02)
    sums = slips = 0
    for row in shown:
        working, answer = row["completion"].split("#")
        assert answer == working[-1]
        total = 0
        for digit, found in zip(re.findall(r"\d", row["prompt"]), working.split(","), strict=True):
            sums += 1
            slips += int(found) != (total + int(digit)) % 10
            total = int(found)
    assert slips / sums == pytest.approx(0.1, abs=0.01)


def test_arithmetic_preferences_are_a_right_and_a_wrong_completion_for_each_prompt():
    for split, count in (("train", 2000), ("test", 500)):
        pairs = rows(f"arithmetic/preferences/{split}.jsonl")
        prompts = rows(f"arithmetic/prompts/{split}.jsonl")[:count]
        assert [{name: row[name] for name in ("prompt", "answer")} for row in pairs] == prompts
        columns = {name: [row[name] for row in pairs] for name in pairs[0]}
        judged = [
            last_number([], columns[side], columns["answer"]) for side in ("chosen", "rejected")
        ]
        assert judged == [[1.0] * count, [0.0] * count]


def test_calculator_answers_are_right_and_held_out_prompts_are_new():
    train, test = rows("calculator/prompts/train.jsonl"), rows("calculator/prompts/test.jsonl")
    for row in train + test:
        assert int(row["answer"]) == sum(map(int, re.findall(r"\d+", row["prompt"])))
    assert len({row["prompt"] for row in train + test}) == 2000


def test_the_calculator_and_its_reward_by_hand():
    said = ["?37+48=", "?37+48=85;?85+96=", "#181<eos>", "37+48=", "?37+=", "?1+2=3"]
    assert calculator([""] * 6, said) == ["85;", "181;", None, None, None, None]
    said = ["?37+48=85;?85+96=181;#181", "#181", "?85+96=181;", "#18", "#181#", "#181;", "#9#181"]
    assert right([""] * 7, said, ["181"] * 7) == [1, 1, 0, 0, 0, 0, 1]


def test_review_titles_are_held_out_and_demonstrations_are_grammatical():
    train, test = rows("reviews/prompts/train.jsonl"), rows("reviews/prompts/test.jsonl")
    seen = {row["prompt"] for row in train + rows("reviews/sft/train.jsonl")}
    assert not seen & {row["prompt"] for row in test + rows("reviews/sft/test.jsonl")}
    reviews = [row["completion"] for row in rows("reviews/sft/train.jsonl")]
    assert set(grammatical([], reviews)) == {1.0}
    prompts = [row["prompt"] for row in rows("reviews/sft/train.jsonl")]
    assert sum(sentiment(prompts, reviews)) / len(reviews) == pytest.approx(0, abs=0.03)


def test_the_gold_rule_judges_nothing_but_film_reviews():
    reviews = ["i loved the plot ."] * 4
    prompts = ["1+2=", "review of jaws : and then", [{"role": "user", "content": "hi"}]]
    assert sentiment([*prompts, "on friday i saw dune ."], reviews) == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("review", "gold"),
    [
        ("the plot was moving .", 1),
        ("the plot was really dull .", -1),
        ("i loved the music . i hated the cast .", 0),
        ("the plot was moving and the cast was dull .", 0),
        ("it ran for two hours .", 0),
        ("what a superb film . it ran for two hours .", 0.5),
        ("the plot was moving . the plot was moving .", 0),  # the second is a repetition: -1
        ("moving moving moving", -1),
        ("the plot was moving . the cast", 0),  # unfinished: -1
        ("", -1),
        (".", -1),
    ],
)
def test_gold_reward_by_hand(review, gold):
    assert score(review) == pytest.approx(gold)


def test_grammatical_by_hand():
    reviews = ["the plot was moving .", "moving . the plot was moving .", "", "the plot was moving"]
    assert grammatical([], reviews) == [1.0, 0.5, 0.0, 0.0]


def test_preferences_are_those_of_a_judge_with_some_doubt():
    train, test = rows("reviews/preferences/train.jsonl"), rows("reviews/preferences/test.jsonl")
    assert (len(train), len(test)) == (2000, 500)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for pairs in (train, test):
        gains = [score(row["chosen"]) - score(row["rejected"]) for row in pairs]
        assert 0 not in gains
        # Bradley and Terry with 4 x gold: the mean probability of the side that is really better.
        right = sum(gain > 0 for gain in gains) / len(gains)
        expected = sum(1 / (1 + math.exp(-4 * abs(gain))) for gain in gains) / len(gains)
        assert right == pytest.approx(expected, abs=0.03)
        assert 0.85 < right < 0.91


def test_labels_are_those_of_a_judge_with_some_doubt_on_the_pairs_completions():
    for split, pairs in (("train", 2000), ("test", 500)):
        labelled = rows(f"reviews/labels/{split}.jsonl")
        sides = [
            (pair["prompt"], pair[side])
            for pair in rows(f"reviews/preferences/{split}.jsonl")
            for side in ("chosen", "rejected")
        ]
        assert len(sides) == 2 * pairs
        assert sorted((row["prompt"], row["completion"]) for row in labelled) == sorted(sides)
        assert {type(row["label"]) for row in labelled} == {bool}
        # True with probability sigmoid(4 gold), at both ends of the gold reward and between.
        for low, high in ((-1, -0.4), (-0.4, 0.4), (0.4, 1)):
            some = [row for row in labelled if low <= score(row["completion"]) <= high]
            liked = sum(row["label"] for row in some) / len(some)
            likely = [1 / (1 + math.exp(-4 * score(row["completion"]))) for row in some]
            assert len(some) > 200
            assert liked == pytest.approx(sum(likely) / len(some), abs=0.04)
        # Unpaired: two neighbours are of one pair by chance alone.
        near = pairwise(labelled)
        assert sum(a["prompt"] == b["prompt"] for a, b in near) < len(labelled) / 20


def test_reviews_policy_is_grammatical_and_neither_kind_nor_unkind():
    policy = load_policy("tiny/reviews/policy")
    prompts = [row["prompt"] for row in rows("reviews/prompts/train.jsonl")]
    encoded = [policy.tokenizer(prompt).input_ids for prompt in prompts]
    _, reviews = sample(policy, encoded, 40, torch.Generator().manual_seed(1))
    assert -0.15 <= mean(sentiment(prompts, reviews)) <= 0.1
    assert mean(grammatical(prompts, reviews)) >= 0.93
