r"""Kahneman-Tversky Optimization (KTO): learn from single completions that are good or bad.

Prospect theory: people value an outcome by its distance from a reference point, and each further
step away from it counts less. Here the outcome is the log-ratio of `dpo.py`,
u(x, y) = log(pi(y|x) / pi_ref(y|x)), and z0 estimates KL(pi || pi_ref) (arXiv 2402.01306, 4.1):

    z0 = max(0, mean of u(x_i, y_(i+1)) over the rows of a step), without gradient,
    v(x, y) = w_D sigmoid(beta (u - z0)) if y is desirable, w_U sigmoid(beta (z0 - u)) if not,
    L = mean over completions of w - v(x, y), where w is w_D or w_U.

The pairs (x_i, y_(i+1)) are mismatched: the completion is that of the next row, for the last row
that of the first. Deviations from the paper:

1. z0 is the mean over an optimiser step; in the authors' code, over a micro-batch.
2. The optimiser is AdamW with a linear schedule, not RMSprop.
3. By default w_D is 1.33, not 1.

    python kto.py                                          # tiny/reviews, under a minute on a CPU
    python kto.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/kto-mix-14k --beta 0.1 \
        --max-length 1024 --max-new-tokens 256 --micro-batch-size 4    # a GPU of 24 GB
    torchrun --nproc_per_node=8 kto.py ...                 # eight GPUs: docs/processes.md

A healthy run: the first loss is half the mean weight (with --reference: any), then `reward/margin`
rises. If `reward/desirable` falls and `eval/kl` passes ten nats: lower the learning rate, or raise
w_D.
"""

import json
import math
import os
import sys
import time
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

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
from common.tokens import as_chat, encode_completions, find_stop_ids
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.checks import check_flags, check_training
from runtime.functions import call_reward, load_function
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, all_reduce_sum, from_rank_0, join_processes, leave_processes
from runtime.processes import peak_memory_gb
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "kto"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 50  # steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy and tokenizer
    reference: str | None = None  # folder or hub name of pi_ref; default: --model
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/reviews/labels"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    completion_column: str = "completion"  # column of the completion, a string or a chat message
    label_column: str = "label"  # column that is true or 1 for desirable completions, or false or 0
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_length: PositiveInt = 128  # prompt and completion, in tokens; longer rows are dropped
    # --- KTO ---
    beta: PositiveFloat = 0.1  # scales u - z0 in the sigmoid: a large one stays near the reference
    # w_D, weight of desirable completions: such that (w_D x their number) / (w_U x the number of
    # the others) is 1 to 1.5
    desirable_weight: PositiveFloat = 1.33
    undesirable_weight: PositiveFloat = 1.0  # w_U, weight of undesirable completions
    # --- optimisation and evaluation ---
    epochs: PositiveFloat = 2.0  # passes over the training completions
    batch_size: Annotated[int, Field(ge=2)] = 32  # rows per optimiser step, over which z0 is a mean
    micro_batch_size: PositiveInt = 32  # rows per forward pass: memory and speed, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak; default: 1e-3 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after the warm-up
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1  # warm-up, as a fraction of the steps
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 100  # steps between evaluations; also at the start and at the end
    # held-out completions, at most, of which z0 needs two; their prompts are completed too
    eval_rows: Annotated[int, Field(ge=2)] = 500
    # path/to/file.py:function for eval/reward; default: gold on the default --dataset, else none
    eval_reward_fn: str | None = None
    max_new_tokens: PositiveInt = 40  # longest sampled completion in tokens
    temperature: PositiveFloat = 1.0  # of the sampled completions, and of the logits in eval/kl

    def __post_init__(self):
        if self.eval_reward_fn is None and self.dataset == "tiny/reviews/labels":
            self.eval_reward_fn = "tiny/reviews/gold.py:sentiment"


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: array  # its token ids
    columns: dict  # the row's other columns, for the reward functions


class LabelledRow(NamedTuple):
    prompt: Prompt
    completion_ids: array  # token ids of the completion
    label: bool  # whether it is desirable


# --- the mathematics ---------------------------------------------------------------------------
def mismatch(sequences: Sequences, max_length: int) -> Sequences:
    """The pairs (x_i, y_(i+1)) of z0: each prompt with the next row's completion, the last prompt
    with the first row's. A completion is cut off where the pair would exceed max_length tokens.
    """
    next_sequences = sequences[1:] + sequences[:1]
    pairs = zip(sequences, next_sequences, strict=True)
    return [(x, y[: max_length - len(x)]) for (x, _), (_, y) in pairs]


def reference_point(logratios: Tensor) -> Tensor:
    """z0 = max(0, mean of u), in nats, of mismatched pairs (B,): a KL is never negative. As an
    estimate it is biased, since y_(i+1) is not sampled from pi(.|x_i).
    """
    return logratios.mean().clamp(min=0)


