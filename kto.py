r"""Kahneman-Tversky Optimization (KTO): learn from single completions that are good or bad.

Prospect theory: people value an outcome by its distance from a reference point, and each further
step away from it counts less. Here the outcome is the log-ratio of `dpo.py`, r(x, y) = log(pi(y|x)
/ pi_ref(y|x)), and the reference point z0 estimates KL(pi || pi_ref) (arXiv 2402.01306, 4.1):

    z0 = max(0, mean of r(x_i, y_j) over mismatched pairs), without gradient,
    v(x, y) = w_D sigmoid(beta (r - z0)) if y is desirable, w_U sigmoid(beta (z0 - r)) if not,
    L = mean over completions of w - v(x, y), where w is w_D or w_U.

Deviations from the paper: z0 covers the whole optimiser step, not a micro-batch; prompts and
completions are mismatched once, for all of the data; AdamW and a linear schedule, not RMSprop.

    python kto.py                                          # tiny/reviews, half a minute on a CPU
    python kto.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/kto-mix-14k --beta 0.1 \
        --max-length 1024 --max-new-tokens 256 --micro-batch-size 4 --learning-rate 1e-6  # one GPU
    torchrun --nproc_per_node=8 kto.py ...                 # eight GPUs: docs/processes.md
    python kto.py --resume runs/kto__1__...                # resume after a crash

A healthy run: the first loss is half the mean weight, and `reward/margin` rises from 0. If
`reward/desirable` sinks and `eval/kl` passes ten nats: lower the learning rate, or raise w_D.
"""

import gc
import inspect
import json
import math
import os
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoConfig, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, checkpoint_activations
from common.generation import find_stop_ids, generate, shard
from common.logprobs import Sequences, UnusableRow, completion_logprobs, encode_pair
from common.logprobs import micro_batches, rollout_logprobs

FULL_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "kto"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 50  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the policy, the reference and their tokenizer
    model: str = "tiny/reviews/policy"
    dataset: str = "tiny/reviews/labels"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    # column of the completion; if the data has none, the pairs of chosen and rejected are split
    completion_column: str = "completion"
    chosen_column: str = "chosen"  # column of a desirable completion, in data of pairs
    rejected_column: str = "rejected"  # column of an undesirable completion, in data of pairs
    label_column: str = "label"  # column that is true or 1 for desirable completions, or false or 0
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    # prompt and completion together, in tokens; longer completions are cut off
    max_length: int = 128
    # --- KTO ---
    # coefficient of the KL to the reference
    beta: float = 0.1
    # w_D, weight of desirable completions; w_D x their number should be 1 to 1.5 times w_U x the
    # number of undesirable ones
    desirable_weight: float = 1.33
    undesirable_weight: float = 1.0  # w_U, weight of undesirable completions
    # --- optimisation and evaluation ---
    # passes over the training completions
    epochs: float = 2.0
    batch_size: int = 32  # completions per optimiser step
    micro_batch_size: int = 32  # completions per forward pass: memory and speed, not the result
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    # how the learning rate changes after its warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.1  # fraction of the steps over which the learning rate rises
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 100  # steps between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out completions, at most; their prompts are completed too
    # file.py:function for eval/reward, or none; default: gold on the default --dataset, else none
    eval_reward_fn: str | None = None
    max_new_tokens: int = 40  # longest sampled completion in tokens
    temperature: float = 1.0  # sampling temperature at evaluation; it divides eval/kl's logits too


class LabelledRow(NamedTuple):
    text: str | list[dict]  # the prompt, a string or chat messages
    sequence: tuple[list[int], list[int]]  # token ids of the prompt and of its completion
    label: bool  # whether the completion is desirable
    columns: dict  # the row's other columns, for the reward function
    # its prompt, another row's completion; filled in last
    mismatched: tuple[list[int], list[int]] = ([], [])


# --- the mathematics ---------------------------------------------------------------------------
def mismatch(sequences: Sequences, max_length: int) -> Sequences:
    """The pairs (x_i, y_j) that z0 is computed from: for each row, its prompt and the completion of
    another row, token ids like the rows' own; cut off at max_length tokens.

    Rows are sorted by prompt; that at place p takes the completion at place p + N // 2 (mod N). So
    each completion is used once. Rows of one prompt are neighbours, and half of all rows further on
    another one begins, unless one prompt fills more than half of the rows.
    """
    by_prompt = sorted(range(len(sequences)), key=lambda i: sequences[i][0])
    half = len(sequences) // 2
    partner_of = dict(zip(by_prompt, by_prompt[half:] + by_prompt[:half], strict=True))  # j by i
    mismatched = []
    for i, (prompt, _) in enumerate(sequences):
        completion = sequences[partner_of[i]][1]
        mismatched.append((prompt, completion[: max_length - len(prompt)]))
    return mismatched


