"""`generate` by samplers that are not the policy, and their whole distribution: docs/sampler.md.

For a small vocabulary: `distributions` holds all log-probs at once. The changes of docs/variants.md
import it. The sampler is the policy itself, unless `use` names another one.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import common.generation
from common.logprobs import Sequences, completion_states, head_logits, output_head

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


def use(sampler: Sampler) -> None:
    global SAMPLER
    SAMPLER = sampler


def generate(model: Any, prompts: list, **options: Any) -> tuple[list, Tensor]:
    return SAMPLER.generate(model, prompts, **options)


def distributions(
    policy: Any, sequences: Sequences, inds: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log pi(v), with its gradient, and q(v) (b, T, V) of the next tokens of these sequences, for
    the sampler that has drawn them. After a completion's end both are uniform.
    """
    batch = [sequences[i] for i in inds]
    width = max(len(completion) for _, completion in sequences)

    def all_logprobs(model: Any, change: Callable) -> Tensor:
        states, row, t = completion_states(model, batch)
        logits = change(head_logits(states, output_head(model))) / temperature  # (n, V)
        num_tokens = logits.shape[1]
        uniform = logits.new_full((len(batch), width, num_tokens), -math.log(num_tokens))
        return uniform.index_put((row, t), logits.log_softmax(dim=1))

    with torch.no_grad():
        q = all_logprobs(SAMPLER.past[0], SAMPLER.change).exp()
    return all_logprobs(policy, unchanged), q


# --- the mathematics: docs/variants.md ---------------------------------------------------------
def centred(losses: Tensor, advantages: Tensor, cap: float, log_pi: Tensor, q: Tensor) -> Tensor:
    """Losses (b, T) with score centering (arXiv 2609.20807): plus A sum_v q(v) w(v) log pi(v).

    Under q the gradient of `-A w(y) log pi(y)` then has the mean 0. q w, which has no gradient, is
    min(pi, cap q), and q without a cap. Advantages are (b,), log pi and q (b, T, V).
    """
    mass = torch.minimum(log_pi.detach().exp(), cap * q) if cap > 0 else q
    return losses + advantages[:, None] * (mass * log_pi).sum(dim=2)


def kept(logprobs: Tensor, log_pi: Tensor, q: Tensor) -> Tensor:
    """log pi_S(y) = log pi(y) - log pi(S) (b, T), of the tokens S that the sampler has not ruled
    out (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). log pi and q are (b, T, V).
    """
    return logprobs - log_pi.masked_fill(q == 0, -torch.inf).logsumexp(dim=2)


SAMPLER = Sampler()
