"""Reward functions of the experiments, beside the 0 or 1 of a right answer.

    python grpo.py --reward-weights 4 1 \
        --reward-fn tiny/arithmetic/reward.py:last_number docs/experiments/rules.py:brevity

The experiments gdpo and variance train with them on tiny/arithmetic, and cost/speed.py with
`count_letters`.
"""

import re

from tiny.arithmetic.reward import last_number


def brevity(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """Minus the characters: -2 for an answer at once (`#5`), -11 with working (`6,6,0,8,5#5`)."""
    return [-float(len(completion)) for completion in completions]


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
