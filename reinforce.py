r"""REINFORCE: the policy gradient itself, the first lesson.

Sample a completion y of a prompt x from the policy and give it a reward r. The log-derivative trick
turns the gradient of the expected reward into an expectation that samples estimate (Williams 1992):

    grad E[r] = E[ (r - b) grad log pi(y|x) ],    log pi(y|x) = sum_t log pi(y_t | x, y_<t).

E[grad log pi(y|x)] is 0, so a baseline b that does not depend on y leaves the mean as it is, and a
good one lowers the variance. Leave-one-out (RLOO, arXiv 2402.14740): of a prompt's G completions,
b is the mean reward of the other G - 1. By default the reward is a rule: the last number of the
completion is its answer, and gets 1 if it is right, else 0. Deviations from RLOO:

1. There is no KL to a reference: grpo.py has it in the loss, ppo_rlhf.py in the reward.
2. Prompts are drawn with replacement, and AdamW's learning rate falls towards 0.

A healthy run: `reward/mean` and `eval/reward` rise.

    python reinforce.py                                  # tiny/arithmetic, half a minute on a CPU
    python reinforce.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k \
        --dataset-config main --prompt-column question --chat --max-prompt-length 256 \
        --max-new-tokens 512 --eval-rows 200 --micro-batch-size 8 \
        --total-rollouts 230                             # about one epoch, on a 24 GB GPU
    torchrun --nproc_per_node=8 reinforce.py ...         # eight GPUs: docs/processes.md
"""

