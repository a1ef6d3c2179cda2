r"""Supervised fine-tuning (SFT): imitate demonstrations. The start of every other script.

Minimise the negative log-likelihood of completions y_i given their prompts x_i,

    L(theta) = - (1/N) sum_i sum_t log pi_theta(y_it | x_i, y_i<t),

with N completion tokens in the batch, each completion's EOS among them: stage 1 of InstructGPT
(arXiv 2203.02155, section 3.5). Deviations from the paper: no dropout (0.2); 4 epochs (16); a
linear decay after a warm-up (cosine to 10 %, none); the last model is kept (the paper: the one that
a reward model prefers).

    python sft.py                                          # tiny/arithmetic, half a minute on a CPU
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara --learning-rate 1e-5 \
        --max-length 2048 --max-new-tokens 512 --micro-batch-size 4    # one GPU, from the hub
    torchrun --nproc_per_node=8 sft.py ...                 # eight GPUs: docs/processes.md
    python sft.py --resume runs/sft__1__...                # resume after a crash

A healthy run: `eval/loss` falls with `objective/loss` (if it rises again, compare samples too: in
the paper they still improved); the gradient norm settles after the warm-up; the samples end by
themselves, and `eval/truncated_fraction` falls.
"""

import json
import math
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, get_scheduler
from transformers import logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, find_stop_ids, generate
from common.generation import shard
from common.logprobs import Pairs, completion_logprobs, encode_pair, micro_batches
from common.logprobs import rollout_logprobs

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "sft"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 200  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/arithmetic/base"  # folder or hub name of the model and its tokenizer
    dataset: str = "tiny/arithmetic/sft"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    completion_column: str = "completion"  # without it, `messages`: each assistant turn is one
    chat: bool = False  # turn string pairs into chat messages of a user and an assistant
    max_length: int = 128  # of prompt and completion, in tokens; longer rows are dropped
    train_on_prompt: bool = False  # learn to predict the prompt's tokens too
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of model/; training is in float32
    # --- optimisation and evaluation ---
    epochs: float = 4.0  # passes over the training rows
    batch_size: int = 32  # rows per optimiser step
    micro_batch_size: int = 32  # rows per forward pass: memory and speed, never the result
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.03  # part of the run over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 200  # steps between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out rows for eval/loss, at most
    eval_samples: int = 8  # held-out prompts to complete into samples.jsonl
    max_new_tokens: int = 24  # longest sampled completion in tokens
    temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