def reference_point(logratios: Tensor) -> Tensor:
    """z0 = max(0, mean of r), in nats, of mismatched pairs (B,): what it estimates is >= 0."""
    return logratios.mean().clamp(min=0)


def kto_loss(
    logratios: Tensor,
    z0: Tensor,
    labels: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """w - v (B,): w_D sigmoid(-beta (r - z0)) if desirable, and if not w_U sigmoid(beta (r - z0)).

    logratios: (B,) r = log pi(y|x) - log pi_ref(y|x), sums over tokens, in nats; labels: (B,) bool,
    true for desirable; z0: (). The slope in r, beta w s (1 - s) in size with
    s = sigmoid(beta (r - z0)), is largest at r = z0 and tends to 0 far from it.
    """
    gains = torch.where(labels, logratios - z0, z0 - logratios)  # v = w sigmoid(beta gain)
    weights = torch.where(labels, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * gains)  # w - v, because 1 - sigmoid(a) = sigmoid(-a)


def kto_metrics(
    logratios: Tensor,
    z0: Tensor,
    labels: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> dict[str, float]:
    """Means over the completions (B,) of a whole step; the margin if there are both kinds.

    objective/kl is z0: biased, since y_j is not sampled from pi(.|x_i). eval/kl is unbiased.
    """
    losses = kto_loss(logratios, z0, labels, beta, desirable_weight, undesirable_weight)
    metrics = {"objective/loss": losses.double().mean().item(), "objective/kl": z0.item()}
    rewards = beta * logratios
    if labels.any():
        metrics["reward/desirable"] = rewards[labels].double().mean().item()
    if not labels.all():
        metrics["reward/undesirable"] = rewards[~labels].double().mean().item()
    if labels.any() and not labels.all():
        metrics["reward/margin"] = metrics["reward/desirable"] - metrics["reward/undesirable"]
    return metrics


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    args = check_args(args)
    run_dir, device, wandb_run = start_run(args)

    # --- data and models ---
    tokenizer, stop_ids = load_tokenizer(args.model)
    train_rows = load_labelled(args, args.train_split, tokenizer, stop_ids)
    eval_rows = load_labelled(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    reward_fn = None
    if args.eval_reward_fn != "none":
        columns = eval_rows[0].columns
        (reward_fn,) = load_reward_fns("--eval-reward-fn", [args.eval_reward_fn], columns).values()
    longest_prompt = max(len(row.sequence[0]) for row in eval_rows)
    positions = max(args.max_length, longest_prompt + args.max_new_tokens)
    policy = load_model("--model", args.model, AutoModelForCausalLM, positions, device)
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(policy)

    # --- the rows of each step, and the reference's log-probs (N,) of all rows ---
    rng = Generator().manual_seed(args.seed)
    total_steps = math.ceil(args.epochs * len(train_rows) / args.batch_size)
    # Permutations that fill every batch, the last one too: they may be one more than --epochs.
    data_epochs = math.ceil(total_steps * args.batch_size / len(train_rows))
    shuffles = [torch.randperm(len(train_rows), generator=rng) for _ in range(data_epochs)]
    batches = torch.cat(shuffles).split(args.batch_size)[:total_steps]
    train_sequences = [row.sequence for row in train_rows]
    train_mismatched = [row.mismatched for row in train_rows]
    train_labels = torch.tensor([row.label for row in train_rows], device=device)
    # No checkpoint is loaded yet: the policy is the reference.
    train_refs = reference_logprobs(args, policy, train_sequences, batches)
    train_mismatched_refs = reference_logprobs(args, policy, train_mismatched, batches)
    eval_refs = sum_logprobs(args, policy, [row.sequence for row in eval_rows])
    eval_mismatched_refs = sum_logprobs(args, policy, [row.mismatched for row in eval_rows])

    # --- optimiser, and where an interrupted run stopped ---
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, fused=True)
    training = {"policy": (policy, optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_rows).encode())}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, total_steps)
    # Set last: a checkpoint brings its own.
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay
    print(f"{run_dir}: {policy.num_parameters():,} parameters on {device}")

    # --- the loop ---
    evaluate_policy = partial(evaluate, args, policy, tokenizer, stop_ids, reward_fn)
    if not args.resume:
        metrics, samples = evaluate_policy(eval_rows, eval_refs, eval_mismatched_refs)
        log(run_dir, wandb_run, 0, metrics, samples)
    progress = tqdm(range(checkpoint["step"], total_steps), disable=RANK > 0)
    for step in progress:
        # 1. Draw the completions of this step.
        start_time = time.perf_counter()
        batch = batches[step]
        sequences = [train_sequences[i] for i in batch]
        mismatched = [train_mismatched[i] for i in batch]
        labels = train_labels[batch]  # (B,)
        ref_logprobs = train_refs[batch]  # (B,)

        # 2. The reference point, of the whole step and without gradient.
        mismatched_logprobs = sum_logprobs(args, policy, mismatched)
        z0 = reference_point(mismatched_logprobs - train_mismatched_refs[batch])

        # 3. Optimise: one step, its gradient summed over micro-batches and ranks.
        optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(args, step, total_steps)
        logratios = torch.zeros(len(sequences), device=device)  # 0 in rows of other ranks
        for inds in micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size):
            logprobs = completion_logprobs(policy, sequences, inds).sum(dim=1)  # (b,)
            r = logprobs - ref_logprobs[inds]
            losses = kto_loss(
                r,
                z0,
                labels[inds],
                beta=args.beta,
                desirable_weight=args.desirable_weight,
                undesirable_weight=args.undesirable_weight,
            )
            loss = losses.sum() / len(sequences)
            loss.backward()
            logratios[inds] = r.detach()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm, run_dir, step)
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log, evaluate, save.
        num_tokens = sum(len(x) + len(y) for x, y in sequences + mismatched)
        metrics = kto_metrics(
            all_reduce_sum(logratios),
            z0,
            labels,
            beta=args.beta,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
        )
        metrics |= {
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": (step + 1) * args.batch_size / len(train_rows),
            "time/tokens_per_second": num_tokens / (time.perf_counter() - start_time),
        }
        samples = []
        is_last = step + 1 == total_steps
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate_policy(eval_rows, eval_refs, eval_mismatched_refs)
            metrics |= eval_metrics
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], kl=metrics["objective/kl"])
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


