r"""Supervised fine-tuning (SFT): imitate demonstrations. The start of every other script.

Minimise the negative log-likelihood of the completion's tokens given the prompt,

    L(theta) = - (1/N) sum_i sum_t log pi_theta(y_it | x_i, y_i<t),

N being the number of completion tokens in the batch. It is stage 1 of InstructGPT (Ouyang et al.,
2022, arXiv 2203.02155, section 3.5).

Deviations from the paper:
1. Averaged over tokens, not over sequences: a sequence mean gives a token of a short answer more
   weight than one of a long answer, and the model learns to be brief.
2. No dropout (InstructGPT: 0.2 in the residual stream), so that the log-probabilities that later
   stages compare are those of one fixed distribution.
3. The best model is not picked among epochs: the last one is kept, and the held-out loss is logged.

Run it:
    python sft.py                                          # tiny/arithmetic, half a minute on a CPU
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara --learning-rate 1e-5 \
        --max-length 2048 --micro-batch-size 4             # one GPU, a model and chats from the hub
    python sft.py --resume runs/sft__1__...                # go on after a crash, bit for bit

A healthy run: `eval/loss` falls with `objective/loss` and ends close to it; the gradient norm settles
after the warm-up; the samples end by themselves. If `eval/loss` turns up again, train for fewer epochs.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from datasets import load_dataset
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from common.generation import generate
from common.logprobs import completion_logprobs


@dataclass
class Args:
    # --- run ---
    exp_name: str = "sft"
    """Name of the run's folder, with the seed and the time."""
    seed: int = 1
    """Seed of the data order, the sampled completions and new weights."""
    output_dir: str = "runs"
    """Where the run's folder is made."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint; its flags are taken from there."""
    save_every: int = 100
    """Optimiser steps between checkpoints; there is always one at the end."""
    track: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str = "plainrlhf"
    """Project for --track."""

    # --- model and data ---
    model: str = "tiny/arithmetic/base"
    """Folder or hub name of the model and its tokenizer."""
    from_scratch: bool = False
    """Take only the configuration and the tokenizer from --model, and start from random weights."""
    dataset: str = "tiny/arithmetic/sft"
    """Folder with train.jsonl and test.jsonl, or hub name. Rows have `prompt` and `completion`
    (strings or chat messages), or `messages`: then every assistant turn is a completion."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    train_split: str = "train"
    """Rows to train on; slices such as train[:95%] work."""
    eval_split: str = "test"
    """Held-out rows; for a dataset without a test split, a slice such as train[95%:]."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    completion_column: str = "completion"
    """Column that holds the completion."""
    chat: bool = False
    """Turn string prompts and completions into chat messages of a user and an assistant."""
    max_length: int = 128
    """Longest prompt and completion together, in tokens; longer rows are dropped and counted."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the saved model; training is in float32."""

    # --- supervised fine-tuning ---
    train_on_prompt: bool = False
    """Learn to predict the prompt's tokens too."""

    # --- optimisation ---
    epochs: float = 4.0
    """Passes over the training rows."""
    batch_size: int = 64
    """Rows an optimiser step."""
    micro_batch_size: int = 64
    """Rows a forward pass: memory and speed, never the result."""
    learning_rate: float = 2e-3
    """AdamW's peak learning rate."""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up."""
    warmup_steps: int = 10
    """Optimiser steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    # --- evaluation ---
    eval_every: int = 100
    """Optimiser steps between evaluations; there is always one at the start and one at the end."""
    eval_rows: int = 500
    """Held-out rows for eval/loss, at most."""
    eval_samples: int = 8
    """Held-out prompts to complete into samples.jsonl."""
    max_new_tokens: int = 24
    """Longest sampled completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature at evaluation; 0 is greedy."""


# --- the mathematics ---------------------------------------------------------------------------


