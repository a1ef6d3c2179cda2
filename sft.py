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

To read it: the mathematics comes after the flags, the algorithm is `main`, at the end. What lies
between turns files into tensors and back; most of it is the same in every script.

Run it:
    python sft.py                                          # tiny/arithmetic, half a minute on a CPU
    python sft.py --model Qwen/Qwen2.5-0.5B --dataset trl-lib/Capybara --learning-rate 1e-5 \
        --max-length 2048 --micro-batch-size 4             # one GPU, a model and chats from the hub
    torchrun --nproc_per_node=8 sft.py ...                 # eight GPUs: docs/processes.md
    python sft.py --resume runs/sft__1__...                # go on after a crash

A healthy run: `eval/loss` falls with `objective/loss` and ends close to it; the gradient norm
settles after the warm-up; the samples end by themselves. If `eval/loss` turns up again, train for
fewer epochs.
"""

import copy
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from datasets import load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.utils import logging as transformers_logging

from common.generation import find_stop_ids, generate, pad_rows, use_bfloat16
from common.logprobs import completion_logprobs, compute_dtype


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
    save_every: int = 200
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
    batch_size: int = 32
    """Rows an optimiser step."""
    micro_batch_size: int = 32
    """Rows a forward pass: memory and speed, never the result."""
    learning_rate: float = 1e-3
    """AdamW's peak learning rate."""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """How the learning rate falls to 0 after the warm-up, or stays."""
    warmup_ratio: float = 0.03
    """Part of the run over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    # --- evaluation ---
    eval_every: int = 200
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


# --- data --------------------------------------------------------------------------------------


def require(condition: Any, message: str) -> None:
    """End the program with a message instead of a traceback, unless the condition holds."""
    if not condition:
        raise SystemExit(f"error: {message}")


def load(flag: str, source: str, loader: Callable, **options: Any) -> Any:
    """`loader(source, **options)`, from a folder or the hub; failures name the flag."""
    require(
        Path(source).is_dir() or re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source),
        f"{flag} {source}: there is no such folder here, and it is not a hub name (owner/name)",
    )
    try:
        return loader(source, **options)
    except Exception as error:  # whatever is wrong with it, it is the user's input
        reason = str(error.__cause__ or error) or type(error).__name__
        raise SystemExit(f"error: {flag} {source}: {reason}") from None


def load_model(flag: str, source: str, auto_class: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, report = load(flag, source, auto_class.from_pretrained, **options)
    missing = sorted(report["missing_keys"])
    require(
        not missing,
        f"{flag} {source}: weights that {type(model).__name__} needs are not in it: {missing}",
    )
    # torch gives the input embedding of this id no gradient, and where pad == eos it is the EOS.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], where: str, **options: Any
) -> list[int]:
    """Token ids of chat messages."""
    require(
        tokenizer.chat_template,
        f"{where}: chat messages, but the tokenizer of --model has no chat template",
    )
    require(
        all(isinstance(message, dict) and message.get("role") for message in messages),
        f"{where}: every chat message needs a role and a content, found {messages!r:.200}",
    )
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template raises what it likes at messages it does not accept
        raise SystemExit(f"error: {where}: the chat template refuses it: {error}") from None


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], where: str
) -> list[int]:
    """Token ids of a prompt: a string as it is, chat messages through the chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        ids = apply_chat_template(tokenizer, prompt, where, add_generation_prompt=True)
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
) -> tuple[list[int], list[int]] | None:
    """Token ids of a prompt and of its completion, which ends with its first stop id.

    The two are tokenised as one text, as the model would meet them, and then cut at the prompt's
    length. What a chat template writes after the stop id is cut off too: a sampled completion
    never has it.

    None where the prompt's tokens are not the first ones of the whole: the tokenizer has merged the
    end of the prompt with the start of the completion, which white space between them, moved from
    the one to the other, often mends; or the template writes a prompt differently once answered.
    """
    prompt_ids = encode_prompt(tokenizer, prompt, where)
    if isinstance(prompt, str):
        ids = tokenizer(prompt + completion).input_ids
    else:
        ids = apply_chat_template(tokenizer, prompt + completion, where)
    if ids[: len(prompt_ids)] != prompt_ids:
        return None
    completion_ids = ids[len(prompt_ids) :]
    ends = [index for index, token in enumerate(completion_ids) if token in stop_ids]
    if ends:
        return prompt_ids, completion_ids[: ends[0] + 1]
    eos = tokenizer.eos_token_id
    return prompt_ids, [*completion_ids, stop_ids[0] if eos is None else eos]


