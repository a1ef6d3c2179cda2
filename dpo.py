r"""Direct Preference Optimization (DPO): learn from preference pairs without a reward model.

RLHF maximises E[r(x, y)] - beta KL(pi || pi_ref). Its optimum is known: pi(y|x) is proportional to
pi_ref(y|x) exp(r(x, y) / beta). Turned around, every policy is optimal for the implicit reward

    r(x, y) = beta log( pi(y|x) / pi_ref(y|x) ) + a term of x alone,

and with that in the place of a reward model, the Bradley-Terry loss of `rm_bradley_terry.py` trains
the policy itself (Rafailov et al. 2023, arXiv 2305.18290, equation 7, where eps = 0):

    h = log( pi(y_w|x) / pi_ref(y_w|x) ) - log( pi(y_l|x) / pi_ref(y_l|x) ),
    L = mean over pairs of  - (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h),

y_w being the preferred completion, log pi(y|x) the sum over its tokens. eps > 0 says that a label
is wrong that often (conservative DPO, Mitchell 2023).

Deviations from the paper:
1. AdamW and a linear schedule, not RMSprop.
2. `--loss ipo` is (h - 1/(2 beta))^2 (Azar et al. 2023, arXiv 2310.12036, equation 17). It stops at
   a distance instead of pushing for ever. log pi is then averaged over the tokens, not summed, as
   the authors advised for completions of different lengths; so beta is on another scale.
3. `--nll-coef` adds the chosen completion's negative log-likelihood, averaged over its tokens (Pang
   et al. 2024, arXiv 2404.19733): a pull against its becoming improbable with the rejected one.

To read it: the mathematics comes after the flags, the algorithm is `main`, at the end. What lies
between turns files into tensors and back; most of it is the same in every script.

Run it:
    python dpo.py                                          # tiny/reviews, half a minute on a CPU
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized \
        --eval-reward-fn None --max-length 1024 --max-new-tokens 256 --batch-size 64 \
        --micro-batch-size 4 --epochs 1 --beta 0.1 --learning-rate 1e-6    # one GPU
    torchrun --nproc_per_node=8 dpo.py ...                 # eight GPUs: docs/processes.md
    python dpo.py --resume runs/dpo__1__...                # go on after a crash

A healthy run: the first loss is ln 2 = 0.693 exactly, for the policy is the reference and h = 0
(IPO begins at 1 / (4 beta^2), --nll-coef adds its term; a warm-up's first step changes nothing).
`reward/margin` and `reward/accuracy` rise. `policy/logprob_rejected` falls, and often
`policy/logprob_chosen` with it: the loss sees only their difference, the two completions share most
of what makes them probable, and on average the reference's own samples can only become less
probable under another policy. If the chosen one falls by tens of nats, lower the learning rate,
raise beta or use --nll-coef.
"""

