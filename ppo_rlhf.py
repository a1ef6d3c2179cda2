r"""Proximal Policy Optimization (PPO) for language models: RLHF as InstructGPT did it.

The policy pi writes a completion y to a prompt x; a reward model (or a rule) scores the whole.
Maximise (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, equation 2)

    J(theta) = E[ score(x, y) - beta sum_t log( pi_theta(y_t | x, y_<t) / pi_ref(y_t | x, y_<t) ) ].

Each completion is an episode; its actions are the tokens, and their rewards

    r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t.

A critic V estimates what is still to come; then generalised advantage estimation (GAE, arXiv
1506.02438, equation 16) and the clipped surrogate (PPO, arXiv 1707.06347, equation 7) give

    delta_t = r_t + gamma V_old,t+1 - V_old,t,    A_t = sum_l (gamma lambda)^l delta_t+l,
    L = - mean_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
        + vf_coef mean_t 1/2 max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-eps_v) - R_t)^2)
        - ent_coef mean_t H(pi_t),    rho_t = (pi_theta / pi_old)_t,    R_t = A_t + V_old,t,

mean_t being over all sampled tokens of an optimiser step, and A_t in L whitened, in R_t not.
Deviations from the paper: no pretraining gradients; advantages are whitened and values clipped, as
in the code that InstructGPT grew from (Ziegler et al. 2019, arXiv 1909.08593); a cut-off completion
ends its episode too. `--kl-placement loss` moves the KL into the loss (see `k2_kl`).

    python ppo_rlhf.py                                   # tiny/reviews, half a minute on a CPU
    python ppo_rlhf.py --model runs/sft__1__.../model --reward-model runs/rm_.../model \
        --dataset trl-lib/ultrafeedback-prompt --max-prompt-length 512 \
        --max-new-tokens 512 --beta 0.05 --learning-rate 1e-6 --critic-learning-rate 1e-5
    torchrun --nproc_per_node=8 ppo_rlhf.py ...          # eight GPUs: docs/processes.md
    python ppo_rlhf.py --resume runs/ppo_rlhf__1__...    # resume after a crash

Healthy: `eval/reward` rises with `reward/mean`; where it falls, the reward model is being hacked.
"""

import inspect
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, GenerationConfig, get_scheduler, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast, content
from common.generation import encode, find_stop_ids, generate, pad_rows, shard
from common.logprobs import Pairs, completion_logprobs, micro_batches, rollout_logprobs

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "ppo_rlhf"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order, of all sampling and of a critic's new weights
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 10  # rollouts between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy, reference and tokenizer
    dataset: str = "tiny/reviews/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column given to the reward functions as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: int = 64  # in tokens; rows with longer prompts are dropped and counted
    # --- reward ---
    reward_model: str | None = "tiny/reviews/reward_model"  # of one label, --model's tokenizer
    reward_fn: list[str] = field(default_factory=list)  # `last_number` or path/to/file.py:function
    reward_weights: list[float] = field(default_factory=list)  # of each rule, then the model
    eval_reward_fn: str | None = "tiny/reviews/gold.py:sentiment"  # None for the training reward
    missing_eos_penalty: float = 0.0  # subtracted from the scores of cut-off completions
    # --- PPO ---
    total_rollouts: int = 30  # rollouts, each followed by its optimiser steps
    prompts_per_rollout: int = 128  # prompts per rollout, one completion each
    max_new_tokens: int = 40  # longest completion in tokens
    temperature: float = 1.0  # of sampling; it divides the logits in all log-probs too
    update_epochs: int = 2  # passes over a rollout
    num_minibatches: int = 2  # optimiser steps per pass
    gamma: float = 1.0  # discount of a reward one token later
    gae_lambda: float = 0.95  # at 0 an advantage trusts the critic alone, at 1 only the rewards
    clip_coef: float = 0.2  # eps: the ratio is clipped to 1 - eps and 1 + eps
    vf_clip_coef: float | None = 0.2  # eps_v: V is clipped to V_old +- this; None: never
    vf_coef: float = 0.5  # of the value loss; Adam hardly sees a scale: tune the rate
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    whiten_advantages: bool = True  # give a rollout's advantages mean 0 and variance 1
    whiten_rewards: bool = False  # give a rollout's rewards variance 1, keeping their mean
    target_kl: float | None = None  # stop after a pass at whose end KL(pi_old || pi) is higher
    critic_init: Literal["reward_model", "sft", "scratch"] = "reward_model"  # sft: from --model
    critic_learning_rate: float = 1e-3  # AdamW's peak learning rate for the critic
    beta: float = 0.2  # coefficient of the KL (InstructGPT: 0.02); 0 loads no reference
    kl_placement: Literal["reward", "loss"] = "reward"  # k1 in the rewards, or k2 in the loss
    kl_target: float | None = None  # KL(pi || pi_ref) per completion that beta is adapted to
    kl_horizon: float = 1_280  # K = completions per rollout / this, in adapt_beta
    # --- optimisation and evaluation ---
    micro_batch_size: int = 64  # completions per forward pass: memory and speed, not the result
    learning_rate: float = 5e-4  # AdamW's peak learning rate for the policy
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.0  # part of the run over which the learning rates rise from 0
    max_grad_norm: float = 1.0  # larger gradients are scaled down to it, policy and critic alone
    eval_every: int = 10  # rollouts between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out prompts, at most; one completion each
    eval_temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


