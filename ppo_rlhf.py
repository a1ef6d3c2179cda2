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
`--kl-placement loss` moves the KL from the rewards into the loss (see `k2_kl`).

    python ppo_rlhf.py                                   # tiny/reviews, half a minute on a CPU
    python ppo_rlhf.py --model runs/sft__1__.../model --reward-model runs/rm_.../model \
        --dataset trl-lib/ultrafeedback-prompt --max-prompt-length 512 \
        --max-new-tokens 512 --beta 0.05 --learning-rate 1e-6 --critic-learning-rate 1e-5
    torchrun --nproc_per_node=8 ppo_rlhf.py ...          # eight GPUs: docs/processes.md
    python ppo_rlhf.py --resume runs/ppo_rlhf__1__...    # resume after a crash

A healthy run: `reward/mean` and `eval/reward` rise together; `value/explained_variance` rises;
`objective/kl` stays at a few nats. If `reward/mean` rises and an independent `--eval-reward-fn`
falls, the reward model is being hacked.
"""

import inspect
import json
import math
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from filelock import FileLock
from torch import Generator, Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast
from common.generation import checkpoint_activations, content, encode, find_stop_ids, generate
from common.generation import pad_rows, shard
from common.logprobs import Sequences, completion_logprobs, hidden_states, micro_batches
from common.logprobs import rollout_logprobs

FULL_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "ppo_rlhf"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order, of all sampling and of a critic's new weights
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 10  # rollouts between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the policy, the reference and their tokenizer
    model: str = "tiny/reviews/policy"
    dataset: str = "tiny/reviews/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: int = 64  # longest prompt in tokens; rows with longer ones are dropped
    # --- reward ---
    # sequence classifier with one label and --model's tokenizer; None: only reward functions
    reward_model: str | None = "tiny/reviews/reward_model"
    reward_fn: list[str] = field(default_factory=list)  # reward functions, path/to/file.py:function
    # weight of each reward function, then of the reward model; default: all 1
    reward_weights: list[float] = field(default_factory=list)
    # file.py:function of eval/reward, or none: the training rewards; default: tiny/reviews/gold.py
    # for the default dataset, else none
    eval_reward_fn: str | None = None
    missing_eos_penalty: float = 0.0  # subtracted from the score of a cut-off completion
    # --- PPO ---
    # rollouts, each followed by its optimiser steps
    total_rollouts: int = 30
    prompts_per_rollout: int = 128  # prompts per rollout, one completion each
    max_new_tokens: int = 40  # longest completion in tokens
    temperature: float = 1.0  # sampling temperature; it divides the logits in all log-probs too
    update_epochs: int = 2  # passes over a rollout's completions
    num_minibatches: int = 2  # optimiser steps per pass
    gamma: float = 1.0  # discount factor per token
    gae_lambda: float = 0.95  # GAE's lambda: 0 trusts the critic alone, 1 only observed rewards
    clip_coef: float = 0.2  # eps: the ratio pi / pi_old is clipped to 1 - eps and 1 + eps
    vf_clip_coef: float | None = 0.2  # eps_v: V is clipped to V_old +- this; None: no clipping
    # factor of the value loss; it matters with --critic-init policy, where both losses train the
    # same weights; a separate critic is nearly insensitive to it: Adam normalises its gradient
    vf_coef: float = 0.5
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    whiten_advantages: bool = True  # give a rollout's advantages mean 0 and variance 1
    whiten_rewards: bool = False  # give a rollout's token rewards variance 1; their mean stays
    target_kl: float | None = None  # no further pass above this KL(pi_old || pi), nats per token
    # initial critic: the reward model, --model with a new head (sft), random weights (scratch), or
    # only a new head on the policy's own backbone, which both losses then train (policy)
    critic_init: Literal["reward_model", "sft", "scratch", "policy"] = "reward_model"
    critic_learning_rate: float = 1e-3  # AdamW's peak learning rate for the critic, or its head
    beta: float = 0.2  # coefficient of the KL (InstructGPT: 0.02); 0 loads no reference
    # KL as k1 in the rewards, or rho k2 in the loss
    kl_placement: Literal["reward", "loss"] = "reward"
    kl_target: float | None = None  # adapt beta to this KL(pi || pi_ref), nats per completion
    kl_horizon: float = 1_280  # completions in which an adapted beta changes by about 20% at most
    # --- optimisation and evaluation ---
    # completions per forward pass: sets memory and speed, not the result
    micro_batch_size: int = 64
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 5e-4  # AdamW's peak learning rate for the policy
    # how the learning rate changes after its warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.0  # fraction of the rollouts over which the learning rates rise
    max_grad_norm: float = 1.0  # each model's gradient is scaled down to this norm if it is larger
    eval_every: int = 10  # rollouts between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out prompts, at most; one completion each
    eval_temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: list[int]  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
# Tensors (B, T) hold a number per sampled token, and 0 after the end of a completion.
def shaped_rewards(scores: Tensor, k1: Tensor | None, mask: Tensor, beta: float) -> Tensor:
    """r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t (after InstructGPT, equation 2).

    Scores are (B,), the mask of sampled tokens (B, T), and k1, the log-ratios in nats, (B, T), or
    None without a reference.
    """
    is_last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(dim=1, keepdim=True) - 1
    score_rewards = is_last * scores[:, None]  # (B, T)
    return score_rewards if k1 is None else score_rewards - beta * k1


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


def whiten(x: Tensor, mask: Tensor, keep_mean: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the sampled tokens, as in Ziegler et al.'s code.

    `keep_mean` adds the mean back.
    """
    mean, variance = x[mask].mean(), x[mask].var(correction=0)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    if keep_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0)


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    On tokens sampled from pi it is an unbiased estimate of KL(pi || pi_ref), never negative. As a
    loss it has the expected gradient of KL(pi_ref || pi).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


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
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    entropy: Tensor,
    weights: Tensor,
    clip_coef: float,
    beta: float,
    ent_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's part of L over some completions of a minibatch, and sums of tokens for the log.

    Log-probs (B, T) of the sampled tokens under pi_theta, pi_old and pi_ref (None: no reference),
    and the entropy of pi_theta, are in nats. Weights (B, T) are 1 / sampled tokens of the whole
    minibatch, so the losses of micro-batches and ranks add up, and 0 after a completion's end.
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
    return (weights * loss).sum(), {
        "policy/loss": surrogate.sum(),
        "policy/entropy": entropy.sum(),
        "policy/ratio": ratio[weights > 0].sum(),  # 1 at padding, where the other terms are 0
        "policy/approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_coef) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_coef) & (advantages > 0)).sum(),
    }


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
    args = check_args(args)
    run_dir, device, wandb_run = start_run(args)

    # --- data and models ---
    tokenizer, stop_ids = load_tokenizer(args.model)
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model("--model", args.model, AutoModelForCausalLM, positions, device)
    ref_model = None
    if args.beta > 0:
        ref_model = load_model("--model", args.model, AutoModelForCausalLM, positions, device)

    # --- rewards, and the critic, which may start as the reward model ---
    columns = train_prompts[0].columns
    # By name: functions of (prompts, sequences, texts), which return rewards (B,).
    reward_fns = load_reward_fns("--reward-fn", args.reward_fn, columns)
    if args.reward_model:
        reward_fns["reward_model"] = load_reward_model(args, tokenizer, positions, device)
    reward_weights = torch.tensor(args.reward_weights or [1.0] * len(reward_fns))  # (K,)
    eval_fns, eval_weights = reward_fns, reward_weights
    if args.eval_reward_fn != "none":
        eval_fns = load_reward_fns("--eval-reward-fn", [args.eval_reward_fn], columns)
        eval_weights = torch.ones(1)
    critic = load_critic(args, device)
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(policy)
            if args.critic_init != "policy":
                checkpoint_activations(critic)

    # --- optimisers, and where an interrupted run stopped ---
    adamw = partial(AdamW, weight_decay=0.0, fused=True)
    policy_optimizer = adamw(policy.parameters(), lr=args.learning_rate)
    critic_optimizer = adamw(critic.parameters(), lr=args.critic_learning_rate)
    training = {"policy": (policy, policy_optimizer), "critic": (critic, critic_optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_prompts).encode()), "beta": args.beta}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, args.total_rollouts)
    beta = checkpoint["beta"] if args.kl_target else args.beta  # as adapted so far
    print(f"{run_dir}: {policy.num_parameters():,} parameters on {device}")

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
        )
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return list(zip(prompt_ids, completion_ids, strict=True)), texts

    if not args.resume:
        metrics, samples = evaluate(args, sample, eval_prompts, eval_fns, eval_weights)
        log(run_dir, wandb_run, 0, metrics, samples)
    rng = Generator().manual_seed(args.seed)
    data_epochs = math.ceil(args.total_rollouts * args.prompts_per_rollout / len(train_prompts))
    shuffles = [torch.randperm(len(train_prompts), generator=rng) for _ in range(data_epochs)]
    prompt_batches = torch.cat(shuffles).split(args.prompts_per_rollout)
    progress = tqdm(range(checkpoint["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser steps on it
        # 1. Roll out: a completion per prompt, from the policy as it is now.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * (step + 1))  # so resume is exact
        prompts = [train_prompts[i] for i in prompt_batches[step]]
        sequences, texts = sample(prompts, args.temperature, rng)  # B of each
        completions = [completion for _, completion in sequences]
        lengths = torch.tensor([len(ids) for ids in completions], device=device)  # (B,)
        ended = torch.tensor([ids[-1] in stop_ids for ids in completions], device=device)  # (B,)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        rollout_time = time.perf_counter()

        # 2. Score: each reward, and their weighted sum; a cut-off completion is penalised.
        rewards_by_name = {name: fn(prompts, sequences, texts) for name, fn in reward_fns.items()}
        rewards = reward_weights @ torch.stack([*rewards_by_name.values()])  # (B,)
        scores = rewards.to(device) - args.missing_eos_penalty * ~ended  # (B,)
        score_time = time.perf_counter()

        # 3. Log-probs and values before the update, fixed during it. They use the micro-batches of
        # the first epoch, so that the first ratio is 1 to the last bit.
        epochs = shuffled_minibatches(len(sequences), args.update_epochs, args.num_minibatches, rng)
        first_micro_batches = []
        for minibatch in epochs[0]:
            first_micro_batches += micro_batches(sequences, minibatch, args.micro_batch_size)
        old_logprobs = rollout_logprobs(  # (B, T)
            policy, sequences, first_micro_batches, args.temperature
        )
        old_values = torch.zeros_like(old_logprobs)  # (B, T)
        with torch.no_grad():
            for inds in first_micro_batches:
                old_values[inds] = critic_values(policy, critic, sequences, inds)
        old_values = all_reduce_sum(old_values)  # each rank has computed some rows
        ref_logprobs = k1 = None
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(
                ref_model, sequences, first_micro_batches, args.temperature
            )
            k1 = old_logprobs - ref_logprobs  # (B, T), the plain estimate of KL(pi_old || pi_ref)

        # 4. A reward per token: the KL penalty, and the score at the last. Advantages and returns.
        beta_in_reward = beta if args.kl_placement == "reward" else 0.0
        beta_in_loss = beta if args.kl_placement == "loss" else 0.0
        token_rewards = shaped_rewards(scores, k1, mask, beta=beta_in_reward)
        if args.whiten_rewards:
            token_rewards = whiten(token_rewards, mask, keep_mean=True)
        advantages, returns = gae(token_rewards, old_values, args.gamma, args.gae_lambda)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)

        # 5. Optimise: a step per minibatch, its gradient summed over micro-batches and ranks.
        factor = lr_factor(args, step, args.total_rollouts)
        policy_optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        critic_optimizer.param_groups[0]["lr"] = args.critic_learning_rate * factor
        loss_sum, sums, trained_tokens = 0.0, defaultdict(float), 0
        policy_grad_norms, critic_grad_norms = [], []
        for epoch in epochs:
            for minibatch in epoch:
                minibatch_tokens = lengths[minibatch].sum().item()
                trained_tokens += minibatch_tokens
                approx_kl = torch.zeros((), device=device)  # of this minibatch
                for inds in micro_batches(sequences, minibatch, args.micro_batch_size):
                    weights = mask[inds] / minibatch_tokens  # (b, T)
                    logprobs, entropy = completion_logprobs(
                        policy, sequences, inds, args.temperature, entropy=True
                    )
                    pg_loss, policy_sums = policy_loss(
                        logprobs,
                        old_logprobs[inds],
                        None if ref_logprobs is None else ref_logprobs[inds],
                        advantages[inds],
                        entropy,
                        weights,
                        clip_coef=args.clip_coef,
                        beta=beta_in_loss,
                        ent_coef=args.ent_coef,
                    )
                    pg_loss.backward()  # frees the policy's activations before the critic's
                    values = critic_values(policy, critic, sequences, inds)
                    v_loss, value_sums = value_loss(
                        values, old_values[inds], returns[inds], weights, args.vf_clip_coef
                    )
                    (args.vf_coef * v_loss).backward()
                    loss_sum += (pg_loss + args.vf_coef * v_loss).detach().double()
                    for name, value in (policy_sums | value_sums).items():
                        sums[name] += value.detach().double()
                    approx_kl += policy_sums["policy/approx_kl"].detach() / minibatch_tokens
                policy_grad_norms.append(clip_grad_norm(policy, args.max_grad_norm, run_dir, step))
                critic_grad_norms.append(clip_grad_norm(critic, args.max_grad_norm, run_dir, step))
                policy_optimizer.step()
                critic_optimizer.step()
                policy_optimizer.zero_grad()
                critic_optimizer.zero_grad()
            # approx_kl is that of the epoch's last minibatch, before its step.
            if args.target_kl is not None and all_reduce_sum(approx_kl) > args.target_kl:
                break
        update_time = time.perf_counter()

        # 6. Log, adapt beta, evaluate, save.
        means = {name: all_reduce_sum(x).item() / trained_tokens for name, x in sums.items()}
        metrics = {
            "reward/mean": rewards.mean().item(),
            **{f"reward/{name}": reward.mean().item() for name, reward in rewards_by_name.items()},
            "completions/length_mean": lengths.float().mean().item(),
            "completions/length_min": lengths.min().item(),
            "completions/length_max": lengths.max().item(),
            "completions/truncated_fraction": 1 - ended.float().mean().item(),
            "objective/reward": scores.mean().item(),  # the KL penalty is added further down
            "objective/beta": beta,
            "objective/loss": all_reduce_sum(loss_sum).item() / len(policy_grad_norms),
            **means,  # per token: policy/loss, policy/entropy, ..., value/clip_fraction
            "policy/grad_norm": np.mean(policy_grad_norms),
            "policy/learning_rate": policy_optimizer.param_groups[0]["lr"],
            "value/grad_norm": np.mean(critic_grad_norms),
            "value/learning_rate": critic_optimizer.param_groups[0]["lr"],
            "value/explained_variance": explained_variance(old_values, returns, mask).item(),
            "value/mean": old_values[mask].mean().item(),
            "value/variance": old_values[mask].var(correction=0).item(),
            "value/return_mean": returns[mask].mean().item(),
            "value/return_variance": returns[mask].var(correction=0).item(),
            "time/rollout_seconds": rollout_time - start_time,
            "time/score_seconds": score_time - rollout_time,
            "time/update_seconds": update_time - score_time,
            "time/tokens_per_second": lengths.sum().item() / (update_time - start_time),
        }
        if ref_model is not None:  # KL(pi_old || pi_ref), nats per completion
            kl_k1 = k1.sum(dim=1).mean().item()  # the KL of the rewards; beta adapts to it
            metrics["objective/kl"] = k3_kl(old_logprobs, ref_logprobs).sum(dim=1).mean().item()
            metrics["objective/kl_k1"] = kl_k1
            metrics["objective/non_score_reward"] = -beta_in_reward * kl_k1
            metrics["objective/reward"] += metrics["objective/non_score_reward"]
            if args.kl_target:
                beta = adapt_beta(beta, kl_k1, args.kl_target, args.kl_horizon, n=len(sequences))
        samples = []
        is_last = step + 1 == args.total_rollouts
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, sample, eval_prompts, eval_fns, eval_weights)
            metrics |= eval_metrics
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(reward=metrics["reward/mean"], entropy=metrics["policy/entropy"])
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, checkpoint | {"step": step + 1, "beta": beta})

    save_model(run_dir, policy, tokenizer, stop_ids)
    if wandb_run:
        wandb_run.finish()
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


