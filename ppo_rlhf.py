r"""Proximal Policy Optimization (PPO) for language models: RLHF as InstructGPT did it.

The policy pi writes a completion y to a prompt x, token by token; a reward model (or a rule) scores
the whole. Maximise (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, equation 2)

    J(theta) = E[ score(x, y) - beta sum_t log( pi_theta(y_t | x, y_<t) / pi_ref(y_t | x, y_<t) ) ]

by making an episode of each completion: its actions are the tokens, and their rewards

    r_t = - beta (log pi_old - log pi_ref)_t + 1[t = last] score.

A critic V estimates what is still to come; generalised advantage estimation (Schulman et al. 2016,
arXiv 1506.02438, equation 16) and the clipped surrogate (PPO, Schulman et al. 2017, arXiv
1707.06347, equation 7) do the rest, V being 0 after the last token:

    delta_t = r_t + gamma V_t+1 - V_t,     A_t = sum_l (gamma lambda)^l delta_t+l,
    L = - mean_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
        + vf_coef mean_t 1/2 max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-eps_v) - R_t)^2)
        - ent_coef mean_t H(pi_t),         rho_t = (pi_theta / pi_old)_t,   R_t = A_t + V_old,t.

Deviations from the paper:
1. No pretraining gradients (InstructGPT's "PPO-ptx").
2. Advantages are whitened, and values clipped: both are in the code that InstructGPT grew from
   (Ziegler et al. 2019, arXiv 1909.08593), not in its text. Both are flags.
3. `--kl-placement loss` takes the KL out of the rewards and puts a term of its own into the loss,
   against the same frozen reference. Schulman (2020) gives three estimators of the value of
   KL(pi || pi_ref) on tokens drawn from pi. As losses, what counts is their gradient (Tang and
   Munos 2025, arXiv 2506.09477; Liu et al. 2025, arXiv 2510.01555), in expectation
     k1 = log(pi/pi_ref):  E[grad log pi] = 0; it does nothing;
     k3 = pi_ref/pi - log(pi_ref/pi) - 1:  - E_ref[grad log pi], that of KL(pi_ref || pi);
     k2 = 1/2 log^2(pi/pi_ref):  E[log(pi/pi_ref) grad log pi], that of KL(pi || pi_ref).
   So it is k2 here, weighted with rho, since the tokens are drawn from pi_old. In the loss a token
   answers for its own KL alone; in the rewards also for the KL of what it leads to.
4. A completion that is cut off is an episode that ends there: V is 0 after it too, and its score is
   what the reward model says of half a text, which it has never seen: `--missing-eos-penalty`.
5. Whitening is over the rollout (CleanRL: over the minibatch), and Adam's eps is 1e-8.

To read it: the mathematics comes after the flags, the algorithm is `main`, at the end. What lies
between turns files into tensors and back; most of it is the same in every script.

Run it:
    python ppo_rlhf.py                                   # tiny/reviews, 40 s on a CPU
    python ppo_rlhf.py --model runs/sft__1__.../model --reward-model runs/rm_.../model \
        --eval-reward-fn None --dataset trl-lib/ultrafeedback-prompt --max-prompt-length 512 \
        --max-new-tokens 512 --beta 0.05 --micro-batch-size 8 --learning-rate 1e-6 \
        --critic-learning-rate 1e-5
    torchrun --nproc_per_node=8 ppo_rlhf.py ...          # eight GPUs: docs/processes.md
    python ppo_rlhf.py --resume runs/ppo_rlhf__1__...    # go on after a crash

A healthy run: `reward/mean` rises, and with it a held-out `eval/reward` by another judge, if there
is one; where the first climbs and the second falls, the reward model is being hacked: raise beta.
`objective/kl` grows to a few nats and stays; `value/explained_variance` rises above 0 within the
first rollouts; clip fractions stay below 0.2; `policy/entropy` falls slowly.
"""

import copy
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from datasets import load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.utils import logging as transformers_logging

from common.generation import find_stop_ids, generate, pad_rows, use_bfloat16
from common.logprobs import as_forward, completion_logprobs, compute_dtype


@dataclass
class Args:
    # --- run ---
    exp_name: str = "ppo_rlhf"
    """Name of the run's folder, with the seed and the time."""
    seed: int = 1
    """Seed of the data order, of all sampling and of a critic's new head."""
    output_dir: str = "runs"
    """Where the run's folder is made."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint; its flags are taken from there."""
    save_every: int = 10
    """Rollouts between checkpoints; there is always one at the end."""
    track: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str = "plainrlhf"
    """Project for --track."""

    # --- model and data ---
    model: str = "tiny/reviews/policy"
    """Folder or hub name of the policy and its tokenizer; also the reference."""
    dataset: str = "tiny/reviews/prompts"
    """Folder with train.jsonl and test.jsonl, or hub name. Rows have `prompt` (a string or chat
    messages) and the columns that the reward functions ask for."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    train_split: str = "train"
    """Rows to train on; slices such as train[:95%] work."""
    eval_split: str = "test"
    """Held-out rows; for a dataset without a test split, a slice such as train[95%:]."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column given to the reward functions as `answer`."""
    chat: bool = False
    """Turn string prompts into one chat message of a user each."""
    max_prompt_length: int = 64
    """Longest prompt in tokens; rows with longer ones are dropped and counted."""

    # --- reward ---
    reward_model: str | None = "tiny/reviews/reward_model"
    """Folder or hub name of a sequence classifier with one label, over the policy's tokenizer;
    None to be rewarded by --reward-fn alone."""
    reward_fn: tuple[str, ...] = ()
    """Rules that score completions: `last_number`, or your own as path/to/file.py:function."""
    reward_weights: tuple[float, ...] = ()
    """A weight for each of --reward-fn, then one for --reward-model; all 1 if left out."""
    eval_reward_fn: str | None = "tiny/reviews/gold.py:sentiment"
    """Rule for eval/reward and eval/accuracy; None to use the training reward."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a completion that was cut off at --max-new-tokens. Reward models
    have only seen finished ones: give one where `completions/truncated_fraction` is not small."""

    # --- PPO ---
    total_rollouts: int = 30
    """Rollouts, each followed by its optimiser steps."""
    prompts_per_rollout: int = 128
    """Prompts a rollout, one completion each."""
    max_new_tokens: int = 40
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; it divides the logits in all log-probabilities too."""
    update_epochs: int = 2
    """Passes over each rollout."""
    num_minibatches: int = 2
    """Optimiser steps a pass."""
    gamma: float = 1.0
    """Discount of a reward one token later."""
    gae_lambda: float = 0.95
    """lambda of GAE: at 0 an advantage trusts the critic's next value, at 1 only the rewards."""
    clip_coef: float = 0.2
    """eps: the ratio counts from 1 - eps to 1 + eps."""
    vf_clip_coef: float | None = 0.2
    """eps_v: a value counts up to this far from that of the rollout; None for no limit."""
    vf_coef: float = 0.5
    """Coefficient of the value loss. The critic is a model of its own and Adam does not see the
    scale of a loss, so that it only counts against --max-grad-norm; tune --critic-learning-rate."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a rollout to mean 0 and variance 1."""
    whiten_rewards: bool = False
    """Scale the rewards of a rollout to variance 1, keeping their mean."""
    target_kl: float | None = None
    """End a rollout's passes after one whose last minibatch had a larger policy/approx_kl."""

    # --- KL to the reference ---
    beta: float = 0.2
    """Coefficient of the KL, reward a nat (InstructGPT: 0.02); at 0 no reference is loaded."""
    kl_placement: Literal["reward", "loss"] = "reward"
    """In the rewards, as k1, through the advantages; or in the loss, as k2 (see above). The same
    beta is not as strong in both: there are rewards on its other side, or whitened advantages."""
    kl_target: float | None = None
    """Nats a completion that beta is adapted to hold (Ziegler et al., section 2.2)."""
    kl_horizon: float = 1_280
    """Completions over which an adapted beta changes by its error, which is at most 0.2. Ten times
    --prompts-per-rollout is the paper's K_beta of 0.1."""

    # --- critic ---
    critic_init: Literal["reward_model", "sft", "scratch"] = "reward_model"
    """What the critic starts as: --reward-model (InstructGPT), --model with a new head, or random
    weights in the shape of --model."""
    critic_learning_rate: float = 1e-3
    """AdamW's peak learning rate for the critic."""

    # --- optimisation ---
    micro_batch_size: int = 64
    """Completions a forward pass: memory and speed, never the result."""
    learning_rate: float = 5e-4
    """AdamW's peak learning rate for the policy."""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """How the learning rates fall to 0 after the warm-up, or stay."""
    warmup_ratio: float = 0.0
    """Part of the run over which the learning rates rise from 0."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it, policy and critic each by itself."""

    # --- evaluation ---
    eval_every: int = 10
    """Rollouts between evaluations; there is always one at the start and one at the end."""
    eval_rows: int = 500
    """Held-out prompts, at most; one completion each."""
    eval_temperature: float = 1.0
    """Sampling temperature at evaluation; 0 is greedy."""