def negative_log_likelihood(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """- (1/N) sum of the log-probabilities where the mask is set: nats a token, a scalar.

    Args:
        logprobs: (B, L) float32 log pi(token t | tokens before t), in nats.
        loss_mask: (B, L) bool, true at the tokens to learn.
        num_tokens: N, counted over the whole optimiser step, of which (B, L) may be a part: the
            parts' losses and gradients then add up to the step's, however it is split.
    """
    return -logprobs.masked_fill(~loss_mask, 0.0).sum() / num_tokens


def scheduled_learning_rate(
    step: int, total_steps: int, peak: float, schedule: str, warmup_steps: int
) -> float:
    """Rise linearly over the warm-up to `peak`, then fall to 0 at `total_steps`, or stay."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)  # in [0, 1)
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


# --- data --------------------------------------------------------------------------------------


def require(condition: Any, message: str) -> None:
    """End the program with a message instead of a traceback, unless the condition holds."""
    if not condition:
        raise SystemExit(f"error: {message}")


def check_source(flag: str, name: str) -> None:
    """A name must be a folder here, or look like `owner/name` on the hub."""
    is_hub_name = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and name
    require(
        Path(name).is_dir() or is_hub_name,
        f"{flag} {name}: there is no such folder here, and it is not a hub name (owner/name)",
    )


def load_rows(args: Args, split: str, flag: str) -> list[dict]:
    """Rows of a split of --dataset, from a folder or from the hub."""
    check_source("--dataset", args.dataset)
    try:
        return load_dataset(args.dataset, name=args.dataset_config, split=split).to_list()
    except Exception as error:  # whatever is wrong with it, it is the user's input
        cause = error.__cause__ or error
        raise SystemExit(f"error: --dataset {args.dataset}, {flag} {split}: {cause}") from None


def load_tokenizer(args: Args) -> PreTrainedTokenizerBase:
    check_source("--model", args.model)
    try:
        return AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --model {args.model}: no tokenizer: {error}") from None


def find_stop_ids(tokenizer: PreTrainedTokenizerBase, model_name: str) -> list[int]:
    """Ids that end a completion: the tokenizer's EOS and those of the generation config."""
    stop_ids = {tokenizer.eos_token_id}
    try:
        more = GenerationConfig.from_pretrained(model_name).eos_token_id
        stop_ids.update(more if isinstance(more, list) else [more])
    except OSError:  # many checkpoints have none
        pass
    stop_ids.discard(None)
    require(stop_ids, f"--model {model_name}: neither tokenizer nor generation config has an EOS")
    return sorted(stop_ids)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], where: str
) -> list[int]:
    """Token ids of a prompt: a string as it is, chat messages through the chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        require(
            tokenizer.chat_template,
            f"{where}: chat messages, but the tokenizer of --model has no chat template",
        )
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    bos = tokenizer.bos_token_id
    require(
        bos is None or ids[:2] != [bos, bos],
        f"{where}: the prompt begins with {tokenizer.bos_token} twice: the tokenizer adds it, so "
        "take it out of the text, or give the prompt as chat messages",
    )
    return ids


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict],
    completion: str | list[dict],
    stop_ids: list[int],
    where: str,
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its completion, which ends with its first stop id.

    The two are tokenised as one text, as the model would meet them, and then cut at the prompt's
    length. What a chat template writes after the stop id is cut off too: a sampled completion
    never has it.
    """
    prompt_ids = encode_prompt(tokenizer, prompt, where)
    if isinstance(prompt, str):
        ids = tokenizer(prompt + completion).input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt + completion, return_dict=False)
    require(
        ids[: len(prompt_ids)] == prompt_ids,
        f"{where}: the tokenizer merges the end of the prompt with the start of the completion, so "
        "the tokens of the prompt are not a prefix of the whole; move white space from the end of "
        "the prompt to the start of the completion",
    )
    completion_ids = ids[len(prompt_ids) :]
    ends = [index for index, token in enumerate(completion_ids) if token in stop_ids]
    if ends:
        return prompt_ids, completion_ids[: ends[0] + 1]
    eos = tokenizer.eos_token_id
    return prompt_ids, [*completion_ids, stop_ids[0] if eos is None else eos]


def to_pairs(args: Args, row: dict, where: str) -> list[tuple[Any, Any]]:
    """The (prompt, completion) pairs of a row: one, or one for each assistant turn of `messages`."""
    if "messages" in row and args.prompt_column not in row:
        turns = row["messages"] or []
        return [(turns[:i], [m]) for i, m in enumerate(turns) if m["role"] == "assistant" and i]
    for flag, column in (
        ("--prompt-column", args.prompt_column),
        ("--completion-column", args.completion_column),
    ):
        require(column in row, f"{flag} {column}: {where} has only the columns {sorted(row)}")
    prompt, completion = row[args.prompt_column], row[args.completion_column]
    if not prompt or not completion:
        return [(prompt, completion)]  # counted as empty by the caller
    require(
        type(prompt) is type(completion),
        f"{where}: the prompt is a {type(prompt).__name__} and the completion a "
        f"{type(completion).__name__}; both must be strings or both lists of chat messages",
    )
    if args.chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion)]


