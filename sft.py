r"""Supervised fine-tuning (SFT): imitate demonstrations. The starting point of every other script.

Minimise the negative log-likelihood of completions y_i given their prompts x_i,

    L(theta) = - (1/N) sum_i sum_t log pi_theta(y_it | x_i, y_i<t),

with N completion tokens in the batch, each completion's EOS among them: stage 1 of InstructGPT
(arXiv 2203.02155, section 3.5; AdamW's beta2 is 0.95, as there). Deviations from the paper:

1. There is no dropout, where the paper has 0.2.
2. There are 4 epochs, not 16, with a warm-up and a linear decay, not a cosine decay to 10 %.
3. The last model is saved, not the one with the best reward model score.

    python sft.py                                          # tiny/arithmetic, half a minute on a CPU
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara \
        --max-length 2048 --max-new-tokens 512 --micro-batch-size 2    # a GPU of 24 GB
    torchrun --nproc_per_node=8 sft.py ...                 # eight GPUs: docs/processes.md

A healthy run: `eval/loss` falls with `objective/loss` (if it rises again, compare samples too: in
the paper they still improved); the gradient norm settles after the warm-up; more and more samples
end with an EOS, so `eval/truncated_fraction` falls.
"""

import json
import math
import os
import sys
import time
from array import array
from collections import Counter
from datetime import datetime
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
from common.tokens import NO_PREFIX, as_chat, encode, encode_answer, find_stop_ids, render
from runtime.adapters import add_adapters
from runtime.chats import UnusableRow
from runtime.checks import check_flags, check_training
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, all_gather, all_reduce_sum, from_rank_0, join_processes
from runtime.processes import leave_processes, peak_memory_gb
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "sft"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 200  # steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/arithmetic/base"  # folder or hub name of the model and its tokenizer
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/arithmetic/sft"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    completion_column: str = "completion"  # column; without it `messages` or `text` is read
    chat: bool = False  # turn string pairs into chat messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_length: PositiveInt = 128  # limit of prompt + completion in tokens; longer ones are dropped
    train_on_prompt: bool = False  # learn to predict the prompt's tokens too
    # --- optimisation and evaluation ---
    epochs: PositiveFloat = 4.0  # passes over the training rows
    batch_size: PositiveInt = 32  # rows per optimiser step; a conversation is one row
    micro_batch_size: PositiveInt = 32  # texts per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time: sets memory and speed
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak; default: 1e-3 below 10M parameters, else 2e-5 (adapters: 2e-4)
    learning_rate: PositiveFloat | None = None
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after the warm-up
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03  # warm-up, as a fraction of all steps
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 200  # steps between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out rows for eval/loss, at most
    eval_samples: PositiveInt = 8  # held-out prompts to complete into samples.jsonl
    max_new_tokens: PositiveInt = 24  # longest sampled completion in tokens
    temperature: NonNegativeFloat = 1.0  # sampling temperature at evaluation; 0 is greedy


class Demonstration(NamedTuple):
    ids: array  # token ids of a text that ends with a learned turn
    is_learned: array  # 1 for the tokens of learned turns, 0 for all others

    def prompt(self) -> list[int]:
        """The ids before the last learned turn, with which the text ends."""
        num_learned = self.is_learned[::-1].index(0)
        return list(self.ids[: len(self.ids) - num_learned])


