r"""Proximal Policy Optimization (PPO) for language models: RLHF as in InstructGPT.

The policy pi completes a prompt x with y, which a reward model, or a function, scores. Maximise
(InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, equation 2)

    J(theta) = E[ score(x, y) - beta sum_t log( pi_theta(y_t | x, y_<t) / pi_ref(y_t | x, y_<t) ) ].

A completion is an episode, its tokens are the actions. Token t gets the reward

    r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t.

A critic V predicts the return-to-go. Generalised advantage estimation (GAE, arXiv 1506.02438,
equation 16) and the clipped surrogate (PPO, arXiv 1707.06347, equation 7) give

    delta_t = r_t + gamma V_old[t+1] - V_old[t],    A_t = sum_l (gamma lambda)^l delta_[t+l],
    R_t = A_t + V_old[t],    rho_t = (pi_theta / pi_old)_t,
    L = - mean_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
        + vf_coef mean_t 1/2 max((V_t - R_t)^2, (V_old[t] + clip(V_t - V_old[t], +-eps_v) - R_t)^2)
        - ent_coef mean_t H(pi_t).

pi_old and V_old are policy and critic at the rollout; V_old is 0 after the last token. mean_t is
over all sampled tokens of an optimiser step; A_t is whitened in L, but not in R_t. With
--kl-placement loss L has beta mean_t rho_t 1/2 log^2(pi_theta / pi_ref)_t, with a constant
rho_t (no gradient), and r_t loses its KL term. Deviations from InstructGPT:

1. No gradients from pretraining data; no average of the policy's weights.
2. Two passes over a rollout, not one; rates that fall to 0, not a warm-up and a constant rate;
   AdamW's beta2 of 0.999, not 0.95.
3. Advantages are whitened over the rollout. The code of Ziegler et al. (2019, arXiv 1909.08593)
   whitens them in each minibatch, and scales its rewards before GAE.
4. The value loss is clipped, as in that code. Gradients are clipped by their norm. A cut-off
   completion, too, has V = 0 after its last token.
5. Scores are centred by held-out preferred completions, not by demonstrations, and beta is 0.2.

    python ppo_rlhf.py                                   # tiny/reviews, half a minute on a CPU
    python ppo_rlhf.py --model runs/sft__1__... --reward-model runs/rm_bradley_terry__1__... \
        --dataset trl-lib/ultrafeedback-prompt --max-prompt-length 512 --max-new-tokens 512 \
        --beta 0.05 --micro-batch-size 8 --total-rollouts 200  # four models of 0.5B, a GPU of 48 GB
    torchrun --nproc_per_node=8 ppo_rlhf.py ...          # eight GPUs: docs/processes.md

A healthy run: `reward/mean`, `eval/reward`, `value/explained_variance` rise, `objective/kl` stays
low. If `reward/mean` rises while an independent `eval/reward` falls, the reward model is hacked.
"""