def encode_rows(
    args: Args,
    rows: list[dict],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
) -> list[tuple[list[int], list[int]]]:
    """Token ids of all usable (prompt, completion) pairs; says how many were dropped and why."""
    pairs, empty, too_long = [], 0, 0
    for index, row in enumerate(rows):
        where = f"row {index} of --dataset {args.dataset} ({split})"
        for prompt, completion in to_pairs(args, row, where):
            if not prompt or not completion:
                empty += 1
                continue
            prompt_ids, completion_ids = encode_pair(tokenizer, prompt, completion, stop_ids, where)
            if not prompt_ids:
                empty += 1
            elif len(prompt_ids) + len(completion_ids) > args.max_length:
                too_long += 1
            else:
                pairs.append((prompt_ids, completion_ids))
    dropped = f"dropped {empty} empty and {too_long} longer than --max-length {args.max_length}"
    print(f"{split}: {len(pairs)} pairs from {len(rows)} rows, {dropped}")
    require(pairs, f"--dataset {args.dataset}: no row of {split} is left ({dropped})")
    return pairs


def pad_rows(
    rows: list[list[int]], pad_id: int, side: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack token ids of different lengths: ids (B, L) int64, and a bool mask of the real ones.

    The mask comes from the lengths, so that a real EOS is never taken for padding where the
    tokenizer has one id for both.
    """
    ids = torch.full((len(rows), max(map(len, rows))), pad_id)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[i, columns] = torch.tensor(row)
        mask[i, columns] = True
    return ids.to(device), mask.to(device)


def batch_rows(step: int, batch_size: int, num_rows: int, seed: int) -> list[int]:
    """Row numbers of optimiser step `step`: the epochs, each shuffled anew, one after the other.

    It is a function of the step alone, so a resumed run repeats no row and skips none.
    """
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(num_rows)
        for epoch in {position // num_rows for position in positions}
    }
    return [int(orders[p // num_rows][p % num_rows]) for p in positions]


def micro_batches(lengths: list[int], micro_batch_size: int) -> Iterator[list[int]]:
    """Split a batch's rows into groups of similar length, so that little is padded.

    Only the rows of one optimiser step are sorted: which rows meet in a step stays random.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), micro_batch_size):
        yield order[start : start + micro_batch_size]


# --- run folder, checkpoint and resume ---------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; with --resume, those that the run was started with."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    if args.resume is None:
        return args
    path = Path(args.resume) / "args.json"
    require(path.is_file(), f"--resume {args.resume}: not the folder of a run: no args.json in it")
    saved = json.loads(path.read_text())
    known = {field.name for field in fields(Args)}
    require(set(saved) == known, f"--resume: {path} is of another script or version")
    saved = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    saved = replace(saved, resume=args.resume)
    # Parsed again with the saved flags as defaults: what differs now was typed, and would be ignored.
    args = tyro.cli(Args, args=argv, default=saved)
    changed = [
        f"--{k.replace('_', '-')}" for k, v in asdict(args).items() if v != getattr(saved, k)
    ]
    require(not changed, f"--resume takes all flags from {path}; leave out {', '.join(changed)}")
    return args