def lr_factor(args: Args, step: int, total_steps: int) -> float:
    """Factor of the learning rate: above 0 in the first step, 1 after the warm-up, then as
    --lr-schedule says.
    """
    warmup_steps = int(args.warmup_ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if args.lr_schedule == "linear":
        return (total_steps - step) / (total_steps - warmup_steps)
    if args.lr_schedule == "cosine":
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0  # constant_with_warmup


def shuffled_minibatches(size: int, epochs: int, num_minibatches: int, rng: Generator) -> list:
    """For each epoch, the numbers 0 to size - 1 shuffled and split into minibatches."""
    shuffles = [torch.randperm(size, generator=rng) for _ in range(epochs)]
    return [shuffle.tensor_split(num_minibatches) for shuffle in shuffles]


def evaluate(
    args: Args, sample: Callable, prompts: list[Prompt], reward_fns: dict, reward_weights: Tensor
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    samples, full_marks = [], []
    for start in range(0, len(prompts), args.prompts_per_rollout):
        batch = prompts[start : start + args.prompts_per_rollout]
        sequences, texts = sample(batch, args.eval_temperature, rng)
        all_rewards = torch.stack([fn(batch, sequences, texts) for fn in reward_fns.values()])
        full_marks += (all_rewards[0] >= 1).tolist()  # read only if there is no other
        rewards = (reward_weights @ all_rewards).tolist()
        for i, prompt in enumerate(batch):
            row = {"prompt": prompt.text, "completion": texts[i]}
            samples.append(row | {"reward": rewards[i], "length": len(sequences[i][1])})
    metrics = {"eval/reward": np.mean([row["reward"] for row in samples])}
    if len(reward_fns) == 1 and "reward_model" not in reward_fns:  # a function's full marks are 1
        metrics["eval/accuracy"] = np.mean(full_marks)
    metrics["eval/length_mean"] = np.mean([row["length"] for row in samples])
    return metrics, samples


# --- the critic --------------------------------------------------------------------------------
def load_critic(args: Args, device: torch.device) -> torch.nn.Module:
    """A model with one output per token, initialised as --critic-init says.

    `policy`: only a head, on the policy's backbone, as in Ziegler et al.'s code.
    """
    kind = AutoModelForSequenceClassification
    source = args.reward_model if args.critic_init == "reward_model" else args.model
    torch.manual_seed(args.seed)
    with explain(f"--critic-init {args.critic_init}"):
        config = AutoConfig.from_pretrained(source, num_labels=1)
        if args.critic_init == "policy":
            critic = torch.nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
            torch.nn.init.normal_(critic.weight, std=(critic.in_features + 1) ** -0.5)
        elif args.critic_init == "scratch":
            critic = kind.from_config(config, dtype=torch.float32).eval()
        else:
            critic = kind.from_pretrained(source, config=config, dtype=torch.float32)
        torch.manual_seed(args.seed)  # loading may have drawn numbers
        if args.critic_init == "sft":  # a new head (Stiennon et al., arXiv 2009.01325, B.1)
            torch.nn.init.normal_(critic.score.weight, std=(critic.score.in_features + 1) ** -0.5)
    return shard(critic, device)


def critic_values(policy: Any, critic: Any, sequences: Sequences, inds: Tensor) -> Tensor:
    """V_t (b, T) of sequences[inds]: the critic's output before token t, centred as scores are."""
    width = max(len(completion) for _, completion in sequences)
    # A rank without rows reads a dummy: sharded, all ranks must run every forward pass.
    batch = [sequences[i] for i in inds] or [([0], [])]
    backbone, head, score_mean = policy, critic, 0.0
    if not isinstance(critic, torch.nn.Linear):  # not --critic-init policy: a model of its own
        backbone, head = critic, critic.score
        score_mean = getattr(critic.config, "score_mean", 0.0)
    ids, _ = pad_rows([prompt + completion for prompt, completion in batch], backbone.device)
    hidden = hidden_states(backbone, ids)  # (b, L, d)
    values = head(hidden.float()).squeeze(2) - score_mean  # (b, L)
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in batch], device=ids.device)
    lengths = torch.tensor([len(completion) for _, completion in batch], device=ids.device)
    t = torch.arange(width, device=ids.device)
    # V_t is read one position before token t, where the critic has seen x and y_<t alone.
    token_inds = (starts[:, None] + t).clamp(max=ids.shape[1] - 1)  # (b, T), masked past the end
    return values.gather(1, token_inds).masked_fill(t >= lengths[:, None], 0.0)[: len(inds)]


