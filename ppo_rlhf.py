r"""Proximal Policy Optimization (PPO) for language models: RLHF as in InstructGPT.

The policy pi completes a prompt x with y. A reward model, or a function, scores the completion.
Maximise (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, equation 2)

    J(theta) = E[ score(x, y) - beta sum_t log( pi_theta(y_t | x, y_<t) / pi_ref(y_t | x, y_<t) ) ].

A completion is an episode, its tokens are the actions. Token t gets the reward

    r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t.

A critic V predicts the return-to-go. Generalised advantage estimation (GAE, arXiv
1506.02438, equation 16) and the clipped surrogate (PPO, arXiv 1707.06347, equation 7) give

    delta_t = r_t + gamma V_old[t+1] - V_old[t],    A_t = sum_l (gamma lambda)^l delta_[t+l],
    R_t = A_t + V_old[t],    rho_t = (pi_theta / pi_old)_t,
    L = - mean_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
        + vf_coef mean_t 1/2 max((V_t - R_t)^2, (V_old[t] + clip(V_t - V_old[t], +-eps_v) - R_t)^2)
        - ent_coef mean_t H(pi_t).

pi_old and V_old are policy and critic at the rollout; V_old is 0 after the last token. mean_t is
over all sampled tokens of an optimiser step; A_t is whitened in L, but not in R_t. Deviations from
the paper: no pretraining gradients; whitened advantages and clipped values, as in the code that
InstructGPT grew from (Ziegler et al. 2019, arXiv 1909.08593); a cut-off completion counts as ended.

    python ppo_rlhf.py                                   # tiny/reviews, half a minute on a CPU
    python ppo_rlhf.py --model runs/sft__1__... --reward-model runs/rm_bradley_terry__1__... \
        --dataset trl-lib/ultrafeedback-prompt --max-prompt-length 512 --max-new-tokens 512 \
        --beta 0.05 --micro-batch-size 8 --learning-rate 1e-6 --critic-learning-rate 1e-5 \
        --total-rollouts 200                             # four models of 0.5B, a GPU of 48 GB
    torchrun --nproc_per_node=8 ppo_rlhf.py ...          # eight GPUs: docs/processes.md
    python ppo_rlhf.py --resume runs/ppo_rlhf__1__...    # continue an interrupted run

A healthy run: `reward/mean` and `eval/reward` rise together; `value/explained_variance` rises;
`objective/kl` stays at a few nats. If `reward/mean` rises and an independent `--eval-reward-fn`
falls, the reward model is being hacked.
"""

import json
import math
import os
import sys
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import field
from datetime import datetime
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file
from torch import Generator, Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, GenerationConfig

