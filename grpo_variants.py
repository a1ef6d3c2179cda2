r"""GRPO with variants of later papers, as flags. Read grpo.py first: this is the same program with
more flags, and with its defaults it trains the same weights, bit for bit.

J(theta), rho_it, A_i and KL_it are those of grpo.py. What a flag changes, and whose idea it is:

    --max-sampling-rounds      new prompts replace groups whose rewards are all equal: DAPO
    --overlong-buffer, --mask-truncated     a penalty on long, no loss on cut-off ones: DAPO
    --scale-rewards            batch: A_i over the std of all rewards (Lite PPO, ScaleRL);
                               mean: A_i over the group's mean reward (MaxRL)
    --multi-objective-aggregation normalize_then_sum    the advantages of each reward: GDPO
    --importance-sampling-level sequence    one ratio for a whole completion: GSPO, LUSPO
    --loss                     cispo: the clipped ratio is a constant weight; sapo: a smooth gate;
                               dppo: a limit on pi - pi_old; ipo: the same for any sign of A,
                               with pi_sampler's log-probs as pi_old's
    --kl-placement             unbiased: rho_it KL_it (DeepSeek-V3.2);
                               reward: the KL is subtracted from the reward, as in PPO
    --importance-cap C         if another policy samples, pi_sampler, a token's loss is weighted
                               with min(pi_old / pi_sampler, C) (Yao et al. 2025)
    --eval-samples             pass@k at evaluation
    --lr-schedule              a warm-up (--warmup-ratio), then linear, cosine or constant

The flags of each paper, with their arXiv numbers and what differs, are in docs/recipes.md.

    python grpo_variants.py                              # trains what grpo.py trains
    python grpo_variants.py --beta 0 --clip-coef-high 0.28 --loss-norm token \
        --overlong-buffer 4 --max-sampling-rounds 10     # DAPO, a minute on a CPU
    torchrun --nproc_per_node=8 grpo_variants.py ...     # eight GPUs: docs/processes.md

A healthy run looks like one of grpo.py. With SAPO, DPPO and IPO, clip fractions count what `clip`
would.
"""

