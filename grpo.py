r"""Group Relative Policy Optimization (GRPO): reinforcement learning without a critic.

For each prompt q sample a group of G completions o_1..o_G from the policy, reward each, and let the
group's own mean be the baseline. Maximise (DeepSeekMath, arXiv 2402.03300, equation 3)

    J(theta) = E[ (1/G) sum_i (1/|o_i|) sum_t
                  { min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it } ],
    rho_it = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t),
    A_i    = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-4),   the same for every token of o_i,
    KL_it  = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1,        the k3 estimator, at token t.

pi_old is the policy that sampled. Deviations from the paper: outcome supervision only; one
reference; std divides by G - 1, plus 1e-4; four optimiser steps per rollout by default. Later
papers: --clip-coef-high 0.28 --loss-norm token --mask-truncated --beta 0 (DAPO, arXiv 2503.14476,
without dynamic sampling and length penalty); --no-scale-rewards --loss-norm constant --beta 0
(Dr. GRPO, 2503.20783); --importance-sampling-level sequence (GSPO, 2507.18071);
--multi-objective-aggregation normalize_then_sum (GDPO, 2601.05242).

    python grpo.py                                       # tiny/arithmetic, half a minute on a CPU
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --dataset-config main \
        --prompt-column question --chat --max-prompt-length 256 --max-new-tokens 512 \
        --prompts-per-rollout 16 --num-minibatches 1 --micro-batch-size 8 --learning-rate 1e-6
    torchrun --nproc_per_node=8 grpo.py ...              # eight GPUs: docs/processes.md
    python grpo.py --resume runs/grpo__1__...            # resume after a crash

A healthy run: `reward/mean` and `eval/accuracy` rise together; `policy/entropy` falls, first fast,
then slowly; `reward/zero_variance_groups` rises; clip fractions and
`completions/truncated_fraction` stay low.
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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import AutoConfig, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast
from common.generation import checkpoint_activations, content, encode, find_stop_ids, generate
from common.generation import pad_rows, shard
from common.logprobs import Sequences, completion_logprobs, micro_batches, rollout_logprobs

FULL_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass
class Args:
    exp_name: str = "grpo"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 20  # rollouts between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the policy, the reference and their tokenizer
    model: str = "tiny/arithmetic/policy"
    dataset: str = "tiny/arithmetic/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: int = 64  # longest prompt in tokens; rows with longer ones are dropped
    # --- reward ---
    # path/to/file.py:function, one or more; default: 1 if the last number is the answer, else 0
    reward_fn: list[str] = field(default_factory=list)
    reward_model: str | None = None  # sequence classifier with one label and --model's tokenizer
    # a weight for each --reward-fn, then one for --reward-model; default: 1 each
    reward_weights: list[float] = field(default_factory=list)
    eval_reward_fn: str | None = None  # reward function of eval/reward; default: those of training
    # --- GRPO ---
    # rollouts, each followed by its optimiser steps
    total_rollouts: int = 60
    prompts_per_rollout: int = 32  # prompts per rollout
    group_size: int = 8  # G, completions per prompt (DeepSeekMath: 64)
    max_new_tokens: int = 24  # longest completion in tokens
    temperature: float = 1.0  # sampling temperature; it divides the logits in all log-probs too
    beta: float = 0.04  # coefficient of the KL (DeepSeekMath: 0.04); 0 loads no reference
    kl_placement: Literal["loss", "reward"] = "loss"  # KL in the loss (k3) or in the reward (k1)
    # lower clip: ratios below 1 - this get no gradient if the advantage is negative (GSPO: 3e-4)
    clip_coef: float = 0.2
    # upper clip: no gradient above 1 + this if it is positive (GSPO: 4e-4); default: --clip-coef
    clip_coef_high: float | None = None
    update_epochs: int = 1  # passes over a rollout's completions
    num_minibatches: int = 4  # optimiser steps per pass
    # divide advantages by the group's standard deviation; --no-scale-rewards: do not
    scale_rewards: bool = True
    # mean over tokens: of each completion (GRPO), of all (DAPO), or sum by a constant (Dr. GRPO)
    loss_norm: Literal["sequence", "token", "constant"] = "sequence"
    mask_truncated: bool = False  # leave cut-off completions out of the loss (DAPO)
    # a ratio for each token (GRPO), or one for the whole completion (GSPO)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # advantages of the summed rewards, or of each reward before they are summed (GDPO)
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    # --- optimisation and evaluation ---
    # completions per forward pass: sets memory and speed, not the result
    micro_batch_size: int = 64
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 5e-4  # AdamW's peak learning rate
    # how the learning rate changes after its warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.0  # fraction of the rollouts over which the learning rate rises
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 20  # rollouts between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out prompts, at most; one completion each
    eval_temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: list[int]  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
def group_advantages(rewards: Tensor, group_size: int, scale: bool = True) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group (DeepSeekMath, section 4.1.2).

    The G completions of a prompt are neighbours in the rewards (B,), B = prompts x G. Without
    `scale` there is no division (Dr. GRPO). Computed in float64.
    """
    groups = rewards.double().view(-1, group_size)
    # Equal rewards teach nothing: exactly 0, not the mean's rounding error divided by 1e-4.
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).masked_fill(all_equal, 0.0)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.view(-1).float()