# --- the mathematics ---------------------------------------------------------------------------


def shaped_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """r_t = - beta (log pi_old - log pi_ref)_t + 1[t = last] score (InstructGPT, equation 2).

    The log-ratio is k1, the plain estimate of KL(pi_old || pi_ref). As part of the reward it needs
    no gradient of its own.

    Args:
        scores: (B,), one for each completion, given at its last sampled token.
        logprobs, ref_logprobs: (B, L) of the sampled tokens, in nats, as they were at sampling.
        mask: (B, L) bool, the sampled tokens.

    Returns:
        (B, L), 0 outside the mask.
    """
    rewards = -beta * (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    tokens = mask.cumsum(dim=1)
    last = mask & (tokens == tokens[:, -1:])
    return rewards + last * scores[:, None]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t = sum_l (gamma lam)^l delta_t+l,  delta_t = r_t + gamma V_t+1 - V_t  (GAE, equation 16).

    Args:
        rewards: (B, L) r_t, received for the token at t.
        values: (B, L) V_t, the critic's estimate before the token at t.
        mask: (B, L) bool, the sampled tokens: one unbroken stretch a row. After its last token an
            episode is over and V is 0.

    Returns:
        Advantages A and returns R = A + V, (B, L) each, 0 outside the mask.
    """
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (B,)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of (B, L) values where the mask is set, whatever stands elsewhere; a scalar."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum()


def whiten(values: torch.Tensor, mask: torch.Tensor, keep_mean: bool = False) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8), with keep_mean the mean added again (Ziegler et al., code).

    Args:
        values: (B, L); mean and variance (of the population) are over the masked ones only.

    Returns:
        (B, L), 0 outside the mask.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean).square(), mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened + mean if keep_mean else whitened).masked_fill(~mask, 0.0)


def clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), to be maximised (PPO, equation 7).

    Args:
        log_ratio: (B, L) log rho = log pi_theta - log pi_old.
        advantages: (B, 1) or (B, L).

    Returns:
        (B, L). Where a token's ratio has left the interval in the direction that its advantage
        pushes, the value is constant and the gradient 0.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)  (Ziegler et al., code).

    Args:
        values, old_values, returns: (B, L) V, the V of the rollout, and R, in units of reward.
        clip: eps_v; None for 1/2 (V - R)^2.

    Returns:
        (B, L). Where a value has moved from V_old by more than the clip and is nearer to R for it
        than the clipped one, the loss is constant and the gradient 0; if farther, it stays.
    """
    loss = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def k3_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    An estimate, from tokens sampled from pi, of KL(pi || pi_ref) in nats: unbiased, never negative,
    0 where the two agree. As a loss its expected gradient on tokens of the current policy is that
    of the other direction, KL(pi_ref || pi); both pull pi towards pi_ref.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def k2_kl(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor
) -> torch.Tensor:
    """rho 1/2 (log pi - log pi_ref)^2 at each token, rho = pi / pi_old without a gradient.

    On tokens sampled from pi_old its gradient is, in expectation, that of KL(pi || pi_ref) at the
    token (see the module's docstring). Its value is not that KL's.
    """
    ratio = (logprobs - old_logprobs).detach().exp()
    return ratio * 0.5 * (logprobs - ref_logprobs).square()


def adapt_beta(beta: float, kl: float, target: float, horizon: float, completions: int) -> float:
    """beta (1 + K e), e = clip(kl / target - 1, +-0.2), K = n / horizon (Ziegler et al., code).

    Args:
        kl: measured KL(pi || pi_ref) in nats a completion.
        completions: n, those of the rollout that it was measured on.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * completions / horizon)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """1 - Var(R - V) / Var(R) over the masked tokens: 1 perfect, 0 no better than a constant.

    Far below 0 where all returns are equal.
    """
    rest, returns = (returns - values)[mask], returns[mask]
    return 1 - rest.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    clip_coef: float,
    kl_coef: float,
    ent_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy's part of L of the module's docstring, over some tokens of an optimiser step.

    Args:
        logprobs, old_logprobs, ref_logprobs: (B, L) of the sampled tokens, in nats. Only the first
            carries a gradient.
        advantages: (B, L).
        entropy: (B, L) of the policy's distribution at each token, in nats, with its gradient.
        mask: (B, L) bool, the sampled tokens; nothing outside it reaches the loss or a metric.
        num_tokens: counted over the whole optimiser step, of which (B, L) may be a part: the parts'
            losses and gradients then add up to the step's, however it is split.
        kl_coef: beta with the KL in the loss, else 0.

    Returns:
        The loss, a scalar, and sums over the tokens for the metrics.
    """
    # Filled before the exponential: garbage at padding could overflow, and 0 x inf is NaN.
    logprobs, old_logprobs, ref_logprobs, advantages, entropy = (
        x.masked_fill(~mask, 0.0)
        for x in (logprobs, old_logprobs, ref_logprobs, advantages, entropy)
    )
    log_ratio = logprobs - old_logprobs
    surrogate = -clipped_surrogate(log_ratio, advantages, clip_coef, clip_coef)
    loss = surrogate
    if ent_coef > 0:
        loss = loss - ent_coef * entropy
    if kl_coef > 0:
        loss = loss + kl_coef * k2_kl(logprobs, old_logprobs, ref_logprobs)
    with torch.no_grad():
        ratio = log_ratio.exp()
        sums = {
            "policy/loss": surrogate.sum(),
            "policy/entropy": entropy.sum(),
            "policy/ratio": ratio[mask].sum(),
            "policy/approx_kl": (ratio - 1 - log_ratio).sum(),
            "policy/clip_fraction_low": ((ratio < 1 - clip_coef) & (advantages < 0)).sum(),
            "policy/clip_fraction_high": ((ratio > 1 + clip_coef) & (advantages > 0)).sum(),
        }
    return loss.sum() / num_tokens, sums


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    clip: float | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The critic's part of L, before vf_coef, over some tokens of an optimiser step.

    Args:
        values, old_values, returns: (B, L); only the first carries a gradient.
        mask, num_tokens: as in `policy_loss`.

    Returns:
        The loss, a scalar, and sums over the tokens for the metrics.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    losses = clipped_value_loss(values, old_values, returns, clip)
    with torch.no_grad():
        held = losses > clipped_value_loss(values, old_values, returns, None)
        sums = {"value/loss": losses.sum(), "value/clip_fraction": held.sum()}
    return losses.sum() / num_tokens, sums


# --- the reward --------------------------------------------------------------------------------

# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w.)])[-+])?)\$?(?P<digits>(\d{1,3}(,\d{3})+(?!\d)|\d+)(\.\d+)?|\.\d+)",
    re.ASCII,
)