import json
import math
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
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
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.generation import generate
from common.logprobs import Sequences, completion_logprobs, last_states, micro_batches
from common.logprobs import rollout_logprobs, sampling_metrics
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
    exp_name: str = "grpo_variants"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 20  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/arithmetic/policy"  # folder or hub name of the policy and its tokenizer
    reference: str | None = None  # folder or hub name of pi_ref; default: --model
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/arithmetic/prompts"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_prompt_length: PositiveInt = 64  # longest prompt in tokens; longer ones are dropped
    # --- reward ---

    # path/to/file.py:function, one or more; default: 1 if the last number is the answer, else 0
    reward_fn: list[str] = field(default_factory=list)
    reward_model: str | None = None  # sequence classifier with one label and --model's tokenizer
    # a weight for each --reward-fn, then one for --reward-model; default: 1 each
    reward_weights: list[FiniteFloat] = field(default_factory=list)
    eval_reward_fn: str | None = None  # reward function of eval/reward; default: those of training
    missing_eos_penalty: NonNegativeFloat = 0.0  # subtracted from a cut-off completion's reward
    # length penalty N: rises from 0 to 1 over the last N of --max-new-tokens (DAPO); 0: off
    overlong_buffer: NonNegativeInt = 0
    # --- GRPO ---
    total_rollouts: PositiveInt = 60  # batches of completions, each followed by its optimiser steps
    prompts_per_rollout: PositiveInt = 32  # prompts per rollout
    group_size: Annotated[int, Field(ge=2)] = 8  # G, completions per prompt (DeepSeekMath: 64)
    # sampling rounds; in all but the last, new prompts replace groups of equal rewards (DAPO)
    max_sampling_rounds: PositiveInt = 1
    max_new_tokens: PositiveInt = 24  # longest completion in tokens
    temperature: PositiveFloat = 1.0  # sampling temperature; divides the logits in log-probs too
    beta: NonNegativeFloat = 0.04  # coefficient of the KL; 0 loads no reference
    # loss: k3 in the loss; unbiased: k3 times the ratio; reward: k1, subtracted from the reward
    kl_placement: Literal["loss", "unbiased", "reward"] = "loss"
    # clip: no gradient where the ratio is clipped (PPO); cispo: it is a constant weight (CISPO);
    # sapo: a smooth gate, without a clip (SAPO); dppo: limits of pi - pi_old, usually 0.15 (DPPO)
    # ipo: the same limits, usually 0.3, of pi - pi_sampler, for any sign of A (prime-rl's IPO)
    loss: Literal["clip", "cispo", "sapo", "dppo", "ipo"] = "clip"
    # eps_low: no gradient below 1 - eps_low where the advantage is negative (GSPO: 3e-4)
    clip_coef: PositiveFloat = 0.2
    # eps_high: none above 1 + eps_high where it is positive (GSPO: 4e-4); default: --clip-coef
    clip_coef_high: PositiveFloat | None = None
    update_epochs: PositiveInt = 1  # passes over a rollout's completions
    num_minibatches: PositiveInt = 4  # optimiser steps per pass
    # advantages are divided by the rewards' standard deviation, or by the group's mean (MaxRL)
    scale_rewards: Literal["group", "batch", "mean", "none"] = "group"
    # mean over each completion's tokens (GRPO), over all (DAPO), or sum / max_new_tokens (Dr. GRPO)
    loss_norm: Literal["sequence", "token", "constant"] = "sequence"
    mask_truncated: bool = False  # leave cut-off completions out of the loss and its means (DAPO)
    importance_cap: NonNegativeFloat = 0.0  # cap C, if another policy samples (usual: 2); 0: off
    # a ratio for each token (GRPO), or one for the whole completion (GSPO; LUSPO: constant)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # advantages of the summed rewards, or of each reward before they are summed (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    ent_coef: NonNegativeFloat = 0.0  # coefficient of the entropy bonus, per token like the loss
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak; default: 5e-4 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after the warm-up
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fraction of rollouts in the warm-up
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 20  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most
    eval_samples: PositiveInt = 1  # completions of each; above 1 pass@2, @4, ... are logged too
    eval_temperature: NonNegativeFloat = 1.0  # sampling temperature at evaluation; 0 is greedy

    def __post_init__(self):
        self.clip_coef_high = self.clip_coef_high or self.clip_coef
        norms = ("sequence", "constant") if self.beta == 0 else ("sequence",)
        if self.importance_sampling_level == "sequence" and self.loss_norm not in norms:
            raise ValueError("--loss-norm: sequence ratios need sequence, or constant at --beta 0")
        if self.num_minibatches > self.prompts_per_rollout * self.group_size:
            raise ValueError("--num-minibatches: there are not as many completions")
        if self.loss == "ipo" and self.importance_cap > 0:
            raise ValueError("--importance-cap: the ratio of --loss ipo is to the sampler already")
        if self.overlong_buffer > self.max_new_tokens:  # even one token would be penalised
            raise ValueError("--overlong-buffer: more than --max-new-tokens")
        is_gdpo = self.multi_objective_aggregation == "normalize_then_sum"
        shaped = self.kl_placement == "reward" or self.missing_eos_penalty or self.overlong_buffer
        if is_gdpo and (shaped or self.scale_rewards != "group"):
            raise ValueError(
                "--multi-objective-aggregation normalize_then_sum has no place for --kl-placement "
                "reward, --missing-eos-penalty, --overlong-buffer and another --scale-rewards"
            )
        if not self.reward_fn and not self.reward_model:
            self.reward_fn = ["tiny/arithmetic/reward.py:last_number"]
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
def group_advantages(rewards: Tensor, group_size: int, scale: str = "group") -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group (DeepSeekMath, section 4.1.2).

    The G completions of a prompt are neighbours in the rewards (B,). `scale` "none" does not divide
    (Dr. GRPO, arXiv 2503.20783).
    """
    groups = rewards.double().view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    # Equal rewards teach nothing: exactly 0, not the mean's rounding error divided by 1e-4.
    advantages[(groups == groups[:, :1]).all(dim=1)] = 0.0
    if scale == "group":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.view(-1).float()


def scaled_advantages(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    """`group_advantages` (B,) of rewards (B,), and with other divisors.

    With `scale` "batch" it is the standard deviation of all B rewards (Lite PPO, arXiv 2508.08221).
    With "mean" it is the mean of a group, the share that is right if rewards are 0 and 1 (MaxRL,
    arXiv 2602.02710); at least 1/G, since the mean of other rewards may be near 0.
    """
    if scale in ("group", "none"):
        return group_advantages(rewards, group_size, scale)
    groups = rewards.double().view(-1, group_size)
    means = groups.mean(dim=1, keepdim=True)
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    divisor = groups.std() + 1e-4 if scale == "batch" else means.clamp(min=1 / group_size)
    return ((groups - means).masked_fill(all_equal, 0.0) / divisor).view(-1).float()


def gdpo_advantages(rewards: Tensor, reward_weights: Tensor, group_size: int) -> Tensor:
    """Group advantages of each reward by itself, their weighted sum, normalised over the batch.

    Rewards are (K, B), weights (K,). No reward dominates the others by its scale (GDPO).
    """
    advantages = torch.stack([group_advantages(reward, group_size) for reward in rewards])  # (K, B)
    weighted_sum = reward_weights.float() @ advantages
    return (weighted_sum - weighted_sum.mean()) / (weighted_sum.std() + 1e-4)


def length_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """0 up to max_new_tokens - buffer tokens, then linearly to 1 at max_new_tokens (DAPO, equation
    13, with the sign of a penalty). Lengths are (B,).
    """
    return (1 - (max_new_tokens - lengths) / buffer).clamp(min=0)


def k3_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """q/p - log(q/p) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4, for p = pi and
    q = pi_ref).

    On tokens sampled from p it is an unbiased estimate of KL(p || q), never negative. But as a loss
    of p, on such tokens, its expected gradient is that of the other direction, KL(q || p).
    """
    log_ratio = log_q - log_p
    return log_ratio.expm1() - log_ratio  # exp(x) - 1 would lose digits near 0


def token_weights(mask: Tensor, lengths: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """Weights (B, T) for all B rows of a rollout, of which the caller uses the n of one optimiser
    step: over these, sum(weights * x) is the step's average of x.

    The mask (B, T) is true at the sampled tokens. Lengths (n,) are the |y_i| of the step. n, not B
    or G, divides, so that the step's micro-batches and ranks add up to the average.
    """
    if loss_norm == "sequence":  # the mean over completions of the mean over their tokens (GRPO)
        return mask / (len(lengths) * mask.sum(dim=1, keepdim=True))
    if loss_norm == "token":  # the mean over all tokens (DAPO)
        return mask / lengths.sum().item()
    return mask / (len(lengths) * max_new_tokens)  # a constant for |y_i| (Dr. GRPO)


def policy_log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """log rho_it (B, T), 0 where the mask (B, T) is false; at level `sequence` log s_i at each t,
    with s_i = (prod_t rho_it)^(1/|y_i|) (GSPO, arXiv 2507.18071, equation 7).
    """
    log_ratios = logprobs - old_logprobs
    if level == "token":
        return log_ratios
    return mask * log_ratios.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)


def variant_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
    level: str = "token",
    loss_type: str = "clip",
    unbiased_kl: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The `grpo_loss` of grpo.py, and the same with another gate, ratio or KL: losses at each token
    (b, T); and for the log, sums over these.

    Log-probs (b, T) of the sampled tokens under pi_theta, pi_old and pi_ref are in nats, 0 where
    the mask (b, T) is false; without those under pi_ref there is no KL. Advantages are (b,). The
    other losses: CISPO (arXiv 2506.13585), SAPO (2511.20347), DPPO (2602.04879, binary TV), and
    prime-rl's IPO, which takes pi_sampler for pi_old and is not the IPO of dpo.py.
    """
    advantages = advantages[:, None]
    ratio = policy_log_ratios(logprobs, old_logprobs, mask, level).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss_type == "clip":  # no gradient where the ratio has left the interval to A's side
        objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    elif loss_type == "cispo":  # the clipped ratio is a constant weight: all have a gradient
        objective = clipped_ratio.detach() * advantages * logprobs
    elif loss_type == "sapo":  # a gate whose slope is 1 at ratio 1, and fades to both sides
        tau = torch.where(advantages > 0, 1.0, 1.05)
        objective = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    else:  # no gradient where the probability, not the ratio, has moved too far
        shift = logprobs.exp() - old_logprobs.exp()
        fell, rose = shift < -clip_low, shift > clip_high
        is_far = fell | rose  # ipo: to either side
        if loss_type == "dppo":  # to A's side
            is_far = torch.where(advantages > 0, rose, fell)
        objective = (ratio * advantages).masked_fill(is_far, 0.0)
    is_low, is_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    if loss_type != "cispo":  # on one side, which the advantage chooses; CISPO clips on both
        is_low, is_high = is_low & (advantages < 0), is_high & (advantages > 0)
    sums = {
        "policy/approx_kl": k3_kl(old_logprobs, logprobs.detach()).sum(),  # KL(pi_old || pi)
        "policy/clip_fraction_low": is_low.sum(),
        "policy/clip_fraction_high": is_high.sum(),
    }
    if ref_logprobs is None:
        return -objective, sums
    kl = k3_kl(logprobs, ref_logprobs)
    if unbiased_kl:  # E_old[rho k3] = KL(pi || pi_ref), and its gradient is the KL's
        kl = kl * (ratio if level == "token" else (logprobs - old_logprobs).exp())
    return beta * kl - objective, sums


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
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    if args.beta == 0:
        ref_model = None
    elif args.reference or args.lora_rank == 0:
        source = args.reference or args.model
        ref_model = load_model(AutoModelForCausalLM, source, tokenizer, positions)
        shard(freeze(ref_model, merged=not args.reference), device)
    else:
        ref_model = policy  # as it was at the start, see part 3
    if args.reward_model:
        kind = AutoModelForSequenceClassification
        reward_model = load_model(kind, args.reward_model, tokenizer, positions)
        shard(freeze(reward_model), device)
        reward_fns["reward_model"] = partial(model_rewards, reward_model, args.micro_batch_size)
    eval_fns = eval_fns or list(reward_fns.values())
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)

    # --- the loop ---
    sample = partial(
        generate,
        policy,
        max_new_tokens=args.max_new_tokens,
        stop_ids=stop_ids,
        batch_size=args.generation_batch_size,
    )
    warmup_steps = int(args.warmup_ratio * args.total_rollouts)
    training = {"policy": (policy, optimizer)}
    data = checksum(train_prompts, args.model, args.reference, args.reward_model)
    state = {"step": 0, "prompts_read": 0, "data": data}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate(args, sample, eval_fns, tokenizer, eval_prompts)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    next_prompts = shuffled(train_prompts, args.seed, skip=state["prompts_read"])
    reward_weights = torch.tensor(args.reward_weights, dtype=torch.float64)  # (K,)
    kl_in_reward = args.beta > 0 and args.kl_placement == "reward"
    progress = tqdm(range(state["step"] + 1, args.total_rollouts + 1), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser steps on it
        # 1. Roll out and score: B sequences (x, y) of token ids, G per prompt, by pi_old, which is
        # the policy now. Random numbers depend on seed and step alone: resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        set_step(step)  # for functions that ask for it
        sequences, sampler_logprobs, all_rewards, num_prompts, reward_seconds = roll_out(
            args, sample, reward_fns, next_prompts, rng
        )
        state["prompts_read"] += num_prompts
        rewards_by_name = {f"rewards/{k}": x for k, x in zip(reward_fns, all_rewards, strict=True)}
        rewards = reward_weights @ all_rewards  # (B,), of rewards (K, B)
        lengths = torch.tensor([len(y) for _, y in sequences])  # (B,)
        ended = torch.tensor([y[-1] in stop_ids for _, y in sequences])  # (B,)
        is_trained = ended if args.mask_truncated else torch.ones_like(ended)  # (B,)
        mask = (torch.arange(lengths.max()) < (lengths * is_trained)[:, None]).to(device)  # (B, T)

        # 2. Log-probs before the update, under pi_old and pi_ref. They are computed exactly as step
        # 4 computes them, so that the first ratio is 1; the sampler's are rounded differently. With
        # a single optimiser step, step 4's own serve as pi_old's.
        split = partial(micro_batches, sequences, size=args.micro_batch_size)
        minibatches, first_pass = [], []  # index tensors
        for _ in range(args.update_epochs):
            order = torch.randperm(len(sequences), generator=rng)  # it may split groups
            minibatches += order.tensor_split(args.num_minibatches)
        for minibatch in minibatches[: args.num_minibatches]:
            first_pass += split(minibatch)
        old_logprobs, ref_logprobs = torch.zeros_like(sampler_logprobs), None
        needs_old_pass = len(minibatches) > 1 or kl_in_reward
        if needs_old_pass:
            old_logprobs = rollout_logprobs(policy, sequences, first_pass, args.temperature)
        if ref_model is not None:
            with as_at_start(policy):  # the reference under LoRA: without what it has learned
                ref_logprobs = rollout_logprobs(ref_model, sequences, first_pass, args.temperature)

        # 3. Advantages: rewards against the group's mean, the same for each token of a completion.
        returns = rewards - args.missing_eos_penalty * ~ended
        if args.overlong_buffer > 0:
            returns -= length_penalty(lengths, args.max_new_tokens, args.overlong_buffer)
        if kl_in_reward:  # k1, summed over the completion's tokens
            returns -= args.beta * (old_logprobs - ref_logprobs).sum(dim=1).cpu()
        if args.multi_objective_aggregation == "normalize_then_sum":
            advantages = gdpo_advantages(all_rewards, reward_weights, args.group_size)  # (B,)
        else:
            advantages = scaled_advantages(returns, args.group_size, args.scale_rewards)
        if not (advantages * is_trained).any():
            reason = "rewards are equal in each group, or --mask-truncated leaves no completion"
            warnings.warn(f"a rollout has no advantages to train on: {reason}", stacklevel=1)
        advantages = advantages.to(device)

        # 4. Optimise: a step per minibatch. Each rank takes its share of the micro-batches.
        factor = lr_factor(step, warmup_steps, args.total_rollouts, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        all_sums, grad_norms = [], []  # of each micro-batch, of each optimiser step
        for minibatch in minibatches:
            minibatch = minibatch[is_trained[minibatch]]
            weights = token_weights(mask, lengths[minibatch], args.loss_norm, args.max_new_tokens)
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
                if not needs_old_pass:
                    old_logprobs[device_inds] = logprobs.detach()
                old = old_logprobs[device_inds]
                ref = None if ref_logprobs is None else ref_logprobs[device_inds]
                losses, sums = variant_loss(
                    logprobs,
                    sampler_logprobs[device_inds] if args.loss == "ipo" else old,
                    None if kl_in_reward else ref,
                    advantages[device_inds],
                    mask[device_inds],
                    clip_low=args.clip_coef,
                    clip_high=args.clip_coef_high,
                    beta=args.beta,
                    level=args.importance_sampling_level,
                    loss_type=args.loss,
                    unbiased_kl=args.kl_placement == "unbiased",
                )  # (b, T)
                micro_weights = weights[device_inds]  # (b, T)
                if args.importance_cap > 0:
                    sampler_ratio = (old - sampler_logprobs[device_inds]).exp()
                    micro_weights *= sampler_ratio.clamp(max=args.importance_cap)
                loss = (micro_weights * losses).sum()
                if args.ent_coef > 0:
                    loss = loss - args.ent_coef * (micro_weights * entropy).sum()
                loss.backward()  # gradients add up; `shard` sums them over ranks
                sums |= {"objective/loss": loss.detach(), "policy/entropy": entropy.detach().sum()}
                if ref is not None:
                    sums["objective/kl"] = (old - ref).sum()  # k1, KL(pi_old || pi_ref)
                all_sums.append(sums)
            grad_norms.append(clip_grad_norm(policy, args.max_grad_norm))
            if len(minibatch) > 0:  # else AdamW would move by its momentum
                optimizer.step()
            optimizer.zero_grad()

        # 5. Log, evaluate, save.
        teach = groups_that_teach(args, all_rewards)
        metrics = rollout_metrics(args, rewards, lengths * is_trained, teach, all_sums, grad_norms)
        metrics |= {name: values.mean().item() for name, values in rewards_by_name.items()}
        metrics["completions/length_mean"] = lengths.float().mean().item()
        metrics["completions/truncated_fraction"] = 1 - ended.float().mean().item()
        if not needs_old_pass:  # each rank has those of its own rows
            all_reduce_sum(old_logprobs)
        metrics |= sampling_metrics(old_logprobs, sampler_logprobs, mask)
        metrics["prompts/sampled"] = num_prompts
        metrics["policy/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["time/reward_seconds"] = reward_seconds
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            columns = rewards_by_name | {"reward": rewards, "advantage": advantages}
            columns["truncated"] = ~ended
            if ref_logprobs is not None:
                columns["log_ratio"] = (old_logprobs - ref_logprobs) * mask
            rollouts = [rollout_row(tokenizer, sequences[: args.group_size], columns)]
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


def lr_factor(step: int, warmup_steps: int, total_steps: int, schedule: str) -> float:
    """The learning rate of a step, counted from 1, as a fraction of its peak: it rises linearly in
    the warm-up; then it falls linearly, or by half a cosine, or is constant.
    """
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    num_steps = total_steps - warmup_steps  # after the warm-up
    num_before = step - warmup_steps - 1  # of these, before this one
    if schedule == "linear":
        return (num_steps - num_before) / num_steps
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (num_before / num_steps)))
    return 1.0


def roll_out(
    args: Args, sample: Callable, reward_fns: dict, prompts: Iterator, rng: Generator
) -> tuple[Sequences, Tensor, Tensor, int, float]:
    """G completions for each of --prompts-per-rollout prompts, with the log-probs (B, T) with which
    they were sampled, rewards (K, B), the number of prompts taken, and the seconds of scoring.

    Completions with equal rewards teach nothing. In all rounds but the last, the next prompts take
    the places of such groups (dynamic sampling, DAPO).
    """
    completions = []  # of each: its sequence, log-probs (T,) and rewards (K,)
    num_prompts, reward_seconds = 0, 0.0
    for sampling_round in range(1, args.max_sampling_rounds + 1):
        is_last = sampling_round == args.max_sampling_rounds
        missing = args.prompts_per_rollout - len(completions) // args.group_size
        taken = [prompt for prompt in islice(prompts, missing) for _ in range(args.group_size)]
        prompt_ids = [prompt.ids for prompt in taken]
        sequences, logprobs = sample(prompt_ids, temperature=args.temperature, rng=rng)
        scoring_start = time.perf_counter()
        rewards = torch.stack([fn(taken, sequences) for fn in reward_fns.values()])
        reward_seconds += time.perf_counter() - scoring_start
        num_prompts += missing
        teach = groups_that_teach(args, rewards)
        for i in range(len(sequences)):
            if is_last or teach[i // args.group_size]:
                completions.append((sequences[i], logprobs[i], rewards[:, i]))
        if len(completions) == args.prompts_per_rollout * args.group_size:
            break
    sequences, logprobs, rewards = zip(*completions, strict=True)
    longest = max(len(ids) for _, ids in sequences)
    logprobs = pad_sequence(logprobs, batch_first=True)[:, :longest]
    return [*sequences], logprobs, torch.stack(rewards, dim=1), num_prompts, reward_seconds


def groups_that_teach(args: Args, rewards: Tensor) -> Tensor:
    """Which groups have advantages other than 0, of rewards (K, n x G): bool (n,). Without
    --missing-eos-penalty, --overlong-buffer and a KL in the reward, which are subtracted later.
    """
    if args.multi_objective_aggregation == "normalize_then_sum":
        rewards = torch.stack([group_advantages(reward, args.group_size) for reward in rewards])
    reward_weights = torch.tensor(args.reward_weights, dtype=torch.float64)
    groups = (reward_weights @ rewards.double()).view(-1, args.group_size)
    return (groups != groups[:, :1]).any(dim=1)


def rollout_metrics(
    args: Args, rewards: Tensor, lengths: Tensor, teach: Tensor, all_sums: list, grad_norms: list
) -> dict[str, float]:
    """Means over the tokens, the completions, or the optimiser steps of a rollout. Lengths are 0
    where a completion is not trained on.
    """
    sums = {name: sum(part[name].double() for part in all_sums) for name in all_sums[0]}
    sums = sums_over_ranks(sums)
    num_tokens = max(lengths.sum().item() * args.update_epochs, 1)
    num_completions = max((lengths > 0).sum().item() * args.update_epochs, 1)
    metrics = {name: total / num_tokens for name, total in sums.items()}  # per token
    if "objective/kl" in sums:  # nats per completion
        metrics["objective/kl"] = sums["objective/kl"] / num_completions
    metrics |= {
        "objective/loss": sums["objective/loss"] / len(grad_norms),  # per step
        "policy/grad_norm": np.mean(grad_norms),  # per step
        "reward/mean": rewards.mean().item(),  # per completion
        "reward/group_std": rewards.view(-1, args.group_size).std(dim=1).mean().item(),  # per group
        "reward/frac_reward_zero_std": 1 - teach.float().mean().item(),
        "prompts/with_signal": teach.sum().item(),
    }
    return metrics


def evaluate(
    args: Args, sample: Callable, eval_fns: list, tokenizer: Any, prompts: list
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of --eval-samples completions per held-out prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation uses the same random numbers
    n = args.eval_samples
    prompts = [prompt for prompt in prompts for _ in range(n)]
    sequences, _ = sample([x.ids for x in prompts], temperature=args.eval_temperature, rng=rng)
    weights = [1.0] if args.eval_reward_fn else args.reward_weights
    all_rewards = torch.stack([fn(prompts, sequences) for fn in eval_fns])  # (K, B)
    rewards = (torch.tensor(weights, dtype=torch.float64) @ all_rewards).tolist()
    metrics = {"eval/reward": np.mean(rewards)}
    if all(reward in (0, 1) for reward in rewards):  # right or wrong
        metrics["eval/accuracy"] = np.mean(rewards)
        num_correct = np.reshape(rewards, (-1, n)).sum(axis=1).astype(int)  # of each prompt's n
        for k in (2**i for i in range(1, n.bit_length())):  # unbiased: arXiv 2107.03374, equation 1
            misses = [math.comb(n - right, k) / math.comb(n, k) for right in num_correct]
            metrics[f"eval/pass_at_{k}"] = 1 - np.mean(misses)
    metrics["eval/length_mean"] = np.mean([len(ids) for _, ids in sequences])
    samples = []
    for prompt, (_, ids), reward in zip(prompts, sequences, rewards, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        row = {"prompt": prompt.text, "completion": text}
        samples.append(row | {"reward": round(reward, 6), "length": len(ids)})
    return metrics, samples


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