import copy
import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from decimal import Decimal
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
    exp_name: str = "dpo"
    """Name of the run's folder, with the seed and the time."""
    seed: int = 1
    """Seed of the data order and of the sampled completions."""
    output_dir: str = "runs"
    """Where the run's folder is made."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint; its flags are taken from there."""
    save_every: int = 50
    """Optimiser steps between checkpoints; there is always one at the end."""
    track: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str = "plainrlhf"
    """Project for --track."""

    # --- model and data ---
    model: str = "tiny/reviews/policy"
    """Folder or hub name of the policy and its tokenizer; also the reference, so it must stay as it
    is while the run lasts."""
    dataset: str = "tiny/reviews/preferences"
    """Folder with train.jsonl and test.jsonl, or hub name. Rows have `prompt`, `chosen` and
    `rejected` (strings or chat messages), or only the latter two, as whole conversations."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    train_split: str = "train"
    """Rows to train on; slices such as train[:95%] work."""
    eval_split: str = "test"
    """Held-out rows; for a dataset without a test split, a slice such as train[95%:]."""
    prompt_column: str = "prompt"
    """Column that holds the prompt, if there is one; `none` where chosen and rejected hold it."""
    chosen_column: str = "chosen"
    """Column that holds the preferred completion."""
    rejected_column: str = "rejected"
    """Column that holds the other completion."""
    answer_column: str = "answer"
    """Column given to the rule of --eval-reward-fn as `answer`, if there is one."""
    chat: bool = False
    """Turn string prompts and completions into chat messages of a user and an assistant."""
    max_length: int = 128
    """Longest prompt and completion together, in tokens; completions are cut off there, and pairs
    whose prompt leaves no room are dropped and counted."""

    # --- DPO ---
    beta: float = 0.3
    """How much leaving the reference costs; the implicit reward is beta times the log-ratio. Large
    models often take 0.1. IPO aims at 1 / (2 beta) nats a token: try 1 with --loss ipo."""
    loss: Literal["dpo", "ipo"] = "dpo"
    """The loss of DPO, or of IPO, which is least at a finite distance."""
    label_smoothing: float = 0.0
    """eps, the probability that a label is wrong (conservative DPO)."""
    nll_coef: float = 0.0
    """Coefficient of the chosen completion's negative log-likelihood, nats a token."""
    online_reference: bool = False
    """Keep the reference in memory and run it in every step, instead of once before training: the
    same numbers up to rounding, for a second model's weights and a forward pass more a step."""

    # --- optimisation ---
    epochs: float = 3.0
    """Passes over the training pairs."""
    batch_size: int = 32
    """Pairs an optimiser step."""
    micro_batch_size: int = 32
    """Pairs a forward pass: memory and speed, never the result."""
    learning_rate: float = 5e-4
    """AdamW's peak learning rate."""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """How the learning rate falls to 0 after the warm-up, or stays."""
    warmup_ratio: float = 0.1
    """Part of the run over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    # --- evaluation ---
    eval_every: int = 100
    """Optimiser steps between evaluations; there is always one at the start and one at the end."""
    eval_rows: int = 500
    """Held-out pairs, at most; their prompts are completed too, 2 x --batch-size at a time."""
    eval_reward_fn: str | None = "tiny/reviews/gold.py:sentiment"
    """Rule that judges the sampled completions, for eval/reward and eval/accuracy: `last_number`,
    or your own as path/to/file.py:function; None for no judge."""
    max_new_tokens: int = 40
    """Longest sampled completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature at evaluation; it divides the logits in eval/kl too."""


# --- the mathematics ---------------------------------------------------------------------------


def dpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float
) -> torch.Tensor:
    """- (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h) of each pair.

    Its derivative with respect to h is beta (sigmoid(beta h) - (1 - eps)): large where the
    implicit reward ranks a pair wrongly, and 0 where sigmoid(beta h) is the label's own certainty.

    Args:
        chosen, rejected: (B,) float32 log(pi / pi_ref) of the two completions, in nats; h is their
            difference.
        label_smoothing: eps in [0, 0.5).

    Returns:
        (B,); ln 2 where h = 0, whatever eps.
    """
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * torch.nn.functional.logsigmoid(logits)
    return loss - label_smoothing * torch.nn.functional.logsigmoid(-logits)


def ipo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """(h - 1 / (2 beta))^2 of each pair (IPO, equation 17).

    Args:
        chosen, rejected: (B,) float32 log(pi / pi_ref) of the two completions, in nats a token.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def preference_loss(
    args: Args, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each pair as --loss, --beta, --label-smoothing and --nll-coef say.

    Args:
        logprobs, ref_logprobs: (B, 2) float32 log pi(y|x) and log pi_ref(y|x), summed over the
            tokens, in nats; chosen first. Only the former carries a gradient.
        lengths: (B, 2) tokens of the completions.

    Returns:
        The losses (B,), and the metrics (B,) of each pair.
    """
    log_ratios = logprobs - ref_logprobs
    if args.loss == "ipo":
        log_ratios = log_ratios / lengths
        loss = ipo_loss(*log_ratios.unbind(dim=1), args.beta)
    else:
        loss = dpo_loss(*log_ratios.unbind(dim=1), args.beta, args.label_smoothing)
    if args.nll_coef > 0:
        loss = loss - args.nll_coef * logprobs[:, 0] / lengths[:, 0]
    rewards, logprobs = args.beta * log_ratios.detach(), logprobs.detach()
    margin = rewards[:, 0] - rewards[:, 1]
    return loss, {
        "reward/chosen": rewards[:, 0],
        "reward/rejected": rewards[:, 1],
        "reward/margin": margin,
        # A tie counts half: before the first step all pairs are ties.
        "reward/accuracy": 0.5 + 0.5 * margin.sign(),
        "policy/logprob_chosen": logprobs[:, 0],
        "policy/logprob_rejected": logprobs[:, 1],
    }


# --- the reward --------------------------------------------------------------------------------

# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w.)])[-+])?)\$?(?P<digits>(\d{1,3}(,\d{3})+(?!\d)|\d+)(\.\d+)?|\.\d+)",
    re.ASCII,
)


def last_number(
    prompts: list, completions: list[str], answer: list, **columns: list
) -> list[float | None]:
    """1 where the completion's last number equals the answer's last number, else 0.

    Serves answers such as `5` and GSM8K's `... #### 1,234`. An answer without a number gives
    None, which ends the run with the row's prompt.
    """

    def find(text: Any) -> Decimal | None:
        numbers = list(NUMBER.finditer(str(text)))
        if not numbers:
            return None
        return Decimal(numbers[-1]["sign"] + numbers[-1]["digits"].replace(",", ""))

    return [
        None if find(right) is None else float(find(completion) == find(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def import_reward_fn(flag: str, spec: str) -> Callable:
    """A rule of this file by its name, or a function from path/to/file.py:function."""
    if spec == "last_number":
        return last_number
    path, _, name = spec.rpartition(":")
    known = path.endswith(".py") and Path(path).is_file()
    require(known, f"{flag} {spec}: neither last_number nor path/to/file.py:function")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"error: {flag} {spec}: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    require(callable(function), f"{flag} {spec}: there is no function {name} in {path}")
    return function


def load_reward_fns(flag: str, specs: tuple[str, ...], row: dict) -> dict[str, Callable]:
    """Reward functions by name; each must accept the columns of a row of the dataset."""
    functions = {}
    for spec in specs:
        name = spec.rpartition(":")[2]
        taken = {*functions, "mean", "std", "zero_variance_groups", "reward_model"}
        require(name not in taken, f"{flag} {spec}: reward/{name} is the name of another metric")
        functions[name] = import_reward_fn(flag, spec)
        try:
            signature = inspect.signature(functions[name])
            signature.bind(prompts=[], completions=[], **row["columns"])
        except TypeError as error:
            raise SystemExit(
                f"error: {flag} {spec}: {error}; it is called with prompts, completions and the "
                f"columns {sorted(row['columns'])} (see --answer-column)"
            ) from None
    return functions


def apply_reward_fn(
    name: str, function: Callable, rows: list[dict], completions: list[str]
) -> torch.Tensor:
    """Rewards (B,) float32 of one completion for each row.

    Of several processes the first calls the function, with all of the rows: it may compare them.
    """
    if RANK > 0:
        return torch.tensor(gather([]))
    prompts = [row["prompt"] for row in rows]
    columns = {key: [row["columns"][key] for row in rows] for key in rows[0]["columns"]}
    rewards = function(prompts=prompts, completions=completions, **columns)
    require(
        hasattr(rewards, "__len__")
        and len(rewards) == len(completions)
        and not isinstance(rewards, str | dict),
        f"reward function {name} must return a list of {len(completions)} numbers, one for each "
        f"completion; it returned {rewards!r:.200}",
    )
    values = []
    for row, completion, reward in zip(rows, completions, rewards, strict=True):
        try:
            values.append(float(reward))
        except (TypeError, ValueError):
            values.append(math.nan)
        require(
            math.isfinite(values[-1]),
            f"reward function {name} returned {reward!r} for the completion {completion!r} of the "
            f"prompt {row['prompt']!r} with {row['columns']}; rules are given by --eval-reward-fn "
            "and, for training, --reward-fn",
        )
    return torch.tensor(gather(values))


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


def to_preference(args: Args, row: dict, where: str) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected of a row; a prompt that is not given is what the two share."""
    for flag in ("chosen_column", "rejected_column"):
        require(
            getattr(args, flag) in row,
            f"{where}: no --{flag.replace('_', '-')} {getattr(args, flag)}, only {sorted(row)}",
        )
    require(
        args.prompt_column in row or args.prompt_column in ("prompt", "none"),
        f"{where}: no --prompt-column {args.prompt_column}, only {sorted(row)}",
    )
    chosen, rejected = row[args.chosen_column] or "", row[args.rejected_column] or ""
    prompt = row.get(args.prompt_column) or ""
    kinds = {type(part).__name__ for part in (prompt, chosen, rejected) if part}
    require(
        kinds in (set(), {"str"}, {"list"}),
        f"{where}: prompt, chosen and rejected must all be strings or all lists of chat messages, "
        f"found {sorted(kinds)}. (If chosen and rejected are whole conversations, leave out the "
        "prompt with --prompt-column none)",
    )
    if not chosen or not rejected:
        return prompt, chosen, rejected
    if args.prompt_column not in row and kinds == {"list"}:
        prompt, chosen, other, rejected = chosen[:-1], chosen[-1:], rejected[:-1], rejected[-1:]
        require(
            prompt == other,
            f"{where}: the two conversations must be the same up to their last message",
        )
    elif args.prompt_column not in row:
        pairs = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)
        )
        shared = "".join(character for character, _ in pairs)
        # Cut in front of white space, where most tokenizers do not merge.
        prompt = re.match(r"(.*\S(?=\s))?", shared, re.DOTALL)[0]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if args.chat and kinds == {"str"}:
        prompt = [{"role": "user", "content": prompt}]
        chosen, rejected = ([{"role": "assistant", "content": c}] for c in (chosen, rejected))
    return prompt, chosen, rejected


