"""The embedded tasks: the data is what tiny/README.md says, and the gold reward is right."""

import json
import re
from pathlib import Path

import pytest

from tiny.calculator.calculator import calculator, right
from tiny.make import sample
from tiny.reviews.gold import grammatical, score, sentiment


def rows(path):
    return [json.loads(line) for line in (Path("tiny") / path).read_text().splitlines()]


@pytest.mark.parametrize(("task", "modulus"), [("arithmetic", 10), ("calculator", 1000)])
def test_answers_are_right(task, modulus):
    for row in rows(f"{task}/prompts/train.jsonl") + rows(f"{task}/prompts/test.jsonl"):
        assert int(row["answer"]) == sum(map(int, re.findall(r"\d+", row["prompt"]))) % modulus


def test_held_out_prompts_are_new():
    train, test = rows("arithmetic/prompts/train.jsonl"), rows("arithmetic/prompts/test.jsonl")
    seen = {row["prompt"] for row in train + rows("arithmetic/sft/train.jsonl")}
    held_out = test + rows("arithmetic/sft/test.jsonl")
    assert not seen & {row["prompt"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) == len(held_out) == 1000
    train, test = rows("calculator/prompts/train.jsonl"), rows("calculator/prompts/test.jsonl")
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


def test_pairs_are_made_of_samples():
    texts = sample(Path("tiny/arithmetic/policy"), ["1+2+3+4+5=", "9+9+9+9+9="], seed=0)
    assert len(texts) == 2 and all("#" in text for text in texts)