def last_number(
    prompts: list, completions: list[str], answer: list, **columns: list
) -> list[float | None]:
    """1 where the completion's last number equals the answer's last number, else 0.

    Serves answers such as `5` and GSM8K's `... #### 1,234`. An answer without a number gives
    None, which ends the run with the row's prompt.
    """

    def find(text: Any) -> Decimal | None:
        numbers = list(NUMBER.finditer(str(text)))
        if not numbers:
            return None
        return Decimal(numbers[-1]["sign"] + numbers[-1]["digits"].replace(",", ""))

    return [
        None if find(right) is None else float(find(completion) == find(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def import_reward_fn(flag: str, spec: str) -> Callable:
    """A rule of this file by its name, or a function from path/to/file.py:function."""
    if spec == "last_number":
        return last_number
    path, _, name = spec.rpartition(":")
    known = path.endswith(".py") and Path(path).is_file()
    require(known, f"{flag} {spec}: neither last_number nor path/to/file.py:function")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"error: {flag} {spec}: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    require(callable(function), f"{flag} {spec}: there is no function {name} in {path}")
    return function


def load_reward_fns(flag: str, specs: tuple[str, ...], row: dict) -> dict[str, Callable]:
    """Reward functions by name; each must accept the columns of a row of the dataset."""
    functions = {}
    for spec in specs:
        name = spec.rpartition(":")[2]
        taken = {*functions, "mean", "std", "zero_variance_groups", "reward_model"}
        require(name not in taken, f"{flag} {spec}: reward/{name} is the name of another metric")
        functions[name] = import_reward_fn(flag, spec)
        try:
            signature = inspect.signature(functions[name])
            signature.bind(prompts=[], completions=[], **row["columns"])
        except TypeError as error:
            raise SystemExit(
                f"error: {flag} {spec}: {error}; it is called with prompts, completions and the "
                f"columns {sorted(row['columns'])} (see --answer-column)"
            ) from None
    return functions


def apply_reward_fn(
    name: str, function: Callable, rows: list[dict], completions: list[str]
) -> torch.Tensor:
    """Rewards (B,) float32 of one completion for each row.

    Of several processes the first calls the function, with all of the rows: it may compare them.
    """
    if RANK > 0:
        return torch.tensor(gather([]))
    prompts = [row["prompt"] for row in rows]
    columns = {key: [row["columns"][key] for row in rows] for key in rows[0]["columns"]}
    rewards = function(prompts=prompts, completions=completions, **columns)
    require(
        hasattr(rewards, "__len__")
        and len(rewards) == len(completions)
        and not isinstance(rewards, str | dict),
        f"reward function {name} must return a list of {len(completions)} numbers, one for each "
        f"completion; it returned {rewards!r:.200}",
    )
    values = []
    for row, completion, reward in zip(rows, completions, rewards, strict=True):
        try:
            values.append(float(reward))
        except (TypeError, ValueError):
            values.append(math.nan)
        require(
            math.isfinite(values[-1]),
            f"reward function {name} returned {reward!r} for the completion {completion!r} of the "
            f"prompt {row['prompt']!r} with {row['columns']}; rules are given by --eval-reward-fn "
            "and, for training, --reward-fn",
        )
    return torch.tensor(gather(values))


@as_forward
def reward_model_scores(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Scores (B,) float32 of rows of tokens (B, L): the head's output at the last real token.

    That token is found from the mask, so that the side and the amount of padding do not matter.
    transformers looks for the last id that is not the padding id, which misses a real EOS where
    the tokenizer has one id for both. B may be 0, as in `completion_logprobs`.
    """
    batch = len(input_ids)
    if batch == 0:
        input_ids, attention_mask = input_ids.new_zeros(1, 1), attention_mask.new_ones(1, 1)
    attention_mask = attention_mask.long()
    positions = attention_mask.cumsum(dim=1)
    hidden = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(positions - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    last = (positions * attention_mask).argmax(dim=1)[:batch]
    rows = torch.arange(len(last), device=last.device)
    with torch.autocast(last.device.type, enabled=False):  # bfloat16 would make near rewards equal
        scores = model.score(hidden[rows, last].float())  # (B, 1)
    return scores.squeeze(1).clone()  # FSDP needs no view, but a tensor of its own


def load_reward_model(source: str, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """A frozen classifier with one label that knows the policy's tokens: it scores their ids."""
    own = load("--reward-model", source, AutoTokenizer.from_pretrained)
    same = tokenizer.get_vocab().items() <= own.get_vocab().items()  # it may have one for padding
    require(same, f"--reward-model {source}: its tokenizer is not that of --model")
    model = load_model("--reward-model", source, AutoModelForSequenceClassification)
    require(
        model.config.num_labels == 1 and hasattr(model, "score"),
        f"--reward-model {source}: {type(model).__name__} with {model.config.num_labels} labels; "
        "one label and a head called `score` are expected",
    )
    return model.requires_grad_(False)


# --- the critic --------------------------------------------------------------------------------


def load_classifier(flag: str, source: str, seed: int) -> torch.nn.Module:
    """A transformer with a head of one output, in float32 and in eval mode: dropout is off.

    A head that the checkpoint lacks is drawn from N(0, 1 / (d + 1)) without a bias, d being the
    hidden size (Stiennon et al. 2020, arXiv 2009.01325, appendix B.1).
    """
    options = {"dtype": torch.float32, "num_labels": 1, "output_loading_info": True}
    loader = AutoModelForSequenceClassification.from_pretrained
    model, report = load(flag, source, loader, **options)
    head = getattr(model, "score", None)
    require(
        isinstance(head, torch.nn.Linear) and head.bias is None,
        f"{flag} {source}: {type(model).__name__} has no linear head called `score` without a bias",
    )
    missing = sorted(set(report["missing_keys"]) - {"score.weight"})
    require(
        not missing,
        f"{flag} {source}: weights that {type(model).__name__} needs are not in it: {missing}",
    )
    torch.manual_seed(seed)
    if "score.weight" in report["missing_keys"]:
        torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    # torch gives the input embedding of this id no gradient, and where pad == eos it is the EOS.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def load_critic(args: Args) -> torch.nn.Module:
    """A model with one output at each token, started as --critic-init says."""
    if args.critic_init == "reward_model":
        return load_classifier("--reward-model", args.reward_model, args.seed)
    if args.critic_init == "sft":
        return load_classifier("--model", args.model, args.seed)
    config = load("--model", args.model, AutoConfig.from_pretrained, num_labels=1)
    torch.manual_seed(args.seed)
    critic = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    critic.get_input_embeddings().padding_idx = None  # as in load_model
    return critic.eval()


@as_forward
def critic_values(
    critic: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_mask: torch.Tensor,
) -> torch.Tensor:
    """V_t, what the critic expects when it has read all tokens before t, in units of reward.

    Args:
        input_ids: (B, L) token ids, padded on either side; B may be 0, as in `completion_logprobs`.
        attention_mask: (B, L) 1 at real tokens, 0 at padding.
        completion_mask: (B, L) true at the tokens to value.

    Returns:
        (B, L) float32, 0 where `completion_mask` is not set.
    """
    batch = len(input_ids)
    if batch == 0:
        blank = (1, max(1, input_ids.shape[1]))
        input_ids, attention_mask = input_ids.new_zeros(blank), attention_mask.new_ones(blank)
    attention_mask = attention_mask.long()
    hidden = critic.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):
        values = critic.score(hidden[:batch, :-1].float()).squeeze(2)  # the one at t - 1 values t
    # One that was a reward model has learnt scores before they were centred.
    values = values - getattr(critic.config, "score_mean", 0.0)
    return torch.nn.functional.pad(values, (1, 0)).masked_fill(~completion_mask, 0.0)


# --- data --------------------------------------------------------------------------------------


def require(condition: Any, message: str) -> None:
    """End the program with a message instead of a traceback, unless the condition holds."""
    if not condition:
        raise SystemExit(f"error: {message}")


def load(flag: str, source: str, loader: Callable, **options: Any) -> Any:
    """`loader(source, **options)`, from a folder or the hub; failures name the flag."""
    require(
        Path(source).is_dir() or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source),
        f"{flag} {source}: there is no such folder here, and it is not a hub name (owner/name)",
    )
    try:
        return loader(source, **options)
    except Exception as error:  # whatever is wrong with it, it is the user's input
        reason = str(error.__cause__ or error) or type(error).__name__
        raise SystemExit(f"error: {flag} {source}: {reason}") from None


def load_model(flag: str, source: str, auto_class: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, report = load(flag, source, auto_class.from_pretrained, **options)
    missing = sorted(report["missing_keys"])
    require(
        not missing,
        f"{flag} {source}: weights that {type(model).__name__} needs are not in it: {missing}",
    )
    # torch gives the input embedding of this id no gradient, and where pad == eos it is the EOS.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], where: str, **options: Any
) -> list[int]:
    """Token ids of chat messages."""
    require(
        tokenizer.chat_template,
        f"{where}: chat messages, but the tokenizer of --model has no chat template",
    )
    require(
        all(isinstance(message, dict) and message.get("role") for message in messages),
        f"{where}: every chat message needs a role and a content, found {messages!r:.200}",
    )
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template raises what it likes at messages it does not accept
        raise SystemExit(f"error: {where}: the chat template refuses it: {error}") from None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], where: str
) -> list[int]:
    """Token ids of a prompt: a string as it is, chat messages through the chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        ids = apply_chat_template(tokenizer, prompt, where, add_generation_prompt=True)
    bos = tokenizer.bos_token_id
    require(
        bos is None or ids[:2] != [bos, bos],
        f"{where}: the prompt begins with {tokenizer.bos_token} twice: the tokenizer adds it, so "
        "take it out of the text, or give the prompt as chat messages",
    )
    return ids


def load_prompts(args: Args, split: str, tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Rows of `prompt`, its token `ids` and the other `columns`; says what was dropped and why."""
    dataset = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    rows, empty, too_long = [], 0, 0
    for index, columns in enumerate(dataset):
        where = f"--dataset {args.dataset}, row {index} of {split}"
        require(
            args.prompt_column in columns,
            f"{where}: no --prompt-column {args.prompt_column}, only {sorted(columns)}",
        )
        prompt = columns.pop(args.prompt_column)
        if args.answer_column in columns:
            columns["answer"] = columns.pop(args.answer_column)
        if args.chat and prompt and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = encode_prompt(tokenizer, prompt, where) if prompt else []
        empty += not ids
        too_long += len(ids) > args.max_prompt_length
        if 0 < len(ids) <= args.max_prompt_length:
            rows.append({"prompt": prompt, "ids": ids, "columns": columns})
    found = (
        f"{split}: {len(rows)} of {len(dataset)} prompts; dropped {empty} empty and {too_long} "
        f"longer than --max-prompt-length {args.max_prompt_length}"
    )
    print(found)
    require(rows, f"--dataset {args.dataset}: nothing is left of {found}")
    return rows