def is_blank(part: str | list) -> bool:
    """Whether a prompt or a side, a string or chat messages, ends with nothing."""
    last = part[-1] if isinstance(part, list) and part else part
    text = last.get("content", last) if isinstance(last, dict) else last
    return not str(text or "").strip()


@dataclass
class Pair:
    """Token ids of a prompt and of its two completions, and what else is known of them."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    row: dict  # `prompt` as it was given, and the other `columns`: what a rule is called with
    reference: list[float] | None = None  # log pi_ref of chosen and rejected, in nats


def load_preference_pairs(
    args: Args, split: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> list[Pair]:
    """The pairs of a split; says what was dropped and why."""
    dataset = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    pairs, empty, merged, no_room, equal, cut = [], 0, 0, 0, 0, 0
    for index, columns in enumerate(dataset):
        where = f"--dataset {args.dataset}, row {index} of {split}"
        prompt, *sides = to_preference(args, columns, where)
        if any(map(is_blank, (prompt, *sides))):
            empty += 1
            continue
        encoded = [encode_pair(tokenizer, prompt, side, stop_ids, where) for side in sides]
        if None in encoded:
            merged += 1
            continue
        (prompt_ids, chosen), (_, rejected) = encoded
        room = args.max_length - len(prompt_ids)
        if room <= 0:
            no_room += 1
        elif chosen[:room] == rejected[:room]:
            equal += 1
        else:
            for name in (args.prompt_column, args.chosen_column, args.rejected_column):
                columns.pop(name, None)
            if args.answer_column in columns:
                columns["answer"] = columns.pop(args.answer_column)
            row = {"prompt": prompt, "ids": prompt_ids, "columns": columns}
            pairs.append(Pair(prompt_ids, chosen[:room], rejected[:room], row))
            cut += len(chosen) > room or len(rejected) > room
    found = (
        f"{split}: {len(pairs)} of {len(dataset)} pairs, {cut} cut off at --max-length "
        f"{args.max_length}; dropped {empty} with an empty prompt or side, {merged} with one that "
        f"changes the prompt's tokens, {no_room} whose prompt leaves no room and {equal} with "
        "chosen equal to rejected"
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
        "save_every max_length beta batch_size micro_batch_size eval_every eval_rows "
        "max_new_tokens epochs learning_rate max_grad_norm temperature"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, found {value}")
    for name in ("seed", "warmup_ratio", "weight_decay", "nll_coef"):
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{name} must not be negative or infinite, found {value}")
    require(
        0 <= args.label_smoothing < 0.5,
        f"--label-smoothing must be at least 0 and less than 0.5, found {args.label_smoothing}",
    )
    require(
        args.loss == "dpo" or args.label_smoothing == 0,
        f"--label-smoothing {args.label_smoothing} belongs to --loss dpo",
    )
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


@dataclass
class Rollout:
    """B completions; the L columns hold the prompt, padded on the left, and the completion."""

    rows: list[dict]  # B rows of the dataset
    ids: torch.Tensor  # (B, L) tokens
    attention_mask: torch.Tensor  # (B, L) bool, prompt and completion
    completion_mask: torch.Tensor  # (B, L) bool, sampled tokens, the stop token included
    finished: torch.Tensor  # (B,) bool, ended at a stop id
    completions: list[str]  # decoded

    def index(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (b, 1) and columns (l,): `x[rows, columns]` is the (b, l) part of an x (B, L).

        Columns that are padding in all of the rows (b,) are left out.
        """
        return rows[:, None], self.attention_mask[rows].any(dim=0).nonzero().squeeze(1)


