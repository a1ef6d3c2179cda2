"""Exact means, variances and gradients where every outcome can be enumerated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tensor(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.float64)


def softmax_policy(probabilities: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Logits and log-probs of a policy that has these probabilities."""
    logits = tensor(probabilities).log().requires_grad_()
    return logits, logits.log_softmax(dim=0)


def gradients(terms: Sequence[Tensor], variables: Tensor) -> Tensor:
    """The gradient of each term by the variables (n, V)."""
    rows = [torch.autograd.grad(term, variables, retain_graph=True)[0] for term in terms]
    return torch.stack(rows)


def mean_and_deviation(probabilities: Tensor, values: Tensor) -> tuple[float, float]:
    """Of a random number that is value i with probability i."""
    (mean,), variance = mean_and_variance(probabilities, values[:, None])
    return mean, variance**0.5


def mean_and_variance(probabilities: Tensor, vectors: Tensor) -> tuple[list[float], float]:
    """Of a random vector that is row i with probability i; the variance is summed over columns."""
    mean = probabilities @ vectors
    variance = probabilities @ (vectors - mean).square().sum(dim=1)
    return mean.tolist(), variance.item()
