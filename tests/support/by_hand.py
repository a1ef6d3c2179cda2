"""Plain Python for small cases, and the tables of an experiment."""

import math
import re

import pytest
import torch


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def rows_of(table):
    """The cells of a table, by the first cell or, where that repeats, the first two."""
    keys = [row[0] for row in table["rows"]]
    return {row[0] if keys.count(row[0]) == 1 else (row[0], row[1]): row for row in table["rows"]}


def numbers(cells):
    return [float(x) for cell in cells for x in re.findall(r"-?\d+\.?\d*", cell)]


def close(cells, expected, digits):
    """Each number of the cells is the expected one, rounded to its digits."""
    assert numbers(cells) == pytest.approx(expected, abs=0.501 * 10**-digits)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(logits):
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def slope(function, at, j, step=1e-5):
    """The derivative of a function of logits by the j-th, as a central difference."""
    up, down = list(at), list(at)
    up[j], down[j] = up[j] + step, down[j] - step
    return (function(up) - function(down)) / (2 * step)


def gradient(function, p):
    """By the logits of a softmax with probabilities p."""
    at = [math.log(x) for x in p]
    return [slope(function, at, j) for j in range(len(p))]