# --- the mathematics ---------------------------------------------------------------------------
def negative_log_likelihood(logprobs: Tensor, num_tokens: int) -> Tensor:
    """-(1/N) sum of log-probs (b, T), in nats; N is the whole step's, so micro-batches add up."""
    return -logprobs.sum() / num_tokens


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- data and model ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_data = load_demonstrations(args, args.train_split, tokenizer, stop_ids)
    eval_data = load_demonstrations(args, args.eval_split, tokenizer, stop_ids, args.eval_rows)
    longest_prompt = max(len(texts[-1].prompt()) for texts in eval_data[: args.eval_samples])
    positions = max(args.max_length, longest_prompt + args.max_new_tokens)
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=1e-3, real=2e-5)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    optimizer = AdamW(  # its learning rate is set before each step
        policy.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )

    # --- the loop ---
    rng = Generator().manual_seed(args.seed)
    num_shuffles = math.ceil(args.epochs)
    shuffles = [torch.randperm(len(train_data), generator=rng) for _ in range(num_shuffles)]
    num_rows = math.ceil(args.epochs * len(train_data))
    batches = torch.cat(shuffles)[:num_rows].split(args.batch_size)  # the last may be smaller
    total_steps = len(batches)
    warmup_steps = int(args.warmup_ratio * total_steps)
    training = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": checksum(train_data, args.model)}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate(args, policy, tokenizer, stop_ids, eval_data)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    progress = tqdm(range(state["step"] + 1, total_steps + 1), disable=RANK > 0)
    for step in progress:
        # 1. Draw the demonstrations of this step.
        start_time = time.perf_counter()
        rows = [train_data[i] for i in batches[step - 1]]
        sequences, is_learned = loss_sequences(args, rows)
        num_tokens = sum(map(sum, is_learned))  # N, over all ranks

        # 2. Optimise: one step, its gradient summed over micro-batches and ranks.
        lr = args.learning_rate * lr_factor(step, warmup_steps, total_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for inds in micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size):
            logprobs = completion_logprobs(policy, sequences, inds, is_learned=is_learned)  # (b, T)
            loss = negative_log_likelihood(logprobs, num_tokens)
            loss.backward()
            loss_sum += loss.detach()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 3. Log, evaluate, save.
        num_tokens_read = sum(len(prompt) + len(completion) for prompt, completion in sequences)
        metrics = {
            "objective/loss": all_reduce_sum(loss_sum).item(),
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": min(args.epochs, step * args.batch_size / len(train_data)),
            "time/tokens_per_second": num_tokens_read / (time.perf_counter() - start_time),
            "time/peak_memory_gb": peak_memory_gb(),
        }
        eval_metrics, samples = {}, []
        is_last = step == total_steps
        if is_last or step % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, policy, tokenizer, stop_ids, eval_data)
        log(args, run_dir, step, metrics | eval_metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], grad_norm=grad_norm)
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


def evaluate(
    args: Args, policy: Any, tokenizer: Any, stop_ids: list[int], data: list[list[Demonstration]]
) -> tuple[dict[str, float], list[dict]]:
    """Held-out loss, and a last turn sampled for each of the first --eval-samples rows."""
    sequences, is_learned = loss_sequences(args, data)
    num_tokens = sum(map(sum, is_learned))
    batches = micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)
    logprobs = rollout_logprobs(policy, sequences, batches, 1.0, is_learned=is_learned)  # (B, T)
    sequences, _ = generate(
        policy,
        [texts[-1].prompt() for texts in data[: args.eval_samples]],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        stop_ids=stop_ids,
        rng=Generator().manual_seed(args.seed),  # every evaluation uses the same random numbers
        batch_size=args.generation_batch_size,
    )
    prompts, completions = zip(*sequences, strict=True)
    metrics = {
        "eval/loss": negative_log_likelihood(logprobs, num_tokens).item(),
        "eval/length_mean": np.mean([len(ids) for ids in completions]),
        "eval/truncated_fraction": np.mean([ids[-1] not in stop_ids for ids in completions]),
    }
    asked = tokenizer.batch_decode(prompts)
    answers = tokenizer.batch_decode(completions, skip_special_tokens=True)
    samples = [{"prompt": x, "completion": y} for x, y in zip(asked, answers, strict=True)]
    return metrics, samples


def loss_sequences(args: Args, data: list[list[Demonstration]]) -> tuple[Sequences, list]:
    """The texts cut before the first learned token, and which tokens behind the cut are learned."""
    sequences, masks = [], []
    for ids, is_learned in (text for texts in data for text in texts):
        # With --train-on-prompt all tokens are learned but the first, which has no context.
        start = 1 if args.train_on_prompt else is_learned.index(1)
        sequences.append((list(ids[:start]), list(ids[start:])))
        masks.append([1] * len(ids[1:]) if args.train_on_prompt else list(is_learned[start:]))
    return sequences, masks