def batch_rows(step: int, batch_size: int, num_rows: int, seed: int) -> list[int]:
    """Row numbers of batch `step` in an endless row of epochs, each shuffled anew.

    It is a function of the step alone, so a resumed run repeats no row and skips none.
    """
    epochs, rows = divmod(np.arange(step * batch_size, (step + 1) * batch_size), num_rows)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(num_rows)
        for epoch in np.unique(epochs)
    }
    return [int(orders[epoch][row]) for epoch, row in zip(epochs, rows, strict=True)]


def micro_batches(lengths: list[int], micro_batch_size: int) -> Iterator[list[int]]:
    """Split a batch's rows into groups of similar length, so that little is padded.

    Only the rows of one optimiser step are sorted: which rows meet in a step stays random. Of
    several processes each gets as many groups, and of a group's neighbours every one its own; of
    the last group one may get nothing.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), micro_batch_size * WORLD_SIZE):
        yield order[start : start + micro_batch_size * WORLD_SIZE][RANK::WORLD_SIZE]


# --- several processes -------------------------------------------------------------------------
# Under torchrun each process runs this whole file. All of them plan the same batches and draw the
# same random numbers, each computes a part of the rows with a part of the weights, and they add up
# what they found. One process alone does nothing here.

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def start_process() -> torch.device:
    """The device of this process; of several, rank 0 alone prints.

    One that waits for the others longer than half an hour ends with an error.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if WORLD_SIZE > 1:
        if device.type == "cuda":  # CUDA-only
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            count = torch.cuda.device_count()
            require(
                device.index < count, f"torchrun: more processes than this machine's {count} GPUs"
            )
            torch.cuda.set_device(device)
        own = device if device.type == "cuda" else None
        torch.distributed.init_process_group(timeout=timedelta(minutes=30), device_id=own)
        if RANK > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            transformers_logging.set_verbosity_error()
    return device