def gdpo_advantages(rewards: Tensor, reward_weights: Tensor, group_size: int) -> Tensor:
    """Group advantages of each reward alone, their weighted sum, normalised over the batch (GDPO).

    Rewards are (K, B), weights (K,). No reward dominates the others by its scale.
    """
    advantages = torch.stack([group_advantages(reward, group_size) for reward in rewards])  # (K, B)
    weighted_sum = reward_weights @ advantages
    return (weighted_sum - weighted_sum.mean()) / (weighted_sum.std() + 1e-4)


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    On tokens sampled from pi it is an unbiased estimate of KL(pi || pi_ref), never negative. As a
    loss it has the expected gradient of KL(pi_ref || pi).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def token_weights(loss_mask: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """Weights (n, T) with which (1/G) sum_i (1/|o_i|) sum_t x_it becomes sum(weights * x).

    They count a minibatch's n completions that have a token in the loss, all of one optimiser step,
    so the losses of its micro-batches and ranks add up.
    """
    lengths = loss_mask.sum(dim=1, keepdim=True)  # (B, 1)
    num_completions = (lengths > 0).sum().clamp(min=1)
    if loss_norm == "sequence":  # the mean over completions of the mean over their tokens (GRPO)
        return loss_mask / (lengths.clamp(min=1) * num_completions)
    if loss_norm == "token":  # the mean over all tokens (DAPO)
        return loss_mask / lengths.sum().clamp(min=1)
    return loss_mask / (max_new_tokens * num_completions)  # a constant instead of |o_i| (Dr. GRPO)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    beta: float,
    level: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J(theta) (equation 3) over some completions of a step, and sums over tokens for the log.

    Log-probs (B, T) of the sampled tokens under pi_theta, pi_old and pi_ref are in nats, 0 after a
    completion's end. Advantages are (B,), weights (B, T) those of `token_weights`. The sums are of
    the tokens in the loss; at level `sequence` each has its completion's ratio.
    """
    advantages = advantages[:, None]
    left_out = weights == 0  # a ratio may be inf there, and 0 * inf is NaN
    log_ratio = (logprobs - old_logprobs).masked_fill(left_out, 0.0)
    if level == "sequence":  # GSPO, equation 7: (prod_t rho_it)^(1/|o_i|) is the ratio of every t
        in_loss = ~left_out
        mean_log_ratio = log_ratio.sum(dim=1) / in_loss.sum(dim=1).clamp(min=1)
        log_ratio = mean_log_ratio[:, None] * in_loss
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    # No gradient where the ratio has left the interval to the side that A pushes to (PPO, eq. 7).
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    sums = {
        "policy/approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).sum(),
    }
    if ref_logprobs is not None:
        sums["objective/kl"] = k3_kl(logprobs, ref_logprobs).detach().sum()
        if beta > 0:  # 0 if the KL is in the rewards
            ref_logprobs = ref_logprobs.masked_fill(left_out, 0.0)
            objective = objective - beta * k3_kl(logprobs.masked_fill(left_out, 0.0), ref_logprobs)
    return -(weights * objective).sum(), sums


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
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(policy)
    ref_model = None
    if args.beta > 0:
        ref_model = load_model("--model", args.model, AutoModelForCausalLM, positions, device)

    # --- rewards ---
    columns = train_prompts[0].columns
    # By name: functions of (prompts, sequences, texts), which return rewards (B,).
    reward_fns = load_reward_fns("--reward-fn", args.reward_fn, columns)
    if args.reward_model:
        reward_fns["reward_model"] = load_reward_model(args, tokenizer, positions, device)
    reward_weights = torch.tensor(args.reward_weights or [1.0] * len(reward_fns))  # (K,)
    eval_fns, eval_weights = reward_fns, reward_weights
    if args.eval_reward_fn:
        eval_fns = load_reward_fns("--eval-reward-fn", [args.eval_reward_fn], columns)
        eval_weights = torch.ones(1)

    # --- optimiser, and where an interrupted run stopped ---
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    training = {"policy": (policy, optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_prompts).encode())}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, args.total_rollouts)
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
        # 1. Roll out: G completions per prompt, from the policy as it is now.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * (step + 1))  # so resume is exact
        prompts = [train_prompts[i] for i in prompt_batches[step] for _ in range(args.group_size)]
        sequences, texts = sample(prompts, args.temperature, rng)  # B = prompts x G of each
        completions = [completion for _, completion in sequences]
        lengths = torch.tensor([len(ids) for ids in completions], device=device)  # (B,)
        ended = torch.tensor([ids[-1] in stop_ids for ids in completions], device=device)  # (B,)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        rollout_time = time.perf_counter()

        # 2. Score: each reward, and their weighted sum.
        rewards_by_name = {name: fn(prompts, sequences, texts) for name, fn in reward_fns.items()}
        all_rewards = torch.stack([*rewards_by_name.values()])  # (K, B)
        rewards = reward_weights @ all_rewards  # (B,)
        score_time = time.perf_counter()

        # 3. Log-probs under the old policy and the reference, fixed during the update. In the first
        # epoch's micro-batches: same padding, same rounding, so the first ratio is exactly 1.
        epochs = shuffled_minibatches(len(sequences), args.update_epochs, args.num_minibatches, rng)
        first_micro_batches = []
        for minibatch in epochs[0]:
            first_micro_batches += micro_batches(sequences, minibatch, args.micro_batch_size)
        kl_in_reward = args.beta > 0 and args.kl_placement == "reward"
        one_step = args.update_epochs * args.num_minibatches == 1
        # With one step pi_old is pi_theta and needs no pass; but k1 is needed before that step.
        is_old_the_policy = one_step and not kl_in_reward
        old_logprobs = ref_logprobs = None
        if not is_old_the_policy:
            old_logprobs = rollout_logprobs(
                policy, sequences, first_micro_batches, args.temperature
            )
        if ref_model is not None:
            ref_logprobs = rollout_logprobs(
                ref_model, sequences, first_micro_batches, args.temperature
            )

        # 4. Advantages: rewards against the group's mean, the same for each token of a completion.
        if args.multi_objective_aggregation == "normalize_then_sum":
            advantages = gdpo_advantages(all_rewards, reward_weights, args.group_size).to(device)
        else:
            shaped_rewards = rewards.to(device)
            if kl_in_reward:  # k1, summed over the completion's tokens
                k1 = (old_logprobs - ref_logprobs).sum(dim=1)
                shaped_rewards = shaped_rewards - args.beta * k1
            advantages = group_advantages(shaped_rewards, args.group_size, args.scale_rewards)

        # 5. Optimise: a step per minibatch, its gradient summed over micro-batches and ranks.
        factor = lr_factor(args, step, args.total_rollouts)
        optimizer.param_groups[0]["lr"] = args.learning_rate * factor
        loss_mask = (mask & ended[:, None]) if args.mask_truncated else mask
        weights = torch.zeros(mask.shape, device=device)  # (B, T), filled minibatch by minibatch
        sums, grad_norms = defaultdict(float), []
        for epoch in epochs:
            for minibatch in epoch:
                weights[minibatch] = token_weights(
                    loss_mask[minibatch], args.loss_norm, args.max_new_tokens
                )
                for inds in micro_batches(sequences, minibatch, args.micro_batch_size):
                    logprobs, entropy = completion_logprobs(
                        policy, sequences, inds, args.temperature, entropy=True
                    )
                    if is_old_the_policy:
                        old = logprobs.detach()
                    else:
                        old = old_logprobs[inds]
                    loss, loss_sums = grpo_loss(
                        logprobs,
                        old,
                        None if ref_logprobs is None else ref_logprobs[inds],
                        advantages[inds],
                        weights[inds],
                        clip_low=args.clip_coef,
                        clip_high=args.clip_coef_high or args.clip_coef,
                        beta=0.0 if kl_in_reward else args.beta,
                        level=args.importance_sampling_level,
                    )
                    loss.backward()
                    loss_sums |= {"objective/loss": loss, "policy/entropy": entropy.sum()}
                    for name, value in loss_sums.items():
                        sums[name] += value.detach().double()
                grad_norms.append(clip_grad_norm(policy, args.max_grad_norm, run_dir, step))
                optimizer.step()
                optimizer.zero_grad()
        update_time = time.perf_counter()

        # 6. Log, evaluate, save.
        sums = {name: all_reduce_sum(value).item() for name, value in sums.items()}
        groups = rewards.view(-1, args.group_size)
        num_tokens = lengths.sum().item()
        loss_tokens = max(loss_mask.sum().item(), 1) * args.update_epochs
        metrics = {
            "reward/mean": rewards.mean().item(),
            **{f"reward/{name}": reward.mean().item() for name, reward in rewards_by_name.items()},
            "reward/std": groups.std(dim=1).mean().item(),
            "reward/zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item(),
            "completions/length_mean": lengths.float().mean().item(),
            "completions/length_min": lengths.min().item(),
            "completions/length_max": lengths.max().item(),
            "completions/truncated_fraction": 1 - ended.float().mean().item(),
            "objective/loss": sums["objective/loss"] / len(grad_norms),  # per optimiser step
            "policy/entropy": sums["policy/entropy"] / (num_tokens * args.update_epochs),
            "policy/approx_kl": sums["policy/approx_kl"] / loss_tokens,
            "policy/clip_fraction_low": sums["policy/clip_fraction_low"] / loss_tokens,
            "policy/clip_fraction_high": sums["policy/clip_fraction_high"] / loss_tokens,
            "policy/grad_norm": np.mean(grad_norms),
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/rollout_seconds": rollout_time - start_time,
            "time/score_seconds": score_time - rollout_time,
            "time/update_seconds": update_time - score_time,
            "time/tokens_per_second": num_tokens / (update_time - start_time),
        }
        if ref_model is not None:  # nats per completion
            metrics["objective/kl"] = sums["objective/kl"] / (len(sequences) * args.update_epochs)
        samples = []
        is_last = step + 1 == args.total_rollouts
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, sample, eval_prompts, eval_fns, eval_weights)
            metrics |= eval_metrics
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(reward=metrics["reward/mean"], entropy=metrics["policy/entropy"])
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, checkpoint | {"step": step + 1})

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
    samples, is_right = [], []
    batch_size = args.prompts_per_rollout * args.group_size
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        sequences, texts = sample(batch, args.eval_temperature, rng)
        all_rewards = [reward_fn(batch, sequences, texts) for reward_fn in reward_fns.values()]
        rewards = (reward_weights @ torch.stack(all_rewards)).tolist()
        is_right += (all_rewards[0] >= 1).tolist()
        for i, prompt in enumerate(batch):
            row = {"prompt": prompt.text, "completion": texts[i]}
            samples.append(row | {"reward": rewards[i], "length": len(sequences[i][1])})
    metrics = {"eval/reward": np.mean([row["reward"] for row in samples])}
    if len(reward_fns) == 1 and "reward_model" not in reward_fns:  # a single rule: right is 1
        metrics["eval/accuracy"] = np.mean(is_right)
    metrics["eval/length_mean"] = np.mean([row["length"] for row in samples])
    return metrics, samples


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
    """What can be seen to be wrong before anything is loaded; fills in the default reward."""
    if args.reward_model == "none":
        args = replace(args, reward_model=None)
    if not args.reward_fn and not args.reward_model:
        args = replace(args, reward_fn=[LAST_NUMBER])
    with explain("flags"):
        check_numbers(args, "save_every max_prompt_length total_rollouts prompts_per_rollout")
        check_numbers(args, "group_size max_new_tokens temperature clip_coef clip_coef_high")
        check_numbers(args, "update_epochs num_minibatches micro_batch_size learning_rate")
        check_numbers(args, "max_grad_norm eval_every eval_rows")
        check_numbers(args, "seed beta warmup_ratio eval_temperature", zero=True)
        check(args.warmup_ratio < 1, f"--warmup-ratio must be below 1, not {args.warmup_ratio}")
        check(args.group_size > 1, "--group-size must be at least 2: with 1 all advantages are 0")
        message = "--kl-placement reward has no use with --beta 0"
        check(args.beta > 0 or args.kl_placement == "loss", message)
        has_clip = args.clip_coef != Args.clip_coef or args.clip_coef_high is not None
        one_step = args.update_epochs * args.num_minibatches == 1
        message = "with one optimiser step per rollout all ratios are 1"
        check(not (has_clip and one_step), f"--clip-coef and --clip-coef-high: {message}")
        if args.importance_sampling_level == "sequence":
            message = (
                "--importance-sampling-level sequence needs --loss-norm sequence (GSPO, eq. 5)"
            )
            check(args.loss_norm == "sequence", message)
        num_completions = args.prompts_per_rollout * args.group_size
        check(
            args.num_minibatches <= num_completions, f"--num-minibatches: {num_completions} at most"
        )
        num_rewards = len(args.reward_fn) + bool(args.reward_model)
        message = f"--reward-weights: give one for each of the {num_rewards} rewards"
        check(len(args.reward_weights) in (0, num_rewards), message)
        finite = all(math.isfinite(weight) for weight in args.reward_weights)
        check(finite, f"--reward-weights must not be {args.reward_weights}")
        if args.multi_objective_aggregation == "normalize_then_sum":
            usable = args.kl_placement == "loss" and args.scale_rewards
            message = "normalize_then_sum needs --kl-placement loss and --scale-rewards"
            check(usable, f"--multi-objective-aggregation {message}")
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