from common.distributed import RANK, all_gather, all_reduce_sum, checkpoint_activations
from common.distributed import clip_grad_norm, gather_weights, join_processes, leave_processes
from common.distributed import shard, sums_over_ranks
from common.generation import generate
from common.logprobs import Sequences, adapters_off, add_adapters, completion_logprobs
from common.logprobs import hidden_states, micro_batches
from common.tokens import UnusableRow, completion_rows, encode, find_stop_ids, pad_rows
from common.tokens import report_rows


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "ppo_rlhf"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of data order, all sampling and a critic's new weights
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue, with its own flags and no others
    save_every: PositiveInt = 10  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy, reference and tokenizer
    lora_rank: NonNegativeInt = 0  # train adapters of this rank alone (LoRA); 0: all weights
    dataset: str = "tiny/reviews/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: PositiveInt = 64  # longest prompt in tokens; longer ones are dropped
    # --- reward ---
    # sequence classifier with one label and --model's tokenizer; None: only reward functions
    reward_model: str | None = "tiny/reviews/reward_model"
    reward_fn: list[str] = field(default_factory=list)  # path/to/file.py:function, one or more
    # a weight for each --reward-fn, then one for --reward-model; default: 1 each
    reward_weights: list[float] = field(default_factory=list)
    # reward function of eval/reward; default: gold on the default --dataset, else those of training
    eval_reward_fn: str | None = None
    # subtracted from the reward of a completion that --max-new-tokens cuts off: a reward model has
    # only seen completions that end, so what it says of others means little
    missing_eos_penalty: NonNegativeFloat = 0.0
    # --- PPO ---
    total_rollouts: PositiveInt = 30  # rollouts, each followed by its optimiser steps
    prompts_per_rollout: PositiveInt = 128  # prompts per rollout, one completion each
    max_new_tokens: PositiveInt = 40  # longest completion in tokens
    temperature: PositiveFloat = 1.0  # sampling temperature; divides the logits in log-probs too
    update_epochs: PositiveInt = 2  # passes over a rollout's completions
    num_minibatches: PositiveInt = 2  # optimiser steps per pass
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor per token
    # GAE's lambda: 0 trusts the critic alone, 1 only observed rewards
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    clip_coef: PositiveFloat = 0.2  # eps: the ratio pi / pi_old is clipped to 1 - eps and 1 + eps
    vf_clip_coef: PositiveFloat | None = 0.2  # eps_v: clips V to V_old +- this; None: no clipping
    # factor of the value loss; hardly matters to a separate critic: Adam normalises its gradient
    vf_coef: NonNegativeFloat = 0.5
    ent_coef: NonNegativeFloat = 0.0  # coefficient of the entropy bonus
    whiten_advantages: bool = True  # give a rollout's advantages mean 0 and variance 1
    # no further pass if the mean KL(pi_old || pi) of a pass is above this, in nats per token
    target_kl: PositiveFloat | None = None
    # initial critic: the reward model, --model with a new head (sft), random weights (scratch), or
    # only a new head on the policy's own backbone, which both losses then train (policy)
    critic_init: Literal["reward_model", "sft", "scratch", "policy"] = "reward_model"
    beta: NonNegativeFloat = 0.2  # coefficient of the KL (InstructGPT: 0.02); 0 loads no reference
    kl_placement: Literal["reward", "loss"] = "reward"  # KL in rewards (k1) or loss (rho k2)
    kl_target: PositiveFloat | None = None  # adapt beta to this KL, in nats per completion
    kl_horizon: PositiveFloat = 1_280  # completions in which beta adapts by about 20% at most
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory and speed alone
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak, for tiny/; for 0.5B parameters or more 1e-6, for adapters ten times as much
    learning_rate: PositiveFloat = 5e-4
    critic_learning_rate: PositiveFloat = 1e-3  # the critic's peak; 0.5B parameters or more: 1e-5
    # how the learning rates change after their warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of rollouts in the warm-up
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down, each model's by itself
    eval_every: PositiveInt = 10  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each
    eval_temperature: NonNegativeFloat = 1.0  # sampling temperature at evaluation; 0 is greedy

    def __post_init__(self):
        if not self.reward_model and (not self.reward_fn or self.critic_init == "reward_model"):
            raise ValueError(
                "without --reward-model give --reward-fn, and --critic-init sft, scratch or policy"
            )
        if self.num_minibatches > self.prompts_per_rollout:
            raise ValueError("--num-minibatches: some would be empty, and AdamW would still move")
        if self.kl_target and self.beta == 0:
            raise ValueError("--kl-target adapts --beta, which is 0")
        if self.kl_target and self.prompts_per_rollout >= 5 * self.kl_horizon:
            raise ValueError("--kl-horizon is so short that beta would become negative")
        if self.eval_reward_fn is None and self.dataset == "tiny/reviews/prompts":
            self.eval_reward_fn = "tiny/reviews/gold.py:sentiment"
        names = [spec.rpartition(":")[2] for spec in self.reward_fn] + ["reward_model"]
        if len({*names}) < len(names):  # they name the metrics
            raise ValueError(f"--reward-fn: two rewards have one name among {names}")
        num_rewards = len(self.reward_fn) + bool(self.reward_model)
        self.reward_weights = self.reward_weights or [1.0] * num_rewards
        if len(self.reward_weights) != num_rewards:
            raise ValueError(f"--reward-weights: give {num_rewards}, one for each reward")


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: list[int]  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
# Tensors (B, T) hold a number per sampled token, and 0 after the end of a completion.
def shaped_rewards(scores: Tensor, k1: Tensor, mask: Tensor, beta: float) -> Tensor:
    """r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t (after InstructGPT, equation 2).

    Scores are (B,), the mask of sampled tokens and k1, the log-ratios in nats, (B, T).
    """
    is_last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(dim=1, keepdim=True) - 1
    return is_last * scores[:, None] - beta * k1