def kto_loss(
    logratios: Tensor,
    z0: Tensor,
    labels: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """w - v (B,): w_D sigmoid(-beta (u - z0)) if desirable, and if not w_U sigmoid(beta (u - z0)).

    logratios: (B,) u = log pi(y|x) - log pi_ref(y|x), sums over tokens, in nats; labels: (B,) bool,
    true for desirable; z0: (). The slope in u, beta w s (1 - s) in size with
    s = sigmoid(beta (u - z0)), is largest at u = z0 and tends to 0 far from it.
    """
    gains = torch.where(labels, logratios - z0, z0 - logratios)  # v = w sigmoid(beta gain)
    weights = torch.where(labels, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * gains)  # w - v, because 1 - sigmoid(a) = sigmoid(-a)


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- the reward, data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    reward_fn = load_reward_fn(args.eval_reward_fn, tokenizer) if args.eval_reward_fn else None
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_rows = load_labelled(args, args.train_split, tokenizer, stop_ids)
    eval_rows = load_labelled(args, args.eval_split, tokenizer, stop_ids, args.eval_rows)
    if min(len(train_rows), len(eval_rows)) < 2:
        raise ValueError("--dataset: the reference point takes two rows or more in each split")
    longest_prompt = max(len(row.prompt.ids) for row in eval_rows)
    positions = max(args.max_length, longest_prompt + args.max_new_tokens)
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=1e-3, real=1e-6)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    if args.reference or args.lora_rank == 0:
        source = args.reference or args.model
        ref_model = load_model(AutoModelForCausalLM, source, tokenizer, positions)
        shard(freeze(ref_model, merged=not args.reference), device)
    else:
        ref_model = policy  # `as_at_start`
    optimizer = AdamW(
        policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )

    # --- the loop ---
    evaluate_policy = partial(
        evaluate, args, policy, ref_model, tokenizer, stop_ids, reward_fn, eval_rows
    )
    rng = Generator().manual_seed(args.seed)
    num_shuffles = math.ceil(args.epochs)
    shuffles = [torch.randperm(len(train_rows), generator=rng) for _ in range(num_shuffles)]
    num_rows = math.ceil(args.epochs * len(train_rows))
    batches = [*torch.cat(shuffles)[:num_rows].split(args.batch_size)]  # the last may be smaller
    if len(batches[-1]) == 1:  # z0 needs a second row's completion: it joins the batch before
        batches[-2:] = [torch.cat(batches[-2:])]
    total_steps = len(batches)
    warmup_steps = int(args.warmup_ratio * total_steps)
    training = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": checksum(train_rows, args.model, args.reference)}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate_policy()
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    progress = tqdm(range(state["step"] + 1, total_steps + 1), disable=RANK > 0)
    for step in progress:
        # 1. Draw the completions of this step.
        start_time = time.perf_counter()
        rows = [train_rows[i] for i in batches[step - 1]]
        sequences = [(list(row.prompt.ids), list(row.completion_ids)) for row in rows]
        labels = torch.tensor([row.label for row in rows], device=device)  # (B,)

        # 2. The reference point, of the whole step and without gradient.
        mismatched = mismatch(sequences, args.max_length)
        z0 = reference_point(sum_logratios(args, policy, ref_model, mismatched))

        # 3. Optimise: one step, its gradient summed over micro-batches and ranks.
        lr = args.learning_rate * lr_factor(step, warmup_steps, total_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        logratios = torch.zeros(len(rows), device=device)  # 0 in rows of other ranks
        for inds in micro_batches(sequences, torch.arange(len(rows)), args.micro_batch_size):
            # The reference first: after the policy's pass, its memory would come on top of that of
            # the policy's activations.
            with torch.no_grad(), as_at_start(policy):
                ref_logprobs = completion_logprobs(ref_model, sequences, inds).sum(dim=1)  # (b,)
            logprobs = completion_logprobs(policy, sequences, inds).sum(dim=1)
            r = logprobs - ref_logprobs
            device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
            losses = kto_loss(
                r,
                z0,
                labels[device_inds],
                args.beta,
                args.desirable_weight,
                args.undesirable_weight,
            )
            loss = losses.sum() / len(rows)
            loss.backward()
            logratios[device_inds] = r.detach()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log, evaluate, save.
        num_tokens = sum(len(x) + len(y) for x, y in sequences + mismatched)
        metrics = kto_metrics(args, all_reduce_sum(logratios).cpu(), z0.cpu(), labels.cpu())
        metrics |= {
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": min(args.epochs, step * args.batch_size / len(train_rows)),
            "time/tokens_per_second": num_tokens / (time.perf_counter() - start_time),
            "time/peak_memory_gb": peak_memory_gb(),
        }
        samples = []
        is_last = step == total_steps
        if is_last or step % args.eval_every == 0:
            eval_metrics, samples = evaluate_policy()
            metrics |= eval_metrics
        log(args, run_dir, step, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], z0=metrics["objective/z0"])
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