# --- the reward --------------------------------------------------------------------------------
def load_reward_fns(flag: str, specs: list[str], columns: dict) -> dict[str, Callable]:
    """Reward functions by name, each from a path/to/file.py:function."""
    reward_fns = {}
    for spec in specs:
        path, _, name = spec.rpartition(":")
        with explain(f"{flag} {spec}"):
            check(Path(path).is_file(), f"no file {path!r}; give path/to/file.py:function")
        with explain(f"{flag} {spec}, called with prompts, completions, {[*columns]}"):
            module_spec = spec_from_file_location(Path(path).stem, path)
            module = module_from_spec(module_spec)
            sys.path.append(str(Path(path).parent))  # for modules beside it
            sys.modules.setdefault(module.__name__, module)  # for its dataclasses and processes
            module_spec.loader.exec_module(module)
            function = getattr(module, name)
            inspect.signature(function).bind(prompts=[], completions=[], **columns)
            is_taken = name in {*reward_fns, "reward_model", "mean", "std"}
            check(not is_taken, "another reward, or a metric, has this name")
        reward_fns[name] = partial(call_reward_fn, name, function)
    return reward_fns


def call_reward_fn(
    name: str, function: Callable, prompts: list, sequences: Sequences, texts: list[str]
) -> Tensor:
    """Rewards (B,) of texts[i], the completion of prompts[i], by a function that only rank 0 calls,
    once for all completions, because it may compare them. Reward models read `sequences` instead.
    """
    rewards = []
    if RANK == 0:
        columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
        prompt_texts = [prompt.text for prompt in prompts]
        rewards = function(prompts=prompt_texts, completions=[*texts], **columns)
        with explain(f"reward function {name} must return a list of {len(texts)} numbers"):
            is_list = isinstance(rewards, list | tuple | np.ndarray | Tensor)
            check(is_list, f"it returned a {type(rewards).__name__}")
            check(len(rewards) == len(texts), f"it returned {len(rewards)}")
            for prompt, text, reward in zip(prompt_texts, texts, rewards, strict=True):
                # Beyond 3e38 it would be infinite in float32.
                is_number = isinstance(reward, SupportsFloat) and abs(float(reward)) < 3e38
                check(is_number, f"it returned {reward!r} for {text!r} after {prompt!r}")
    return torch.tensor(all_gather([float(reward) for reward in rewards]))  # rank 0's, on all