# --- the mathematics ---------------------------------------------------------------------------
def negative_log_likelihood(logprobs: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """- (1/N) sum of log-probs (B, T), in nats; N is the whole step's, so that parts add up."""
    return -logprobs.sum() / num_tokens


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_pairs = load_pairs(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_pairs(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    prompts = [prompt for prompt, _ in eval_pairs[: args.eval_samples]]
    if args.train_on_prompt:  # all tokens count but the first, which has no context
        train_pairs = [(x[:1], x[1:] + y) for x, y in train_pairs]
        eval_pairs = [(x[:1], x[1:] + y) for x, y in eval_pairs]
    longest = max(args.max_length, max(map(len, prompts)) + args.max_new_tokens)
    model = load_model("--model", args.model, AutoModelForCausalLM, longest, device)
    adam = dict(betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    steps = math.ceil(args.epochs * len(train_pairs) / args.batch_size)
    schedule = get_scheduler(args.lr_schedule, optimizer, int(args.warmup_ratio * steps), steps)
    trained = {"policy": (model, optimizer)}
    state = {"step": 0, "data": zlib.crc32(repr(train_pairs).encode())}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    size = model.num_parameters()  # with gradient and Adam's state four times
    print(f"{run_dir}: {size:,} parameters, {4 * size * 4e-9:.3f} GB on {device}")
    held_out = (args, model, tokenizer, stop_ids, prompts, eval_pairs)
    if not args.resume:
        log(run_dir, 0, *evaluate(*held_out))
    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(steps * args.batch_size / len(train_pairs))
    order = torch.cat([torch.randperm(len(train_pairs), generator=rng) for _ in range(epochs)])
    progress = tqdm(range(state["step"], steps), disable=RANK > 0)
    for step in progress:
        # 1. draw the rows of this step
        started = time.perf_counter()
        pairs = [train_pairs[i] for i in order[step * args.batch_size :][: args.batch_size]]
        num_tokens = sum(len(completion) for _, completion in pairs)  # N, of all ranks

        # 2. optimise: one step, its gradient summed over micro-batches
        rate = args.learning_rate * schedule.lr_lambdas[0](step)
        optimizer.param_groups[0].update(lr=rate, weight_decay=args.weight_decay)
        step_loss = torch.zeros((), dtype=torch.float64, device=device)
        for rows in micro_batches(pairs, torch.arange(len(pairs)), args.micro_batch_size):
            loss = negative_log_likelihood(completion_logprobs(model, pairs, rows), num_tokens)
            loss.backward()
            step_loss += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
        with explain(f"step {step + 1}: no step was taken; is --learning-rate too high?"):
            require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
        optimizer.step()
        optimizer.zero_grad()

        # 3. log, evaluate, save
        done, seconds = step + 1, time.perf_counter() - started
        metrics = {
            "objective/loss": all_reduce_sum(step_loss).item(),
            "policy/grad_norm": norm,
            "policy/learning_rate": rate,
            "time/epoch": done * args.batch_size / len(train_pairs),
            "time/tokens_per_second": sum(len(x) + len(y) for x, y in pairs) / seconds,
        }
        due = done % args.eval_every == 0 or done == steps
        eval_metrics, samples = evaluate(*held_out) if due else ({}, [])
        log(run_dir, done, metrics | eval_metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], grad_norm=norm)
        if done % args.save_every == 0 or done == steps:
            save_checkpoint(run_dir, trained, state | {"step": done})

    finish(run_dir, model.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    print(f"next: python grpo.py --model {run_dir / 'model'}", flush=True)
    return run_dir


def evaluate(args: Args, model: Any, tokenizer: Any, stop_ids: list, prompts: list, pairs: Pairs):
    """Held-out loss of the pairs, and a completion sampled for each of the prompts."""
    batches = micro_batches(pairs, torch.arange(len(pairs)), args.micro_batch_size)
    logprobs = rollout_logprobs(model, pairs, batches, temperature=1.0)  # (B, T)
    num_tokens = sum(len(completion) for _, completion in pairs)
    rng = torch.Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    sampled = generate(model, prompts, args.max_new_tokens, args.temperature, stop_ids, rng)
    texts = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (prompts, sampled))
    metrics = {
        "eval/loss": negative_log_likelihood(logprobs, num_tokens).item(),
        "eval/length_mean": np.mean([len(ids) for ids in sampled]),
        "eval/truncated_fraction": np.mean([ids[-1] not in stop_ids for ids in sampled]),
    }
    return metrics, [{"prompt": x, "completion": y} for x, y in zip(*texts, strict=True)]


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


def load_pairs(args: Args, split: str, tokenizer: Any, stop_ids: list[int]) -> Pairs:
    """Token ids of prompts and completions."""
    pairs, dropped = [], {}
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                for prompt, completion in to_pairs(args, row) or [(str(row), "")]:
                    pair = encode_pair(tokenizer, prompt, completion, stop_ids)
                    if not isinstance(pair, str) and len(pair[0] + pair[1]) > args.max_length:
                        pair = f"longer than --max-length {args.max_length}"
                    if isinstance(pair, str):
                        shown = (str(prompt)[-60:], str(completion)[:60])
                        dropped.setdefault(pair, []).append(shown)
                    else:
                        pairs.append(pair)
        report(split, pairs, dropped)
    return pairs


def to_pairs(args: Args, row: dict) -> list[tuple[Any, Any]]:
    """The (prompt, completion) pairs of a row: one, or one per assistant turn of `messages`."""
    if "messages" in row and args.completion_column not in row:
        turns = row["messages"] or []
        answer = [isinstance(turn, dict) and turn.get("role") == "assistant" for turn in turns]
        pairs = [(turns[:i], turns[i : i + 1]) for i in range(1, len(turns)) if answer[i]]
        return pairs[-1:] if args.train_on_prompt else pairs  # the last one has all tokens
    for name in (args.prompt_column, args.completion_column):
        require(name in row, f"there is no column {name}, only {sorted(row)}")
    prompt, completion = row[args.prompt_column], row[args.completion_column]
    if not prompt or not completion:
        return []
    kinds = [type(part).__name__ for part in (prompt, completion)]
    require(len({*kinds}) == 1, "the prompt is a {} and the completion a {}".format(*kinds))
    if args.chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion)]


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
    with explain("flags"):
        for name, value in vars(args).items():
            zero = value == 0 and name in ("seed", "warmup_ratio", "weight_decay", "temperature")
            most = 1 if name == "warmup_ratio" else math.inf
            known = type(value) not in (int, float) or zero or 0 < value < most
            require(known, f"--{name.replace('_', '-')} must not be {value}")


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
