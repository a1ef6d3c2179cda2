r"""Group Relative Policy Optimization (GRPO): reinforcement learning without a critic.

For each prompt x sample a group of G completions y_1..y_G from the policy, reward each, and let the
group's own mean be the baseline. Maximise (DeepSeekMath, arXiv 2402.03300, equation 3)

    J(theta) = E[ (1/G) sum_i (1/|y_i|) sum_t
                  { min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it } ],
    rho_it = pi_theta(y_it | x, y_i<t) / pi_old(y_it | x, y_i<t),
    A_i    = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-4),   the same for every token of y_i,
    KL_it  = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1,        the k3 estimator, at token t.

where pi_old is the policy before a rollout's first optimiser step. By default the reward r_i is a
rule: the last number of the completion is its answer, and gets 1 if it is right, else 0. Deviations
from the paper:

1. Rewards are for whole completions alone, and the reference is fixed.
2. The standard deviation divides by G - 1, and 1e-4 is added to it.
3. By default a rollout has four optimiser steps, not one, and the learning rate falls towards 0.
4. By default the reward is a rule. Gradients are clipped by their norm.

The rest of DAPO, GSPO and others are flags of grpo_variants.py: docs/recipes.md.

    python grpo.py                                       # tiny/arithmetic, half a minute on a CPU
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --dataset-config main \
        --prompt-column question --chat --max-prompt-length 256 --max-new-tokens 512 --beta 0 \
        --prompts-per-rollout 16 --num-minibatches 1 --micro-batch-size 8 \
        --total-rollouts 460                             # about one epoch, on a 24 GB GPU
    torchrun --nproc_per_node=8 grpo.py ...              # eight GPUs: docs/processes.md

A healthy run: `reward/mean`, `eval/accuracy` and, as prompts are solved,
`reward/frac_reward_zero_std` rise; `policy/entropy` falls; clip fractions stay low.
"""