def load_reward_model(args: Args, tokenizer: Any, positions: int, device: Any) -> Callable:
    """The scores of --reward-model as a reward function."""
    with explain(f"--reward-model {args.reward_model}"):
        vocabulary = AutoTokenizer.from_pretrained(args.reward_model).get_vocab().items()
        check(tokenizer.get_vocab().items() <= vocabulary, "its tokenizer differs from --model's")
    kind = AutoModelForSequenceClassification
    model = load_model("--reward-model", args.reward_model, kind, positions, device)
    return partial(reward_model_scores, model, args.micro_batch_size)


@torch.no_grad()
def reward_model_scores(
    model: Any, micro_batch_size: int, prompts: list, sequences: Sequences, texts: list[str]
) -> Tensor:
    """Scores (B,) of the last token, minus the preferred completions' mean (after InstructGPT)."""
    scores = torch.zeros(len(sequences), device=model.device)
    for inds in micro_batches(sequences, torch.arange(len(sequences)), micro_batch_size):
        # A rank without rows scores a dummy: sharded, all ranks must run every forward pass.
        rows = [sequences[i][0] + sequences[i][1] for i in inds] or [[0]]
        ids, mask = pad_rows(rows, model.device)
        with autocast(model.device):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
        scores[inds] = model.score(last.float()).squeeze(1)[: len(inds)]
    scores = all_reduce_sum(scores).cpu()
    with explain("--reward-model"):
        check(scores.isfinite().all(), "it gave a score that is not finite")
    return scores - getattr(model.config, "score_mean", 0.0)


