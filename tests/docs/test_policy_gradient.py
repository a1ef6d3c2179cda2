"""Examples of docs/reinforce.md and ppo_rlhf.md by enumeration, and a function behind them."""

import math

import pytest
import torch
from by_hand import close, rows_of

import grpo

GRADIENT = "docs/reinforce.md"
P, R = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)


def score(o):
    """grad log pi(o) by the logits of a softmax."""
    return [(o == j) - P[j] for j in range(3)]


def test_the_baselines_table():
    squares = [sum(x * x for x in score(o)) for o in range(3)]
    best = sum(P[o] * R[o] * squares[o] for o in range(3))
    best /= sum(P[o] * squares[o] for o in range(3))
    signal = sum((P[j] * (R[j] - 0.9)) ** 2 for j in range(3))

    def variance(b):
        return sum(P[o] * (R[o] - b) ** 2 * squares[o] for o in range(3)) - signal

    exact = {"-1": -1, "0": 0, "0.9, the mean reward": 0.9, f"{best:.3f}, the best": best}
    table = rows_of(GRADIENT, "| $b$ |")
    assert [*table] == [*exact]
    for name, b in exact.items():
        close(table[name][1:2], [P[j] * (R[j] - 0.9) for j in range(3)], 2)
        close(table[name][2:], [variance(b)], 3)
    # GRPO's group mean: (k - 1) / k of leave one out, here 2/3 for one of two that are right.
    found = grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), 4, scale="none")
    assert found.tolist() == pytest.approx([2 / 3 * 3 / 4 * sign for sign in (1, -1, -1, 1)])


def test_bias_and_variance_of_gae():
    """Of token b, whose true advantage is 0.25 - 0.4: what ppo_rlhf.md says in words."""
    for lam, expected in ((0, (0.10, 0)), (1, (-0.15, 0.43))):
        by_end = [0.5 - 0.4 + lam * (reward - 0.5) for reward in (1, 0)]
        average = 0.25 * by_end[0] + 0.75 * by_end[1]
        square = 0.25 * (by_end[0] - average) ** 2 + 0.75 * (by_end[1] - average) ** 2
        assert (average, math.sqrt(square)) == pytest.approx(expected, abs=0.005)
