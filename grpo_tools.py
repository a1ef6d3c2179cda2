r"""GRPO over several turns: a policy that calls tools, and learns when to.

A completion is a conversation with an environment. The policy samples until it ends a call or a
turn; the environment replies, or says that the completion is over; the policy goes on after the
reply. The reward is for the whole completion. All else is GRPO (arXiv 2402.03300, equation 3) over
S_i, the tokens of y_i that the policy has sampled:

    J(theta) = E[ (1/G) sum_i (1/|S_i|) sum_{t in S_i}
                  { min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it } ],

with rho_it, A_i and KL_it (k3) as in grpo.py. The policy reads the environment's tokens, but they
are no actions: one mask (B, T) leaves them out of the loss, lengths, entropy, KL and ratios. No
token is decoded and tokenised again. Deviations from the paper: the turns; std divides by G - 1,
plus 1e-4; two optimiser steps per rollout. A healthy run: `reward/mean` and `eval/reward` rise.

    python grpo_tools.py                                 # tiny/calculator, a minute on a CPU
    python grpo_tools.py --model Qwen/Qwen2.5-0.5B-Instruct --chat ... \
        --environment mine.py:tool --reward-fn mine.py:right  # docs/grpo_tools.md
    torchrun --nproc_per_node=8 grpo_tools.py ...        # eight GPUs: docs/processes.md
"""

import json
import os
import re
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.logprobs import Sequences, completion_logprobs, micro_batches, rollout_logprobs
from common.logprobs import sampling_metrics
from common.tokens import as_chat, encode, find_stop_ids
from runtime.adapters import add_adapters, as_at_start
from runtime.chats import message_text, special_tokens
from runtime.checks import check_flags, check_message, check_training
from runtime.functions import call_reward, check_columns, load_function, set_step
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, from_rank_0, join_processes, leave_processes, peak_memory_gb
from runtime.processes import sums_over_ranks
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, rollout_row, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "grpo_tools"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 20  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/calculator/policy"  # folder or hub name of the policy and its tokenizer
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/calculator/prompts"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that reward functions receive as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_prompt_length: PositiveInt = 32  # longest prompt in tokens; longer ones are dropped
    # --- environment and reward ---

    # path/to/file.py:function that replies to the policy; the default is for the default --model
    environment: str | None = None
    # path/to/file.py:function, which also reads the environment's words; default: as above
    reward_fn: str | None = None
    # text of the one token that ends a call; default: only the model's own ends of turns
    call_end: str | None = None
    max_turns: PositiveInt = 4  # turns of the policy in a completion, at most
    # --- GRPO ---
    total_rollouts: PositiveInt = 40  # rollouts, each followed by its optimiser steps
    prompts_per_rollout: PositiveInt = 32  # prompts per rollout
    group_size: Annotated[int, Field(ge=2)] = 8  # G, completions per prompt (DeepSeekMath: 64)
    max_new_tokens: PositiveInt = 40  # longest completion in tokens, the environment's included
    beta: NonNegativeFloat = 0.04  # coefficient of the KL; 0 loads no reference
    clip_coef: PositiveFloat = 0.2  # eps: the ratio pi / pi_old is clipped to 1 - eps and 1 + eps
    num_minibatches: PositiveInt = 2  # optimiser steps per rollout
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's; default: 3e-4 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    anneal_lr: bool = True  # the learning rate falls linearly to 0; else it is constant
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 20  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each

    def __post_init__(self):
        if self.num_minibatches > self.prompts_per_rollout * self.group_size:
            raise ValueError("--num-minibatches: some would be empty, and AdamW would still move")
        if self.model == "tiny/calculator/policy":
            self.environment = self.environment or "tiny/calculator/calculator.py:calculator"
            self.reward_fn = self.reward_fn or "tiny/calculator/calculator.py:right"
            self.call_end = self.call_end or "="
        if not self.environment or not self.reward_fn:
            raise ValueError("--environment and --reward-fn: this --model needs its own")