def kto_metrics(args: Args, logratios: Tensor, z0: Tensor, labels: Tensor) -> dict[str, float]:
    """Means over the completions (B,) of a whole step; the margin if there are both kinds."""
    losses = kto_loss(
        logratios, z0, labels, args.beta, args.desirable_weight, args.undesirable_weight
    )
    metrics = {"objective/loss": losses.double().mean().item(), "objective/z0": z0.item()}
    rewards = args.beta * logratios.double()
    if labels.any():
        metrics["reward/desirable"] = rewards[labels].mean().item()
    if not labels.all():
        metrics["reward/undesirable"] = rewards[~labels].mean().item()
    if labels.any() and not labels.all():
        metrics["reward/margin"] = metrics["reward/desirable"] - metrics["reward/undesirable"]
    return metrics


def sum_logratios(
    args: Args, policy: Any, ref_model: Any, sequences: Sequences, temperature: float = 1.0
) -> Tensor:
    """u(x, y) = log(pi(y|x) / pi_ref(y|x)) (B,), sums over tokens, in nats, without gradient."""
    batches = [*micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)]
    logprobs = rollout_logprobs(policy, sequences, batches, temperature)  # (B, T)
    with as_at_start(policy):
        ref_logprobs = rollout_logprobs(ref_model, sequences, batches, temperature)
    return logprobs.sum(dim=1) - ref_logprobs.sum(dim=1)


# --- the evaluation ----------------------------------------------------------------------------
def evaluate(
    args: Args,
    policy: Any,
    ref_model: Any,
    tokenizer: Any,
    stop_ids: list[int],
    reward_fn: Callable | None,
    rows: list[LabelledRow],
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of the held-out rows and of one sampled completion for each, and the samples."""
    labelled = [(list(row.prompt.ids), list(row.completion_ids)) for row in rows]
    logratios = sum_logratios(args, policy, ref_model, labelled)
    # In another order: held-out neighbours are often the two sides of one pair.
    order = torch.randperm(len(rows), generator=Generator().manual_seed(args.seed))
    mismatched = mismatch([labelled[i] for i in order], args.max_length)
    z0 = reference_point(sum_logratios(args, policy, ref_model, mismatched))
    labels = torch.tensor([row.label for row in rows], device=policy.device)
    held_out = kto_metrics(args, logratios, z0, labels)
    prompts = [row.prompt for row in rows]
    sequences, _ = generate(
        policy,
        [prompt.ids for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        stop_ids=stop_ids,
        rng=Generator().manual_seed(args.seed),  # every evaluation uses the same random numbers
        batch_size=args.generation_batch_size,
    )
    metrics = {"eval/loss": held_out["objective/loss"]}
    if "reward/margin" in held_out:
        metrics["eval/margin"] = held_out["reward/margin"]
    # KL(pi || pi_ref), nats per completion: k1 on samples of pi
    k1 = sum_logratios(args, policy, ref_model, sequences, args.temperature)
    metrics["eval/kl"] = k1.double().mean().item()
    sample_metrics, samples = rate_samples(reward_fn, tokenizer, prompts, sequences)
    return metrics | sample_metrics, samples


def rate_samples(
    reward_fn: Callable | None, tokenizer: Any, prompts: list, sequences: Sequences
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of sampled completions, and for each a row of samples.jsonl."""
    metrics = {"eval/length_mean": np.mean([len(ids) for _, ids in sequences])}
    samples = []
    for prompt, (_, ids) in zip(prompts, sequences, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        samples.append({"prompt": prompt.text, "completion": text, "length": len(ids)})
    if reward_fn is not None:
        rewards = reward_fn(prompts, sequences).tolist()
        metrics["eval/reward"] = np.mean(rewards)
        for sample, reward in zip(samples, rewards, strict=True):
            sample["reward"] = round(reward, 6)
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


# --- model and data ----------------------------------------------------------------------------
def load_labelled(
    args: Args, split: str, tokenizer: Any, stop_ids: list[int], most: int | None = None
) -> list[LabelledRow]:
    """The rows of a split, without those that are empty or longer than --max-length."""
    columns = [args.prompt_column, args.completion_column, args.label_column]

    def encode_row(row: dict) -> tuple[LabelledRow, list[int]]:
        prompt, completion, label = [row.pop(column) for column in columns]  # the rest: rewards'
        if label not in (0, 1):
            raise ValueError(f"--label-column {args.label_column}: {label!r} is neither 0 nor 1")
        prompt = as_chat(prompt) if args.chat else prompt
        prompt_ids, [ids] = encode_completions(tokenizer, prompt, [completion], stop_ids)
        prompt = Prompt(prompt, array("i", prompt_ids), row)
        return LabelledRow(prompt, array("i", ids), bool(label)), prompt_ids + ids

    rows = load_rows(args.dataset, args.dataset_config, split, {*columns})
    reader = "reward functions" if args.eval_reward_fn else None
    labelled = encode_rows(rows, encode_row, tokenizer, args.max_length, most=most, reader=reader)
    print(f"{split}: {sum(row.label for row in labelled)} of them desirable")
    return labelled


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