# --- model and data ----------------------------------------------------------------------------
def load_tokenizer(source: str) -> tuple[Any, list[int]]:
    """The tokenizer, and the ids that end a completion."""
    with explain(f"--model {source}"):
        check_folder(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        stop_ids = find_stop_ids(source, tokenizer)
        check(stop_ids, "neither tokenizer nor generation config has an EOS")
        vocab_size = AutoConfig.from_pretrained(source).get_text_config().vocab_size
        message = f"its tokenizer has {len(tokenizer)} tokens, its embedding only {vocab_size}"
        check(len(tokenizer) <= vocab_size, message)
    return tokenizer, stop_ids


def load_model(flag: str, source: str, kind: Any, positions: int, device: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    with explain(f"{flag} {source}"):
        check_folder(source)
        model, info = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        check(not wrong, f"weights missing or unknown to {type(model).__name__}: {wrong}")
        one_label = not hasattr(model, "score") or model.config.num_labels == 1
        check(one_label, "it has more than one label")
        limit = getattr(model.config, "max_position_embeddings", positions)
        check(positions <= limit, f"it has {limit} positions, the --max flags need {positions}")
    return shard(model, device)


def load_prompts(args: Args, split: str, tokenizer: Any) -> list[Prompt]:
    """The prompts of a split; rows that cannot be used are dropped, counted and reported."""
    prompts, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        check_folder(args.dataset)
        dataset = load_dataset(args.dataset, args.dataset_config, split=split)
    for index, row in enumerate(dataset):
        with explain(f"--dataset {args.dataset}, row {index} of {split}"):
            check(args.prompt_column in row, f"no --prompt-column in {[*row]}")
            text = row.pop(args.prompt_column) or ""
            message = f"a prompt is a string or a list of messages, not {text!r:.80}"
            check(isinstance(text, str | list), message)
            if args.answer_column in row:
                row["answer"] = row.pop(args.answer_column)
                check(row["answer"] is not None, f"--answer-column {args.answer_column} is null")
            if args.chat and isinstance(text, str):
                text = [{"role": "user", "content": text}]
            last_turn = text if isinstance(text, str) else content(text[-1])
            ids = []
            if last_turn.strip():
                ids = encode(tokenizer, text, add_generation_prompt=True)
        if not ids:
            dropped["empty"].append(text)
        elif len(ids) > args.max_prompt_length:
            dropped[f"longer than --max-prompt-length {args.max_prompt_length}"].append(text)
        else:
            prompts.append(Prompt(text, ids, row))
    report_rows(args, split, prompts, dropped)
    return prompts


def report_rows(args: Args, split: str, rows: list, dropped: dict[str, list]) -> None:
    """Print how many rows are used, how many are not and why, and the first of each reason."""
    num_dropped = sum(len(examples) for examples in dropped.values())
    message = f"{len(rows)} of {len(rows) + num_dropped} rows"
    for reason, examples in dropped.items():
        message += f"; dropped {len(examples)} {reason}, first {examples[0]!r:.200}"
    with explain(f"--dataset {args.dataset}, {split}"):
        check(rows, f"nothing is left: {message}")
    print(f"{split}: {message}")


def check_args(args: Args) -> Args:
    """What can be seen to be wrong before anything is loaded; fills in the reward of evaluation."""
    if args.reward_model == "none":
        args = replace(args, reward_model=None)
    if args.eval_reward_fn is None:
        gold = "tiny/reviews/gold.py:sentiment"
        args = replace(args, eval_reward_fn=gold if args.dataset == Args.dataset else "none")
    with explain("flags"):
        check_numbers(args, "save_every max_prompt_length total_rollouts prompts_per_rollout")
        check_numbers(args, "max_new_tokens temperature update_epochs num_minibatches clip_coef")
        check_numbers(args, "vf_clip_coef target_kl critic_learning_rate kl_target kl_horizon")
        check_numbers(args, "micro_batch_size learning_rate max_grad_norm eval_every eval_rows")
        check_numbers(args, "seed missing_eos_penalty gamma gae_lambda vf_coef ent_coef", zero=True)
        check_numbers(args, "beta warmup_ratio eval_temperature", zero=True)
        check(args.warmup_ratio < 1, f"--warmup-ratio must be below 1, not {args.warmup_ratio}")
        check(max(args.gamma, args.gae_lambda) <= 1, "--gamma or --gae-lambda is more than 1")
        check(
            args.num_minibatches <= args.prompts_per_rollout,
            f"--num-minibatches: {args.prompts_per_rollout} at most",
        )
        message = "--kl-placement loss has no use with --beta 0"
        check(args.beta > 0 or args.kl_placement == Args.kl_placement, message)
        one_step = args.update_epochs * args.num_minibatches == 1
        message = "with one optimiser step per rollout all ratios are 1, and V is V_old"
        check(args.clip_coef == Args.clip_coef or not one_step, f"--clip-coef: {message}")
        has_clip = args.vf_clip_coef not in (None, Args.vf_clip_coef)
        check(not (has_clip and one_step), f"--vf-clip-coef: {message}")
        has_horizon = args.kl_horizon != Args.kl_horizon
        check(args.kl_target or not has_horizon, "--kl-horizon has no use without --kl-target")
        message = (
            "without --reward-model give --reward-fn, and --critic-init sft, scratch or policy"
        )
        needs_no_model = args.reward_fn and args.critic_init != "reward_model"
        check(args.reward_model or needs_no_model, message)
        num_rewards = len(args.reward_fn) + bool(args.reward_model)
        message = f"--reward-weights: give one for each of the {num_rewards} rewards"
        check(len(args.reward_weights) in (0, num_rewards), message)
        finite = all(math.isfinite(weight) for weight in args.reward_weights)
        check(finite, f"--reward-weights must not be {args.reward_weights}")
        if args.kl_target:
            check(args.beta > 0, "--kl-target adapts --beta, which is 0")
            is_long_enough = args.prompts_per_rollout < 5 * args.kl_horizon
            check(is_long_enough, "--kl-horizon is so short that beta would become negative")
    return args


# --- the run: the same in every script; skip it on a first reading -----------------------------
class InputError(Exception):
    """What the user can mend, in one line; `python -X dev` shows the traceback too."""


@contextmanager
def explain(what: str) -> Iterator[None]:
    """An error in here is the user's to mend: one line says where it is and what is wrong."""
    try:
        yield
    except Exception as error:
        message = str(error.__cause__ or error).strip() or repr(error)
        raise InputError(f"{what}: {' '.join(message.split()):.500}") from error


def check(condition: Any, message: str) -> None:
    """Raise unless the condition holds; `explain` around it names the flag or the row."""
    if not condition:
        raise ValueError(message)


def check_numbers(args: Args, flags: str, zero: bool = False) -> None:
    """The flags' values are above 0 (with `zero`: or 0) and fit into 64 bits, or are None."""
    bound = "of at least 0" if zero else "above 0"
    for name in flags.split():
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value is not None:
            is_number = isinstance(value, int | float)  # not after an edit of args.json
            valid = is_number and (value > 0 or (zero and value == 0))
            check(valid, f"{flag} must be a number {bound}, not {value!r}")
            check(value < 2**63, f"{flag} must be below 2**63, not {value}")


def check_folder(source: str) -> None:
    """A model or a dataset is a folder, or a name on the hub, which has one slash at most."""
    folder = Path(source)
    is_path = source.count("/") > 1 or source.startswith((".", "/", "~"))
    check(folder.exists() or not is_path, f"there is no such folder in {Path.cwd()}")
    check(not folder.is_file(), "it is a file, and must be a folder")
    if not (folder / "config.json").exists():
        is_adapter = (folder / "adapter_config.json").exists()
        check(not is_adapter, "it is a PEFT adapter: merge it into its model first")
        check(
            not [*folder.glob("*.gguf")], "GGUF weights: safetensors and a config.json are needed"
        )
    saved_to_disk = (folder / "state.json").exists()
    check(not saved_to_disk, "it was made by save_to_disk; use to_json or to_parquet")
    for path in folder.rglob("*.json*"):
        check(path.stat().st_size > 0, f"{path} is empty")


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; with --resume, over those that the run was started with."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    if args.resume:
        with explain(f"--resume {args.resume}: not a run of this script"):
            saved = json.loads((Path(args.resume) / "args.json").read_text())
            args = tyro.cli(Args, args=argv, default=Args(**saved | {"resume": args.resume}))
    return args


def start_run(args: Args) -> tuple[Path, torch.device, Any]:
    """The run's folder (new, or the one --resume names), this rank's device, and wandb's run."""
    logging.disable_progress_bar()
    if torch.cuda.is_available():  # CUDA-only
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
    if RANK > 0:  # rank 0 alone prints and writes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    path = args.resume or f"{args.output_dir}/{name}-{time.time_ns() // 1000 % 10**6:06}"
    run_dir = all_gather([Path(path)])[0]  # rank 0's
    if RANK == 0 and not args.resume:
        with explain(f"--output-dir {args.output_dir}"):
            run_dir.mkdir(parents=True)
            (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    if RANK == 0:
        start_run.lock = FileLock(run_dir / ".lock", is_singleton=True)  # until the process ends
        with explain(f"{run_dir}: not a run, or another process is at work on it"):
            start_run.lock.acquire(timeout=0)
    wandb_run = None
    if RANK == 0 and args.track:
        with explain("--track"):
            options = dict(config=vars(args), resume="allow", reinit="create_new")
            wandb_run = wandb.init(id=run_dir.name, **options)
    return run_dir, torch.device("cuda" if torch.cuda.is_available() else "cpu"), wandb_run


def clip_grad_norm(model: torch.nn.Module, max_norm: float, run_dir: Path, step: int) -> float:
    """Scale the gradient down to max_norm; returns its norm before that, which must be finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
    with explain(f"{run_dir} stopped in step {step + 1}"):
        hint = "is the learning rate too high? checkpoint.previous.pt, if any, may be from before"
        check(math.isfinite(norm), f"gradient norm {norm}: {hint}")
    return norm


def save_checkpoint(run_dir: Path, training: dict[str, tuple], checkpoint: dict) -> None:
    """Replace checkpoint.pt and keep the one before, as this one may hold weights that diverge.

    A kill at any moment leaves a whole file.
    """
    for name, (model, optimizer) in training.items():
        weights, moments = dcp.get_state_dict(model, optimizer, options=FULL_STATE)  # all ranks
        checkpoint[name] = {"model_state_dict": weights, "optim_state_dict": moments}
    if RANK == 0:
        checkpoint["logs"] = {file.name: file.stat().st_size for file in run_dir.glob("*.jsonl")}
        new_file = run_dir / "checkpoint.tmp"
        with explain(f"{run_dir}: no checkpoint could be written (is the disk full?)"):
            try:
                torch.save(checkpoint, new_file)
                if (run_dir / "checkpoint.pt").exists():
                    os.replace(run_dir / "checkpoint.pt", run_dir / "checkpoint.previous.pt")
                os.replace(new_file, run_dir / "checkpoint.pt")
            finally:
                new_file.unlink(missing_ok=True)


def load_checkpoint(
    args: Args, run_dir: Path, training: dict, checkpoint: dict, total_steps: int
) -> dict:
    """Read checkpoint.pt into models and optimizers, and cut the logs back to its step."""
    with explain(f"--resume {run_dir}"):
        saved_args = json.loads((run_dir / "args.json").read_text())
        # With another value it would be another run.
        for flag in ("seed", "model", "dataset", "loss", "train_layers", "critic_init"):
            same = saved_args.get(flag) == getattr(args, flag, None)
            message = f"--{flag.replace('_', '-')} cannot be changed, it was {saved_args.get(flag)}"
            check(same, message)
    file = run_dir / "checkpoint.pt"
    if not file.exists():  # killed between the two renamings of `save_checkpoint`
        file = run_dir / "checkpoint.previous.pt"
    with explain(f"--resume {run_dir}: no whole checkpoint of this script, model and data"):
        saved = torch.load(file, weights_only=True, mmap=True)
        check(saved["data"] == checkpoint["data"], "the training rows of --dataset have changed")
        for name, (model, optimizer) in training.items():
            dcp.set_state_dict(model, optimizer, **saved.pop(name), options=FULL_STATE)
    with explain(f"--resume {run_dir}"):
        at_step = f"its checkpoint is at step {saved['step']}, these flags end at {total_steps}"
        check(saved["step"] <= total_steps, at_step)
    if RANK == 0:
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
        for name, size in saved["logs"].items():
            if (run_dir / name).is_file() and (run_dir / name).stat().st_size >= size:
                os.truncate(run_dir / name, size)
            else:
                print(f"{run_dir / name} has lost lines since the checkpoint; it is continued")
    return saved


def log(run_dir: Path, wandb_run: Any, step: int, metrics: dict, samples: list[dict]) -> None:
    """Append to metrics.jsonl and samples.jsonl, tell wandb, and print evaluations."""
    if RANK == 0:
        with explain(f"{run_dir}"):
            for name, rows in (("metrics", [metrics]), ("samples", samples)):
                with open(run_dir / f"{name}.jsonl", "a") as file:
                    file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
    if wandb_run:
        wandb_run.log(metrics, step=step)
    if samples:
        evals = [f"{key[5:]} {metrics[key]:.3f}" for key in metrics if key.startswith("eval/")]
        lines = [f"step {step}: held-out {', '.join(evals)}", *map(str, samples[:2])]
        tqdm.write("\n    ".join(lines))


def save_model(run_dir: Path, model: torch.nn.Module, tokenizer: Any, stop_ids: list[int]) -> None:
    """Write model/ for `from_pretrained`."""
    weights = dcp.get_model_state_dict(model, options=FULL_STATE)  # all ranks
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    weights = {name: weights[name] for name in names if name in weights}  # a tied one only once
    # The checkpoint's own may ask for top-k, or be one that transformers refuses to save.
    special_ids = dict(eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id)
    model.generation_config = GenerationConfig(**special_ids)
    if RANK == 0:
        with explain(f"{run_dir / 'model'}"):
            model.generation_config.save_pretrained(run_dir / "model")
            tokenizer.save_pretrained(run_dir / "model")
            model.save_pretrained(run_dir / "model", state_dict=weights)
    print(f"model: {run_dir / 'model'}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # where a console cannot show a sample
    try:
        main(parse_args())
    except (InputError, KeyboardInterrupt) as error:
        if sys.flags.dev_mode:  # python -X dev
            raise
        hint = "stopped; resume with --resume and the run's folder"
        sys.exit(f"error: {error}" if str(error) else hint)
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        os._exit(0)  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)