# --- model and data ----------------------------------------------------------------------------
def load_demonstrations(
    args: Args, split: str, tokenizer: Any, stop_ids: list[int], most: int | None = None
) -> list[list[Demonstration]]:
    """The rows of a split: each a text, or several if the chat template changes earlier turns, as
    some drop their thoughts.
    """
    lost = Counter()  # by reason, dropped turns of rows that keep other turns

    def encode_row(row: dict) -> tuple[list[Demonstration], list[int]]:
        if "text" in row and not {"messages", args.prompt_column, args.completion_column} & {*row}:
            if args.chat:
                raise ValueError("--chat: a column `text` is learned as it is, without a template")
            ids = encode(tokenizer, row.pop("text"))  # all learned; stop ids within it end nothing
            if len(ids) == 1 or ids[-1] not in stop_ids:
                ids = [*ids, stop_ids[0]]
            return [Demonstration(array("i", ids), array("b", [0] + [1] * (len(ids) - 1)))], ids
        texts, reasons, prefix = [], [], NO_PREFIX
        for prompt, completion in to_turns(args, row):
            is_long = len(prefix.ids) > args.max_length
            if is_long and render(tokenizer, prompt).startswith(prefix.text):
                reasons.append("longer than --max-length")  # as its beginning already is
                continue
            try:
                prompt_ids, ids, prefix = encode_answer(
                    tokenizer, prompt, completion, stop_ids, prefix
                )
            except UnusableRow as reason:
                reasons.append(str(reason))
                continue
            if texts and len(prompt_ids) + len(ids) > args.max_length:
                reasons.append("longer than --max-length")
                continue
            if not texts or prompt_ids[: len(texts[-1].ids)] != texts[-1].ids:
                texts.append(Demonstration([], []))  # the template has changed earlier turns
            text = texts[-1]
            new_ids = prompt_ids[len(text.ids) :]
            text.ids.extend(new_ids + ids)
            text.is_learned.extend([0] * len(new_ids) + [1] * len(ids))
        if not texts:
            raise UnusableRow(reasons[0])
        lost.update(reasons)
        longest = max((text.ids for text in texts), key=len)
        texts = [Demonstration(array("i", ids), array("b", learned)) for ids, learned in texts]
        return texts, longest

    columns = {args.prompt_column, args.completion_column} - {"prompt", "completion"}
    rows = load_rows(args.dataset, args.dataset_config, split, columns)
    data = encode_rows(rows, encode_row, tokenizer, args.max_length, most=most)
    if lost := sum(all_gather([lost]), Counter()):
        print(f"{split}: of these rows, turns dropped {dict(lost)}")
    return data


def to_turns(args: Args, row: dict) -> list[tuple]:
    """The prompt and the completion of each turn that is learned, strings or chat messages."""
    columns = [args.prompt_column, args.completion_column]
    if "messages" in row and columns[0] == "prompt" and columns[1] not in row:
        turns = row.pop("messages") or []
        if not isinstance(turns, list):
            raise ValueError(f"`messages` is not a list of chat messages: {turns!r:.200}")
        # OpenAI's `weight`: a turn of weight 0 is read, not learned.
        is_learned = [t.get("role") == "assistant" and t.get("weight") != 0 for t in turns]
        places = [i for i in range(1, len(turns)) if is_learned[i]]
        if not places:
            roles = dict.fromkeys(turn.get("role") for turn in turns)
            raise UnusableRow(f"with no assistant's reply to learn, only {[*roles]}")
        if args.train_on_prompt:  # the last one has all turns, those of weight 0 too
            places = places[-1:]
        return [(turns[:i], [turns[i]]) for i in places]
    for column in columns:
        if column not in row:
            raise ValueError(f"no column {column} in --dataset: it has {[*row]}")
    prompt, completion = [row.pop(column) for column in columns]
    if args.chat or isinstance(completion, list):
        prompt = as_chat(prompt)
    if isinstance(prompt, list):
        completion = as_chat(completion, "assistant")
    return [(prompt, completion)]


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