import json
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable
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
from common.logprobs import Sequences, completion_logprobs, last_states, micro_batches
from common.logprobs import rollout_logprobs
from common.tokens import as_chat, encode, find_stop_ids
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.checks import check_flags, check_sampling_kl, check_training
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
    exp_name: str = "grpo"  # name of the run's folder, before the seed and the time
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
    reward_model: str | None = None  # sequence classifier with one label and --model's tokenizer
    # path/to/file.py:function, one or more; default, without --reward-model: 1 if the last number
    # is the answer, else 0
    reward_fn: list[str] = field(default_factory=list)
    # a weight for each --reward-fn, then one for --reward-model; default: 1 each
    reward_weights: list[FiniteFloat] = field(default_factory=list)
    eval_reward_fn: str | None = None  # reward function of eval/reward; default: those of training
    # --- GRPO ---
    total_rollouts: PositiveInt = 60  # batches of completions, each followed by its optimiser steps
    prompts_per_rollout: PositiveInt = 32  # prompts per rollout
    group_size: Annotated[int, Field(ge=2)] = 8  # G, completions per prompt (DeepSeekMath: 64)
    max_new_tokens: PositiveInt = 24  # longest completion in tokens
    temperature: PositiveFloat = 1.0  # sampling temperature; divides the logits in log-probs too
    beta: NonNegativeFloat = 0.04  # coefficient of the KL; 0 loads no reference
    clip_coef: PositiveFloat = 0.2  # eps: the ratio pi / pi_old is clipped to 1 - eps and 1 + eps
    clip_coef_high: PositiveFloat | None = None  # the upper eps; default: --clip-coef (DAPO: 0.28)
    update_epochs: PositiveInt = 1  # passes over a rollout's completions
    num_minibatches: PositiveInt = 4  # optimiser steps per pass
    scale_rewards: Literal["group", "none"] = "group"  # divide by the group's std; none: do not
    # sequence: mean over each completion's tokens (GRPO); token: mean over all tokens (DAPO);
    # constant: sum / max_new_tokens (Dr. GRPO)
    loss_norm: Literal["sequence", "token", "constant"] = "sequence"
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's; default: 5e-4 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    anneal_lr: bool = True  # the learning rate falls linearly to 0; else it is constant
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 20  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each
    eval_temperature: NonNegativeFloat = 1.0  # sampling temperature at evaluation; 0 is greedy

    def __post_init__(self):
        self.clip_coef_high = self.clip_coef_high or self.clip_coef
        if self.num_minibatches > self.prompts_per_rollout * self.group_size:
            raise ValueError("--num-minibatches: some would be empty, and AdamW would still move")
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


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-{ min(...) - beta KL_it } (equation 3) at each token (b, T), and sums over them for the log.

    Log-probs (b, T) of the sampled tokens under pi_theta, pi_old and pi_ref are in nats. After the
    end of y they are 0, where the ratio is 1: `token_weights` are 0 there. Advantages are (b,).
    """
    advantages = advantages[:, None]
    ratio = (logprobs - old_logprobs).exp()  # rho
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    # No gradient once the ratio has passed the bound on the side that A favours (PPO, equation 7).
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    sums = {
        "policy/approx_kl": k3_kl(old_logprobs, logprobs.detach()).sum(),  # KL(pi_old || pi)
        "policy/clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).sum(),
    }
    if ref_logprobs is None:
        return -objective, sums
    kl = k3_kl(logprobs, ref_logprobs)
    # Logged, not in the loss: log(pi_old/pi_ref), summed, estimates KL(pi_old || pi_ref) (k1).
    sums["objective/kl"] = (old_logprobs - ref_logprobs).sum()
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
        # With the merged weights of an earlier LoRA run, as the policy, so that the KL starts at 0.
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
    training = {"policy": (policy, optimizer)}
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
        # 1. Roll out and score: B sequences (x, y) of token ids, G per prompt, by pi_old, which is
        # the policy now. Random numbers depend on seed and step alone: resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        set_step(step)  # for functions that ask for it
        taken = islice(next_prompts, args.prompts_per_rollout)
        prompts = [prompt for prompt in taken for _ in range(args.group_size)]  # B, groups adjacent
        prompt_ids = [prompt.ids for prompt in prompts]
        sequences, sampler_logprobs = sample(prompt_ids, temperature=args.temperature, rng=rng)
        lengths = torch.tensor([len(y) for _, y in sequences])  # (B,)
        ended = torch.tensor([y[-1] in stop_ids for _, y in sequences])  # (B,)
        mask = (torch.arange(lengths.max()) < lengths[:, None]).to(device)  # (B, T), T the longest
        scoring_start = time.perf_counter()
        rewards_by_name = {f"rewards/{k}": fn(prompts, sequences) for k, fn in reward_fns.items()}
        rewards = reward_weights @ torch.stack([*rewards_by_name.values()])  # (K,) @ (K, B)
        reward_seconds = time.perf_counter() - scoring_start

        # 2. Advantages: rewards (B,) against the group's mean, the same for each token of y.
        advantages = group_advantages(rewards, args.group_size, args.scale_rewards).to(device)
        if not advantages.any():
            warnings.warn("a rollout has no advantages: equal rewards in each group", stacklevel=1)

        # 3. Log-probs before the update, under pi_old and pi_ref, in the micro-batches of part 4,
        # so that the first ratio is exactly 1; the sampler's log-probs are rounded differently.
        # With a single optimiser step, part 4's own log-probs are pi_old's. A model's output at
        # position t predicts token t + 1, so y is read from one position earlier:
        #     logits (|x| + |y|, V)[|x| - 1 : -1] -> log_softmax -> at y: (|y|,), a row of (B, T)
        split = partial(micro_batches, sequences, size=args.micro_batch_size)
        minibatches = []  # indices of the rows of each optimiser step, the same on all ranks
        first_pass = []  # indices of this rank's micro-batches, in the first pass over all rows
        for _ in range(args.update_epochs):
            order = torch.randperm(len(sequences), generator=rng)  # it may cut groups
            minibatches += order.tensor_split(args.num_minibatches)
        for minibatch in minibatches[: args.num_minibatches]:
            first_pass += split(minibatch)
        # `rollout_logprobs` adds up the rows of all ranks, so each rank has all B for later passes.
        old_logprobs = ref_logprobs = None
        if len(minibatches) > 1:
            old_logprobs = rollout_logprobs(policy, sequences, first_pass, args.temperature)
        if ref_model is not None:
            with as_at_start(policy):  # the reference under LoRA: without what it has learned
                ref_logprobs = rollout_logprobs(ref_model, sequences, first_pass, args.temperature)

        # 4. Optimise: a step per minibatch. Each rank takes its share of the micro-batches.
        if args.anneal_lr:
            remaining = (args.total_rollouts + 1 - step) / args.total_rollouts
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        all_sums, grad_norms = [], []  # of each micro-batch, of each optimiser step
        for minibatch in minibatches:
            weights = token_weights(mask, lengths[minibatch], args.loss_norm, args.max_new_tokens)
            for inds in split(minibatch):
                logprobs, entropy = completion_logprobs(
                    policy, sequences, inds, args.temperature, entropy=True
                )  # (b, T), 0 after the end of y
                device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
                old = logprobs.detach() if old_logprobs is None else old_logprobs[device_inds]
                ref = None if ref_logprobs is None else ref_logprobs[device_inds]
                losses, sums = grpo_loss(
                    logprobs,
                    old,
                    ref,
                    advantages[device_inds],
                    clip_low=args.clip_coef,
                    clip_high=args.clip_coef_high,
                    beta=args.beta,
                )  # (b, T)
                loss = (weights[device_inds] * losses).sum()
                loss.backward()  # gradients add up; `shard` sums them over ranks
                sums |= {"objective/loss": loss.detach(), "policy/entropy": entropy.sum()}
                # KL(sampler || pi_old), which differ by rounding alone.
                sums["policy/sampling_kl"] = k3_kl(sampler_logprobs[device_inds], old).sum()
                all_sums.append(sums)
            grad_norms.append(clip_grad_norm(policy, args.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad()

        # 5. Log, evaluate, save.
        metrics = rollout_metrics(args, rewards, lengths, ended, all_sums, grad_norms)
        metrics |= {name: values.mean().item() for name, values in rewards_by_name.items()}
        metrics["policy/learning_rate"] = optimizer.param_groups[0]["lr"]
        metrics["time/reward_seconds"] = reward_seconds
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            columns = rewards_by_name | {"reward": rewards, "advantage": advantages}
            columns["truncated"] = ~ended
            if ref_logprobs is not None:  # log(pi_old / pi_ref), pi_old by the sampler's numbers
                columns["log_ratio"] = sampler_logprobs - ref_logprobs
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


def rollout_metrics(
    args: Args, rewards: Tensor, lengths: Tensor, ended: Tensor, all_sums: list, grad_norms: list
) -> dict[str, float]:
    """Means over the tokens, the completions, or the optimiser steps of a rollout."""
    sums = {name: sum(part[name].double() for part in all_sums) for name in all_sums[0]}
    sums = sums_over_ranks(sums)
    num_tokens = lengths.sum().item() * args.update_epochs
    # Per token; the KL and the loss follow in other units.
    metrics = {name: total / num_tokens for name, total in sums.items()}
    check_sampling_kl(metrics["policy/sampling_kl"])
    if "objective/kl" in sums:  # nats per completion
        metrics["objective/kl"] = sums["objective/kl"] / (len(rewards) * args.update_epochs)
    groups = rewards.view(-1, args.group_size)
    metrics |= {
        "objective/loss": sums["objective/loss"] / len(grad_norms),  # per step
        "policy/grad_norm": np.mean(grad_norms),  # per step
        "reward/mean": rewards.mean().item(),  # per completion
        "reward/group_std": groups.std(dim=1).mean().item(),  # per group
        "reward/frac_reward_zero_std": (groups == groups[:, :1]).all(dim=1).float().mean().item(),
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
    if all(reward in (0, 1) for reward in rewards):  # right or wrong
        metrics["eval/accuracy"] = np.mean(rewards)
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