def gather(part: list) -> list:
    """The lists of all processes, one after the other."""
    parts = [part] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(parts, part)
    return list(itertools.chain(*parts))


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, written to `values`."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a transformer, the first nearest to the embeddings."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise SystemExit(f"error: {type(model).__name__}: no list of its {count} layers was found")


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model to the device; of several processes, each keeps a part of every weight.

    FSDP gathers the weights of one layer at a time, in bfloat16 on a GPU, forgets them after use,
    and adds up the gradients in float32. The parts are float32, and so is a reward head's product.
    (One GPU keeps embeddings, norms and what the layers hand on in float32; here it is bfloat16.)
    """
    if WORLD_SIZE == 1:
        return model.to(device)
    # For `gathered`: the same model on weights without elements.
    empty = {id(weight): Parameter(torch.empty(0), False) for weight in model.parameters()}
    whole = copy.deepcopy(model, empty).to(device)
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    low = torch.bfloat16 if use_bfloat16(device) else None
    head = [model.score] if hasattr(model, "score") else []
    for module in (*head, *decoder_layers(model), model):
        dtype = None if module in head else low
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        # Losses are divided by counts over all processes, so gradients are added, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.whole = [whole]  # in a list, so that it is no submodule
    return model


@contextmanager
def gathered(model: torch.nn.Module, to_save: bool = False) -> Iterator[torch.nn.Module]:
    """The model with whole weights: to sample from, on each process; to save, on rank 0's host.

    They are gathered once, in the type that autocast computes with where it is on. It is a plain
    model without FSDP's hooks: no process waits for another between two tokens.
    """
    if WORLD_SIZE == 1:
        yield model
        return
    (whole,) = model.whole
    for name, weight in model.named_parameters():
        weight = weight.detach().to(compute_dtype(weight)).full_tensor()
        if to_save:  # on a GPU there may be no room for all of them
            weight = weight.cpu() if RANK == 0 else weight.new_empty(0)
        whole.get_parameter(name).data = weight
    yield whole
    for weight in whole.parameters():
        weight.data = weight.new_empty(0)


def clip_gradients(parameters: Iterable[Parameter], max_norm: float) -> float:
    """Scale gradients with a larger norm down to it; returns the norm that they had."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def whole_state(state: Any) -> Any:
    """A state dict with whole tensors, in the memory of rank 0's host; None elsewhere."""
    if isinstance(state, dict):
        return {name: whole_state(value) for name, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()  # together
        return state.cpu() if RANK == 0 else None
    return state.cpu() if torch.is_tensor(state) else state


def load_state(part: Any, state: dict) -> None:
    """Give a model or an optimizer, or this process's parts of it, what `whole_state` made."""

    def cut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor) or tensor.dim() == 0:  # a number, as Adam's `step`
            return tensor
        layout = (like.device_mesh, like.placements)
        return distribute_tensor(tensor.to(like.device), *layout, src_data_rank=None)

    if isinstance(part, torch.optim.Optimizer):
        weights = [weight for group in part.param_groups for weight in group["params"]]
        for index, values in state["state"].items():
            values |= {name: cut(value, weights[index]) for name, value in values.items()}
    else:
        own = part.state_dict()
        state = {name: cut(value, own[name]) for name, value in state.items()}
    part.load_state_dict(state)


# --- run folder, checkpoint and resume ---------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; with --resume, those that the run was started with."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    if args.resume is None:
        return args
    path = Path(args.resume) / "args.json"
    require(path.is_file(), f"--resume {args.resume}: not the folder of a run: no args.json in it")
    saved = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(path.read_text()).items()
    }
    known = {field.name for field in fields(Args)}
    require(set(saved) == known, f"--resume: {path} is of another script or version")
    saved = replace(Args(**saved), resume=args.resume)
    # Parsed again with the saved flags as defaults: what differs now was typed, and must not be
    # ignored without a word.
    typed = asdict(tyro.cli(Args, args=argv, default=saved))
    changed = [name for name, value in asdict(saved).items() if typed[name] != value]
    require(not changed, f"--resume takes all flags from {path}, so {changed} cannot be changed")
    return saved


def make_run_dir(args: Args) -> Path:
    """A new folder `{exp_name}__{seed}__{time}` with the flags in it."""
    run_dir = None
    if RANK == 0:
        name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir, number = Path(args.output_dir) / name, 1
        while run_dir.exists():  # another run started within the same second
            number += 1
            run_dir = Path(args.output_dir) / f"{name}-{number}"
        run_dir.mkdir(parents=True)  # fails rather than write into a folder made meanwhile
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    return gather([run_dir])[0]


def log(run_dir: Path, tracker: Any, step: int, metrics: dict, samples: list[dict]) -> None:
    """Append to metrics.jsonl and samples.jsonl, and to Weights & Biases under --track."""
    if RANK > 0:
        return
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in samples)
    if tracker:
        tracker.log(metrics, step=step)