# --- log-probs of completions ------------------------------------------------------------------
def sum_logprobs(args: Args, model: Any, sequences: Sequences) -> Tensor:
    """log pi(y|x) (B,) of all sequences, from all ranks and without gradient."""
    batches = micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)
    return rollout_logprobs(model, sequences, batches, temperature=1.0).sum(dim=1)


def reference_logprobs(
    args: Args, policy: Any, sequences: Sequences, batches: tuple[Tensor, ...]
) -> Tensor:
    """log pi_ref(y|x) (N,) of the sequences to train on, from the policy before its first step.

    They are computed in the batches of the first epoch: step 1 then runs the same micro-batches
    again, and its r is exactly 0, with no difference of rounding. The last of these batches may be
    filled up with rows of the second epoch, which earlier batches hold too. In reverse order the
    earlier batch writes last, and its numbers stay.
    """
    logprobs = torch.zeros(len(sequences), device=policy.device)
    first_epoch = batches[: math.ceil(len(sequences) / args.batch_size)]
    for batch in tqdm(first_epoch[::-1], "reference", disable=RANK > 0):
        logprobs[batch] = sum_logprobs(args, policy, [sequences[i] for i in batch])
    return logprobs


# --- the evaluation ----------------------------------------------------------------------------
def evaluate(
    args: Args,
    policy: Any,
    tokenizer: Any,
    stop_ids: list[int],
    reward_fn: Callable | None,
    rows: list[LabelledRow],
    ref_logprobs: Tensor,
    mismatched_ref_logprobs: Tensor,
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of the held-out rows and of one sampled completion for each, and the samples."""
    logprobs = sum_logprobs(args, policy, [row.sequence for row in rows])
    mismatched_logprobs = sum_logprobs(args, policy, [row.mismatched for row in rows])
    held_out = kto_metrics(
        logprobs - ref_logprobs,
        reference_point(mismatched_logprobs - mismatched_ref_logprobs),
        torch.tensor([row.label for row in rows], device=policy.device),
        beta=args.beta,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
    )
    prompts = [row.sequence[0] for row in rows]
    completions = sample_completions(args, policy, prompts, stop_ids)
    sequences = list(zip(prompts, completions, strict=True))
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    # The reference is loaded for this alone.
    ref_model = load_model(
        "--model", args.model, AutoModelForCausalLM, args.max_length, policy.device
    )
    metrics = {
        "eval/loss": held_out["objective/loss"],
        "eval/kl": sampled_kl(args, policy, ref_model, sequences),
        "eval/length_mean": np.mean([len(completion) for completion in completions]),
    }
    del ref_model
    if WORLD_SIZE > 1:
        gc.collect()  # sharded, it and its hooks refer to each other
    if "reward/margin" in held_out:
        metrics["eval/margin"] = held_out["reward/margin"]
    samples = []
    for row, text, completion in zip(rows, texts, completions, strict=True):
        samples.append({"prompt": row.text, "completion": text, "length": len(completion)})
    if reward_fn is not None:
        rewards = reward_fn(rows, sequences, texts).tolist()
        metrics["eval/reward"] = np.mean(rewards)
        metrics["eval/accuracy"] = np.mean([reward >= 1 for reward in rewards])  # full marks
        for sample, reward in zip(samples, rewards, strict=True):
            sample["reward"] = reward
    return metrics, samples


def sample_completions(
    args: Args, policy: Any, prompts: list[list[int]], stop_ids: list[int]
) -> list[list[int]]:
    """Token ids of one completion per prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    completions, batch_size = [], 2 * args.batch_size  # sampling needs less memory than training
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        completions += generate(
            policy,
            batch,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            stop_ids=stop_ids,
            rng=rng,
        )
    return completions


def sampled_kl(args: Args, policy: Any, ref_model: Any, sequences: Sequences) -> float:
    """KL(pi || pi_ref) in nats per completion, from completions that pi has sampled: the mean of
    log pi(y|x) - log pi_ref(y|x), which is unbiased (the k1 estimator).
    """
    inds = torch.arange(len(sequences))
    batches = [*micro_batches(sequences, inds, 2 * args.micro_batch_size)]
    logprobs = rollout_logprobs(policy, sequences, batches, args.temperature)  # (N, T)
    ref_logprobs = rollout_logprobs(ref_model, sequences, batches, args.temperature)
    return (logprobs - ref_logprobs).double().sum().item() / len(sequences)


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


def load_labelled(args: Args, split: str, tokenizer: Any, stop_ids: list[int]) -> list[LabelledRow]:
    """The completions of a split; those that cannot be used are dropped, counted and reported."""
    rows, dropped, num_pairs, num_cut = [], defaultdict(list), 0, 0
    used = [args.prompt_column, args.completion_column, args.label_column]
    used += [args.chosen_column, args.rejected_column]
    too_long = f"whose prompt leaves no room in --max-length {args.max_length}"
    with explain(f"--dataset {args.dataset}, {split}"):
        check_folder(args.dataset)
        dataset = load_dataset(args.dataset, args.dataset_config, split=split)
    for index, row in enumerate(dataset):
        with explain(f"--dataset {args.dataset}, row {index} of {split}"):
            labelled = to_labelled(args, row)  # two of a pair, which is used or dropped as one
            columns = {name: value for name, value in row.items() if name not in used}
            try:
                sequences = []
                for text, completion, _ in labelled:
                    prompt_ids, completion_ids = encode_pair(tokenizer, text, completion, stop_ids)
                    limit = args.max_length - len(prompt_ids)  # of the completion, in tokens
                    if limit <= 0:
                        raise UnusableRow(too_long)
                    num_cut += len(completion_ids) > limit
                    sequences.append((prompt_ids, completion_ids[:limit]))
            except UnusableRow as reason:
                dropped[str(reason)] += labelled
                continue
        num_pairs += len(labelled) == 2
        for (text, _, label), sequence in zip(labelled, sequences, strict=True):
            rows.append(LabelledRow(text, sequence, label, columns))
    report_rows(args, split, rows, dropped)
    num_desirable = sum(row.label for row in rows)
    message = f"{split}: {num_desirable} of {len(rows)} desirable; {num_pairs} pairs split in two"
    print(f"{message}; {num_cut} cut off at --max-length {args.max_length}")
    if num_desirable in (0, len(rows)):
        print(f"{split}: all labels are of one kind, so there is no margin to learn")
    if len({str(row.text) for row in rows}) == 1:
        print(f"{split}: all prompts are the same, so no pair is mismatched and z0 means little")
    mismatched = mismatch([row.sequence for row in rows], args.max_length)
    return [row._replace(mismatched=pair) for row, pair in zip(rows, mismatched, strict=True)]


def to_labelled(args: Args, row: dict) -> list[tuple[Any, Any, bool]]:
    """Prompt, completion and label of a row, or of each side of a preference pair."""
    has_pairs = args.chosen_column in row and args.rejected_column in row
    if has_pairs and "completion" not in row and args.completion_column == "completion":
        check(args.label_column == "label", "--label-column has no effect: the data has pairs")
        prompt, chosen, rejected = to_preference(args, row)
        return [(prompt, chosen, True), (prompt, rejected, False)]
    columns = sorted(row)
    turns = row.get(args.completion_column)
    if args.prompt_column == "prompt" and "prompt" not in row and isinstance(turns, list):
        row = row | {"prompt": turns[:-1], args.completion_column: turns[-1:]}  # a conversation
    needed = [args.prompt_column, args.completion_column, args.label_column]
    check(
        set(needed) <= set(row), f"needs the columns {needed}, or those of pairs, found {columns}"
    )
    prompt, completion = row[args.prompt_column] or "", row[args.completion_column] or ""
    label = row[args.label_column]
    check(label in (0, 1), f"{args.label_column} must be true or false, not {label!r:.80}")
    types = sorted({type(value).__name__ for value in (prompt, completion) if value})
    message = "prompt and completion must both be strings or both lists of messages"
    check(types in ([], ["str"], ["list"]), f"{message}, found {types}")
    if args.chat and types == ["str"]:
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion, bool(label))]


