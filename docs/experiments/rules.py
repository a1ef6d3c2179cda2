"""Reward functions of the experiment shown_working, and of cost/speed.py."""

import re


def working(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """10 for five digits with commas between them and the answer, whatever the digits are."""
    rewards = []
    for completion in completions:
        shows_working = re.fullmatch(r"\d(,\d){4}#\d", completion) is not None
        rewards.append(10.0 if shows_working else 0.0)
    return rewards


def count_letters(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs between the samples of a model with random weights."""
    return [float(sum(map(str.isalpha, completion))) for completion in completions]