def gae(token_rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_[t+l],  delta_t = r_t + gamma V_[t+1] - V_t  (equation 16).

    All (B, T) and 0 after a completion's end, so V is 0 after its last token. V_t is V_old[t], the
    critic's prediction before token t. Returns A and R = A + V.
    """
    advantages = torch.zeros_like(token_rewards)
    next_value = next_advantage = torch.zeros_like(token_rewards[:, 0])  # (B,), at t + 1
    for t in reversed(range(token_rewards.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the sampled tokens, as in Ziegler et al.'s code."""
    mean, variance = x[mask].mean(), x[mask].var(correction=0)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def k2_kl(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """rho 1/2 (log pi - log pi_ref)^2 at each token, rho = pi / pi_old without a gradient.

    As a loss on tokens sampled from pi_old, its expected gradient at each prefix is that of
    KL(pi || pi_ref). As losses, k1 would have none, and k3 that of KL(pi_ref || pi) (arXiv
    2506.09477 and 2510.01555).
    """
    return 0.5 * (logprobs - old_logprobs).detach().exp() * (logprobs - ref_logprobs).square()


def adapt_beta(beta: float, kl: float, target: float, horizon: float, n: int) -> float:
    """beta (1 + e n / horizon), e = clip(kl / target - 1, +-0.2) (Ziegler et al.'s code).

    The KL, in nats per completion, was measured on n completions.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * n / horizon)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R): 1 is perfect up to a constant, 0 is no better than a constant."""
    errors, returns = (returns - values)[mask], returns[mask]
    return 1 - errors.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    weights: Tensor,
    clip_coef: float,
    beta: float,
    ent_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's part of L over some completions of a minibatch, and sums of tokens for the log.

    Log-probs (B, T) of the sampled tokens under pi_theta, pi_old and pi_ref, and the entropy of
    pi_theta, are in nats. Weights (B, T) are 1 / sampled tokens of the whole minibatch, so the
    losses of micro-batches and ranks add up, and 0 after a completion's end.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()  # rho
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    # No gradient where the ratio has left the interval to the side that A pushes to (PPO, eq. 7).
    surrogate = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    loss = surrogate
    if beta > 0:  # the KL is in the loss, not in the rewards
        loss = loss + beta * k2_kl(logprobs, old_logprobs, ref_logprobs)
    if ent_coef > 0:
        loss = loss - ent_coef * entropy
    sums = {
        "policy/loss": surrogate.sum(),
        "policy/entropy": entropy.sum(),
        "policy/ratio": (ratio * (weights > 0)).sum(),  # 1 at padding, where other terms are 0
        "policy/approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_coef) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_coef) & (advantages > 0)).sum(),
    }
    return (weights * loss).sum(), sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip_coef: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's part of L: 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-eps_v) - R)^2).

    All (B, T), with the weights of `policy_loss`; also sums over tokens. There is no gradient where
    V has left the interval and is nearer to R than the clipped V (Ziegler et al.'s code).
    """
    unclipped_losses = 0.5 * (values - returns).square()
    losses = unclipped_losses
    if clip_coef is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        losses = torch.maximum(unclipped_losses, 0.5 * (clipped_values - returns).square())
    # Inside the interval the two losses differ too, but only by rounding.
    has_left = (values - old_values).abs() > (clip_coef or math.inf)
    is_clipped = has_left & (losses > unclipped_losses)
    sums = {"value/loss": losses.sum(), "value/clip_fraction": is_clipped.sum()}
    return (weights * losses).sum(), sums


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    device = join_processes()
    os.makedirs(args.output_dir, exist_ok=True)  # before a model is loaded
    sources = f"{args.model} on {args.dataset}, rewards {args.reward_fn}, {args.reward_model}"
    print(f"{sources}, learning rate {args.learning_rate}, {device}")

    # --- rewards, data and models ---
    reward_fns = {spec.rpartition(":")[2]: load_reward_fn(spec) for spec in args.reward_fn}
    eval_fn = load_reward_fn(args.eval_reward_fn) if args.eval_reward_fn else None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    add_adapters(policy, args.lora_rank, args.seed)
    shard(policy, device)
    ref_model = None
    if args.beta > 0:
        ref_model = policy  # without its adapters
        if args.lora_rank == 0:
            ref_model = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
            shard(ref_model.requires_grad_(False), device)
    if args.reward_model:
        kind = AutoModelForSequenceClassification
        vocabulary = AutoTokenizer.from_pretrained(args.reward_model).get_vocab()
        if not tokenizer.get_vocab().items() <= vocabulary.items():
            raise ValueError(f"the tokenizer of {args.reward_model} is not that of --model")
        reward_model = load_model(kind, args.reward_model, tokenizer, positions)
        reward_model.requires_grad_(False)
        if args.lora_rank > 0 and args.critic_init == "reward_model":  # it is the critic too
            add_adapters(reward_model, args.lora_rank, args.seed)
            reward_model.value_head = deepcopy(reward_model.score).requires_grad_(True)
        shard(reward_model, device)
    reward_weights = torch.tensor(args.reward_weights)  # (K,)
    # The value function: a backbone and a head of its own, or a head on the policy's backbone.
    if args.lora_rank > 0 and args.critic_init == "reward_model":
        critic = value_backbone = reward_model
        value_head = reward_model.value_head
    else:
        critic = load_critic(args, tokenizer, positions, device)
        shared = args.critic_init == "policy"
        value_backbone, value_head = (policy, critic) if shared else (critic, critic.score)
    if args.activation_checkpointing:
        for model in {policy, value_backbone}:
            checkpoint_activations(model)
    adamw = partial(AdamW, weight_decay=0.0, fused=True)
    policy_optimizer = adamw(policy.parameters(), lr=args.learning_rate)
    critic_optimizer = adamw(critic.parameters(), lr=args.critic_learning_rate)
    highest_rate = max(args.learning_rate, args.critic_learning_rate)
    if args.lora_rank == 0 and policy.num_parameters() > 1e8 and highest_rate >= 1e-4:
        warnings.warn("--learning-rate: 1e-6 is usual here, see docs/choosing.md", stacklevel=1)

    # --- the loop ---
    def sample(prompts: list[Prompt], temperature: float, rng: Generator) -> tuple[Sequences, list]:
        """A completion for each prompt: pairs (prompt, completion) of token ids, and texts."""
        prompt_ids = [prompt.ids for prompt in prompts]
        completion_ids = generate(
            policy,
            prompt_ids,
            max_new_tokens=args.max_new_tokens,
            temperature=temperature,
            stop_ids=stop_ids,
            rng=rng,
            batch_size=args.generation_batch_size,
        )
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return list(zip(prompt_ids, completion_ids, strict=True)), texts

    def score(prompts: list[Prompt], sequences: Sequences, texts: list[str]) -> dict[str, Tensor]:
        """Each reward (B,) of the completions, by its name."""
        rewards = {name: rule_rewards(fn, prompts, texts) for name, fn in reward_fns.items()}
        if args.reward_model:
            with adapters_off(reward_model):
                size = args.micro_batch_size
                rewards["reward_model"] = model_rewards(reward_model, sequences, size)
        return rewards

    training = {"policy": (policy, policy_optimizer), "critic": (critic, critic_optimizer)}
    trained_on = [(prompt.ids, prompt.columns.get("answer")) for prompt in train_prompts]
    state = {"step": 0, "data": zlib.crc32(repr(trained_on).encode()), "beta": args.beta}
    if args.resume:
        state = load_checkpoint(args, training, state)
        run_dir = open_run(args)
    else:
        metrics, samples = evaluate(args, sample, score, eval_fn, eval_prompts)
        run_dir = open_run(args)  # not earlier: a run that fails before this leaves no folder
        log(args, run_dir, 0, metrics, samples)
    beta = state["beta"]  # as adapted so far
    data_rng = Generator().manual_seed(args.seed)
    data_epochs = math.ceil(args.total_rollouts * args.prompts_per_rollout / len(train_prompts))
    shuffles = [torch.randperm(len(train_prompts), generator=data_rng) for _ in range(data_epochs)]
    prompt_batches = torch.cat(shuffles).split(args.prompts_per_rollout)
    kl_in_reward = args.kl_placement == "reward"
    progress = tqdm(range(state["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser steps on it
        # 1. Roll out: a completion per prompt, from the policy as it is now.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * (step + 1))  # so resume is exact
        prompts = [train_prompts[i] for i in prompt_batches[step]]
        sequences, texts = sample(prompts, args.temperature, rng)  # B of each
        lengths = torch.tensor([len(ids) for _, ids in sequences], device=device)  # (B,)
        ended = torch.tensor([ids[-1] in stop_ids for _, ids in sequences], device=device)  # (B,)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        rollout_time = time.perf_counter()

        # 2. Score: each reward, and their weighted sum; a cut-off completion is penalised.
        rewards_by_name = score(prompts, sequences, texts)
        rewards = reward_weights @ torch.stack([*rewards_by_name.values()])  # (B,)
        scores = rewards.to(device) - args.missing_eos_penalty * ~ended  # (B,)
        score_time = time.perf_counter()

        # 3. Log-probs and values before the update, fixed during it. In the first epoch's
        # micro-batches: same padding, same rounding, so the first ratio is exactly 1.
        orders = [torch.randperm(len(sequences), generator=rng) for _ in range(args.update_epochs)]
        epochs = [order.tensor_split(args.num_minibatches) for order in orders]
        old_logprobs, ref_logprobs, old_values = torch.zeros((3, *mask.shape), device=device)
        with torch.no_grad():
            for minibatch in epochs[0]:
                for inds in micro_batches(sequences, minibatch, args.micro_batch_size):
                    idx = inds.to(device, non_blocking=True)  # indexing by a CPU tensor blocks
                    old_logprobs[idx] = completion_logprobs(
                        policy, sequences, inds, args.temperature
                    )
                    if ref_model is not None:  # without it beta is 0
                        with adapters_off(policy):
                            ref_logprobs[idx] = completion_logprobs(
                                ref_model, sequences, inds, args.temperature
                            )
                    old_values[idx] = critic_values(value_backbone, value_head, sequences, inds)
        for tensor in (old_logprobs, ref_logprobs, old_values):
            all_reduce_sum(tensor)  # each rank has computed some rows

        # 4. A reward per token: the score at the last, and the KL penalty. Advantages and returns.
        k1 = old_logprobs - ref_logprobs  # (B, T), the plain estimate of KL(pi_old || pi_ref)
        token_rewards = shaped_rewards(scores, k1, mask, beta=beta if kl_in_reward else 0.0)
        advantages, returns = gae(token_rewards, old_values, args.gamma, args.gae_lambda)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)

        # 5. Optimise: a step per minibatch, its gradient summed over micro-batches and ranks.
        factor = lr_factor(args, step, args.total_rollouts)
        policy_optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * factor
        sums, policy_grad_norms, critic_grad_norms = defaultdict(float), [], []
        num_tokens, trained_tokens = lengths.sum().item(), 0
        for epoch in epochs:
            approx_kl = torch.zeros((), device=device)  # summed over the epoch's tokens
            for minibatch in epoch:
                minibatch_tokens = lengths[minibatch].sum()
                for inds in micro_batches(sequences, minibatch, args.micro_batch_size):
                    idx = inds.to(device, non_blocking=True)
                    weights = mask[idx] / minibatch_tokens  # (b, T)
                    logprobs, entropy = completion_logprobs(
                        policy, sequences, inds, args.temperature, entropy=True
                    )
                    pg_loss, policy_sums = policy_loss(
                        logprobs,
                        old_logprobs[idx],
                        ref_logprobs[idx],
                        advantages[idx],
                        entropy,
                        weights,
                        clip_coef=args.clip_coef,
                        beta=0.0 if kl_in_reward else beta,
                        ent_coef=args.ent_coef,
                    )
                    pg_loss.backward()  # frees the policy's activations before the critic's
                    values = critic_values(value_backbone, value_head, sequences, inds)
                    v_loss, value_sums = value_loss(
                        values, old_values[idx], returns[idx], weights, args.vf_clip_coef
                    )
                    (args.vf_coef * v_loss).backward()
                    loss_sums = policy_sums | value_sums
                    loss_sums["objective/loss"] = pg_loss + args.vf_coef * v_loss
                    for name, value in loss_sums.items():
                        sums[name] += value.detach().double()
                    approx_kl += loss_sums["policy/approx_kl"].detach()
                policy_grad_norms.append(clip_grad_norm(policy, args.max_grad_norm))
                critic_grad_norms.append(clip_grad_norm(critic, args.max_grad_norm))
                policy_optimizer.step()
                critic_optimizer.step()
                policy_optimizer.zero_grad()
                critic_optimizer.zero_grad()
            trained_tokens += num_tokens
            # The mean over the tokens of all ranks: all ranks stop, or none.
            if args.target_kl and all_reduce_sum(approx_kl) / num_tokens > args.target_kl:
                break
        update_time = time.perf_counter()

        # 6. Log, adapt beta, evaluate, save.
        sums = sums_over_ranks(sums)
        loss = sums.pop("objective/loss") / len(policy_grad_norms)
        metrics = {
            "reward/mean": rewards.mean().item(),
            **{f"rewards/{name}": reward.mean().item() for name, reward in rewards_by_name.items()},
            "reward/std": rewards.std(correction=0).item(),
            "completions/length_mean": lengths.float().mean().item(),
            "completions/truncated_fraction": 1 - ended.float().mean().item(),
            "objective/reward": scores.mean().item(),  # the KL penalty is added further down
            "objective/beta": beta,
            "objective/loss": loss,  # per optimiser step
            # per token: policy/loss, policy/entropy, ..., value/clip_fraction
            **{name: value / trained_tokens for name, value in sums.items()},
            "policy/grad_norm": np.mean(policy_grad_norms),
            "policy/learning_rate": policy_optimizer.param_groups[0]["lr"],
            "value/grad_norm": np.mean(critic_grad_norms),
            "value/explained_variance": explained_variance(old_values, returns, mask).item(),
            "value/mean": old_values[mask].mean().item(),
            "value/return_mean": returns[mask].mean().item(),
            "time/rollout_seconds": rollout_time - start_time,
            "time/score_seconds": score_time - rollout_time,
            "time/update_seconds": update_time - score_time,
            "time/tokens_per_second": num_tokens / (update_time - start_time),
        }
        if ref_model is not None:  # KL(pi_old || pi_ref), nats per completion
            kl = metrics["objective/kl"] = k1.sum(dim=1).mean().item()  # beta adapts to it
            metrics["objective/non_score_reward"] = -beta * kl if kl_in_reward else 0.0
            metrics["objective/reward"] += metrics["objective/non_score_reward"]
            if args.kl_target:
                beta = adapt_beta(beta, kl, args.kl_target, args.kl_horizon, n=len(sequences))
        if RANK == 0 and args.log_rollouts_every and (step + 1) % args.log_rollouts_every == 0:
            columns = {f"rewards/{name}": reward for name, reward in rewards_by_name.items()}
            columns |= {"reward": rewards, "advantage": advantages, "truncated": ~ended}
            if ref_model is not None:
                columns["log_ratio"] = k1
            rows = completion_rows(tokenizer, sequences[:4], columns)
            with open(run_dir / "rollouts.jsonl", "a") as file:
                file.write(json.dumps({"step": step + 1, "completions": rows}) + "\n")
        samples = []
        is_last = step + 1 == args.total_rollouts
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, sample, score, eval_fn, eval_prompts)
            metrics |= eval_metrics
        log(args, run_dir, step + 1, metrics, samples)
        shown = ("reward/mean", "objective/kl", "completions/truncated_fraction")
        progress.set_postfix({name: metrics.get(name) for name in shown})
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step + 1, "beta": beta})

    # The checkpoint's own may ask for top-k, or be one that transformers refuses to save.
    config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id)
    policy.generation_config = config
    save_model(run_dir, policy, tokenizer)
    return run_dir


def lr_factor(args: Args, step: int, total_steps: int) -> float:
    """Factor of the learning rate: rises to 1 in the warm-up, then follows --lr-schedule."""
    warmup_steps = int(args.warmup_ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    remaining = (total_steps - step) / (total_steps - warmup_steps)
    if args.lr_schedule == "cosine":
        return 0.5 * (1 - math.cos(math.pi * remaining))
    return remaining if args.lr_schedule == "linear" else 1.0


def evaluate(
    args: Args, sample: Callable, score: Callable, eval_fn: Callable | None, prompts: list[Prompt]
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    sequences, texts = sample(prompts, args.eval_temperature, rng)
    if eval_fn is not None:
        rewards = rule_rewards(eval_fn, prompts, texts).tolist()
    else:
        all_rewards = torch.stack([*score(prompts, sequences, texts).values()])  # (K, B)
        rewards = (torch.tensor(args.reward_weights) @ all_rewards).tolist()
    lengths = [len(completion) for _, completion in sequences]
    metrics = {"eval/reward": np.mean(rewards)}
    if {*rewards} <= {0, 1}:  # right or wrong
        metrics["eval/accuracy"] = np.mean(rewards)
    metrics["eval/length_mean"] = np.mean(lengths)
    samples = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt.text, "completion": texts[i]}
        samples.append(row | {"reward": round(rewards[i], 6), "length": lengths[i]})
    return metrics, samples


# --- the critic --------------------------------------------------------------------------------
def load_critic(args: Args, tokenizer: Any, positions: int, device: torch.device) -> Any:
    """A classifier with one label; for --critic-init policy only its head (Ziegler et al.)."""
    kind = AutoModelForSequenceClassification
    if args.critic_init == "reward_model":
        return shard(load_model(kind, args.reward_model, tokenizer, positions), device)
    config = AutoConfig.from_pretrained(args.model, num_labels=1)
    torch.manual_seed(args.seed)
    if args.critic_init == "scratch":
        return shard(kind.from_config(config, dtype=torch.float32).eval(), device)
    if args.critic_init == "policy":
        critic = head = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
    else:
        where = None if RANK == 0 else "meta"  # as in `load_model`
        critic, info = kind.from_pretrained(
            args.model, config=config, device_map=where, output_loading_info=True
        )
        missing = set(info["missing_keys"]) - {"score.weight"}
        if missing:
            raise ValueError(f"--critic-init sft: {args.model} has no weights for {missing}")
        add_adapters(critic, args.lora_rank, args.seed)
        head = critic.score.float().requires_grad_(True)
        torch.manual_seed(args.seed)  # loading has drawn numbers
    torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)  # arXiv 2009.01325, B.1
    return shard(critic, device)


def critic_values(backbone: Any, head: Callable, sequences: Sequences, inds: Tensor) -> Tensor:
    """V_t (b, T) of sequences[inds]: the head's output before token t, centred as scores are."""
    # A rank without rows reads a dummy: sharded, all ranks must run every forward pass.
    batch = [sequences[i] for i in inds] or [([0], [])]
    ids, _ = pad_rows([prompt + completion for prompt, completion in batch], backbone.device)
    outputs = head(hidden_states(backbone, ids).float()).squeeze(2)  # (b, L)
    outputs = outputs - getattr(backbone.config, "score_mean", 0.0)
    width = max(len(completion) for _, completion in sequences)
    values = torch.zeros(len(batch), width, device=ids.device)
    for i, (prompt, completion) in enumerate(batch):
        # V_t is read one position before token t, where the critic has seen x and y_<t alone.
        start = len(prompt) - 1
        values[i, : len(completion)] = outputs[i, start : start + len(completion)]
    return values[: len(inds)]


# --- rewards -----------------------------------------------------------------------------------
def load_reward_fn(spec: str) -> Callable:
    """The reward function of path/to/file.py:function."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--(eval-)reward-fn {spec}: expected path/to/file.py:function")
    module_spec = spec_from_file_location(Path(path).stem, path)
    module = module_from_spec(module_spec)
    sys.path.append(str(Path(path).parent))  # for modules beside it
    sys.modules.setdefault(module.__name__, module)  # so that its functions can be pickled
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def rule_rewards(function: Callable, prompts: list[Prompt], texts: list[str]) -> Tensor:
    """Rewards (B,) of the texts; rank 0 calls the function once, because it may compare them."""
    rewards = []
    if RANK == 0:
        name = f"{getattr(function, '__name__', function)} of {function.__module__}.py"
        columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
        prompt_texts = [prompt.text for prompt in prompts]
        try:
            rewards = function(prompts=prompt_texts, completions=[*texts], **columns)
        except Exception as error:
            raise RuntimeError(f"reward {name}, with columns {[*columns]}: {error!r}") from error
        rewards = np.asarray(rewards, dtype=np.float32)  # None becomes NaN
        if rewards.shape != (len(texts),) or not np.isfinite(rewards).all():
            raise ValueError(f"reward {name}: {len(texts)} finite numbers expected, not {rewards}")
        rewards = rewards.tolist()
    return torch.tensor(all_gather(rewards))  # rank 0's, on all


@torch.no_grad()
def model_rewards(model: Any, sequences: Sequences, micro_batch_size: int) -> Tensor:
    """Scores (B,) of the last token, minus the preferred completions' mean (after InstructGPT)."""
    scores = torch.zeros(len(sequences), device=model.device)
    for inds in micro_batches(sequences, torch.arange(len(sequences)), micro_batch_size):
        # A rank without rows scores a dummy: sharded, all ranks must run every forward pass.
        rows = [sequences[i][0] + sequences[i][1] for i in inds] or [[0]]
        ids, mask = pad_rows(rows, model.device)
        hidden = hidden_states(model, ids)  # (b, L, d)
        last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
        idx = inds.to(model.device, non_blocking=True)  # indexing by a CPU tensor blocks
        scores[idx] = model.score(last.float()).squeeze(1)[: len(inds)]
    return all_reduce_sum(scores).cpu() - getattr(model.config, "score_mean", 0.0)


# --- model and data ----------------------------------------------------------------------------
def load_model(kind: Any, source: str, tokenizer: Any, positions: int) -> Any:
    """A model in eval mode: dropout is off, while sampling and while training."""
    where = None if RANK == 0 else "meta"  # one process reads the weights, see `shard`
    model, info = kind.from_pretrained(source, device_map=where, output_loading_info=True)
    if info["missing_keys"]:  # they would be random
        raise ValueError(f"{source} has no weights for {sorted(info['missing_keys'])}")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(f"{source}: the tokenizer has more tokens than the embedding")
    if positions > getattr(model.config, "max_position_embeddings", positions):
        raise ValueError(f"{source} has fewer positions than the {positions} of the --max flags")
    print(f"{source}: {model.num_parameters():,} parameters")
    return model


def load_rows(args: Args, split: str, columns: set[str]) -> Any:
    """The rows of a split of --dataset, which must have these columns."""
    source, data_files = args.dataset, None
    if os.path.isfile(source):  # all its rows are of the split `train`
        source, data_files = os.path.split(os.path.abspath(source))
    try:
        dataset = load_dataset(source, args.dataset_config, data_files=data_files, split=split)
    except Exception as error:
        raise ValueError(f"--dataset {args.dataset}, {split} (docs/data.md): {error!r}") from error
    for column in columns:
        if column not in dataset.column_names:
            raise ValueError(f"no column {column} in --dataset: it has {dataset.column_names}")
    return dataset


def load_prompts(args: Args, split: str, tokenizer: Any) -> list[Prompt]:
    """The prompts of a split, without those that are empty or longer than --max-prompt-length."""
    prompts, dropped, longest = [], Counter(), 0
    columns = {args.prompt_column, args.answer_column} - {"answer"}  # not all data have answers
    for row in load_rows(args, split, columns):
        text = row.pop(args.prompt_column)
        if args.chat and isinstance(text, str):
            text = [{"role": "user", "content": text}]
        if args.answer_column in row:
            row["answer"] = row.pop(args.answer_column)
        try:
            ids = encode(tokenizer, text, add_generation_prompt=True)
            longest = max(longest, len(ids))
            if len(ids) > args.max_prompt_length:
                raise UnusableRow("longer than --max-prompt-length")
            prompts.append(Prompt(text, ids, row))
        except UnusableRow as reason:
            dropped[str(reason)] += 1
    report_rows(split, len(prompts), dropped, longest)
    return prompts


# --- the run: the same in every script; skip it on a first reading -----------------------------
TRAINED = dcp.StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; a run that is resumed keeps its own."""
    words = sys.argv[1:] if argv is None else argv
    args = tyro.cli(Args, args=words, description=__doc__.splitlines()[0])
    if args.resume:
        if sum(word.startswith("--") for word in words) > 1:  # it would be another run
            raise ValueError("--resume takes no other flags: a run keeps its own")
        saved = json.loads(Path(args.resume, "args.json").read_text())
        if saved.keys() != vars(args).keys():
            raise ValueError(f"--resume {args.resume}: {saved['exp_name']} has other flags")
        args = Args(**saved | {"resume": args.resume})
    return args


def open_run(args: Args) -> Path:
    """The run's folder: a new one, or the one that --resume names."""
    name = f"{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir = all_gather([Path(args.resume or f"{args.output_dir}/{name}")])[0]  # rank 0's
    if RANK == 0 and args.track:
        wandb.init(id=run_dir.name, config=vars(args), resume="allow", reinit="finish_previous")
    if RANK == 0 and not args.resume:
        run_dir.mkdir(parents=True)
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    print(f"{run_dir}: if the run is interrupted, --resume {run_dir} continues it", flush=True)
    return run_dir


def save_checkpoint(run_dir: Path, training: dict[str, tuple], state: dict) -> None:
    """Write checkpoint_{step}.pt; the last two stay, and a kill at any moment leaves them whole."""
    for key, (model, optimizer) in training.items():
        weights, moments = dcp.get_state_dict(model, optimizer, options=TRAINED)  # all ranks
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        state[key] = {name: weights[name] for name in names if name in weights}, moments
    if RANK == 0:
        state["logs"] = {file.name: file.stat().st_size for file in run_dir.glob("*.jsonl")}
        torch.save(state, run_dir / "checkpoint.tmp")
        with open(run_dir / "checkpoint.tmp", "rb+") as file:
            os.fsync(file)  # on the disk before it gets its name
        os.replace(run_dir / "checkpoint.tmp", run_dir / f"checkpoint_{state['step']:08}.pt")
        for old_checkpoint in sorted(run_dir.glob("checkpoint_*.pt"))[:-2]:
            old_checkpoint.unlink()


def load_checkpoint(args: Args, training: dict[str, tuple], state: dict) -> dict:
    """Read the last checkpoint into models and optimizers, and cut the logs back to its step."""
    run_dir = Path(args.resume)
    for path in sorted(run_dir.glob("checkpoint_*.pt"), reverse=True):
        try:
            saved = torch.load(path, weights_only=True, mmap=True)
            break
        except Exception as error:  # then the one before it
            print(f"--resume: {path} cannot be read: {error}")
    else:
        raise FileNotFoundError(f"--resume {run_dir}: there is no checkpoint that can be read")
    if saved["data"] != state["data"]:
        raise ValueError(f"--resume {run_dir}: the training rows of {args.dataset} have changed")
    for name, (model, optimizer) in training.items():
        weights, moments = saved.pop(name)
        dcp.set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=TRAINED
        )
    if RANK == 0:
        for file in run_dir.glob("*.jsonl"):
            os.truncate(file, min(saved["logs"].get(file.name, 0), file.stat().st_size))
    return saved


def log(args: Args, run_dir: Path, step: int, metrics: dict, samples: list[dict]) -> None:
    """Append to metrics.jsonl and samples.jsonl, tell wandb, and print evaluations."""
    if RANK > 0:
        return
    for name, rows in (("metrics", [metrics]), ("samples", samples)):
        if rows:
            with open(run_dir / f"{name}.jsonl", "a") as file:
                file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
    if args.track:
        wandb.log(metrics, step=step)
    evals = [f"{key[5:]} {metrics[key]:.3f}" for key in metrics if key.startswith("eval/")]
    if evals:
        lines = [f"step {step}: held-out {', '.join(evals)}", *map(str, samples[:2])]
        tqdm.write("\n    ".join(lines))


def save_model(run_dir: Path, model: torch.nn.Module, tokenizer: Any) -> None:
    """Write the model into the run's folder, for `from_pretrained` and --model."""
    weights, adapter = gather_weights(model)  # all ranks
    if RANK == 0:
        tokenizer.save_pretrained(run_dir)
        model.save_pretrained(run_dir, state_dict=weights)
        if adapter:  # for peft's `from_pretrained`
            model.peft_config["default"].save_pretrained(run_dir / "adapter")
            save_file(adapter, run_dir / "adapter" / "adapter_model.safetensors")
    print(f"model: {run_dir} (docs/viewer.html shows the run)", flush=True)


if __name__ == "__main__":
    main(parse_args())
    leave_processes()