# --- the mathematics ---------------------------------------------------------------------------
# Tensors (B, T) hold a number per sampled token, and 0 after the end of a completion.
def shaped_rewards(scores: Tensor, log_ratio: Tensor, mask: Tensor, beta: float) -> Tensor:
    """r_t = 1[t = last] score - beta (log pi_old - log pi_ref)_t (InstructGPT, equation 2)."""
    last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(dim=1, keepdim=True) - 1
    return last * scores[:, None] - beta * log_ratio  # (B, T)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_t+l,  delta_t = r_t + gamma V_t+1 - V_t  (GAE, equation 16).

    V_t is the critic's estimate before token t, 0 after the last, as rewards. Returns A, R = A + V.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (B,)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_value, next_advantage = values[:, t], delta + gamma * lam * next_advantage
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten(values: Tensor, mask: Tensor, keep_mean: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the sampled tokens, as in Ziegler et al.'s code."""
    mean, variance = values[mask].mean(), values[mask].var(correction=0)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened + mean if keep_mean else whitened).masked_fill(~mask, 0.0)


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    On tokens from pi, which those of pi_old are in the first step, an unbiased estimate of
    KL(pi || pi_ref). As a loss it has the expected gradient of KL(pi_ref || pi).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def k2_kl(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """rho 1/2 (log pi - log pi_ref)^2 at each token, rho = pi / pi_old without a gradient.

    At each prefix, tokens from pi_old give it the gradient of KL(pi || pi_ref) in expectation; as
    losses k1 would have none, k3 that of KL(pi_ref || pi) (arXiv 2506.09477 and 2510.01555).
    """
    return 0.5 * (logprobs - old_logprobs).detach().exp() * (logprobs - ref_logprobs).square()


def adapt_beta(beta: float, kl: float, target: float, horizon: float, completions: int) -> float:
    """beta (1 + K e), e = clip(kl / target - 1, +-0.2), K = n / horizon (Ziegler et al., code)."""
    error = min(max(kl / target - 1, -0.2), 0.2)  # kl: nats per completion, measured on n
    return beta * (1 + error * completions / horizon)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant."""
    rest, returns = (returns - values)[mask], returns[mask]
    return 1 - rest.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    weights: Tensor,
    clip_coef: float,
    kl_coef: float,
    ent_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's part of L, and sums; weights (B, T): 1 / sampled tokens in the step, else 0."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()  # rho
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    # No gradient once the ratio has left the interval as its advantage pushes (PPO, equation 7).
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = surrogate + kl_coef * k2_kl(logprobs, old_logprobs, ref_logprobs)
    loss = loss - ent_coef * entropy if ent_coef > 0 else loss
    return (weights * loss).sum(), {
        "policy/loss": surrogate.sum(),
        "policy/entropy": entropy.sum(),
        "policy/ratio": ratio[weights > 0].sum(),
        "policy/approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_coef) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_coef) & (advantages > 0)).sum(),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-eps_v) - R)^2), and sums.

    No gradient where V is out of the interval and nearer to R than the clipped V (Ziegler, code).
    """
    losses = free = 0.5 * (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(free, 0.5 * (clipped - returns).square())
    sums = {"value/loss": losses.sum(), "value/clip_fraction": (losses > free).sum()}
    return (weights * losses).sum(), sums


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_prompts(args, args.train_split, tokenizer)
    eval_rows = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    judges = dict(load_rule("--reward-fn", spec, train_rows[0]) for spec in args.reward_fn)
    load = partial(load_model, longest=args.max_prompt_length + args.max_new_tokens, device=device)
    policy = load("--model", args.model, AutoModelForCausalLM)
    ref_model = load("--model", args.model, AutoModelForCausalLM) if args.beta > 0 else None
    reward_model = None
    if args.reward_model:
        with explain(f"--reward-model {args.reward_model}"):
            known = AutoTokenizer.from_pretrained(args.reward_model).get_vocab().items()
            require(tokenizer.get_vocab().items() <= known, "its tokenizer is not that of --model")
        reward_model = load("--reward-model", args.reward_model, AutoModelForSequenceClassification)
        judges["reward_model"] = partial(reward_model_scores, reward_model, args.micro_batch_size)
    critic = load_critic(args, device)
    with explain(f"--reward-weights: give one for each of {[*judges]}"):
        known = len(args.reward_fn) + bool(args.reward_model)
        require(len(judges) == known, "two --reward-fn of one name")
        weights = dict(zip(judges, args.reward_weights or [1.0] * len(judges), strict=True))
    # The default rule judges the default dataset alone.
    judged = args.eval_reward_fn != Args.eval_reward_fn or args.dataset == Args.dataset
    rules = [args.eval_reward_fn] if args.eval_reward_fn and judged else []
    rules = dict(load_rule("--eval-reward-fn", spec, eval_rows[0]) for spec in rules)
    eval_judges = (rules, dict.fromkeys(rules, 1.0)) if rules else (judges, weights)
    policy_optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), weight_decay=0.0, fused=True)
    trained = {"policy": (policy, policy_optimizer), "critic": (critic, critic_optimizer)}
    warmup_steps = int(args.warmup_ratio * args.total_rollouts)
    schedule = get_scheduler(args.lr_schedule, policy_optimizer, warmup_steps, args.total_rollouts)
    state = {"step": 0, "data": zlib.crc32(repr(train_rows).encode()), "beta": args.beta}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    beta = state["beta"] if args.kl_target else args.beta
    models = [*[policy, critic] * 4, ref_model, reward_model]  # Adam: 4 times the weights
    size = sum(model.num_parameters() for model in models if model is not None)
    print(f"{run_dir}: {policy.num_parameters():,} parameters, {size * 4e-9:.3f} GB on {device}")

    def sample(rows: list[dict], temperature: float, rng: Any) -> tuple[Pairs, list[str]]:
        prompts = [row["ids"] for row in rows]
        sampled = generate(policy, prompts, args.max_new_tokens, temperature, stop_ids, rng)
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return list(zip(prompts, sampled, strict=True)), texts

    if not args.resume:
        log(run_dir, 0, *evaluate(args, sample, eval_rows, *eval_judges))
    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(args.total_rollouts * args.prompts_per_rollout / len(train_rows))
    order = torch.cat([torch.randperm(len(train_rows), generator=rng) for _ in range(epochs)])
    progress = tqdm(range(state["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:
        # 1. roll out: a completion per prompt, from the policy as it is now
        started = time.perf_counter()
        rng = torch.Generator().manual_seed(args.seed + 1_000_003 * (step + 1))
        picked = order[step * args.prompts_per_rollout :][: args.prompts_per_rollout]
        rows = [train_rows[i] for i in picked]
        pairs, texts = sample(rows, args.temperature, rng)  # B pairs of token ids
        lengths = torch.tensor([len(sampled) for _, sampled in pairs], device=device)  # (B,)
        finished = torch.tensor([sampled[-1] in stop_ids for _, sampled in pairs], device=device)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        rolled_out = time.perf_counter()

        # 2. score: every reward by name, and their weighted sum
        rewards_by_name = {name: judge(rows, pairs, texts) for name, judge in judges.items()}
        rewards = sum(weights[name] * values for name, values in rewards_by_name.items())  # (B,)
        scores = rewards.to(device) - args.missing_eos_penalty * ~finished  # (B,)
        scored = time.perf_counter()

        # 3. log-probs and values that stay fixed during the update, in the micro-batches of the
        # first pass, so that before the first step the ratio is exactly 1
        passes = [torch.randperm(len(pairs), generator=rng) for _ in range(args.update_epochs)]
        minibatches = [part for rows in passes for part in rows.tensor_split(args.num_minibatches)]
        batches = [[*micro_batches(pairs, rows, args.micro_batch_size)] for rows in minibatches]
        first_pass = [rows for parts in batches[: args.num_minibatches] for rows in parts]
        fixed = (pairs, first_pass, args.temperature)
        old_logprobs = rollout_logprobs(policy, *fixed)  # (B, T)
        ref_logprobs = rollout_logprobs(ref_model, *fixed) if args.beta > 0 else old_logprobs
        old_values = torch.zeros(mask.shape, device=device)  # (B, T)
        with torch.no_grad():
            for some in first_pass:
                old_values[some] = critic_values(critic, pairs, some)
        all_reduce_sum(old_values)

        # 4. a reward per token: the KL penalty, and the score at the last; advantages and returns
        kl_in_reward, kl_in_loss = (beta, 0.0) if args.kl_placement == "reward" else (0.0, beta)
        k1 = old_logprobs - ref_logprobs  # (B, T), the plain estimate of KL(pi_old || pi_ref)
        token_rewards = shaped_rewards(scores, k1, mask, kl_in_reward)
        if args.whiten_rewards:
            token_rewards = whiten(token_rewards, mask, keep_mean=True)
        advantages, returns = gae(token_rewards, old_values, args.gamma, args.gae_lambda)
        if args.whiten_advantages:
            advantages = whiten(advantages, mask)

        # 5. optimise: an optimiser step per minibatch, its gradient summed over micro-batches
        decay = schedule.lr_lambdas[0](step)
        policy_optimizer.param_groups[0]["lr"] = decay * args.learning_rate
        critic_optimizer.param_groups[0]["lr"] = decay * args.critic_learning_rate
        norms, sums, tokens_seen = defaultdict(list), defaultdict(float), 0
        for number, (minibatch, parts) in enumerate(zip(minibatches, batches, strict=True), 1):
            tokens, approx_kl = lengths[minibatch].sum().item(), 0.0
            tokens_seen += tokens
            for some in parts:
                w = mask[some] / tokens  # (b, T), so that micro-batches add up to the step
                logprobs, entropy = completion_logprobs(policy, pairs, some, args.temperature, True)
                old = (old_logprobs[some], ref_logprobs[some], advantages[some])
                coefs = (args.clip_coef, kl_in_loss, args.ent_coef)
                loss, terms = policy_loss(logprobs, *old, entropy, w, *coefs)
                loss.backward()  # before the critic's forward pass: half the activations
                values, old = critic_values(critic, pairs, some), (old_values[some], returns[some])
                v_loss, v_terms = value_loss(values, *old, w, args.vf_clip_coef)
                (args.vf_coef * v_loss).backward()
                terms |= v_terms | {"objective/loss": loss.detach() + args.vf_coef * v_loss}
                for name, value in terms.items():
                    sums[name] += value.detach().double()
                approx_kl += terms["policy/approx_kl"].detach() / tokens
            for name, (model, _) in trained.items():
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
                norms[name].append(norm)
            last = [values[-1] for values in norms.values()]  # of policy and critic
            with explain(f"rollout {step + 1}: no step was taken; is --learning-rate too high?"):
                require(math.isfinite(sum(last)), f"gradient norms {last}; stopped run: {run_dir}")
            for _, optimizer in trained.values():
                optimizer.step()
                optimizer.zero_grad()
            ends_pass = number % args.num_minibatches == 0
            if ends_pass and args.target_kl and all_reduce_sum(approx_kl) > args.target_kl:
                break
        updated = time.perf_counter()

        # 6. log, evaluate, save
        kl = k1.sum(dim=1).mean().item()  # nats per completion
        metrics = {
            "reward/mean": rewards.mean().item(),
            **{f"reward/{name}": values.mean().item() for name, values in rewards_by_name.items()},
            "completions/length_mean": lengths.float().mean().item(),
            "completions/length_min": lengths.min().item(),
            "completions/length_max": lengths.max().item(),
            "completions/truncated_fraction": 1 - finished.float().mean().item(),
            "objective/beta": beta,
            "objective/reward": scores.mean().item() - kl_in_reward * kl,
            "policy/grad_norm": np.mean(norms["policy"]),
            "policy/learning_rate": policy_optimizer.param_groups[0]["lr"],
            "value/grad_norm": np.mean(norms["critic"]),
            "value/learning_rate": critic_optimizer.param_groups[0]["lr"],
            "value/explained_variance": explained_variance(old_values, returns, mask).item(),
            "time/rollout_seconds": rolled_out - started,
            "time/score_seconds": scored - rolled_out,
            "time/update_seconds": updated - scored,
            "time/tokens_per_second": lengths.sum().item() / (updated - started),
        }
        for name, value in sums.items():  # per optimiser step, or else per token
            count = len(norms["policy"]) if name == "objective/loss" else tokens_seen
            metrics[name] = all_reduce_sum(value).item() / count
        for name, x in {"value/": old_values, "value/return_": returns}.items():
            metrics[f"{name}mean"] = x[mask].mean().item()
            metrics[f"{name}variance"] = x[mask].var(correction=0).item()
        if args.beta > 0:
            metrics["objective/kl"] = k3_kl(old_logprobs, ref_logprobs).sum(dim=1).mean().item()
            metrics |= {"objective/kl_k1": kl, "objective/non_score_reward": -kl_in_reward * kl}
        if args.kl_target:
            beta = adapt_beta(beta, kl, args.kl_target, args.kl_horizon, len(pairs))
        done, due = step + 1, (step + 1) % args.eval_every == 0 or step + 1 == args.total_rollouts
        found = evaluate(args, sample, eval_rows, *eval_judges) if due else ({}, [])
        log(run_dir, done, metrics | found[0], found[1])
        progress.set_postfix(reward=metrics["reward/mean"], entropy=metrics["policy/entropy"])
        if done % args.save_every == 0 or done == args.total_rollouts:
            save_checkpoint(run_dir, trained, state | {"step": done, "beta": beta})

    finish(run_dir, policy, tokenizer, stop_ids)
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


def evaluate(args: Args, sample: Callable, rows: list, judges: dict, weights: dict) -> tuple:
    """Metrics and samples of one completion per held-out prompt."""
    rng = torch.Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    samples, right, size = [], [], args.prompts_per_rollout
    for some in (rows[start : start + size] for start in range(0, len(rows), size)):
        pairs, texts = sample(some, args.eval_temperature, rng)
        rewards_by_name = {name: judge(some, pairs, texts) for name, judge in judges.items()}
        rewards = sum(weights[name] * values for name, values in rewards_by_name.items())  # (b,)
        if len(judges) == 1 and "reward_model" not in judges:  # a single rule: full marks are 1
            right += (sum(rewards_by_name.values()) >= 1).tolist()
        for row, text, r, (_, y) in zip(some, texts, rewards.tolist(), pairs, strict=True):
            samples.append(dict(prompt=row["prompt"], completion=text, reward=r, length=len(y)))
    metrics = {"eval/reward": np.mean([sampled["reward"] for sampled in samples])}
    metrics |= {"eval/accuracy": np.mean(right)} if right else {}
    return metrics | {"eval/length_mean": np.mean([s["length"] for s in samples])}, samples


# --- the reward and the critic -----------------------------------------------------------------
# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
NUMBER = r"((?:(?<![\w.)])[-+])?)\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"


def last_number(prompts: list, completions: list[str], answer: list, **columns: list) -> list:
    """1 where the completion's last number is the answer's, such as `5` or `... #### 1,234`."""

    def find(text: Any) -> float | None:
        numbers = re.findall(NUMBER, str(text), re.ASCII)
        return float("".join(numbers[-1]).replace(",", "")) if numbers else None

    found = [(find(text), find(right)) for text, right in zip(completions, answer, strict=True)]
    return [None if right is None else float(number == right) for number, right in found]


def load_rule(flag: str, spec: str, row: dict) -> tuple[str, Callable]:
    """Name and judge of a rule: `last_number`, or a function as path/to/file.py:function."""
    path, _, name = spec.rpartition(":")
    with explain(f"{flag} {spec}, called with prompts, completions, {[*row['columns']]}"):
        function = last_number
        if spec != "last_number":
            require(Path(path).is_file(), "neither last_number nor path/to/file.py:function")
            sys.path.insert(0, str(Path(path).parent))
            module = import_module(Path(path).stem)
            require(Path(path).samefile(module.__file__), f"its name is that of {module.__file__}")
            function = getattr(module, name)
        inspect.signature(function).bind(prompts=[], completions=[], **row["columns"])
    return name, partial(apply_rule, name, function)


def apply_rule(name: str, rule: Callable, rows: list, pairs: Pairs, texts: list[str]) -> Tensor:
    """Rewards (B,) of a completion per row. Rank 0 alone calls: a rule may compare the rows."""
    rewards = []
    if RANK == 0:
        columns = {key: [row["columns"][key] for row in rows] for key in rows[0]["columns"]}
        rewards = rule(prompts=[row["prompt"] for row in rows], completions=texts, **columns)
        with explain(f"reward function {name} must return a list of {len(texts)} numbers"):
            for row, text, reward in zip(rows, texts, [*rewards], strict=True):
                finite = isinstance(reward, SupportsFloat) and math.isfinite(reward)
                require(finite, f"it returned {reward!r} for {text!r} after {row['prompt']!r}")
    return torch.tensor(all_gather([float(reward) for reward in rewards]))


@torch.no_grad()
def reward_model_scores(model: Any, size: int, rows: list, pairs: Pairs, texts: list) -> Tensor:
    """Scores (B,) of the last token, less the preferred completions' mean (after InstructGPT)."""
    scores = torch.zeros(len(pairs), device=model.device)
    for some in micro_batches(pairs, torch.arange(len(pairs)), size):
        # A rank without rows reads a blank one: those of a sharded model run all passes together.
        ids, mask = pad_rows([pairs[i][0] + pairs[i][1] for i in some] or [[0]], model.device)
        with autocast(model.device):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
        scores[some] = model.score(last.float()).squeeze(1)[: len(some)]
    return all_reduce_sum(scores).cpu() - getattr(model.config, "score_mean", 0.0)


def load_critic(args: Args, device: torch.device) -> torch.nn.Module:
    """A model with one output per token, started as --critic-init says."""
    kind = AutoModelForSequenceClassification
    source = args.reward_model if args.critic_init == "reward_model" else args.model
    torch.manual_seed(args.seed)
    with explain(f"--critic-init {args.critic_init}"):
        config = AutoConfig.from_pretrained(source, num_labels=1)
        if args.critic_init == "scratch":
            critic = kind.from_config(config, dtype=torch.float32).eval()
        else:
            critic = kind.from_pretrained(source, config=config, dtype=torch.float32)
        torch.manual_seed(args.seed)  # loading may have drawn numbers
        if args.critic_init == "sft":  # a new head (Stiennon et al., arXiv 2009.01325, B.1)
            torch.nn.init.normal_(critic.score.weight, std=(critic.score.in_features + 1) ** -0.5)
    return shard(critic, device)


def critic_values(critic: torch.nn.Module, pairs: Pairs, rows: Tensor) -> Tensor:
    """V_t (b, T): the head's output before token t of pairs[rows], centred as scores are."""
    width = max(len(completion) for _, completion in pairs)
    # A rank without rows reads a blank one: those of a sharded model run all passes together.
    some = [pairs[i] for i in rows] or [([0], [])]
    ids, _ = pad_rows([prompt + completion for prompt, completion in some], critic.device)
    starts, lengths = torch.tensor([[len(x) - 1, len(y)] for x, y in some], device=ids.device).T
    with autocast(ids.device):
        hidden = critic.base_model(input_ids=ids, use_cache=False).last_hidden_state
    values = critic.score(hidden.float()).squeeze(2) - getattr(critic.config, "score_mean", 0.0)
    t = torch.arange(width, device=ids.device)
    columns = (starts[:, None] + t).clamp(max=ids.shape[1] - 1)  # (b, T)
    return values.gather(1, columns).masked_fill(t >= lengths[:, None], 0.0)[: len(rows)]


# --- model and data ----------------------------------------------------------------------------
def load_model(flag: str, source: str, kind: Any, longest: int, device: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    with explain(f"{flag} {source}"):
        model, info = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        wrong = sorted({*info["missing_keys"]} | {*info["unexpected_keys"]})
        require(not wrong, f"weights missing or of no use to {type(model).__name__}: {wrong}")
        require(not hasattr(model, "score") or model.config.num_labels == 1, "more than one label")
        positions = getattr(model.config, "max_position_embeddings", longest)
        told = f"the --max flags allow {longest} tokens, but it has only {positions} positions"
        require(longest <= positions, told)
    return shard(model, device)


def load_prompts(args: Args, split: str, tokenizer: Any) -> list[dict]:
    """Rows of `prompt`, its token `ids` and the other `columns`."""
    rows, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                require(args.prompt_column in row, f"no --prompt-column in {[*row]}")
                prompt = row.pop(args.prompt_column) or ""
                if args.answer_column in row:
                    row["answer"] = row.pop(args.answer_column)
                if args.chat and isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                empty = not (prompt if isinstance(prompt, str) else content(prompt[-1])).strip()
                ids = [] if empty else encode(tokenizer, prompt, add_generation_prompt=True)
                if 0 < len(ids) <= args.max_prompt_length:
                    rows.append({"prompt": prompt, "ids": ids, "columns": row})
                else:
                    long = f"longer than --max-prompt-length {args.max_prompt_length}"
                    dropped["empty" if empty else long].append(prompt)
        report(split, rows, dropped)
    return rows


def report(split: str, rows: list, dropped: dict[str, list]) -> None:
    """Print how many rows are used, how many are not and why, and the first of each kind."""
    told = f"{len(rows)} of {len(rows) + sum(map(len, dropped.values()))} rows"
    for why, some in dropped.items():
        told += f"; dropped {len(some)} {why}, first {some[0]!r:.200}"
    require(rows, f"nothing is left: {told}")
    print(f"{split}: {told}")


# --- the run: flags, folder, checkpoint --------------------------------------------------------
def require(condition: Any, message: str) -> None:
    """Raise unless the condition holds; within `explain`, which names the flag or the row."""
    if not condition:
        raise ValueError(message)


@contextmanager
def explain(what: str) -> Iterator[None]:
    """What fails in here is the user's input: end with one message instead of a traceback."""
    try:
        yield
    except Exception as error:
        message = str(error.__cause__ or error).strip() or repr(error)
        raise SystemExit(f"error: {what}: {message.splitlines()[0]}") from None


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; with --resume, over those that the run was started with."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    if args.resume:
        with explain(f"--resume {args.resume}: not a run of this script"):
            saved = json.loads((Path(args.resume) / "args.json").read_text())
            args = tyro.cli(Args, args=argv, default=Args(**saved | {"resume": args.resume}))
    return args


def check_args(args: Args) -> None:
    """What can be seen to be wrong before anything is loaded."""
    may_be_zero = "seed beta gamma gae_lambda vf_coef ent_coef missing_eos_penalty warmup_ratio "
    may_be_zero = [*may_be_zero.split(), "eval_temperature"]
    with explain("flags"):
        for name, value in vars(args).items():
            zero = value == 0 and name in may_be_zero
            most = 1 if name == "warmup_ratio" else math.inf
            known = type(value) not in (int, float) or zero or 0 < value < most
            require(known, f"--{name.replace('_', '-')} must not be {value}")
        require(max(args.gamma, args.gae_lambda) <= 1, "--gamma or --gae-lambda is more than 1")
        known = args.reward_model or (args.reward_fn and args.critic_init != "reward_model")
        require(known, "without --reward-model give --reward-fn, and --critic-init sft or scratch")
        require(args.beta > 0 or not args.kl_target, "--kl-target adapts --beta, which is 0")
        require(args.num_minibatches <= args.prompts_per_rollout, "--num-minibatches: too many")
        adapted = args.kl_target and 5 * args.kl_horizon <= args.prompts_per_rollout
        require(not adapted, "--kl-horizon is so short that beta would become negative")


def start_run(args: Args) -> tuple[Path, torch.device]:
    """The run's folder, made anew or that of --resume, and the device of this rank."""
    logging.disable_progress_bar()
    if torch.cuda.is_available():  # CUDA-only
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
    if RANK > 0:  # rank 0 alone prints
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    path = args.resume or f"{args.output_dir}/{name}-{time.time_ns() // 1000 % 10**6:06}"
    run_dir = all_gather([Path(path)])[0]
    with explain(f"--output-dir {args.output_dir}"):
        if RANK == 0 and not args.resume:
            run_dir.mkdir(parents=True)
            (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    if RANK == 0 and args.track:
        wandb.init(id=run_dir.name, resume="allow", config=vars(args))
    how = f"; with checkpoint.pt, resume: python {sys.argv[0]} --resume {run_dir}"
    signal.signal(signal.SIGINT, lambda *_: sys.exit(f"stopped; saved: {os.listdir(run_dir)}{how}"))
    return run_dir, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_checkpoint(run_dir: Path, trained: dict[str, tuple], state: dict) -> None:
    """Replace checkpoint.pt; a kill at any moment leaves a whole file, the old or the new."""
    for name, (model, optimizer) in trained.items():
        both = dcp.get_state_dict(model, optimizer, options=WHOLE)  # all ranks
        state[name] = dict(zip(("model_state_dict", "optim_state_dict"), both, strict=True))
    if RANK == 0:
        state["logs"] = {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")}
        file = run_dir / "checkpoint.tmp"
        with explain(f"{run_dir}: no checkpoint could be written"):
            try:
                torch.save(state, file)
                os.replace(file, run_dir / "checkpoint.pt")
            finally:
                file.unlink(missing_ok=True)


def load_checkpoint(args: Args, run_dir: Path, trained: dict[str, tuple], state: dict) -> dict:
    """Read checkpoint.pt into models and optimizers, and cut the logs back to its step."""
    with explain(f"--resume {run_dir}: no whole checkpoint of this script, model and data"):
        saved = torch.load(run_dir / "checkpoint.pt", weights_only=True, mmap=True)
        require(saved["data"] == state["data"], "the training rows of --dataset are not the same")
        for name, (model, optimizer) in trained.items():
            dcp.set_state_dict(model, optimizer, **saved.pop(name), options=WHOLE)
    if RANK == 0:
        (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2) + "\n")
        for name, size in saved["logs"].items():
            os.truncate(run_dir / name, size)
    return saved


def log(run_dir: Path, step: int, metrics: dict, samples: list[dict]) -> None:
    """Append to metrics.jsonl, samples.jsonl and, under --track, wandb; prints evaluations."""
    with explain(f"{run_dir}"):
        for name, rows in {"metrics": [metrics], "samples": samples}.items():
            with open(run_dir / f"{name}.jsonl" if RANK == 0 else os.devnull, "a") as file:
                file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
    if wandb.run:
        wandb.log(metrics, step=step)
    if samples:
        found = ", ".join(f"{key[5:]} {x:.3f}" for key, x in metrics.items() if key[:5] == "eval/")
        tqdm.write("\n    ".join([f"step {step}: held-out {found}", *map(str, samples[:2])]))


def finish(run_dir: Path, model: torch.nn.Module, tokenizer: Any, stop_ids: list[int]) -> None:
    """Write model/ for `from_pretrained`."""
    weights = dcp.get_model_state_dict(model, options=WHOLE)  # all ranks
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    weights = {name: weights[name] for name in names if name in weights}  # a tied one only once
    # The checkpoint's own may ask for top-k, or be one that transformers refuses to save.
    ids = dict(eos_token_id=stop_ids, pad_token_id=tokenizer.pad_token_id)
    model.generation_config = GenerationConfig(**ids)
    with explain(f"{run_dir / 'model'}"):
        if RANK == 0:
            for part in (model.generation_config, tokenizer):
                part.save_pretrained(run_dir / "model")
            model.save_pretrained(run_dir / "model", state_dict=weights)
    print(f"model: {run_dir / 'model'}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # where a console cannot show a sample
    main(parse_args())
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        wandb.finish()
        os._exit(0)  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)
