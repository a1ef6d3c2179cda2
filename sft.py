r"""Supervised fine-tuning (SFT): imitate demonstrations. The starting point of every other script.

Minimise the negative log-likelihood of completions y_i given their prompts x_i,

    L(theta) = - (1/N) sum_i sum_t log pi_theta(y_it | x_i, y_i<t),

with N completion tokens in the batch, each completion's EOS among them: stage 1 of InstructGPT
(arXiv 2203.02155, section 3.5). Deviations (the paper's choice in brackets): no dropout [0.2]; 4
epochs [16]; a warm-up and a linear decay [a cosine decay to 10 %]; the last model is saved [the one
with the best reward model score].

    python sft.py                                          # tiny/arithmetic, half a minute on a CPU
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara --learning-rate 1e-5 \
        --max-length 2048 --max-new-tokens 512 --micro-batch-size 4    # one GPU, from the hub
    torchrun --nproc_per_node=8 sft.py ...                 # eight GPUs: docs/processes.md
    python sft.py --resume runs/sft__1__...                # resume after a crash

A healthy run: `eval/loss` falls with `objective/loss` (if it rises again, compare samples too: in
the paper they still improved); the gradient norm settles after the warm-up; more and more samples
end with an EOS, so `eval/truncated_fraction` falls.
"""

import json
import math
import os
import sys
import time
import zlib
from collections import defaultdict
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
    exp_name: str = "sft"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 200  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the model and its tokenizer
    model: str = "tiny/arithmetic/base"
    dataset: str = "tiny/arithmetic/sft"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    # column of the completion; if it is absent, each assistant turn of `messages` is one
    completion_column: str = "completion"
    chat: bool = False  # turn string pairs into chat messages of a user and an assistant
    max_length: int = 128  # limit of prompt + completion in tokens; longer rows are dropped
    train_on_prompt: bool = False  # learn to predict the prompt's tokens too
    # type of the weights in model/; they are float32 while training
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    # --- optimisation and evaluation ---
    # passes over the training rows
    epochs: float = 4.0
    batch_size: int = 32  # rows per optimiser step
    micro_batch_size: int = 32  # rows per forward pass: sets memory and speed, not the result
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    # how the learning rate changes after its warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.03  # fraction of the steps over which the learning rate rises
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 200  # steps between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out rows for eval/loss, at most
    eval_samples: int = 8  # held-out prompts to complete into samples.jsonl
    max_new_tokens: int = 24  # longest sampled completion in tokens
    temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