def roll_out(
    args: Args,
    policy: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    rows: list[dict],
    temperature: float,
    generator: torch.Generator,
) -> Rollout:
    """Sample one completion for each row."""
    # Any id will do for padding: the masks come from lengths.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [row["ids"] for row in rows]
    sampled, finished = complete(args, policy, prompts, temperature, stop_ids, pad_id, generator)
    prompt_ids, prompt_mask = pad_rows(prompts, pad_id, "left", policy.device)
    ids, mask = pad_rows(sampled, pad_id, "right", policy.device)
    return Rollout(
        rows=rows,
        ids=torch.cat([prompt_ids, ids], dim=1),
        attention_mask=torch.cat([prompt_mask, mask], dim=1),
        completion_mask=torch.cat([torch.zeros_like(prompt_mask), mask], dim=1),
        finished=torch.tensor(finished, device=policy.device),
        completions=tokenizer.batch_decode(sampled, skip_special_tokens=True),
    )


def rollout_logprobs(
    args: Args, model: torch.nn.Module, rollout: Rollout, at: tuple, **options: bool
) -> Any:
    """What `completion_logprobs` gives (b, l) at an index of the rollout, as it was sampled."""
    with autocast(rollout.ids.device):
        return completion_logprobs(
            model,
            rollout.ids[at],
            rollout.attention_mask[at],
            rollout.completion_mask[at],
            args.temperature,
            **options,
        )