import json
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from copy import deepcopy
from dataclasses import field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeFloat
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation import generate
from common.logprobs import Sequences, completion_logprobs, completion_states, last_states
from common.logprobs import micro_batches, rollout_logprobs, sampling_metrics
from common.tokens import as_chat, encode, find_stop_ids
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.checks import check_flags, check_training
from runtime.functions import call_reward, check_columns, load_function, set_step
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, all_reduce_sum, from_rank_0, join_processes, leave_processes
from runtime.processes import peak_memory_gb, sums_over_ranks
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, rollout_row, save_model, shuffled
from runtime.saving import write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "ppo_rlhf"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of data order, all sampling and new weights
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 10  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy and tokenizer
    reference: str | None = None  # folder or hub name of pi_ref; default: --model
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/reviews/prompts"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_prompt_length: PositiveInt = 64  # longest prompt in tokens; longer ones are dropped
    # --- reward ---

    # sequence classifier with one label and --model's tokenizer; default: tiny's, or none if there
    # is a --reward-fn
    reward_model: str | None = None
    reward_fn: list[str] = field(default_factory=list)  # path/to/file.py:function, one or more
    # a weight for each --reward-fn, then one for --reward-model; default: 1 each
    reward_weights: list[FiniteFloat] = field(default_factory=list)
    # reward function of eval/reward; default: gold on the default --dataset, else those of training
    eval_reward_fn: str | None = None
    missing_eos_penalty: NonNegativeFloat = 0.0  # subtracted from a cut-off completion's reward
    # --- PPO ---
    total_rollouts: PositiveInt = 30  # rollouts, each followed by its optimiser steps
    prompts_per_rollout: PositiveInt = 128  # prompts per rollout
    group_size: PositiveInt = 1  # completions per prompt
    max_new_tokens: PositiveInt = 40  # longest completion in tokens
    temperature: PositiveFloat = 1.0  # sampling temperature; divides the logits in log-probs too
    update_epochs: PositiveInt = 2  # passes over a rollout's completions
    num_minibatches: PositiveInt = 2  # optimiser steps per pass
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount factor per token
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95  # lambda; 0: one-step TD, 1: Monte Carlo
    clip_coef: PositiveFloat = 0.2  # eps: the ratio pi / pi_old is clipped to 1 - eps and 1 + eps
    vf_clip_coef: PositiveFloat | None = 0.2  # eps_v: clips V to V_old +- this; None: no clipping
    # factor of the value loss; for a separate critic it matters to --max-grad-norm alone, since
    # AdamW's steps do not depend on the scale of a loss
    vf_coef: NonNegativeFloat = 0.5
    ent_coef: NonNegativeFloat = 0.0  # coefficient of the entropy bonus
    whiten_advantages: bool = True  # give a rollout's advantages mean 0 and variance 1
    critic_warmup_rollouts: NonNegativeInt = 0  # first rollouts, which train only the critic
    # where the critic starts; sft: --model with a new head; policy: a head on the policy itself
    critic_init: Literal["reward_model", "sft", "policy"] = "reward_model"
    beta: NonNegativeFloat = 0.2  # coefficient of the KL (InstructGPT: 0.02); 0 loads no reference
    kl_placement: Literal["reward", "loss"] = "reward"  # KL in rewards (k1) or loss (rho k2)
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's; default: 5e-4 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    # the critic's; default: 1e-3 below 10M parameters, else 1e-5 (adapters: 1e-4)
    critic_learning_rate: PositiveFloat | None = None
    anneal_lr: bool = True  # learning rates fall linearly to 0; else they are constant
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down, each model's by itself
    eval_every: PositiveInt = 10  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each
    eval_temperature: NonNegativeFloat = 1.0  # sampling temperature at evaluation; 0 is greedy

    def __post_init__(self):
        if not self.reward_fn:
            self.reward_model = self.reward_model or "tiny/reviews/reward_model"
        if not self.reward_model and self.critic_init == "reward_model":
            raise ValueError("--critic-init reward_model needs --reward-model: choose another")
        if self.num_minibatches > self.prompts_per_rollout * self.group_size:
            raise ValueError("--num-minibatches: some would be empty, and AdamW would still move")
        if self.critic_warmup_rollouts >= self.total_rollouts:
            raise ValueError("--critic-warmup-rollouts: the policy would never be trained")
        if self.eval_reward_fn is None and self.dataset == "tiny/reviews/prompts":
            self.eval_reward_fn = "tiny/reviews/gold.py:sentiment"
        names = [spec.split(":")[-1] for spec in self.reward_fn] + ["reward_model"]
        if len({*names}) < len(names):  # they name the metrics
            raise ValueError(f"--reward-fn: two rewards have one name among {names}")
        num_rewards = len(self.reward_fn) + bool(self.reward_model)
        self.reward_weights = self.reward_weights or [1.0] * num_rewards
        if len(self.reward_weights) != num_rewards:
            raise ValueError(f"--reward-weights: {num_rewards} expected, one for each reward")


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: array  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
# Tensors (B, T) hold a number per sampled token, and 0 after the end of a completion. k1, k2 and k3
# are estimators of a KL from samples (Schulman 2020, joschu.net/blog/kl-approx.html).
def shaped_rewards(scores: Tensor, k1: Tensor, mask: Tensor, beta: float) -> Tensor:
    """r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t (after InstructGPT, equation 2).

    Scores are (B,). The mask of sampled tokens and the log-ratios k1, in nats, are (B, T).
    """
    is_last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(dim=1, keepdim=True) - 1
    return is_last * scores[:, None] - beta * k1