# --- the mathematics ---------------------------------------------------------------------------
def negative_log_likelihood(logprobs: Tensor, num_tokens: int) -> Tensor:
    """-(1/N) sum of log-probs (b, T), in nats; N is the whole step's, so micro-batches add up."""
    return -logprobs.sum() / num_tokens


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    args = check_args(args)
    run_dir, device, wandb_run = start_run(args)

    # --- data and model ---
    tokenizer, stop_ids = load_tokenizer(args.model)
    train_sequences = load_sequences(args, args.train_split, tokenizer, stop_ids)
    eval_sequences = load_sequences(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    eval_prompts = [prompt for prompt, _ in eval_sequences[: args.eval_samples]]
    if args.train_on_prompt:  # the loss is on all tokens but the first, which has no context
        train_sequences = [(x[:1], x[1:] + y) for x, y in train_sequences]
        eval_sequences = [(x[:1], x[1:] + y) for x, y in eval_sequences]
    longest_prompt = max(len(prompt) for prompt in eval_prompts)
    positions = max(args.max_length, longest_prompt + args.max_new_tokens)
    policy = load_model("--model", args.model, AutoModelForCausalLM, positions, device)
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(policy)

    # --- optimiser, and where an interrupted run stopped ---
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
    total_steps = math.ceil(args.epochs * len(train_sequences) / args.batch_size)
    training = {"policy": (policy, optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_sequences).encode())}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, total_steps)
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay  # a checkpoint brings its own
    print(f"{run_dir}: {policy.num_parameters():,} parameters on {device}")

    # --- the loop ---
    if not args.resume:
        metrics, samples = evaluate(
            args, policy, tokenizer, stop_ids, sequences=eval_sequences, prompts=eval_prompts
        )
        log(run_dir, wandb_run, 0, metrics, samples)
    rng = Generator().manual_seed(args.seed)
    data_epochs = math.ceil(total_steps * args.batch_size / len(train_sequences))
    shuffles = [torch.randperm(len(train_sequences), generator=rng) for _ in range(data_epochs)]
    batches = torch.cat(shuffles).split(args.batch_size)
    progress = tqdm(range(checkpoint["step"], total_steps), disable=RANK > 0)
    for step in progress:
        # 1. Draw the rows of this step.
        start_time = time.perf_counter()
        sequences = [train_sequences[i] for i in batches[step]]
        num_tokens = sum(len(completion) for _, completion in sequences)  # N, over all ranks

        # 2. Optimise: one step, its gradient summed over micro-batches and ranks.
        optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(args, step, total_steps)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for inds in micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size):
            logprobs = completion_logprobs(policy, sequences, inds)  # (b, T)
            loss = negative_log_likelihood(logprobs, num_tokens)
            loss.backward()
            loss_sum += loss.detach()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm, run_dir, step)
        optimizer.step()
        optimizer.zero_grad()

        # 3. Log, evaluate, save.
        num_tokens_read = sum(len(prompt) + len(completion) for prompt, completion in sequences)
        metrics = {
            "objective/loss": all_reduce_sum(loss_sum).item(),
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": (step + 1) * args.batch_size / len(train_sequences),
            "time/tokens_per_second": num_tokens_read / (time.perf_counter() - start_time),
        }
        samples = []
        is_last = step + 1 == total_steps
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(
                args, policy, tokenizer, stop_ids, sequences=eval_sequences, prompts=eval_prompts
            )
            metrics |= eval_metrics
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], grad_norm=grad_norm)
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, checkpoint | {"step": step + 1})

    save_model(run_dir, policy.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    if wandb_run:
        wandb_run.finish()
    print(f"next: python grpo.py --model {run_dir / 'model'}", flush=True)
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


def evaluate(
    args: Args, policy: Any, tokenizer: Any, stop_ids: list, sequences: Sequences, prompts: list
) -> tuple[dict[str, float], list[dict]]:
    """Held-out loss of the sequences, and a completion sampled for each of the prompts."""
    batches = micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)
    logprobs = rollout_logprobs(policy, sequences, batches, temperature=1.0)  # (B, T)
    num_tokens = sum(len(completion) for _, completion in sequences)
    completions = generate(
        policy,
        prompts,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        stop_ids=stop_ids,
        rng=Generator().manual_seed(args.seed),  # every evaluation draws the same numbers
    )
    metrics = {
        "eval/loss": negative_log_likelihood(logprobs, num_tokens).item(),
        "eval/length_mean": np.mean([len(ids) for ids in completions]),
        "eval/truncated_fraction": np.mean([ids[-1] not in stop_ids for ids in completions]),
    }
    prompt_texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    samples = [{"prompt": prompt_texts[i], "completion": texts[i]} for i in range(len(texts))]
    return metrics, samples


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


def load_sequences(args: Args, split: str, tokenizer: Any, stop_ids: list[int]) -> Sequences:
    """Token ids of prompts and completions; rows that cannot be used are dropped and counted."""
    sequences, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        check_folder(args.dataset)
        dataset = load_dataset(args.dataset, args.dataset_config, split=split)
    for index, row in enumerate(dataset):
        with explain(f"--dataset {args.dataset}, row {index} of {split}"):
            pairs = to_pairs(args, row)
            if not pairs:
                dropped["with an empty prompt or completion"].append(row)
            for prompt, completion in pairs:
                try:
                    x, y = encode_pair(tokenizer, prompt, completion, stop_ids)
                    if len(x) + len(y) > args.max_length:
                        raise UnusableRow(f"longer than --max-length {args.max_length}")
                    sequences.append((x, y))
                except UnusableRow as reason:
                    dropped[str(reason)].append((str(prompt)[-60:], str(completion)[:60]))
    report_rows(args, split, sequences, dropped)
    return sequences


def to_pairs(args: Args, row: dict) -> list[tuple[Any, Any]]:
    """The (prompt, completion) pairs of a row: one, or one per assistant turn of `messages`."""
    if "messages" in row and args.completion_column not in row:
        turns, pairs = row["messages"] or [], []
        for i in range(1, len(turns)):
            if isinstance(turns[i], dict) and turns[i].get("role") == "assistant":
                pairs.append((turns[:i], [turns[i]]))
        # The last pair holds all turns: it is enough where prompts are learned too.
        return pairs[-1:] if args.train_on_prompt else pairs
    for column in (args.prompt_column, args.completion_column):
        check(column in row, f"there is no column {column}, only {sorted(row)}")
    prompt, completion = row[args.prompt_column], row[args.completion_column]
    if not prompt or not completion:
        return []
    prompt_type, completion_type = type(prompt).__name__, type(completion).__name__
    message = f"the prompt is a {prompt_type} and the completion a {completion_type}"
    check(prompt_type == completion_type, message)
    if args.chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion)]


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
    """What can be seen to be wrong before anything is loaded."""
    with explain("flags"):
        check_numbers(args, "save_every max_length epochs batch_size micro_batch_size")
        check_numbers(args, "learning_rate max_grad_norm eval_every eval_rows eval_samples")
        check_numbers(args, "max_new_tokens")
        check_numbers(args, "seed warmup_ratio weight_decay temperature", zero=True)
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