def pair_logprobs(model: torch.nn.Module, pairs: list[Pair], pad_id: int) -> torch.Tensor:
    """log pi(y|x) (B, 2) of the chosen and rejected completions, in nats; one forward pass."""
    prompts = [pair.prompt for pair in pairs] * 2
    sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    rows = [prompt + side for prompt, side in zip(prompts, sides, strict=True)]
    ids, mask = pad_rows(rows, pad_id, "right", model.device)  # (2B, L)
    columns = torch.arange(ids.shape[1], device=model.device)
    starts = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    with autocast(model.device):
        logprobs = completion_logprobs(model, ids, mask, mask & (columns >= starts[:, None]))
    return logprobs.sum(dim=1).view(2, len(pairs)).T


@torch.no_grad()
def add_reference(
    model: torch.nn.Module, pairs: list[Pair], batches: list[list[Pair]], pad_id: int
) -> None:
    """Keep log pi_ref of both completions with each of the pairs that has none yet.

    Args:
        batches: the pairs in micro-batches; of several processes, those that this one computes.
    """
    found = {}
    for batch in batches:
        logprobs = pair_logprobs(model, batch, pad_id).tolist()
        found |= {id(pair): values for pair, values in zip(batch, logprobs, strict=True)}
    answers = gather([[found.get(id(pair)) for pair in pairs]])  # a list for each process
    for pair, *values in zip(pairs, *answers, strict=True):
        if pair.reference is None:
            pair.reference = next(value for value in values if value)


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
    train_pairs = load_preference_pairs(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_preference_pairs(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    if args.eval_reward_fn:
        specs = (args.eval_reward_fn,)
        functions = load_reward_fns("--eval-reward-fn", specs, eval_pairs[0].row)
        ((rule_name, rule),) = functions.items()

    policy = shard(load_model("--model", args.model, AutoModelForCausalLM), device)
    reference = None
    if args.online_reference:
        reference = load_model("--model", args.model, AutoModelForCausalLM)
        reference = shard(reference.requires_grad_(False), device)
    positions = getattr(policy.config, "max_position_embeddings", math.inf)
    longest = max(len(pair.prompt) for pair in eval_pairs)
    require(
        max(args.max_length, longest + args.max_new_tokens) <= positions,
        f"--max-length {args.max_length}, or a prompt of {longest} tokens and --max-new-tokens "
        f"{args.max_new_tokens}, is more than the {positions} positions of --model",
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        args.learning_rate,
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # CUDA-only: no temporaries of the weights' size
    )
    total_steps = math.ceil(args.epochs * len(train_pairs) / args.batch_size)
    warmup_steps = int(args.warmup_ratio * total_steps)
    scheduler = get_scheduler(args.lr_schedule, optimizer, warmup_steps, total_steps)

    def split(pairs: list[Pair]) -> list[list[Pair]]:
        """Micro-batches of pairs of similar length, so that little is padded."""
        lengths = [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs]
        return [[pairs[i] for i in rows] for rows in micro_batches(lengths, args.micro_batch_size)]

    def step_pairs(step: int) -> list[Pair]:
        """The pairs of an optimiser step."""
        picked = batch_rows(step, args.batch_size, len(train_pairs), args.seed)
        return [train_pairs[i] for i in picked]

    first_step = 0
    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        first_step = state["step"]
    else:
        run_dir = make_run_dir(args)
    tracker = None
    if args.track and RANK == 0:
        import wandb  # only here: nobody else needs an account

        tracker = wandb.init(
            project=args.wandb_project, id=run_dir.name, resume="allow", config=asdict(args)
        )
    print_models({"policy": policy, "reference": reference})
    print(f"{run_dir}: on {device}, {total_steps} steps")

    eval_batches = split(eval_pairs)
    if reference is None:
        # The policy is still the reference, also on resume. In the micro-batches in which a pair is
        # met first, so that the first loss is exactly ln 2.
        first_epoch = min(total_steps, math.ceil(len(train_pairs) / args.batch_size))
        for step in tqdm(range(first_epoch), desc="reference log-probs", disable=RANK > 0):
            pairs = step_pairs(step)
            add_reference(policy, pairs, split(pairs), pad_id)
        add_reference(policy, eval_pairs, eval_batches, pad_id)

    def losses(pairs: list[Pair]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics (B,) of each pair of a micro-batch."""
        lengths = [[len(p.chosen), len(p.rejected)] for p in pairs]
        lengths = torch.tensor(lengths, device=device).view(-1, 2)  # (B, 2), also where B is 0
        if reference is None:
            ref_logprobs = [pair.reference for pair in pairs]
            ref_logprobs = torch.tensor(ref_logprobs, device=device).view(-1, 2)
        else:
            with torch.no_grad():
                ref_logprobs = pair_logprobs(reference, pairs, pad_id)
        return preference_loss(args, pair_logprobs(policy, pairs, pad_id), ref_logprobs, lengths)

    @torch.no_grad()
    def evaluate() -> tuple[dict, list[dict]]:
        """Metrics of the held-out pairs, and of a sampled completion for each of their prompts."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for pairs in eval_batches:
            loss, found = losses(pairs)
            values = (loss, found["reward/accuracy"], found["reward/margin"])
            sums += torch.stack(values).sum(dim=1)
        names = ("eval/loss", "eval/pair_accuracy", "eval/margin")
        metrics = dict(zip(names, (total(sums) / len(eval_pairs)).tolist(), strict=True))
        # Only for the KL of the samples, and not kept while training.
        judge = reference
        if judge is None:
            judge = shard(load_model("--model", args.model, AutoModelForCausalLM), device)
        # A generator of its own, so that every evaluation draws with the same random numbers.
        draws = torch.Generator().manual_seed(args.seed)
        samples, kl = [], torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(eval_pairs), 2 * args.batch_size):
            rows = [pair.row for pair in eval_pairs[start : start + 2 * args.batch_size]]
            rollout = roll_out(args, policy, tokenizer, stop_ids, rows, args.temperature, draws)
            lengths = rollout.completion_mask.sum(dim=1).tolist()
            for some in micro_batches(lengths, 2 * args.micro_batch_size):
                at = rollout.index(torch.tensor(some, dtype=torch.long, device=device))
                logprobs, ref_logprobs = (
                    rollout_logprobs(args, model, rollout, at) for model in (policy, judge)
                )
                # k1: unbiased, and no single token can carry the mean away, as k3's ratio can.
                kl += (logprobs - ref_logprobs).sum()  # 0 outside the completions
            found = [
                {"prompt": row["prompt"], "completion": text, "length": length}
                for row, text, length in zip(rows, rollout.completions, lengths, strict=True)
            ]
            if args.eval_reward_fn:
                rewards = apply_reward_fn(rule_name, rule, rows, rollout.completions)
                for sample, reward in zip(found, rewards.tolist(), strict=True):
                    sample["reward"] = reward
            samples += found
        if WORLD_SIZE > 1:  # a sharded model and its hooks refer to each other
            del judge
            gc.collect()
        metrics["eval/kl"] = total(kl).item() / len(samples)
        metrics["eval/length_mean"] = np.mean([sample["length"] for sample in samples])
        if args.eval_reward_fn:
            rewards = np.array([sample["reward"] for sample in samples])
            metrics |= {"eval/reward": rewards.mean(), "eval/accuracy": (rewards >= 1).mean()}
        return metrics, samples

    if args.resume:
        load_state(policy, state["policy"])
        load_state(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        del state  # a second copy of all that was loaded
    else:
        log(run_dir, tracker, 0, *evaluate())

    progress = tqdm(
        range(first_step, total_steps), initial=first_step, total=total_steps, disable=RANK > 0
    )
    for step in progress:
        started = time.perf_counter()

        # 1. draw the pairs of this step
        pairs = step_pairs(step)
        tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)

        # 2. optimise: one step, its gradient summed over micro-batches
        loss = torch.zeros((), dtype=torch.float64, device=device)
        sums = defaultdict(float)
        for batch in split(pairs):
            pair_losses, pair_metrics = losses(batch)
            micro_loss = pair_losses.sum() / args.batch_size
            micro_loss.backward()
            loss += micro_loss.detach()
            for name, values in pair_metrics.items():
                sums[name] += values.double().sum()
        loss = total(loss).item()
        grad_norm = clip_gradients(policy.parameters(), args.max_grad_norm)
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
            **{name: total(value).item() / args.batch_size for name, value in sums.items()},
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": scheduler.get_last_lr()[0],
            "time/epoch": done * args.batch_size / len(train_pairs),
            "time/tokens_per_second": tokens / (time.perf_counter() - started),
        }
        scheduler.step()
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate()
            metrics |= eval_metrics
        log(run_dir, tracker, done, metrics, samples)
        progress.set_postfix(loss=f"{loss:.3f}", accuracy=f"{metrics['reward/accuracy']:.2f}")
        if done % args.save_every == 0 or last:
            state = {"policy": policy, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: whole_state(part.state_dict()) for name, part in state.items()}
            save_checkpoint(run_dir, state | {"step": done})

    with gathered(policy, to_save=True) as whole:
        save_model(run_dir, whole, tokenizer, stop_ids)
    if RANK == 0:
        print_evaluations(run_dir)
        print_example(run_dir)
    print(f"model: {run_dir / 'model'}")
    print(f"next: generate with it, or train on from it with --model {run_dir / 'model'}")
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