def gae(token_rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_[t+l],  delta_t = r_t + gamma V[t+1] - V[t]  (equation 16).

    All (B, T) and 0 after a completion's end, so V is 0 after its last token. V[t] is V_old[t], the
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
    """(x - mean) / sqrt(var + 1e-8) over the sampled tokens (Ziegler et al.'s code)."""
    mean, variance = x[mask].mean(), x[mask].var(correction=0)
    return ((x - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def k2_kl(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """rho 1/2 (log pi - log pi_ref)^2 at each token, rho = pi / pi_old without a gradient.

    As a loss on tokens sampled from pi_old, its expected gradient at each prefix is that of
    KL(pi || pi_ref). As losses, k1 would have none, and k3 that of KL(pi_ref || pi) (arXiv
    2506.09477 and 2510.01555).
    """
    return 0.5 * (logprobs - old_logprobs).detach().exp() * (logprobs - ref_logprobs).square()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R): 1 is perfect up to a constant, 0 is no better than a constant. R has
    V in it unless lambda is 1, which flatters V.
    """
    errors, returns = (returns - values)[mask], returns[mask]
    return 1 - errors.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(rho A, clip(rho, 1 - eps, 1 + eps) A) at each token (b, T) (PPO, equation 7), and sums
    over tokens for the log. Log-probs of the sampled tokens under pi_theta and pi_old are in nats.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()  # rho
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    # No gradient once rho has passed the bound on the side that A favours.
    losses = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return losses, {
        "policy/loss": losses.sum(),
        "policy/approx_kl": (log_ratio.expm1() - log_ratio).sum(),  # k3, KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_coef) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_coef) & (advantages > 0)).sum(),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old, +-eps_v) - R)^2) at each token (b, T), and sums
    over tokens for the log. There is no gradient where V has left the interval and is nearer to R
    than the clipped V (Ziegler et al.'s code).
    """
    losses = 0.5 * (values - returns).square()
    is_clipped = torch.zeros_like(losses)
    if clip_coef is not None:
        change = values - old_values
        clipped_losses = 0.5 * (old_values + change.clamp(-clip_coef, clip_coef) - returns).square()
        # Inside the interval the clipped loss may be larger too, but only by rounding.
        is_clipped = (change.abs() > clip_coef) & (clipped_losses > losses)
        losses = torch.maximum(losses, clipped_losses)
    return losses, {"value/loss": losses.sum(), "value/clip_fraction": is_clipped.sum()}


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- rewards, data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    reward_fns = {spec.split(":")[-1]: load_reward_fn(spec, tokenizer) for spec in args.reward_fn}
    eval_fns = [load_reward_fn(args.eval_reward_fn, tokenizer)] if args.eval_reward_fn else []
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer, args.eval_rows)
    check_columns(args.reward_fn, train_prompts)
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=5e-4, real=1e-6)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.beta == 0:
        ref_model = None
    elif args.reference or args.lora_rank == 0:
        source = args.reference or args.model
        ref_model = load_model(AutoModelForCausalLM, source, tokenizer, positions)
        # With the merged weights of an earlier LoRA run, as the policy, so that the KL starts at 0.
        shard(freeze(ref_model, merged=not args.reference), device)
    else:
        ref_model = policy  # as it was at the start, see part 2
    critic = load_critic(args, policy, tokenizer, positions, device)
    args.critic_learning_rate = find_rate(
        critic.backbone, args.critic_learning_rate, args.lora_rank, tiny=1e-3, real=1e-5
    )
    if args.reward_model:
        if args.lora_rank > 0 and args.critic_init == "reward_model":
            reward_model = critic.backbone  # without what its adapters learn: `as_at_start`
        else:
            kind = AutoModelForSequenceClassification
            reward_model = load_model(kind, args.reward_model, tokenizer, positions)
            shard(freeze(reward_model), device)
        reward_fns["reward_model"] = partial(model_rewards, reward_model, args.micro_batch_size)
    eval_fns = eval_fns or list(reward_fns.values())
    if args.activation_checkpointing:
        for model in {policy, critic.backbone}:
            checkpoint_activations(model)
    adamw = partial(AdamW, weight_decay=0.0, fused=True)
    policy_optimizer = adamw(policy.parameters(), lr=args.learning_rate)
    critic_optimizer = adamw(critic.trained.parameters(), lr=args.critic_learning_rate)

    # --- the loop ---
    sample = partial(
        generate,
        policy,
        max_new_tokens=args.max_new_tokens,
        stop_ids=stop_ids,
        batch_size=args.generation_batch_size,
    )
    training = {"policy": (policy, policy_optimizer), "critic": (critic.trained, critic_optimizer)}
    data = checksum(train_prompts, args.model, args.reference, args.reward_model)
    state = {"step": 0, "data": data}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate(args, sample, eval_fns, tokenizer, eval_prompts)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    next_prompts = shuffled(train_prompts, args.seed, skip=state["step"] * args.prompts_per_rollout)
    reward_weights = torch.tensor(args.reward_weights, dtype=torch.float64)  # (K,)
    progress = tqdm(range(state["step"] + 1, args.total_rollouts + 1), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser steps on it
        # 1. Roll out and score: B sequences (x, y) of token ids, by pi_old, which is the policy
        # now. Random numbers depend on seed and step alone: resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        set_step(step)  # for functions that ask for it
        taken = islice(next_prompts, args.prompts_per_rollout)
        prompts = [prompt for prompt in taken for _ in range(args.group_size)]  # B
        prompt_ids = [prompt.ids for prompt in prompts]
        sequences, sampler_logprobs = sample(prompt_ids, temperature=args.temperature, rng=rng)
        lengths = torch.tensor([len(y) for _, y in sequences])  # (B,)
        ended = torch.tensor([y[-1] in stop_ids for _, y in sequences])  # (B,)
        mask = (torch.arange(lengths.max()) < lengths[:, None]).to(device)  # (B, T), T the longest
        scoring_start = time.perf_counter()
        rewards_by_name = {f"rewards/{k}": fn(prompts, sequences) for k, fn in reward_fns.items()}
        rewards = reward_weights @ torch.stack([*rewards_by_name.values()])  # (K,) @ (K, B)
        reward_seconds = time.perf_counter() - scoring_start
        scores = (rewards - args.missing_eos_penalty * ~ended).float().to(device)  # (B,)
        if (scores == scores[0]).all():
            warnings.warn("a rollout's rewards are all equal: they teach nothing", stacklevel=1)

        # 2. Log-probs under pi_old and pi_ref, and values, before the update, in the micro-batches
        # of part 4, so that the first ratio is exactly 1; the sampler's log-probs are rounded
        # differently. Column t is read from the state before token t of the completion.
        split = partial(micro_batches, sequences, size=args.micro_batch_size)
        minibatches = []  # indices of the rows of each optimiser step, the same on all ranks
        first_pass = []  # indices of this rank's micro-batches, in the first pass over all rows
        for _ in range(args.update_epochs):
            order = torch.randperm(len(sequences), generator=rng)
            minibatches += order.tensor_split(args.num_minibatches)
        for minibatch in minibatches[: args.num_minibatches]:
            first_pass += split(minibatch)
        old_logprobs = rollout_logprobs(policy, sequences, first_pass, args.temperature)  # (B, T)
        ref_logprobs = old_logprobs  # without a reference the KL counts as 0
        if ref_model is not None:
            with as_at_start(policy):  # the reference under LoRA: without what it has learned
                ref_logprobs = rollout_logprobs(ref_model, sequences, first_pass, args.temperature)
        old_values = rollout_values(critic, sequences, first_pass)  # (B, T)

        # 3. Rewards of tokens (B, T), and from them advantages and returns.
        k1 = old_logprobs - ref_logprobs  # the plain estimate of KL(pi_old || pi_ref), in nats
        beta_in_reward = args.beta if args.kl_placement == "reward" else 0.0
        token_rewards = shaped_rewards(scores, k1, mask, beta_in_reward)
        advantages, returns = gae(token_rewards, old_values, args.gamma, args.gae_lambda)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)

        # 4. Optimise: a step per minibatch. Each rank takes its share of the micro-batches. While
        # the critic warms up (after VC-PPO, arXiv 2503.01491), the policy takes steps of rate 0.
        # They change its AdamW's moments, which are cleared when the warm-up ends.
        remaining = (args.total_rollouts + 1 - step) / args.total_rollouts if args.anneal_lr else 1
        critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * remaining
        policy_optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        if step <= args.critic_warmup_rollouts:
            policy_optimizer.param_groups[0]["lr"] = 0.0
        elif step == args.critic_warmup_rollouts + 1:
            policy_optimizer.state.clear()
        all_sums, grad_norms = [], []  # of each micro-batch, of each optimiser step
        for minibatch in minibatches:
            weights = mask / lengths[minibatch].sum().item()  # (B, T), for a mean over its tokens
            for inds in split(minibatch):
                logprobs, entropy = completion_logprobs(
                    policy,
                    sequences,
                    inds,
                    args.temperature,
                    entropy=True,
                    entropy_gradient=args.ent_coef > 0,
                )  # (b, T)
                device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
                old = old_logprobs[device_inds]
                losses, sums = policy_loss(logprobs, old, advantages[device_inds], args.clip_coef)
                if args.kl_placement == "loss":
                    losses = losses + args.beta * k2_kl(logprobs, old, ref_logprobs[device_inds])
                losses = losses - args.ent_coef * entropy  # (b, T)
                pg_loss = (weights[device_inds] * losses).sum()
                pg_loss.backward()  # frees the policy's activations before the critic's are made
                values = critic_values(critic, sequences, inds)
                losses, value_sums = value_loss(
                    values, old_values[device_inds], returns[device_inds], args.vf_clip_coef
                )  # (b, T)
                v_loss = args.vf_coef * (weights[device_inds] * losses).sum()
                v_loss.backward()  # gradients add up; `shard` sums them over ranks
                sums |= value_sums | {"objective/loss": pg_loss + v_loss}
                sums |= {"policy/entropy": entropy.sum(), "tokens": mask[device_inds].sum()}
                all_sums.append({name: total.detach() for name, total in sums.items()})
            grad_norms.append(
                [clip_grad_norm(model, args.max_grad_norm) for model, _ in training.values()]
            )
            for optimizer in (policy_optimizer, critic_optimizer):
                optimizer.step()
                optimizer.zero_grad()

        # 5. Log, evaluate, save.
        metrics = rollout_metrics(args, rewards, lengths, ended, all_sums, grad_norms)
        metrics |= {name: values.mean().item() for name, values in rewards_by_name.items()}
        metrics |= sampling_metrics(old_logprobs, sampler_logprobs, mask)  # per token
        if ref_model is not None:
            metrics["objective/kl"] = k1.sum(dim=1).mean().item()  # nats per completion
        metrics["objective/reward"] = token_rewards.sum(dim=1).mean().item()  # per completion
        metrics["value/explained_variance"] = explained_variance(old_values, returns, mask).item()
        metrics["policy/learning_rate"] = policy_optimizer.param_groups[0]["lr"]
        metrics["time/reward_seconds"] = reward_seconds
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            columns = rewards_by_name | {"reward": rewards, "advantage": advantages}
            columns["truncated"] = ~ended
            if ref_model is not None:
                columns["log_ratio"] = k1
            rollouts = [rollout_row(tokenizer, sequences[:4], columns)]
        is_last = step == args.total_rollouts
        if is_last or step % args.eval_every == 0:
            evals, samples = evaluate(args, sample, eval_fns, tokenizer, eval_prompts)
            metrics |= evals
        log(args, run_dir, step, metrics, samples, rollouts)
        shown = ("reward/mean", "objective/kl", "completions/truncated_fraction")
        progress.set_postfix({name: metrics[name] for name in shown if name in metrics})
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    save_model(run_dir, policy, tokenizer, stop_ids)
    return run_dir


def rollout_metrics(
    args: Args, rewards: Tensor, lengths: Tensor, ended: Tensor, all_sums: list, grad_norms: list
) -> dict[str, float]:
    """Means over the tokens, the completions, or the optimiser steps of a rollout."""
    sums = {name: sum(part[name].double() for part in all_sums) for name in all_sums[0]}
    sums = sums_over_ranks(sums)
    num_tokens = sums.pop("tokens")  # of all passes
    metrics = {name: total / num_tokens for name, total in sums.items()}  # per token
    policy_norms, critic_norms = zip(*grad_norms, strict=True)
    metrics |= {
        "objective/loss": sums["objective/loss"] / len(grad_norms),  # per step
        "policy/grad_norm": np.mean(policy_norms),  # per step
        "value/grad_norm": np.mean(critic_norms),  # per step
        "reward/mean": rewards.mean().item(),  # per completion
        "reward/std": rewards.std(correction=0).item(),
        "completions/length_mean": lengths.float().mean().item(),  # tokens per completion
        "completions/truncated_fraction": 1 - ended.float().mean().item(),
    }
    return metrics


def evaluate(
    args: Args, sample: Callable, eval_fns: list, tokenizer: Any, prompts: list
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation uses the same random numbers
    sequences, _ = sample([x.ids for x in prompts], temperature=args.eval_temperature, rng=rng)
    weights = [1.0] if args.eval_reward_fn else args.reward_weights
    all_rewards = torch.stack([fn(prompts, sequences) for fn in eval_fns])  # (K, B)
    rewards = (torch.tensor(weights, dtype=torch.float64) @ all_rewards).tolist()
    metrics = {"eval/reward": np.mean(rewards)}
    metrics["eval/length_mean"] = np.mean([len(ids) for _, ids in sequences])
    samples = []
    for prompt, (_, ids), reward in zip(prompts, sequences, rewards, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        row = {"prompt": prompt.text, "completion": text}
        samples.append(row | {"reward": round(reward, 6), "length": len(ids)})
    return metrics, samples


# --- the critic --------------------------------------------------------------------------------
class Critic(NamedTuple):
    """V: a head on the hidden states of a backbone."""

    backbone: Any
    head: torch.nn.Linear
    trained: torch.nn.Module  # by its optimiser: the backbone with its head, or the head alone


def load_critic(
    args: Args, policy: Any, tokenizer: Any, positions: int, device: torch.device
) -> Critic:
    """The critic of --critic-init, before training."""
    if args.critic_init == "policy":  # a head on the policy's backbone (Ziegler et al.)
        torch.manual_seed(args.seed)
        head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)  # as for `sft`
        return Critic(policy, shard(head, device), trained=head)
    kind = AutoModelForSequenceClassification
    if args.critic_init == "reward_model":
        critic = load_model(kind, args.reward_model, tokenizer, positions)
        head = critic.score
        if args.lora_rank > 0:  # adapters, a second head; at the start it is the reward model
            # `any_rank`: an earlier LoRA run's adapter keeps its rank.
            add_adapters(critic, args.lora_rank, args.seed, any_rank=True)
            head = critic.value_head = deepcopy(critic.score).requires_grad_(True)
    else:
        critic = load_model(kind, args.model, tokenizer, positions, new_head=True)
        add_adapters(critic, args.lora_rank, args.seed)
        torch.manual_seed(args.seed)
        head = critic.score.float().requires_grad_(True)
        # N(0, 1/(d + 1)) for d hidden units (Stiennon et al., arXiv 2009.01325, B.1)
        torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    return Critic(shard(critic, device), head, trained=critic)


def critic_values(critic: Critic, sequences: Sequences, inds: Tensor) -> Tensor:
    """V_t (b, T) of sequences[inds]: the head's output before token t, minus the reward model's
    `score_mean` if the critic began as it (see `model_rewards`).
    """
    batch = [sequences[i] for i in inds]
    states, row, t = completion_states(critic.backbone, batch)
    outputs = critic.head(states.float()).squeeze(1)  # (n,), of all tokens of all completions
    outputs = outputs - getattr(critic.backbone.config, "score_mean", 0.0)
    width = max(len(completion) for _, completion in sequences)
    return torch.zeros(len(batch), width, device=outputs.device).index_put((row, t), outputs)


@torch.no_grad()
def rollout_values(critic: Critic, sequences: Sequences, batches: list[Tensor]) -> Tensor:
    """`critic_values` (B, T) of all sequences; each must be in one batch of one rank."""
    width = max(len(completion) for _, completion in sequences)
    values = torch.zeros(len(sequences), width, device=critic.backbone.device)
    for inds in batches:
        device_inds = inds.to(values.device, non_blocking=True)  # CPU indices make a GPU wait
        values[device_inds] = critic_values(critic, sequences, inds)
    return all_reduce_sum(values)


# --- rewards -----------------------------------------------------------------------------------
def load_reward_fn(spec: str, tokenizer: Any) -> Callable:
    """path/to/file.py:function as a function of prompts and sequences: B rewards (B,)."""
    return partial(rule_rewards, load_function("--(eval-)reward-fn", spec), tokenizer)


def rule_rewards(function: Callable, tokenizer: Any, prompts: list, sequences: Sequences) -> Tensor:
    """A function's rewards (B,). It gets all completions at once, so it can compare them."""
    completion_ids = [completion for _, completion in sequences]
    columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
    columns["prompts"] = [prompt.text for prompt in prompts]
    columns["completions"] = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    columns["completion_ids"] = completion_ids  # as TRL does; texts lack special tokens
    return call_reward(function, columns)


@torch.no_grad()
def model_rewards(model: Any, micro_batch_size: int, prompts: list, sequences: Sequences) -> Tensor:
    """Scores (B,) of the last token, minus `score_mean` (after InstructGPT): the model's mean score
    of held-out preferred completions, which rm_bradley_terry.py has written into its config.json.
    """
    scores = torch.zeros(len(sequences), device=model.device)
    for inds in micro_batches(sequences, torch.arange(len(sequences)), micro_batch_size):
        with as_at_start(model):  # in ppo_rlhf.py it may also be the critic, which is trained
            last = last_states(model, [sequences[i] for i in inds])  # (b, d)
        device_inds = inds.to(model.device, non_blocking=True)
        scores[device_inds] = model.score(last.float()).squeeze(1)
    return all_reduce_sum(scores).cpu().double() - getattr(model.config, "score_mean", 0.0)


# --- model and data ----------------------------------------------------------------------------
def load_prompts(args: Args, split: str, tokenizer: Any, most: int | None = None) -> list[Prompt]:
    """The prompts of a split, without those that are empty or longer than --max-prompt-length."""

    def encode_row(row: dict) -> tuple[Prompt, array]:
        text = row.pop(args.prompt_column)
        text = as_chat(text) if args.chat else text
        ids = array("i", encode(tokenizer, text, add_generation_prompt=True))
        return Prompt(text, ids, columns=row), ids  # which say whether it is too long

    required = {args.prompt_column, args.answer_column} - {"answer"}  # the default may be missing
    rows = load_rows(args.dataset, args.dataset_config, split, required, args.answer_column)
    flag, reader = "--max-prompt-length", "reward functions"
    return encode_rows(rows, encode_row, tokenizer, args.max_prompt_length, flag, most, reader)


# --- the run: the same in every script; skip it on a first reading -----------------------------
def parse_args(argv: list[str]) -> Args:
    """Flags from the command line; a resumed run uses those that it has saved."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    check_flags(argv, args.resume)
    if not args.resume:
        return args
    saved = json.loads(Path(args.resume, "args.json").read_text())
    return Args(**saved | {"resume": args.resume})


def open_run(args: Args) -> Path:
    """The run's folder: a new one, or the one that --resume names."""
    name = f"{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir = from_rank_0(Path(args.resume or f"{args.output_dir}/{name}").expanduser())
    if RANK == 0 and not args.resume:
        run_dir.mkdir(parents=True)
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    if RANK == 0 and args.track:
        wandb.init(id=run_dir.name, config=vars(args), resume="allow", reinit="finish_previous")
    print(f"{run_dir}: after its first checkpoint --resume {run_dir} continues it", flush=True)
    return run_dir


def save_checkpoint(run_dir: Path, training: dict[str, tuple], state: dict) -> None:
    """Write checkpoint.pt, with the sizes of the logs at its step."""
    logs = {file.name: file.stat().st_size for file in run_dir.glob("*.jsonl")}
    write_checkpoint(run_dir / "checkpoint.pt", training, state | {"logs": logs})  # all ranks


def load_checkpoint(run_dir: Path, training: dict[str, tuple], state: dict) -> dict:
    """Read the checkpoint into models and optimizers, and cut the logs back to its step."""
    saved = read_checkpoint(run_dir / "checkpoint.pt", training, state["data"])
    if RANK == 0:
        for file in run_dir.glob("*.jsonl"):
            if file.stem in ("metrics", "samples", "rollouts"):  # others are the user's
                os.truncate(file, min(saved["logs"].get(file.name, 0), file.stat().st_size))
    return saved


def log(args: Args, run_dir: Path, step: int, metrics: dict, samples=(), rollouts=()) -> None:
    """Append to metrics, samples and rollouts.jsonl, log to wandb, and print evaluations."""
    if RANK > 0:
        return
    for name, rows in (("metrics", [metrics]), ("samples", samples), ("rollouts", rollouts)):
        if rows:
            with open(run_dir / f"{name}.jsonl", "a") as file:
                file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
    if args.track:
        wandb.log(metrics, step=step)
    if evals := {k.removeprefix("eval/"): x for k, x in metrics.items() if k.startswith("eval/")}:
        shown = ", ".join(f"{name} {x:.3f}" for name, x in evals.items())
        lines = [f"step {step}: held-out {shown}", *map(str, samples[:2])]
        tqdm.write("\n    ".join(lines))


if __name__ == "__main__":
    main(parse_args(sys.argv[1:]))
    wandb.finish()  # before the processes end
    leave_processes()