def to_preference(args: Args, row: dict) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected of a row: all strings, or all lists of chat messages."""
    for column in (args.chosen_column, args.rejected_column):
        check(column in row, f"no column {column} in {sorted(row)}")
    chosen, rejected = row[args.chosen_column] or "", row[args.rejected_column] or ""
    hint = "(is it --prompt-column none?)"
    implicit_prompt = args.prompt_column not in row
    if not implicit_prompt:
        prompt = row[args.prompt_column] or ""
    else:
        # By default two conversations without a prompt have an implicit one, two strings do not.
        by_default = args.prompt_column == "prompt" and isinstance(chosen or rejected, list)
        message = f"no column {args.prompt_column} in {sorted(row)} {hint}"
        check(by_default or args.prompt_column == "none", message)
        prompt = ""
    types = sorted({type(value).__name__ for value in (prompt, chosen, rejected) if value})
    message = "prompt, chosen and rejected must all be strings or all lists of messages"
    check(types in ([], ["str"], ["list"]), f"{message}, found {types} {hint}")
    if not chosen or not rejected:
        return prompt, chosen, rejected  # `encode_pair` calls the row unusable
    if implicit_prompt:
        prompt, chosen, rejected = split_implicit_prompt(chosen, rejected)
    if args.chat and isinstance(chosen, str):
        prompt = [{"role": "user", "content": prompt}]
        chosen = [{"role": "assistant", "content": chosen}]
        rejected = [{"role": "assistant", "content": rejected}]
    return prompt, chosen, rejected


def split_implicit_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The prompt that two whole conversations or texts begin with, and the rest of each."""
    if isinstance(chosen, list):
        same = chosen[:-1] == rejected[:-1]
        check(same, "the two conversations must be equal up to their last message")
        return chosen[:-1], chosen[-1:], rejected[-1:]
    # Cut in front of white space, where most tokenizers do not merge.
    beginning = os.path.commonprefix([chosen, rejected])
    prompt = re.match(r"(.*\S(?=\s))?", beginning, re.DOTALL)[0]
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


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
    if args.eval_reward_fn is None:  # the gold reward knows the default dataset's reviews alone
        default = "tiny/reviews/gold.py:sentiment" if args.dataset == Args.dataset else "none"
        args = replace(args, eval_reward_fn=default)
    with explain("flags"):
        check_numbers(args, "save_every max_length beta desirable_weight undesirable_weight")
        check_numbers(args, "epochs batch_size micro_batch_size learning_rate max_grad_norm")
        check_numbers(args, "eval_every eval_rows max_new_tokens temperature")
        check_numbers(args, "seed warmup_ratio weight_decay", zero=True)
        check(args.warmup_ratio < 1, f"--warmup-ratio must be below 1, not {args.warmup_ratio}")
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
