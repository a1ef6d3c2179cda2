"""Policies, their samples, their scores, and how far two policies are apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import grpo
from common.generation import generate
from common.logprobs import Sequences, micro_batches, rollout_logprobs
from common.tokens import encode, find_stop_ids
from docs.experiments.lib.measuring import quietly

BATCH_SIZE = 256  # sequences sampled at a time
MICRO_BATCH_SIZE = 64  # sequences scored at a time


class Policy(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]


def load_policy(source: str | Path) -> Policy:
    """The model, its tokenizer, and the ids that end a completion."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return Policy(model, tokenizer, find_stop_ids(str(source), tokenizer))


def load_reward_model(source: str) -> Callable[[Sequences], Tensor]:
    """A function of sequences: their rewards (B,), centred as in grpo.py."""
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(source, dtype=torch.float32).eval()
    return lambda sequences: grpo.model_rewards(model, MICRO_BATCH_SIZE, [], sequences)


def load_prompts(args: Any, split: str, tokenizer: PreTrainedTokenizerBase) -> list[grpo.Prompt]:
    """The prompts of a script's --dataset."""
    return [*quietly(grpo.load_prompts, args, split, tokenizer)]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list) -> list[list[int]]:
    """The token ids of strings or chats, as they are sampled from."""
    return [encode(tokenizer, prompt, add_generation_prompt=True) for prompt in prompts]


def sample(
    policy: Policy,
    prompt_ids: list[list[int]],
    max_new_tokens: int,
    rng: Generator,
    temperature: float = 1.0,
) -> tuple[Sequences, list[str]]:
    """A completion for each prompt: pairs (prompt, completion) of ids, and texts.

    The same as in a script's evaluation, if the generator has its --seed.
    """
    sequences, _ = generate(
        policy.model,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_ids=policy.stop_ids,
        rng=rng,
        batch_size=BATCH_SIZE,
    )
    completion_ids = [completion for _, completion in sequences]
    return sequences, policy.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)


def total_logprob(policy: Policy, sequences: Sequences) -> float:
    """The sum of all completions' log-probs, in nats."""
    batches = micro_batches(sequences, torch.arange(len(sequences)), MICRO_BATCH_SIZE)
    return rollout_logprobs(policy.model, sequences, batches, temperature=1.0).double().sum().item()


@torch.no_grad()
def mean_log_ratio(policy: Policy, start: Policy, sequences: Sequences) -> float:
    """The mean over completions of log(pi(y|x) / pi_start(y|x)), in nats per completion.

    On samples of the policy this is k1, an estimate of KL(policy || start).
    """
    log_ratio = total_logprob(policy, sequences) - total_logprob(start, sequences)
    return log_ratio / len(sequences)