def to_pairs(args: Args, row: dict, where: str) -> list[tuple[Any, Any]]:
    """The (prompt, completion) pairs of a row: one, or one an assistant turn of `messages`."""
    if "messages" in row and args.prompt_column not in row:
        turns = row["messages"] or []
        require(isinstance(turns, list), f"{where}: messages must be a list, found {turns!r:.200}")
        return [
            (turns[:i], turns[i : i + 1])
            for i in range(1, len(turns))
            if isinstance(turns[i], dict) and turns[i].get("role") == "assistant"
        ]
    for flag in ("prompt_column", "completion_column"):
        require(
            getattr(args, flag) in row,
            f"{where}: no --{flag.replace('_', '-')} {getattr(args, flag)}, only {sorted(row)}",
        )
    prompt, completion = row[args.prompt_column], row[args.completion_column]
    require(
        not prompt or not completion or type(prompt) is type(completion),
        f"{where}: the prompt is a {type(prompt).__name__} and the completion a "
        f"{type(completion).__name__}; both must be strings or both lists of chat messages",
    )
    if args.chat and prompt and completion and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion)]


def load_pairs(
    args: Args, split: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and completions; says what was dropped and why."""
    dataset = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    pairs, empty, merged, too_long = [], 0, 0, 0
    for index, row in enumerate(dataset):
        where = f"--dataset {args.dataset}, row {index} of {split}"
        for prompt, completion in to_pairs(args, row, where) or [(None, None)]:
            if not prompt or not completion:  # no assistant turn counts as empty too
                empty += 1
                continue
            pair = encode_pair(tokenizer, prompt, completion, stop_ids, where)
            if pair is None:
                merged += 1
            elif len(pair[0]) + len(pair[1]) > args.max_length:
                too_long += 1
            else:
                pairs.append(pair)
    found = (
        f"{split}: {len(pairs)} pairs of {len(dataset)} rows; dropped {empty} empty, {merged} with "
        f"a completion that changes the prompt's tokens and {too_long} longer than --max-length "
        f"{args.max_length}"
    )
    print(found)
    require(pairs, f"--dataset {args.dataset}: nothing is left of {found}")
    return pairs


def batch_rows(step: int, batch_size: int, num_rows: int, seed: int) -> list[int]:
    """Row numbers of batch `step` in an endless row of epochs, each shuffled anew.

    It is a function of the step alone, so a resumed run repeats no row and skips none.
    """
    epochs, rows = divmod(np.arange(step * batch_size, (step + 1) * batch_size), num_rows)
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(num_rows)
        for epoch in np.unique(epochs)
    }
    return [int(orders[epoch][row]) for epoch, row in zip(epochs, rows, strict=True)]


def micro_batches(lengths: list[int], micro_batch_size: int) -> Iterator[list[int]]:
    """Split a batch's rows into groups of similar length, so that little is padded.

    Only the rows of one optimiser step are sorted: which rows meet in a step stays random. Of
    several processes each gets as many groups, and of a group's neighbours every one its own; of
    the last group one may get nothing.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for start in range(0, len(order), micro_batch_size * WORLD_SIZE):
        yield order[start : start + micro_batch_size * WORLD_SIZE][RANK::WORLD_SIZE]


# --- several processes -------------------------------------------------------------------------
# Under torchrun each process runs this whole file. All of them plan the same batches and draw the
# same random numbers, each computes a part of the rows with a part of the weights, and they add up
# what they found. One process alone does nothing here.

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def start_process() -> torch.device:
    """The device of this process; of several, rank 0 alone prints.

    One that waits for the others longer than half an hour ends with an error.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if WORLD_SIZE > 1:
        if device.type == "cuda":  # CUDA-only
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            count = torch.cuda.device_count()
            require(
                device.index < count, f"torchrun: more processes than this machine's {count} GPUs"
            )
            torch.cuda.set_device(device)
        own = device if device.type == "cuda" else None
        torch.distributed.init_process_group(timeout=timedelta(minutes=30), device_id=own)
        if RANK > 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            transformers_logging.set_verbosity_error()
    return device


def gather(part: list) -> list:
    """The lists of all processes, one after the other."""
    parts = [part] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(parts, part)
    return list(itertools.chain(*parts))


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, written to `values`."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a transformer, the first nearest to the embeddings."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise SystemExit(f"error: {type(model).__name__}: no list of its {count} layers was found")


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model to the device; of several processes, each keeps a part of every weight.

    FSDP gathers the weights of one layer at a time, in bfloat16 on a GPU, forgets them after use,
    and adds up the gradients in float32. The parts are float32, and so is a reward head's product.
    (One GPU keeps embeddings, norms and what the layers hand on in float32; here it is bfloat16.)
    """
    if WORLD_SIZE == 1:
        return model.to(device)
    # For `gathered`: the same model on weights without elements.
    empty = {id(weight): Parameter(torch.empty(0), False) for weight in model.parameters()}
    whole = copy.deepcopy(model, empty).to(device)
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    low = torch.bfloat16 if use_bfloat16(device) else None
    head = [model.score] if hasattr(model, "score") else []
    for module in (*head, *decoder_layers(model), model):
        dtype = None if module in head else low
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        # Losses are divided by counts over all processes, so gradients are added, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.whole = [whole]  # in a list, so that it is no submodule
    return model


@contextmanager
def gathered(model: torch.nn.Module, to_save: bool = False) -> Iterator[torch.nn.Module]:
    """The model with whole weights: to sample from, on each process; to save, on rank 0's host.

    They are gathered once, in the type that autocast computes with where it is on. It is a plain
    model without FSDP's hooks: no process waits for another between two tokens.
    """
    if WORLD_SIZE == 1:
        yield model
        return
    (whole,) = model.whole
    for name, weight in model.named_parameters():
        weight = weight.detach().to(compute_dtype(weight)).full_tensor()
        if to_save:  # on a GPU there may be no room for all of them
            weight = weight.cpu() if RANK == 0 else weight.new_empty(0)
        whole.get_parameter(name).data = weight
    yield whole
    for weight in whole.parameters():
        weight.data = weight.new_empty(0)


def clip_gradients(parameters: Iterable[Parameter], max_norm: float) -> float:
    """Scale gradients with a larger norm down to it; returns the norm that they had."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def whole_state(state: Any) -> Any:
    """A state dict with whole tensors, in the memory of rank 0's host; None elsewhere."""
    if isinstance(state, dict):
        return {name: whole_state(value) for name, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()  # together
        return state.cpu() if RANK == 0 else None
    return state.cpu() if torch.is_tensor(state) else state


def load_state(part: Any, state: dict) -> None:
    """Give a model or an optimizer, or this process's parts of it, what `whole_state` made."""

    def cut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor) or tensor.dim() == 0:  # a number, as Adam's `step`
            return tensor
        layout = (like.device_mesh, like.placements)
        return distribute_tensor(tensor.to(like.device), *layout, src_data_rank=None)

    if isinstance(part, torch.optim.Optimizer):
        weights = [weight for group in part.param_groups for weight in group["params"]]
        for index, values in state["state"].items():
            values |= {name: cut(value, weights[index]) for name, value in values.items()}
    else:
        own = part.state_dict()
        state = {name: cut(value, own[name]) for name, value in state.items()}
    part.load_state_dict(state)


# --- run folder, checkpoint and resume ---------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> Args:
    """Flags from the command line; with --resume, those that the run was started with."""
    args = tyro.cli(Args, args=argv, description=__doc__.splitlines()[0])
    if args.resume is None:
        return args
    path = Path(args.resume) / "args.json"
    require(path.is_file(), f"--resume {args.resume}: not the folder of a run: no args.json in it")
    saved = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(path.read_text()).items()
    }
    known = {field.name for field in fields(Args)}
    require(set(saved) == known, f"--resume: {path} is of another script or version")
    saved = replace(Args(**saved), resume=args.resume)
    # Parsed again with the saved flags as defaults: what differs now was typed, and must not be
    # ignored without a word.
    typed = asdict(tyro.cli(Args, args=argv, default=saved))
    changed = [name for name, value in asdict(saved).items() if typed[name] != value]
    require(not changed, f"--resume takes all flags from {path}, so {changed} cannot be changed")
    return saved