import json
import math
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.logprobs import Sequences, completion_logprobs, micro_batches, sampling_metrics
from common.tokens import as_chat, encode, find_stop_ids
from runtime.adapters import add_adapters
from runtime.checks import check_flags, check_training
from runtime.functions import call_reward, check_columns, load_function, set_step
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, all_reduce_sum, from_rank_0, join_processes, leave_processes
from runtime.processes import peak_memory_gb
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, rollout_row, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "reinforce"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 20  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/arithmetic/policy"  # folder or hub name of the policy and its tokenizer
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/arithmetic/prompts"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that the reward function receives as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_prompt_length: PositiveInt = 64  # longest prompt in tokens; longer ones are dropped
    # --- REINFORCE ---
    total_rollouts: PositiveInt = 60  # batches of completions, each followed by one optimiser step
    # path/to/file.py:function; the default gives 1 if the last number is the answer, else 0
    reward_fn: str = "tiny/arithmetic/reward.py:last_number"
    prompts_per_rollout: PositiveInt = 32  # prompts per rollout
    group_size: PositiveInt = 8  # G, completions per prompt; leave_one_out needs at least 2
    # b, subtracted from each reward: 0, the rollout's mean, or the mean of the prompt's other G - 1
    baseline: Literal["none", "batch_mean", "leave_one_out"] = "leave_one_out"
    max_new_tokens: PositiveInt = 24  # longest completion in tokens
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's; default: 1e-3 below 10M parameters, else 1e-6 (adapters: 1e-5)
    learning_rate: PositiveFloat | None = None
    anneal_lr: bool = True  # the learning rate falls linearly to 0; else it is constant
    eval_every: PositiveInt = 20  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each

    def __post_init__(self):
        if self.group_size == 1 and self.baseline == "leave_one_out":
            raise ValueError("--baseline leave_one_out needs a --group-size of at least 2")


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: array  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
def baseline_advantages(rewards: Tensor, group_size: int, baseline: str) -> Tensor:
    """r - b (B,) of rewards r (B,), in which the G completions of a prompt are neighbours."""
    groups = rewards.double().view(-1, group_size)  # equal rewards of 0 or 1 give exactly 0
    if baseline == "leave_one_out":  # the mean of the prompt's other completions (RLOO)
        b = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    elif baseline == "batch_mean":
        b = groups.mean()  # includes r itself: scales the expected gradient by (B - 1) / B
    else:
        b = torch.zeros_like(groups)
    return (groups - b).view(-1).float()


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, num_completions: int) -> Tensor:
    """-(1/B) sum (r - b) log pi(y|x) over n of a step's B completions; micro-batches add up.

    Log-probs (n, T) are in nats, and 0 after the end of y; advantages r - b are (n,). The gradient
    is the estimate of -grad E[r]; the value has no meaning.
    """
    log_pi = logprobs.sum(dim=1)  # log pi(y|x), (n,)
    return -(advantages * log_pi).sum() / num_completions


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- the reward, data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    reward_fn = load_reward_fn(args.reward_fn, tokenizer)
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer, args.eval_rows)
    check_columns([args.reward_fn], train_prompts)
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=1e-3, real=1e-6)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)

    # --- the loop ---
    sample = partial(
        generate,
        policy,
        max_new_tokens=args.max_new_tokens,
        temperature=1.0,
        stop_ids=stop_ids,
        batch_size=args.generation_batch_size,
    )
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
    for step in progress:  # a rollout, and the optimiser step on it
        # 1. Roll out and score: B sequences (x, y) of token ids, G per prompt, by the policy as it
        # is now; y has its stop token. Random numbers depend on seed and step: resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        set_step(step)  # for functions that ask for it
        prompt_inds = torch.randint(len(train_prompts), [args.prompts_per_rollout], generator=rng)
        prompts = [train_prompts[i] for i in prompt_inds for _ in range(args.group_size)]
        prompt_ids = [prompt.ids for prompt in prompts]
        sequences, sampler_logprobs = sample(prompt_ids, rng=rng)  # log-probs (B, T), T the longest
        lengths = torch.tensor([len(y) for _, y in sequences])  # (B,)
        ended = torch.tensor([y[-1] in stop_ids for _, y in sequences])  # (B,)
        mask = (torch.arange(lengths.max()) < lengths[:, None]).to(device)  # (B, T)
        rewards = reward_fn(prompts, sequences)  # (B,)

        # 2. Advantages: rewards minus the baseline, the same for each token of y.
        advantages = baseline_advantages(rewards, args.group_size, args.baseline).to(device)
        if not advantages.any():
            warnings.warn("a rollout has no advantages: each reward is its baseline", stacklevel=1)

        # 3. Optimise: one step on all B. Each rank takes its share of the micro-batches. A model's
        # output at position t predicts token t + 1, so `completion_logprobs` reads y from one
        # position earlier:
        #     logits (|x| + |y|, V)[|x| - 1 : -1] -> log_softmax -> at y: (|y|,), a row of (n, T)
        if args.anneal_lr:
            remaining = (args.total_rollouts + 1 - step) / args.total_rollouts
            optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        # The same policy has sampled, so these differ from the sampler's by rounding alone: part 4
        # logs by how much, as a check of the sampler. Rows of other ranks are 0, and then added.
        policy_logprobs = torch.zeros_like(sampler_logprobs)
        for inds in micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size):
            logprobs = completion_logprobs(policy, sequences, inds)  # (n, T)
            device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
            loss = policy_gradient_loss(logprobs, advantages[device_inds], len(sequences))
            loss.backward()  # gradients add up; `shard` sums them over ranks
            policy_logprobs[device_inds] = logprobs.detach()
        grad_norm = clip_grad_norm(policy, math.inf)  # only measured: no clipping
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log, evaluate, save.
        metrics = sampling_metrics(all_reduce_sum(policy_logprobs), sampler_logprobs, mask) | {
            "reward/mean": rewards.mean().item(),  # per completion
            "reward/std": rewards.std(correction=0).item(),
            "policy/grad_norm": grad_norm,  # per step
            "completions/length_mean": lengths.float().mean().item(),  # tokens per completion
            "completions/truncated_fraction": 1 - ended.float().mean().item(),
        }
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            columns = {"reward": rewards, "advantage": advantages, "truncated": ~ended}
            rollouts = [rollout_row(tokenizer, sequences[: args.group_size], columns)]
        is_last = step == args.total_rollouts
        if is_last or step % args.eval_every == 0:
            evals, samples = evaluate(args, sample, reward_fn, tokenizer, eval_prompts)
            metrics |= evals
        log(args, run_dir, step, metrics, samples, rollouts)
        progress.set_postfix(reward=metrics["reward/mean"])
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    save_model(run_dir, policy, tokenizer, stop_ids)
    return run_dir


def evaluate(
    args: Args, sample: Callable, reward_fn: Callable, tokenizer: Any, prompts: list
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    rng = Generator().manual_seed(args.seed)  # every evaluation uses the same random numbers
    sequences, _ = sample([prompt.ids for prompt in prompts], rng=rng)
    rewards = reward_fn(prompts, sequences).tolist()
    samples = []
    for prompt, (_, ids), reward in zip(prompts, sequences, rewards, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        row = {"prompt": prompt.text, "completion": text}
        samples.append(row | {"reward": round(reward, 6), "length": len(ids)})
    length_mean = np.mean([len(completion) for _, completion in sequences])
    return {"eval/reward": np.mean(rewards), "eval/length_mean": length_mean}, samples


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
