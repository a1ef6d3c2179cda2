"""Reward functions of the experiments shown_working and variance, and of cost/speed.py."""

import re

from tiny.arithmetic.reward import last_number


def working(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """10 for five digits with commas between them and the answer, whatever the digits are."""
    rewards = []
    for completion in completions:
        shows_working = re.fullmatch(r"\d(,\d){4}#\d", completion) is not None
        rewards.append(10.0 if shows_working else 0.0)
    return rewards


def one_or_two(prompts: list, completions: list[str], answer: list, **columns: list) -> list[float]:
    """2 for a right answer, else 1: all rewards of `last_number` are one higher."""
    return [1 + reward for reward in last_number(prompts, completions, answer)]


def count_letters(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs between the samples of a model with random weights."""
    return [float(sum(map(str.isalpha, completion))) for completion in completions]