def make_run_dir(args: Args) -> Path:
    """A new folder `{exp_name}__{seed}__{time}` with the flags in it."""
    name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 1
    while True:  # two runs may start within the same second
        run_dir = Path(args.output_dir) / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            attempt += 1
    (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    for log in ("metrics.jsonl", "samples.jsonl"):
        (run_dir / log).touch()
    return run_dir


def save_checkpoint(run_dir: Path, state: dict) -> None:
    """Replace checkpoint/state.pt; a kill at any moment leaves the old file or the new one whole."""
    state = state | {
        log: (run_dir / log).stat().st_size for log in ("metrics.jsonl", "samples.jsonl")
    }
    path = run_dir / "checkpoint" / "state.pt"
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(run_dir: Path) -> dict:
    """Read checkpoint/state.pt and cut the logs back to its moment."""
    path = run_dir / "checkpoint" / "state.pt"
    require(path.is_file(), f"--resume {run_dir}: no checkpoint was saved yet; start anew")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for log in ("metrics.jsonl", "samples.jsonl"):
        os.truncate(run_dir / log, state[log])
    return state


def log_rows(run_dir: Path, log: str, rows: list[dict]) -> None:
    """Append rows to metrics.jsonl or samples.jsonl."""
    with open(run_dir / log, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def start_tracking(args: Args, run_dir: Path) -> Any:
    """The Weights & Biases run of --track, or None."""
    if not args.track:
        return None
    import wandb  # only with --track: it is the one import that wants an account

    return wandb.init(
        project=args.wandb_project, id=run_dir.name, resume="allow", config=asdict(args)
    )


def check_finite(step: int, loss: float, grad_norm: float, run_dir: Path) -> None:
    """End the run before anything is trained on NaN or infinity."""
    require(
        math.isfinite(loss) and math.isfinite(grad_norm),
        f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; the weights were left "
        f"as they were. Likely causes: --learning-rate too high, a broken --model, extreme rewards "
        f"or labels. The last checkpoint, if any, is in {run_dir / 'checkpoint'}",
    )


# --- training ----------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """What can be seen to be wrong before anything is loaded."""
    for name in (
        "save_every max_length batch_size micro_batch_size eval_every eval_rows eval_samples "
        "max_new_tokens epochs learning_rate max_grad_norm"
    ).split():
        value = getattr(args, name)
        require(value > 0, f"--{name.replace('_', '-')} must be more than 0, found {value}")
    for name in ("warmup_steps", "temperature", "weight_decay"):
        value = getattr(args, name)
        require(value >= 0, f"--{name.replace('_', '-')} must not be negative, found {value}")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    require(world_size == 1, f"started as {world_size} processes, but this script runs as one")


def load_model(args: Args, device: torch.device) -> torch.nn.Module:
    """The causal language model of --model in float32, without dropout."""
    try:
        if args.from_scratch:
            torch.manual_seed(args.seed)
            config = AutoConfig.from_pretrained(args.model)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: --model {args.model}: {error}") from None
    return model.to(device).eval()  # eval: dropout is off, while sampling and while training


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU; the weights, and all of the mathematics, are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def make_batch(
    args: Args, pairs: list[tuple[list[int], list[int]]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and loss mask of some pairs, each (B, L), padded on the right."""
    ids, mask = pad_rows(
        [prompt + completion for prompt, completion in pairs], pad_id, "right", device
    )
    # The first token of all has no context to be predicted from.
    first = [1 if args.train_on_prompt else len(prompt) for prompt, _ in pairs]
    columns = torch.arange(ids.shape[1], device=device)
    return ids, mask, mask & (columns >= torch.tensor(first, device=device)[:, None])


@torch.no_grad()
def evaluate(
    args: Args,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    pad_id: int,
    pairs: list[tuple[list[int], list[int]]],
) -> tuple[dict, list[dict]]:
    """Held-out loss, and sampled completions of the first held-out prompts."""
    total, count = 0.0, 0
    for start in range(0, len(pairs), args.micro_batch_size):
        chunk = pairs[start : start + args.micro_batch_size]
        ids, mask, loss_mask = make_batch(args, chunk, pad_id, model.device)
        with autocast(model.device):
            logprobs = completion_logprobs(model, ids, mask, loss_mask)
        total += negative_log_likelihood(logprobs, loss_mask, 1).item()
        count += int(loss_mask.sum())

    prompts = [prompt for prompt, _ in pairs[: args.eval_samples]]
    ids, mask = pad_rows(prompts, pad_id, "left", model.device)
    # A generator of its own, so that every evaluation draws with the same random numbers.
    generator = torch.Generator(model.device).manual_seed(args.seed)
    with autocast(model.device):
        sequences, completion_mask, finished = generate(
            model, ids, mask, args.max_new_tokens, args.temperature, stop_ids, pad_id, generator
        )
    completions = [ids[mask] for ids, mask in zip(sequences, completion_mask, strict=True)]
    samples = [
        {
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
            "completion": tokenizer.decode(completion, skip_special_tokens=True),
            "finished": bool(end),
        }
        for prompt, completion, end in zip(prompts, completions, finished, strict=True)
    ]
    metrics = {
        "eval/loss": total / count,
        "eval/completion_length": float(completion_mask.sum(dim=1).float().mean()),
        "eval/truncated_fraction": float((~finished).float().mean()),
    }
    return metrics, samples


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check_args(args)
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(args)
    stop_ids = find_stop_ids(tokenizer, args.model)
    # Any id will do for padding: the masks come from lengths.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = load_rows(args, args.train_split, "--train-split")
    eval_rows = load_rows(args, args.eval_split, "--eval-split")[: args.eval_rows]
    pairs = encode_rows(args, rows, args.train_split, tokenizer, stop_ids)
    eval_pairs = encode_rows(args, eval_rows, args.eval_split, tokenizer, stop_ids)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args, device)
    positions = getattr(model.config, "max_position_embeddings", math.inf)
    require(
        args.max_length <= positions,
        f"--max-length {args.max_length} is more than the {positions} positions of --model",
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    total_steps = math.ceil(args.epochs * len(pairs) / args.batch_size)

    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step, before = state["step"], state["before"]
    else:
        run_dir = make_run_dir(args)
        first_step, before = 0, None
    tracker = start_tracking(args, run_dir)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{run_dir}: {num_parameters:,} parameters on {device}, {total_steps} steps")

    def log(step: int, metrics: dict, samples: list[dict]) -> None:
        log_rows(run_dir, "metrics.jsonl", [{"step": step, **metrics}])
        log_rows(run_dir, "samples.jsonl", [{"step": step, **sample} for sample in samples])
        if tracker:
            tracker.log(metrics, step=step)

    if before is None:
        metrics, samples = evaluate(args, model, tokenizer, stop_ids, pad_id, eval_pairs)
        before = {"loss": metrics["eval/loss"], "sample": samples[0]}
        log(0, metrics, samples)

    progress = tqdm(range(first_step, total_steps), initial=first_step, total=total_steps)
    for step in progress:
        start_time = time.perf_counter()

        # 1. draw the rows of this step
        batch = [pairs[i] for i in batch_rows(step, args.batch_size, len(pairs), args.seed)]
        lengths = [len(prompt) + len(completion) for prompt, completion in batch]
        num_tokens = sum(
            lengths[i] - 1 if args.train_on_prompt else len(completion)
            for i, (_, completion) in enumerate(batch)
        )

        # 2. gradient of the loss, one micro-batch at a time
        loss = 0.0
        for indices in micro_batches(lengths, args.micro_batch_size):
            ids, mask, loss_mask = make_batch(args, [batch[i] for i in indices], pad_id, device)
            with autocast(device):
                logprobs = completion_logprobs(model, ids, mask, loss_mask)
            micro_loss = negative_log_likelihood(logprobs, loss_mask, num_tokens)
            micro_loss.backward()
            loss += micro_loss.item()

        # 3. optimiser step
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
        check_finite(step, loss, grad_norm, run_dir)
        learning_rate = scheduled_learning_rate(
            step, total_steps, args.learning_rate, args.lr_schedule, args.warmup_steps
        )
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # 4. log, evaluate, save
        done, last = step + 1, step + 1 == total_steps
        metrics, samples = {}, []
        if done % args.eval_every == 0 or last:
            metrics, samples = evaluate(args, model, tokenizer, stop_ids, pad_id, eval_pairs)
        metrics |= {
            "objective/loss": loss,
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": learning_rate,
            "time/epoch": done * args.batch_size / len(pairs),
            "time/tokens_per_second": sum(lengths) / (time.perf_counter() - start_time),
        }
        log(done, metrics, samples)
        progress.set_postfix(loss=f"{loss:.3f}", grad_norm=f"{grad_norm:.2f}")
        if done % args.save_every == 0 or last:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(run_dir, state | {"step": done, "before": before})

    metrics, samples = evaluate(args, model, tokenizer, stop_ids, pad_id, eval_pairs)
    model.to(getattr(torch, args.save_dtype)).save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")
    print(f"held-out loss: {before['loss']:.3f} -> {metrics['eval/loss']:.3f} nats a token")
    for when, sample in (("before", before["sample"]), ("after", samples[0])):
        print(f"{when}: {sample['prompt']!r} -> {sample['completion']!r}")
    print(f"model: {run_dir / 'model'}")
    print(f"next: python grpo.py --model {run_dir / 'model'}")
    return run_dir


if __name__ == "__main__":
    main(parse_args())