CONVERSATION_IDS = count()  # of the process, for environments that keep a state of each


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
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- environment, reward, data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    environment = load_environment(args.environment, tokenizer)
    reward_fn = load_reward_fn(args.reward_fn, tokenizer)
    stop_ids = find_stop_ids(args.model, tokenizer)
    turn_ends = stop_ids  # at these ids sampling pauses
    if args.call_end:
        call_end_ids = tokenizer(args.call_end, add_special_tokens=False).input_ids
        if len(call_end_ids) != 1 or tokenizer.decode(call_end_ids) != args.call_end:
            tokens = tokenizer.convert_ids_to_tokens(call_end_ids)
            raise ValueError(f"--call-end {args.call_end}: one token expected, found {tokens}")
        turn_ends = stop_ids + call_end_ids
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer, args.eval_rows)
    check_columns([args.reward_fn], train_prompts)
    # A turn is sampled for as long as the shortest completion has room; what is over is cut off.
    positions = args.max_prompt_length + 2 * args.max_new_tokens
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=3e-4, real=1e-6)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    if args.beta == 0:
        ref_model = None
    elif args.lora_rank == 0:
        ref_model = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
        shard(ref_model.requires_grad_(False), device)
    else:
        ref_model = policy  # as it was at the start, see part 3
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)

    # --- the loop ---
    sample = partial(sample_turns, args, policy, turn_ends, environment)
    training = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": checksum(train_prompts, args.model)}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate(args, sample, reward_fn, tokenizer, eval_prompts)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    progress = tqdm(range(state["step"] + 1, args.total_rollouts + 1), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser steps on it
        # 1. Roll out and score: B sequences (x, y) of token ids, G per prompt, by pi_old, which is
        # the policy now. Random numbers depend on seed and step alone: resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        set_step(step)  # for functions that ask for it
        prompt_inds = torch.randint(len(train_prompts), [args.prompts_per_rollout], generator=rng)
        prompts = [train_prompts[i] for i in prompt_inds for _ in range(args.group_size)]
        sequences, sampler_logprobs, mask, called, ended = sample(prompts, rng)
        rewards = reward_fn(prompts, sequences)  # (B,)
        # The mask (B, T) is true at tokens that the policy sampled. Elsewhere (the environment's
        # tokens, and after the end) log-probs and entropies become 0, without a gradient.
        lengths = mask.sum(dim=1)  # |S_i|, (B,)
        mask = mask.to(device)

        # 2. Advantages: rewards (B,) against the group's mean, the same for each token of y.
        advantages = group_advantages(rewards, args.group_size).to(device)
        if not advantages.any():
            warnings.warn("a rollout has no advantages: equal rewards in each group", stacklevel=1)

        # 3. Log-probs before the update, under pi_old and pi_ref. They are computed exactly as step
        # 4 computes them, so that the first ratio is 1; the sampler's are rounded differently.
        split = partial(micro_batches, sequences, size=args.micro_batch_size)
        minibatches = torch.randperm(len(prompts), generator=rng).tensor_split(args.num_minibatches)
        first_pass = []
        for minibatch in minibatches:
            first_pass += split(minibatch)
        old_logprobs = rollout_logprobs(policy, sequences, first_pass, temperature=1.0)  # (B, T)
        old_logprobs = old_logprobs.masked_fill(~mask, 0.0)
        ref_logprobs = None
        if ref_model is not None:
            with as_at_start(policy):  # the reference under LoRA: without what it has learned
                ref_logprobs = rollout_logprobs(ref_model, sequences, first_pass, temperature=1.0)
            ref_logprobs = ref_logprobs.masked_fill(~mask, 0.0)

        # 4. Optimise: a step per minibatch. Each rank takes its share of the micro-batches.
        if args.anneal_lr:
            remaining = (args.total_rollouts + 1 - step) / args.total_rollouts
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        all_sums, grad_norms = [], []  # of each micro-batch, of each optimiser step
        for minibatch in minibatches:
            weights = token_weights(mask, lengths[minibatch], "sequence", args.max_new_tokens)
            for inds in split(minibatch):
                logprobs, entropy = completion_logprobs(policy, sequences, inds, entropy=True)
                device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
                logprobs = logprobs.masked_fill(~mask[device_inds], 0.0)
                entropy = entropy.masked_fill(~mask[device_inds], 0.0)
                ref = None if ref_logprobs is None else ref_logprobs[device_inds]
                losses, sums = grpo_loss(
                    logprobs,
                    old_logprobs[device_inds],
                    ref,
                    advantages[device_inds],
                    clip_low=args.clip_coef,
                    clip_high=args.clip_coef,
                    beta=args.beta,
                )  # (b, T)
                loss = (weights[device_inds] * losses).sum()
                loss.backward()  # gradients add up; `shard` sums them over ranks
                sums |= {"objective/loss": loss.detach(), "policy/entropy": entropy.sum()}
                all_sums.append(sums)
            grad_norms.append(clip_grad_norm(policy, args.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad()

        # 5. Log, evaluate, save.
        sums = {name: sum(part[name].double() for part in all_sums) for name in all_sums[0]}
        sums = sums_over_ranks(sums)
        metrics = {name: total / lengths.sum().item() for name, total in sums.items()}  # per token
        metrics |= {
            "objective/loss": sums["objective/loss"] / len(grad_norms),  # per step
            "policy/grad_norm": np.mean(grad_norms),  # per step
            "reward/mean": rewards.mean().item(),  # per completion
            "completions/truncated_fraction": 1 - ended.float().mean().item(),
        }
        means = turn_metrics(sequences, lengths, called)
        metrics |= {f"completions/{name}": x for name, x in means.items()}
        metrics |= sampling_metrics(old_logprobs, sampler_logprobs, mask)
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        columns = {"reward": rewards, "advantage": advantages, "truncated": ~ended, "sampled": mask}
        if ref_logprobs is not None:
            columns["log_ratio"] = old_logprobs - ref_logprobs
            metrics["objective/kl"] = sums["objective/kl"] / len(prompts)  # nats per completion
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            rollouts = [rollout_row(tokenizer, sequences[: args.group_size], columns)]
        is_last = step == args.total_rollouts
        if is_last or step % args.eval_every == 0:
            evals, samples = evaluate(args, sample, reward_fn, tokenizer, eval_prompts)
            metrics |= evals
        log(args, run_dir, step, metrics, samples, rollouts)
        shown = ("reward/mean", "objective/kl", "completions/called_fraction")
        progress.set_postfix({name: metrics[name] for name in shown if name in metrics})
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    save_model(run_dir, policy, tokenizer, stop_ids)  # the token that ends a call ends no text
    return run_dir


def sample_turns(
    args: Args, policy: Any, turn_ends: list, environment: Callable, prompts: list, rng: Generator
) -> tuple[Sequences, Tensor, Tensor, Tensor, Tensor]:
    """A completion of up to --max-turns turns for each prompt: pairs (prompt, completion) of token
    ids; the log-probs (B, T) with which tokens were sampled; which tokens were, bool (B, T); to
    which completions the environment has replied, and which of them it says are over, both (B,).
    The others are cut off.

    The policy samples a turn, up to an id in `turn_ends`; the environment replies; the policy goes
    on after the reply. A reply that leaves no token or no turn to go on is not appended.
    """
    prompts = [  # a column for the environment: positions change from turn to turn
        prompt._replace(columns=prompt.columns | {"conversation_id": next(CONVERSATION_IDS)})
        for prompt in prompts
    ]
    completions = [[] for _ in prompts]
    logprobs = torch.zeros(len(prompts), args.max_new_tokens, device=policy.device)
    is_sampled = torch.zeros(logprobs.shape).bool()
    called, ended = torch.zeros(2, len(prompts)).bool()
    running = [*range(len(prompts))]  # the completions that go on
    for turn in range(1, args.max_turns + 1):
        starts = [len(completions[i]) for i in running]
        turns, turn_logprobs = generate(
            policy,
            [list(prompts[i].ids) + completions[i] for i in running],
            max_new_tokens=args.max_new_tokens - min(starts),  # what is too long is cut below
            temperature=1.0,
            stop_ids=turn_ends,
            rng=rng,
            batch_size=args.generation_batch_size,
        )
        for i, start, (_, ids), values in zip(running, starts, turns, turn_logprobs, strict=True):
            completions[i] += ids[: args.max_new_tokens - start]
            end = len(completions[i])
            is_sampled[i, start:end] = True
            logprobs[i, start:end] = values[: end - start]
        asking = [i for i in running if completions[i][-1] in turn_ends]
        replies = environment([prompts[i] for i in asking], [completions[i] for i in asking])
        running = []
        for i, reply in zip(asking, replies, strict=True):
            called[i] |= reply is not None
            if reply is None:
                ended[i] = True
            elif turn < args.max_turns and len(completions[i] + reply) < args.max_new_tokens:
                completions[i] += reply
                running.append(i)
        if not running:
            break
    longest = max(map(len, completions))
    sequences = [(list(prompt.ids), ids) for prompt, ids in zip(prompts, completions, strict=True)]
    return sequences, logprobs[:, :longest], is_sampled[:, :longest], called, ended


def turn_metrics(sequences: Sequences, lengths: Tensor, called: Tensor) -> dict[str, float]:
    """Means over completions: tokens sampled (B,), the environment's, whether it has replied."""
    others = torch.tensor([len(completion) for _, completion in sequences]) - lengths
    return {
        "length_mean": lengths.float().mean().item(),
        "environment_length_mean": others.float().mean().item(),
        "called_fraction": called.float().mean().item(),
    }


def evaluate(
    args: Args, sample: Callable, reward_fn: Callable, tokenizer: Any, prompts: list[Prompt]
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt, sampled as in training."""
    rng = Generator().manual_seed(args.seed)  # every evaluation uses the same random numbers
    sequences, _, mask, called, _ = sample(prompts, rng)
    rewards = reward_fn(prompts, sequences).tolist()
    metrics = {"eval/reward": np.mean(rewards)}
    lengths = mask.sum(dim=1)
    metrics |= {f"eval/{name}": x for name, x in turn_metrics(sequences, lengths, called).items()}
    samples = []
    for prompt, (_, ids), reward, length in zip(prompts, sequences, rewards, lengths, strict=True):
        row = {"prompt": prompt.text, "completion": tokenizer.decode(ids, skip_special_tokens=True)}
        samples.append(row | {"reward": round(reward, 6), "length": length.item()})
    return metrics, samples


# --- the environment ---------------------------------------------------------------------------
def load_environment(spec: str, tokenizer: Any) -> Callable:
    """path/to/file.py:function as a function of prompts and completions, see `ask`."""
    return partial(ask, load_function("--environment", spec), tokenizer)


def ask(function: Callable, tokenizer: Any, prompts: list, completions: list) -> list:
    """Token ids of the reply to each completion, None if it is over; rank 0 asks for all."""
    replies = []
    if RANK == 0 and prompts:
        columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
        columns["prompts"] = [prompt.text for prompt in prompts]
        columns["completions"] = tokenizer.batch_decode(completions)  # special tokens show turns
        try:
            result = function(**{key: [*map(deepcopy, column)] for key, column in columns.items()})
            if not isinstance(result, list) or len(result) != len(prompts):
                raise ValueError(f"a list of {len(prompts)} replies expected: {result!r:.200}")
            for reply, ids in zip(result, completions, strict=True):
                replies.append(None if reply is None else encode_reply(tokenizer, reply, ids[-1]))
        except (Exception, SystemExit) as error:  # an exit would end the run without an error
            name = f"{getattr(function, '__name__', function)} of {function.__module__}"
            raise RuntimeError(f"environment {name}: {type(error).__name__}: {error}") from error
    return from_rank_0(replies)


def encode_reply(tokenizer: Any, reply: str | dict | list, last_id: int) -> list[int]:
    """Token ids of a text, a chat message, or a list of texts and ids, after `last_id`. A special
    token that a text spells out is text: what a tool has read must not end a turn.
    """
    parts = [reply] if isinstance(reply, str) else reply
    if isinstance(reply, dict):
        parts = between_turns(tokenizer, reply)
        if parts[0] == last_id:  # the policy has ended its turn itself
            parts = parts[1:]
    if not isinstance(parts, list) or not {*map(type, parts)} <= {str, int}:  # True is no id
        raise ValueError(f"a text, a message, or texts and token ids expected, found {reply!r}")
    ids = [last_id]
    for part in parts:
        ids += text_ids(tokenizer, part, ids[-1]) if isinstance(part, str) else [part]
    if len(ids) == 1:
        warnings.warn("--environment: a reply is empty: the policy writes it itself", stacklevel=2)
    return ids[1:]


def text_ids(tokenizer: Any, text: str, last_id: int) -> list[int]:
    """Ids of a text after a token, as a demonstration has them: some tokenizers put a space before
    a text that stands alone.
    """
    if not special_tokens(tokenizer).search(text):
        before = tokenizer.decode(last_id)
        ids = tokenizer(before + text, add_special_tokens=False).input_ids
        for start in (1, 2):  # the text's first token: some tokenizers put a space before both
            if ids[start - 1 : start] == [last_id] and tokenizer.decode(ids[:start]) == before:
                return ids[start:]
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def between_turns(tokenizer: Any, reply: dict) -> list[str | int]:
    """What the chat template writes from the end of an assistant's turn to the start of the next,
    with a message between them: ids of its special tokens, and texts. A ValueError unless the
    template leaves what is before the message as it was.
    """
    check_message(reply)
    role, text = reply["role"], message_text(reply)
    turn = "<think>\nwhy\n</think>\n\nthe turn"  # some drop the thought once a message follows
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": turn}]
    before = tokenizer.apply_chat_template(messages, tokenize=False)
    messages.append(reply | {"content": "the reply"})
    after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turn_end = before.rfind(turn) + len(turn)
    _, *pieces = re.split(f"(?={special_tokens(tokenizer).pattern})", after[turn_end:])
    if not (turn in before and after.startswith(before) and "the reply" in after and pieces):
        raise ValueError(f"the chat template appends no {role!r} message: return texts and ids")
    parts = []
    for piece in pieces:  # each begins with a special token
        special_id = tokenizer(piece, add_special_tokens=False).input_ids[0]
        piece = piece.removeprefix(tokenizer.decode(special_id))
        written, content = "the reply", text
        if '"the reply"' in piece:  # some templates write what a tool says as JSON
            written, content = '"the reply"', json.dumps(text, ensure_ascii=False)
        parts += [special_id, piece.replace(written, content)]
    return parts


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