def make_run_dir(args: Args) -> Path:
    """A new folder `{exp_name}__{seed}__{time}` with the flags in it."""
    run_dir = None
    if RANK == 0:
        name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir, number = Path(args.output_dir) / name, 1
        while run_dir.exists():  # another run started within the same second
            number += 1
            run_dir = Path(args.output_dir) / f"{name}-{number}"
        run_dir.mkdir(parents=True)  # fails rather than write into a folder made meanwhile
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    return gather([run_dir])[0]


def log(run_dir: Path, tracker: Any, step: int, metrics: dict, samples: list[dict]) -> None:
    """Append to metrics.jsonl and samples.jsonl, and to Weights & Biases under --track."""
    if RANK > 0:
        return
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, **metrics}) + "\n")
    with open(run_dir / "samples.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, **sample}) + "\n" for sample in samples)
    if tracker:
        tracker.log(metrics, step=step)


def save_checkpoint(run_dir: Path, state: dict) -> None:
    """Replace checkpoint/state.pt; a kill at any moment leaves a whole file, the old or the new."""
    if RANK > 0:
        return
    logs = {path.name: path.stat().st_size for path in run_dir.glob("*.jsonl")}
    path = run_dir / "checkpoint" / "state.pt"
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save({**state, "logs": logs}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(run_dir: Path) -> dict:
    """Read checkpoint/state.pt and cut the logs back to its moment."""
    path = run_dir / "checkpoint" / "state.pt"
    require(path.is_file(), f"--resume {run_dir}: no checkpoint was saved yet; start anew")
    # Processes that read it together share the pages of the file, and copy their parts only.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=WORLD_SIZE > 1)
    if RANK > 0:
        return state
    for name, size in state["logs"].items():
        log = run_dir / name
        whole = log.is_file() and log.stat().st_size >= size
        require(whole, f"--resume {run_dir}: {name} is shorter than the checkpoint says")
        os.truncate(log, size)
    return state


def save_model(
    run_dir: Path, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> None:
    """Write model/ for `from_pretrained`."""
    if RANK > 0:
        return
    # The checkpoint's own may ask for top-k, or be one that transformers refuses to save.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.cpu().save_pretrained(run_dir / "model")
    model.generation_config.save_pretrained(run_dir / "model")  # a classifier's is not saved else
    tokenizer.save_pretrained(run_dir / "model")


def print_evaluations(run_dir: Path) -> None:
    """What the first and the last evaluation measured, from the run's own log."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(name.startswith("eval/") for name in row)]
    first, last = evaluations[0], evaluations[-1]
    for name in first:
        if name.startswith("eval/"):
            print(f"held-out {name[5:]}: {first[name]:.3f} -> {last[name]:.3f}")


def print_example(run_dir: Path) -> None:
    """A completion of the first and of the last evaluation, from the run's own log."""
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    before = [sample for sample in samples if sample["step"] == samples[0]["step"]]
    after = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    # The prompt whose reward rose most; without rewards, the first.
    gains = [b.get("reward", 0) - a.get("reward", 0) for a, b in zip(before, after, strict=True)]
    best = gains.index(max(gains))
    print(f"before: {before[best]['prompt']!r} -> {before[best]['completion']!r}")
    print(f"after:  {after[best]['prompt']!r} -> {after[best]['completion']!r}")


# --- training ----------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """What can be seen to be wrong before anything is loaded."""
    for name in (
        "save_every max_length batch_size micro_batch_size eval_every eval_rows eval_samples "
        "max_new_tokens epochs learning_rate max_grad_norm"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, found {value}")
    for name in ("seed", "warmup_ratio", "temperature", "weight_decay"):
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{name} must not be negative or infinite, found {value}")
    require(
        not Path(args.output_dir).is_file(),
        f"--output-dir {args.output_dir} is a file, not a folder",
    )
    require(args.warmup_ratio < 1, f"--warmup-ratio must be less than 1, found {args.warmup_ratio}")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU; weights, log-softmax, losses and rewards are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


def complete(
    args: Args,
    model: torch.nn.Module,
    prompts: list[list[int]],
    temperature: float,
    stop_ids: list[int],
    pad_id: int,
    generator: torch.Generator,
) -> tuple[list[list[int]], list[bool]]:
    """A completion's tokens for each prompt, and whether it ended at a stop id.

    Of several processes each samples some. Random numbers are drawn for all, and for all tokens
    that a completion may have: what is sampled depends neither on their number nor on lengths.
    """
    count = len(prompts)
    uniform = torch.rand(count, args.max_new_tokens, dtype=torch.float64, generator=generator)
    part = slice(count * RANK // WORLD_SIZE, count * (RANK + 1) // WORLD_SIZE)
    ids, mask = pad_rows(prompts[part], pad_id, "left", model.device)
    width = ids.shape[1]
    with autocast(model.device), gathered(model) as whole:
        ids, mask, finished = generate(
            whole,
            ids,
            mask,
            args.max_new_tokens,
            temperature,
            stop_ids,
            pad_id,
            uniform[part].to(model.device),
        )
    lengths = mask.sum(dim=1).tolist()
    sampled = [row[:n] for row, n in zip(ids[:, width:].tolist(), lengths, strict=True)]
    return gather(sampled), gather(finished.tolist())


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


def print_models(models: dict[str, torch.nn.Module | None]) -> None:
    """A table of the models: size, and bytes while training in float32 with AdamW."""
    print(
        f"{'model':<13}{'parameters':>14}  {'role':<9}{'weights':>10}{'gradients':>11}{'AdamW':>9}"
    )
    together = 0
    for name, model in models.items():
        if model is None:
            print(f"{name:<13}{'-':>14}  not used")
            continue
        size = {True: 0, False: 0}  # bytes of what is trained, and of what is frozen
        for parameter in model.parameters():
            size[parameter.requires_grad] += parameter.numel() * parameter.element_size()
        columns = (size[True] + size[False], size[True], 2 * size[True])
        together += sum(columns)
        mb = [f"{number / 1e6:,.1f} MB" for number in columns]
        role = "frozen" if not size[True] else "in part" if size[False] else "trained"
        count = f"{model.num_parameters():,}"
        print(f"{name:<13}{count:>14}  {role:<9}{mb[0]:>10}{mb[1]:>11}{mb[2]:>9}")
    where = "" if WORLD_SIZE == 1 else f", dealt out to {WORLD_SIZE} processes"
    print(f"together {together / 1e6:,.1f} MB{where}, activations not counted")


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check_args(args)
    device = start_process()
    transformers_logging.disable_progress_bar()
    tokenizer = load("--model", args.model, AutoTokenizer.from_pretrained)
    stop_ids = load("--model", args.model, find_stop_ids, tokenizer=tokenizer)
    require(stop_ids, f"--model {args.model}: neither tokenizer nor generation config has an EOS")
    # Any id will do for padding: the masks come from lengths.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    train_pairs = load_pairs(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_pairs(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]

    if args.from_scratch:
        config = load("--model", args.model, AutoConfig.from_pretrained)
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    else:
        model = load_model("--model", args.model, AutoModelForCausalLM)
    model = shard(model, device)
    positions = getattr(model.config, "max_position_embeddings", math.inf)
    longest = max(len(prompt) for prompt, _ in eval_pairs[: args.eval_samples])
    require(
        max(args.max_length, longest + args.max_new_tokens) <= positions,
        f"--max-length {args.max_length}, or a prompt of {longest} tokens and --max-new-tokens "
        f"{args.max_new_tokens}, is more than the {positions} positions of --model",
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # CUDA-only: no temporaries of the weights' size
    )
    total_steps = math.ceil(args.epochs * len(train_pairs) / args.batch_size)
    warmup_steps = int(args.warmup_ratio * total_steps)
    scheduler = get_scheduler(args.lr_schedule, optimizer, warmup_steps, total_steps)

    def split(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[torch.Tensor, ...]]:
        """Micro-batches of pairs of similar length, so that little is padded."""
        lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
        return [
            make_batch(args, [pairs[i] for i in rows], pad_id, device)
            for rows in micro_batches(lengths, args.micro_batch_size)
        ]

    @torch.no_grad()
    def evaluate() -> tuple[dict, list[dict]]:
        """Held-out loss, and sampled completions of the first held-out prompts."""
        loss, count = torch.zeros(2, dtype=torch.float64, device=device)
        for ids, mask, loss_mask in split(eval_pairs):
            with autocast(device):
                logprobs = completion_logprobs(model, ids, mask, loss_mask)
            loss += negative_log_likelihood(logprobs, loss_mask, 1)
            count += loss_mask.sum()
        prompts = [prompt for prompt, _ in eval_pairs[: args.eval_samples]]
        # A generator of its own, so that every evaluation draws with the same random numbers.
        draws = torch.Generator().manual_seed(args.seed)
        completions, finished = complete(
            args, model, prompts, args.temperature, stop_ids, pad_id, draws
        )
        prompts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
        lengths = [len(completion) for completion in completions]
        completions = tokenizer.batch_decode(completions, skip_special_tokens=True)
        samples = [
            {"prompt": prompt, "completion": completion}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        metrics = {
            "eval/loss": (total(loss) / total(count)).item(),
            "eval/length_mean": np.mean(lengths),
            "eval/truncated_fraction": 1 - np.mean(finished),
        }
        return metrics, samples

    first_step = 0
    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        load_state(model, state["model"])
        load_state(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_step = state["step"]
        del state  # a second copy of all that was loaded
    else:
        run_dir = make_run_dir(args)
    tracker = None
    if args.track and RANK == 0:
        import wandb  # only here: nobody else needs an account

        tracker = wandb.init(
            project=args.wandb_project, id=run_dir.name, resume="allow", config=asdict(args)
        )
    print_models({"policy": model})
    print(f"{run_dir}: on {device}, {total_steps} steps")
    if not args.resume:
        log(run_dir, tracker, 0, *evaluate())

    progress = tqdm(
        range(first_step, total_steps), initial=first_step, total=total_steps, disable=RANK > 0
    )
    for step in progress:
        started = time.perf_counter()

        # 1. draw the rows of this step
        picked = batch_rows(step, args.batch_size, len(train_pairs), args.seed)
        pairs = [train_pairs[i] for i in picked]
        batches = split(pairs)
        num_tokens = sum(loss_mask.sum() for _, _, loss_mask in batches)
        num_tokens = total(num_tokens).item()

        # 2. optimise: one step, its gradient summed over micro-batches
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for ids, mask, loss_mask in batches:
            with autocast(device):
                logprobs = completion_logprobs(model, ids, mask, loss_mask)
            micro_loss = negative_log_likelihood(logprobs, loss_mask, num_tokens)
            micro_loss.backward()
            loss += micro_loss.detach()
        loss = total(loss).item()
        grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
        require(
            math.isfinite(loss) and math.isfinite(grad_norm),
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; no step was taken. Likely "
            "causes: --learning-rate too high, a broken --model. The last checkpoint, if any, is "
            f"in {run_dir / 'checkpoint'}",
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # 3. log, evaluate, save
        done, last = step + 1, step + 1 == total_steps
        metrics = {
            "objective/loss": loss,
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": scheduler.get_last_lr()[0],
            "time/epoch": done * args.batch_size / len(train_pairs),
            "time/tokens_per_second": sum(map(len, itertools.chain(*pairs)))
            / (time.perf_counter() - started),
        }
        scheduler.step()
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate()
            metrics |= eval_metrics
        log(run_dir, tracker, done, metrics, samples)
        progress.set_postfix(loss=f"{loss:.3f}", grad_norm=f"{grad_norm:.2f}")
        if done % args.save_every == 0 or last:
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: whole_state(part.state_dict()) for name, part in state.items()}
            save_checkpoint(run_dir, state | {"step": done})

    with gathered(model, to_save=True) as whole:
        save_model(run_dir, whole.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    if RANK == 0:
        print_evaluations(run_dir)
        print_example(run_dir)
    print(f"model: {run_dir / 'model'}")
    print(f"next: python grpo.py --model {run_dir / 'model'} (with --dataset for your prompts)")
    if tracker:
        tracker.finish()
    if WORLD_SIZE > 1:
        torch.distributed.barrier()  # nobody leaves before rank 0 has saved
        torch.distributed.destroy_process_group()
    return run_dir


if __name__ == "__main__":
    main(parse_args())
    if WORLD_SIZE > 1:  # threads of gloo may abort Python while it shuts down (pytorch PR 179291)
        sys.stdout.flush()
        os._exit(0)