def save_checkpoint(run_dir: Path, state: dict) -> None:
    """Replace checkpoint/state.pt; a kill at any moment leaves a whole file, the old or the new."""
    if RANK > 0:
        return
    logs = {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")}
    path = run_dir / "checkpoint" / "state.pt"
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save({**state, "logs": logs}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(run_dir: Path) -> dict:
    """Read checkpoint/state.pt and cut the logs back to its moment."""
    path = run_dir / "checkpoint" / "state.pt"
    require(path.is_file(), f"--resume {run_dir}: no checkpoint was saved yet; start anew")
    # Processes that read it together share the pages of the file, and copy their parts only.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=WORLD_SIZE > 1)
    if RANK > 0:
        return state
    for name, size in state["logs"].items():
        log = run_dir / name
        whole = log.is_file() and log.stat().st_size >= size
        require(whole, f"--resume {run_dir}: {name} is shorter than the checkpoint says")
        os.truncate(log, size)
    return state


def save_model(
    run_dir: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> None:
    """Write model/ for `from_pretrained`."""
    if RANK > 0:
        return
    # The checkpoint's own may ask for top-k, or be one that transformers refuses to save.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.cpu().save_pretrained(run_dir / "model")
    model.generation_config.save_pretrained(run_dir / "model")  # a classifier's is not saved else
    tokenizer.save_pretrained(run_dir / "model")


def print_evaluations(run_dir: Path) -> None:
    """What the first and the last evaluation measured, from the run's own log."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    first, last = evaluations[0], evaluations[-1]
    for name in first:
        if name.startswith("eval/"):
            print(f"held-out {name[5:]}: {first[name]:.3f} -> {last[name]:.3f}")


def print_example(run_dir: Path) -> None:
    """A completion of the first and of the last evaluation, from the run's own log."""
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    before = [sample for sample in samples if sample["step"] == samples[0]["step"]]
    after = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    # The prompt whose reward rose most; without rewards, the first.
    gains = [b.get("reward", 0) - a.get("reward", 0) for a, b in zip(before, after, strict=True)]
    best = gains.index(max(gains))
    print(f"before: {before[best]['prompt']!r} -> {before[best]['completion']!r}")
    print(f"after:  {after[best]['prompt']!r} -> {after[best]['completion']!r}")


# --- training ----------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """What can be seen to be wrong before anything is loaded."""
    for name in (
        "save_every max_prompt_length total_rollouts prompts_per_rollout max_new_tokens "
        "temperature update_epochs num_minibatches micro_batch_size learning_rate "
        "critic_learning_rate max_grad_norm eval_every eval_rows kl_horizon"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, found {value}")
    for name in ("vf_clip_coef", "target_kl", "kl_target"):
        value = getattr(args, name)
        require(
            value is None or value > 0,
            f"--{name.replace('_', '-')} must be more than 0 or None, found {value}",
        )
    for name in (
        "seed beta warmup_ratio eval_temperature vf_coef ent_coef missing_eos_penalty"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{name} must not be negative or infinite, found {value}")
    for name in ("gamma", "gae_lambda"):
        value = getattr(args, name)
        require(
            0 <= value <= 1, f"--{name.replace('_', '-')} must lie between 0 and 1, found {value}"
        )
    require(0 < args.clip_coef < 1, f"--clip-coef must lie between 0 and 1, found {args.clip_coef}")
    require(
        args.num_minibatches <= args.prompts_per_rollout,
        f"--num-minibatches {args.num_minibatches} is more than the {args.prompts_per_rollout} "
        "completions of a rollout (--prompts-per-rollout)",
    )
    require(
        args.reward_fn or args.reward_model,
        "there is nothing to learn from: give --reward-model or --reward-fn",
    )
    require(
        args.reward_model or args.critic_init != "reward_model",
        "--critic-init reward_model needs a --reward-model; with --reward-fn alone use sft",
    )
    require(
        args.kl_target is None or args.beta > 0,
        "--kl-target adapts --beta, which must be more than 0 to begin with",
    )
    require(
        args.kl_target is None or args.kl_horizon >= args.prompts_per_rollout,
        f"--kl-horizon {args.kl_horizon} must be at least --prompts-per-rollout, or beta may jump",
    )
    rewards = len(args.reward_fn) + bool(args.reward_model)
    require(
        len(args.reward_weights) in (0, rewards),
        f"--reward-weights: {len(args.reward_weights)} weights for {rewards} rewards",
    )
    require(
        not Path(args.output_dir).is_file(),
        f"--output-dir {args.output_dir} is a file, not a folder",
    )
    require(args.warmup_ratio < 1, f"--warmup-ratio must be less than 1, found {args.warmup_ratio}")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU; weights, log-softmax, losses and rewards are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


def complete(
    args: Args,
    model: torch.nn.Module,
    prompts: list[list[int]],
    temperature: float,
    stop_ids: list[int],
    pad_id: int,
    generator: torch.Generator,
) -> tuple[list[list[int]], list[bool]]:
    """A completion's tokens for each prompt, and whether it ended at a stop id.

    Of several processes each samples some. Random numbers are drawn for all, and for all tokens
    that a completion may have: what is sampled depends neither on their number nor on lengths.
    """
    count = len(prompts)
    uniform = torch.rand(count, args.max_new_tokens, dtype=torch.float64, generator=generator)
    part = slice(count * RANK // WORLD_SIZE, count * (RANK + 1) // WORLD_SIZE)
    ids, mask = pad_rows(prompts[part], pad_id, "left", model.device)
    width = ids.shape[1]
    with autocast(model.device), gathered(model) as whole:
        ids, mask, finished = generate(
            whole,
            ids,
            mask,
            args.max_new_tokens,
            temperature,
            stop_ids,
            pad_id,
            uniform[part].to(model.device),
        )
    lengths = mask.sum(dim=1).tolist()
    sampled = [row[:n] for row, n in zip(ids[:, width:].tolist(), lengths, strict=True)]
    return gather(sampled), gather(finished.tolist())


@dataclass
class Rollout:
    """B completions; the L columns hold the prompt, padded on the left, and the completion."""

    rows: list[dict]  # B rows of the dataset
    ids: torch.Tensor  # (B, L) tokens
    attention_mask: torch.Tensor  # (B, L) bool, prompt and completion
    completion_mask: torch.Tensor  # (B, L) bool, sampled tokens, the stop token included
    finished: torch.Tensor  # (B,) bool, ended at a stop id
    completions: list[str]  # decoded

    def index(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (b, 1) and columns (l,): `x[rows, columns]` is the (b, l) part of an x (B, L).

        Columns that are padding in all of the rows (b,) are left out.
        """
        return rows[:, None], self.attention_mask[rows].any(dim=0).nonzero().squeeze(1)


def roll_out(
    args: Args,
    policy: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    rows: list[dict],
    temperature: float,
    generator: torch.Generator,
) -> Rollout:
    """Sample one completion for each row."""
    # Any id will do for padding: the masks come from lengths.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [row["ids"] for row in rows]
    sampled, finished = complete(args, policy, prompts, temperature, stop_ids, pad_id, generator)
    prompt_ids, prompt_mask = pad_rows(prompts, pad_id, "left", policy.device)
    ids, mask = pad_rows(sampled, pad_id, "right", policy.device)
    return Rollout(
        rows=rows,
        ids=torch.cat([prompt_ids, ids], dim=1),
        attention_mask=torch.cat([prompt_mask, mask], dim=1),
        completion_mask=torch.cat([torch.zeros_like(prompt_mask), mask], dim=1),
        finished=torch.tensor(finished, device=policy.device),
        completions=tokenizer.batch_decode(sampled, skip_special_tokens=True),
    )


def score(
    args: Args,
    rollout: Rollout,
    functions: dict[str, Callable],
    reward_model: torch.nn.Module | None,
    weights: tuple[float, ...],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of all rewards (B,), and each of them by name (B,), before weighting.

    `rm_bradley_terry.py` leaves with its models the mean score of preferred completions; it is
    subtracted, so that such a completion scores about 0 (after InstructGPT, section 3.5).
    """
    device, parts = rollout.ids.device, {}
    for name, function in functions.items():
        parts[name] = apply_reward_fn(name, function, rollout.rows, rollout.completions).to(device)
    if reward_model is not None:
        scores = torch.zeros(len(rollout.rows), device=device)
        lengths = rollout.attention_mask.sum(dim=1).tolist()
        for rows in micro_batches(lengths, args.micro_batch_size):
            rows = torch.tensor(rows, dtype=torch.long, device=device)
            at = rollout.index(rows)
            with autocast(device):
                scores[rows] = reward_model_scores(
                    reward_model, rollout.ids[at], rollout.attention_mask[at]
                )
        parts["reward_model"] = total(scores) - getattr(reward_model.config, "score_mean", 0.0)
    weights = torch.tensor(weights or [1.0] * len(parts), dtype=torch.float32, device=device)
    return weights @ torch.stack(list(parts.values())), parts


def rollout_logprobs(
    args: Args, model: torch.nn.Module, rollout: Rollout, at: tuple, **options: bool
) -> Any:
    """What `completion_logprobs` gives (b, l) at an index of the rollout, as it was sampled."""
    with autocast(rollout.ids.device):
        return completion_logprobs(
            model,
            rollout.ids[at],
            rollout.attention_mask[at],
            rollout.completion_mask[at],
            args.temperature,
            **options,
        )


def rollout_values(
    critic: torch.nn.Module, rollout: Rollout, at: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """What `critic_values` gives (b, l) at an index of the rollout."""
    with autocast(rollout.ids.device):
        return critic_values(
            critic, rollout.ids[at], rollout.attention_mask[at], rollout.completion_mask[at]
        )


def plan_pass(
    args: Args, lengths: torch.Tensor, generator: torch.Generator
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """A pass over a rollout in random order: row numbers of each minibatch, and its micro-batches.

    Of several processes each gets all of the former, but micro-batches of its own rows.
    """
    order = torch.randperm(len(lengths), generator=generator).to(lengths.device)
    return [
        (
            rows,
            [rows[some] for some in micro_batches(lengths[rows].tolist(), args.micro_batch_size)],
        )
        for rows in order.tensor_split(args.num_minibatches)
    ]


def completion_metrics(
    rewards: torch.Tensor, parts: dict[str, torch.Tensor], rollout: Rollout
) -> dict[str, float]:
    """What is logged of a rollout itself."""
    lengths = rollout.completion_mask.sum(dim=1).float()
    return {
        "reward/mean": rewards.mean().item(),
        **{f"reward/{name}": values.mean().item() for name, values in parts.items()},
        "completions/length_mean": lengths.mean().item(),
        "completions/length_min": lengths.min().item(),
        "completions/length_max": lengths.max().item(),
        "completions/truncated_fraction": 1 - rollout.finished.float().mean().item(),
    }


def print_models(models: dict[str, torch.nn.Module | None]) -> None:
    """A table of the models: size, and bytes while training in float32 with AdamW."""
    print(
        f"{'model':<13}{'parameters':>14}  {'role':<9}{'weights':>10}{'gradients':>11}{'AdamW':>9}"
    )
    together = 0
    for name, model in models.items():
        if model is None:
            print(f"{name:<13}{'-':>14}  not used")
            continue
        size = {True: 0, False: 0}  # bytes of what is trained, and of what is frozen
        for parameter in model.parameters():
            size[parameter.requires_grad] += parameter.numel() * parameter.element_size()
        columns = (size[True] + size[False], size[True], 2 * size[True])
        together += sum(columns)
        mb = [f"{number / 1e6:,.1f} MB" for number in columns]
        role = "frozen" if not size[True] else "in part" if size[False] else "trained"
        count = f"{model.num_parameters():,}"
        print(f"{name:<13}{count:>14}  {role:<9}{mb[0]:>10}{mb[1]:>11}{mb[2]:>9}")
    where = "" if WORLD_SIZE == 1 else f", dealt out to {WORLD_SIZE} processes"
    print(f"together {together / 1e6:,.1f} MB{where}, activations not counted")


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check_args(args)
    device = start_process()
    transformers_logging.disable_progress_bar()
    tokenizer = load("--model", args.model, AutoTokenizer.from_pretrained)
    stop_ids = load("--model", args.model, find_stop_ids, tokenizer=tokenizer)
    require(stop_ids, f"--model {args.model}: neither tokenizer nor generation config has an EOS")
    train_rows = load_prompts(args, args.train_split, tokenizer)
    eval_rows = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    functions = load_reward_fns("--reward-fn", args.reward_fn, train_rows[0])
    if args.eval_reward_fn:
        specs = (args.eval_reward_fn,)
        eval_functions = load_reward_fns("--eval-reward-fn", specs, eval_rows[0])

    policy = shard(load_model("--model", args.model, AutoModelForCausalLM), device)
    reference = reward_model = None
    if args.beta > 0:
        reference = load_model("--model", args.model, AutoModelForCausalLM)
        reference = shard(reference.requires_grad_(False), device)
    if args.reward_model:
        reward_model = shard(load_reward_model(args.reward_model, tokenizer), device)
        require(
            reward_model.config.vocab_size >= policy.config.vocab_size,
            f"--reward-model {args.reward_model} has fewer embeddings than the policy may sample",
        )
    critic = shard(load_critic(args), device)
    for flag, model in (("--model", policy), ("--reward-model", reward_model or policy)):
        positions = getattr(model.config, "max_position_embeddings", math.inf)
        require(
            args.max_prompt_length + args.max_new_tokens <= positions,
            f"--max-prompt-length {args.max_prompt_length} + --max-new-tokens "
            f"{args.max_new_tokens} is more than the {positions} positions of {flag}",
        )
    optimizer = torch.optim.AdamW(
        [
            {"params": policy.parameters(), "lr": args.learning_rate},
            {"params": critic.parameters(), "lr": args.critic_learning_rate},
        ],
        weight_decay=0.0,
        fused=device.type == "cuda",  # CUDA-only: no temporaries of the weights' size
    )
    warmup = int(args.warmup_ratio * args.total_rollouts)
    scheduler = get_scheduler(args.lr_schedule, optimizer, warmup, args.total_rollouts)
    generator = torch.Generator().manual_seed(args.seed)
    beta = args.beta

    def evaluate() -> tuple[dict, list[dict]]:
        """Metrics and samples of one completion for each held-out prompt."""
        # A generator of its own, so that every evaluation draws with the same random numbers.
        draws = torch.Generator().manual_seed(args.seed)
        samples, right = [], []
        for start in range(0, len(eval_rows), args.prompts_per_rollout):
            rows = eval_rows[start : start + args.prompts_per_rollout]
            rollout = roll_out(
                args, policy, tokenizer, stop_ids, rows, args.eval_temperature, draws
            )
            if args.eval_reward_fn:
                rewards, parts = score(args, rollout, eval_functions, None, ())
            else:
                rewards, parts = score(args, rollout, functions, reward_model, args.reward_weights)
            if len(parts) == 1 and "reward_model" not in parts:  # a single rule: full marks are 1
                right += (next(iter(parts.values())) >= 1).tolist()
            lengths = rollout.completion_mask.sum(dim=1)
            samples += [
                {"prompt": row["prompt"], "completion": text, "reward": reward, "length": length}
                for row, text, reward, length in zip(
                    rows, rollout.completions, rewards.tolist(), lengths.tolist(), strict=True
                )
            ]
        metrics = {"eval/reward": np.mean([sample["reward"] for sample in samples])}
        if right:
            metrics["eval/accuracy"] = np.mean(right)
        metrics["eval/length_mean"] = np.mean([sample["length"] for sample in samples])
        return metrics, samples

    first_step = 0
    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        load_state(policy, state["policy"])
        load_state(critic, state["critic"])
        load_state(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        generator.set_state(state["generator"])
        first_step, beta = state["step"], state["beta"]
        del state  # a second copy of all that was loaded
    else:
        run_dir = make_run_dir(args)
    tracker = None
    if args.track and RANK == 0:
        import wandb  # only here: nobody else needs an account

        tracker = wandb.init(
            project=args.wandb_project, id=run_dir.name, resume="allow", config=asdict(args)
        )
    models = {"policy": policy, "reference": reference, "reward model": reward_model}
    print_models(models | {"critic": critic})
    print(f"{run_dir}: on {device}")
    if not args.resume:
        log(run_dir, tracker, 0, *evaluate())

    progress = tqdm(
        range(first_step, args.total_rollouts),
        initial=first_step,
        total=args.total_rollouts,
        disable=RANK > 0,
    )
    for step in progress:
        started = time.perf_counter()

        # 1. roll out: a completion of each prompt, from the policy as it is now
        picked = batch_rows(step, args.prompts_per_rollout, len(train_rows), args.seed)
        rows = [train_rows[i] for i in picked]
        rollout = roll_out(args, policy, tokenizer, stop_ids, rows, args.temperature, generator)
        mask = rollout.completion_mask  # (B, L)
        rolled_out = time.perf_counter()

        # 2. score
        rewards, parts = score(args, rollout, functions, reward_model, args.reward_weights)  # (B,)
        scores = rewards - args.missing_eos_penalty * ~rollout.finished  # (B,)
        scored = time.perf_counter()

        # 3. log-probs under policy and reference, and values: they stay fixed during the update
        lengths = mask.sum(dim=1)  # (B,)
        passes = [plan_pass(args, lengths, generator) for _ in range(args.update_epochs)]
        old_logprobs, ref_logprobs, old_values = torch.zeros(3, *mask.shape, device=device)
        with torch.no_grad():
            # Over the micro-batches of the first pass: the first ratio is then exactly 1.
            for rows in itertools.chain(*(micro for _, micro in passes[0])):
                at = rollout.index(rows)
                old_logprobs[at] = rollout_logprobs(args, policy, rollout, at)
                old_values[at] = rollout_values(critic, rollout, at)
                if reference is not None:
                    ref_logprobs[at] = rollout_logprobs(args, reference, rollout, at)
        for values in (old_logprobs, ref_logprobs, old_values):
            total(values)

        # 4. a reward for each token: the KL penalty, and the score at the last
        kl_in_reward = beta if args.kl_placement == "reward" else 0.0
        token_rewards = shaped_rewards(scores, old_logprobs, ref_logprobs, mask, kl_in_reward)
        if args.whiten_rewards:
            token_rewards = whiten(token_rewards, mask, keep_mean=True)

        # 5. advantages and returns
        advantages, returns = gae(token_rewards, old_values, mask, args.gamma, args.gae_lambda)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)

        # 6. optimise: an optimiser step a minibatch, its gradient summed over micro-batches
        losses, policy_norms, value_norms, sums = [], [], [], defaultdict(float)
        tokens_seen = 0
        for minibatches in passes:
            for step_rows, minibatch in minibatches:
                tokens = lengths[step_rows].sum().item()
                step_loss = torch.zeros((), dtype=torch.float64, device=device)
                approx_kl = torch.zeros_like(step_loss)
                for rows in minibatch:
                    at = rollout.index(rows)
                    logprobs, entropy = rollout_logprobs(
                        args, policy, rollout, at, return_entropy=True
                    )
                    p_loss, p_sums = policy_loss(
                        logprobs,
                        old_logprobs[at],
                        ref_logprobs[at],
                        advantages[at],
                        entropy,
                        mask[at],
                        tokens,
                        args.clip_coef,
                        beta if args.kl_placement == "loss" else 0.0,
                        args.ent_coef,
                    )
                    p_loss.backward()  # before the critic's forward pass: half the activations
                    values = rollout_values(critic, rollout, at)
                    v_loss, v_sums = value_loss(
                        values, old_values[at], returns[at], mask[at], tokens, args.vf_clip_coef
                    )
                    (args.vf_coef * v_loss).backward()
                    step_loss += p_loss.detach() + args.vf_coef * v_loss.detach()
                    approx_kl += p_sums["policy/approx_kl"] / tokens
                    for name, value in (p_sums | v_sums).items():
                        sums[name] += value
                tokens_seen += tokens
                losses.append(total(step_loss).item())
                for model, norms in ((policy, policy_norms), (critic, value_norms)):
                    norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
                require(
                    math.isfinite(losses[-1] + policy_norms[-1] + value_norms[-1]),
                    f"rollout {step + 1}: loss {losses[-1]}, gradient norms {policy_norms[-1]} and "
                    f"{value_norms[-1]} (critic); no step was taken. Likely causes: "
                    "--learning-rate too high (or that of the critic), extreme rewards, a broken "
                    f"--model. The last checkpoint, if any, is in {run_dir / 'checkpoint'}",
                )
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if args.target_kl is not None and total(approx_kl) > args.target_kl:
                break
        updated = time.perf_counter()

        # 7. log, evaluate, save
        metrics = completion_metrics(rewards, parts, rollout) | {
            "objective/loss": np.mean(losses),
            "objective/beta": beta,
            "policy/grad_norm": np.mean(policy_norms),
            "policy/learning_rate": scheduler.get_last_lr()[0],
            "value/grad_norm": np.mean(value_norms),
            "value/learning_rate": scheduler.get_last_lr()[1],
            "value/explained_variance": explained_variance(old_values, returns, mask).item(),
            "value/mean": old_values[mask].mean().item(),
            "value/variance": old_values[mask].var(correction=0).item(),
            "value/return_mean": returns[mask].mean().item(),
            "value/return_variance": returns[mask].var(correction=0).item(),
            "time/rollout_seconds": rolled_out - started,
            "time/score_seconds": scored - rolled_out,
            "time/update_seconds": updated - scored,
            "time/tokens_per_second": lengths.sum().item() / (updated - started),
        }
        for name, value in sums.items():  # means a token
            metrics[name] = total(value).item() / tokens_seen
        metrics["objective/reward"] = scores.mean().item()
        if reference is not None:  # nats a completion
            k1 = (old_logprobs - ref_logprobs).sum(dim=1).mean().item()
            metrics["objective/kl_k1"] = k1
            k3 = k3_kl(old_logprobs, ref_logprobs).sum(dim=1)  # 0 outside the mask, like both
            metrics["objective/kl"] = k3.mean().item()
            metrics["objective/non_score_reward"] = -kl_in_reward * k1
            metrics["objective/reward"] -= kl_in_reward * k1
            if args.kl_target is not None:
                beta = adapt_beta(beta, k1, args.kl_target, args.kl_horizon, len(lengths))
        scheduler.step()
        done, last = step + 1, step + 1 == args.total_rollouts
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate()
            metrics |= eval_metrics
        log(run_dir, tracker, done, metrics, samples)
        shown = ("reward/mean", "completions/length_mean", "policy/entropy")
        progress.set_postfix({name: f"{metrics[name]:.2f}" for name in shown})
        if done % args.save_every == 0 or last:
            state = {"policy": policy, "critic": critic}
            state |= {"optimizer": optimizer, "scheduler": scheduler}
            state = {name: whole_state(part.state_dict()) for name, part in state.items()}
            state |= {"generator": generator.get_state(), "beta": beta, "step": done}
            save_checkpoint(run_dir, state)

    with gathered(policy, to_save=True) as whole:
        save_model(run_dir, whole, tokenizer, stop_ids)
    if RANK == 0:
        print_evaluations(run_dir)
        print_example(run_dir)
    print(f"model: {run_dir / 'model'}")
    print(
        f"next: generate with it, or train on with --model {run_dir / 'model'}, also as reference"
    )
    if tracker:
        tracker.finish()
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        torch.distributed.destroy_process_group()
    return run_dir


if __name__ == "__main__":
    main(parse_args())
    if WORLD_SIZE > 1:  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)
        sys.stdout.flush()
        os._exit(0)
