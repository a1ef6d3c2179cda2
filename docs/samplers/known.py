"""`generate` by samplers that are not the policy: docs/sampler.md."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import common.generation

sample_tokens = common.generation.sample_tokens


def unchanged(logits: Tensor) -> Tensor:
    return logits


def colder(logits: Tensor) -> Tensor:
    """Temperature 0.7."""
    return logits / 0.7


def top_two(logits: Tensor) -> Tensor:
    """The two most likely tokens alone."""
    second = logits.topk(2).values[:, 1:]
    return logits.masked_fill(logits < second, -torch.inf)


class Sampler:
    """q = softmax(change(logits)), with the weights that the policy had `age` rollouts ago."""

    def __init__(self, change: Callable = unchanged, age: int = 0):
        self.change, self.age, self.past = change, age, []

    def generate(self, model: Any, prompts: list, **options: Any) -> tuple[list, Tensor]:
        self.past = [*self.past, copy.deepcopy(model)][-self.age - 1 :]

        def sample_changed(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return sample_tokens(self.change(logits), *rest)

        common.generation.sample_tokens = sample_changed
        try:
            return common.generation.generate(self.past[0], prompts, **options)
        finally:
            common.generation.sample_tokens = sample_tokens
