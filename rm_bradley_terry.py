r"""Reward modelling (Bradley-Terry): learn from pairs of completions what people prefer.

Somebody saw two completions of a prompt x and preferred y_w to y_l. Give each a score r(x, y) so
that the preferred one is likely to win by the model of Bradley and Terry (1952),

    p(y_w beats y_l) = sigmoid(r(x, y_w) - r(x, y_l)),

by minimising (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155, equation 1)

    L = mean over pairs of  - log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2.

m is an optional margin, how much better the preferred one was (Llama 2, arXiv 2307.09288, section
3.2.2); c is an optional weight that keeps the scores, of which the first term sees only
differences, near 0 (Eisenstein et al. 2023, arXiv 2312.09244). It is stage 2 of InstructGPT.

Deviations from the paper:
1. Pairs, not rankings of K completions. InstructGPT put the K (K - 1) / 2 pairs of a ranking into
   one batch: shuffled among the others, they overfitted in a single epoch.
2. No dropout, and AdamW.
3. The scores are not shifted. The mean score of the held-out preferred completions is left in the
   saved configuration as `score_mean`, which `ppo_rlhf.py` and `grpo.py` subtract. (InstructGPT
   centred on its labellers' demonstrations.)

To read it: the mathematics comes after the flags, the algorithm is `main`, at the end. What lies
between turns files into tensors and back; most of it is the same in every script.

Run it:
    python rm_bradley_terry.py                             # tiny/reviews, half a minute on a CPU
    python rm_bradley_terry.py --model Qwen/Qwen2.5-0.5B-Instruct --max-length 1024 \
        --dataset trl-lib/ultrafeedback_binarized --batch-size 64 --micro-batch-size 8 \
        --epochs 1 --learning-rate 1e-5                    # one GPU, a model and chats from the hub
    torchrun --nproc_per_node=8 rm_bradley_terry.py ...    # eight GPUs: docs/processes.md
    python rm_bradley_terry.py --resume runs/rm_bradley_terry__1__...      # go on after a crash

A healthy run: the first loss is a little above ln 2 = 0.69, a coin's; `eval/pair_accuracy` rises to
about the rate at which people agree with each other, seldom above 0.8 on real data;
`eval/calibration_error` ends below 0.05 to 0.1. If `eval/loss` rises while `reward/accuracy` goes
to 1, it learns by heart: fewer epochs.
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
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.utils import logging as transformers_logging

from common.generation import find_stop_ids, pad_rows, use_bfloat16
from common.logprobs import as_forward, compute_dtype


@dataclass
class Args:
    # --- run ---
    exp_name: str = "rm_bradley_terry"
    """Name of the run's folder, with the seed and the time."""
    seed: int = 1
    """Seed of the data order and of the new head."""
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
    """Folder or hub name of the model and its tokenizer, usually the policy that sft.py made. Its
    transformer gets a new head of one output, unless it has such a head already."""
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
    margin_column: str = "margin"
    """Column that holds m, if there is one: how much better the preferred completion was; `none`
    to do without."""
    chat: bool = False
    """Turn string prompts and completions into chat messages of a user and an assistant."""
    max_length: int = 128
    """Longest prompt and completion together, in tokens; pairs with a longer one are dropped and
    counted: half a completion has no score."""
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the saved model; training is in float32."""

    # --- reward modelling ---
    train_layers: Literal["all"] | int = "all"
    """What is trained: all, or the head and this many of the last layers; 0 is the head alone."""
    center_coef: float = 0.0
    """c, weight of the term that keeps r_w + r_l near 0 (Eisenstein et al.: 0.01)."""

    # --- optimisation ---
    epochs: float = 3.0
    """Passes over the training pairs."""
    batch_size: int = 32
    """Pairs an optimiser step."""
    micro_batch_size: int = 32
    """Pairs a forward pass: memory and speed, never the result."""
    learning_rate: float = 1e-3
    """AdamW's peak learning rate."""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """How the learning rate falls to 0 after the warm-up, or stays."""
    warmup_ratio: float = 0.2
    """Part of the run over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    # --- evaluation ---
    eval_every: int = 50
    """Optimiser steps between evaluations; there is always one at the start and one at the end."""
    eval_rows: int = 500
    """Held-out pairs, at most."""
    eval_samples: int = 20
    """How many of them go into samples.jsonl with their scores."""


# --- the mathematics ---------------------------------------------------------------------------


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, center_coef: float
) -> torch.Tensor:
    """- log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2 of each pair (InstructGPT, equation 1).

    Its derivative with respect to r_w, without c, is sigmoid(r_w - r_l - m) - 1, and with respect
    to r_l the opposite: a pair that is already told apart by far teaches nothing more.

    Args:
        chosen, rejected: (B,) float32 scores r_w and r_l.
        margin: (B,) m, in the units of the scores (Llama 2, equation 2); 0 for none.
        center_coef: c (Eisenstein et al., section 2).

    Returns:
        (B,). `logsigmoid` is exact where the logarithm of a rounded sigmoid would be -inf.
    """
    preference = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
    return preference + center_coef * (chosen + rejected).square()


def calibration(margins: torch.Tensor, bins: int = 5) -> tuple[list[dict[str, float]], float]:
    """Does the completion that is said to win with 80 % win in 80 % of such pairs?

    Args:
        margins: (N,) r_w - r_l of held-out pairs. The predicted winner is the one with the higher
            score, its probability sigmoid(|r_w - r_l|) lies between 0.5 and 1.
        bins: of equal width in that probability.

    Returns:
        For each bin that is not empty its limits, the number of pairs, the mean predicted
        probability and the observed frequency with which the predicted winner was the preferred
        one (a tie counts half); and the expected calibration error, the mean difference of the two
        weighted by pairs (Guo et al. 2017, arXiv 1706.04599, equation 3).
    """
    margins = margins.double()
    predicted = margins.abs().sigmoid()
    observed = (margins > 0).double() + 0.5 * (margins == 0)
    index = ((predicted - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    table = []
    for number in index.unique().tolist():
        inside = index == number
        limits = {"from": 0.5 + 0.5 * number / bins, "to": 0.5 + 0.5 * (number + 1) / bins}
        means = {"predicted": predicted[inside].mean(), "observed": observed[inside].mean()}
        means = {name: mean.item() for name, mean in means.items()}
        table.append(limits | {"pairs": inside.sum().item()} | means)
    errors = [row["pairs"] * abs(row["predicted"] - row["observed"]) for row in table]
    return table, sum(errors) / len(margins)


# --- the reward --------------------------------------------------------------------------------


@as_forward
def reward_model_scores(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Scores (B,) float32 of rows of tokens (B, L): the head's output at the last real token.

    That token is found from the mask, so that the side and the amount of padding do not matter.
    transformers looks for the last id that is not the padding id, which misses a real EOS where
    the tokenizer has one id for both. B may be 0, as in `completion_logprobs`.
    """
    batch = len(input_ids)
    if batch == 0:
        input_ids, attention_mask = input_ids.new_zeros(1, 1), attention_mask.new_ones(1, 1)
    attention_mask = attention_mask.long()
    positions = attention_mask.cumsum(dim=1)
    hidden = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(positions - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    last = (positions * attention_mask).argmax(dim=1)[:batch]
    rows = torch.arange(len(last), device=last.device)
    with torch.autocast(last.device.type, enabled=False):  # bfloat16 would make near rewards equal
        scores = model.score(hidden[rows, last].float())  # (B, 1)
    return scores.squeeze(1).clone()  # FSDP needs no view, but a tensor of its own


def load_classifier(flag: str, source: str, seed: int) -> torch.nn.Module:
    """A transformer with a head of one output, in float32 and in eval mode: dropout is off.

    A head that the checkpoint lacks is drawn from N(0, 1 / (d + 1)) without a bias, d being the
    hidden size (Stiennon et al. 2020, arXiv 2009.01325, appendix B.1).
    """
    options = {"dtype": torch.float32, "num_labels": 1, "output_loading_info": True}
    loader = AutoModelForSequenceClassification.from_pretrained
    model, report = load(flag, source, loader, **options)
    head = getattr(model, "score", None)
    require(
        isinstance(head, torch.nn.Linear) and head.bias is None,
        f"{flag} {source}: {type(model).__name__} has no linear head called `score` without a bias",
    )
    missing = sorted(set(report["missing_keys"]) - {"score.weight"})
    require(
        not missing,
        f"{flag} {source}: weights that {type(model).__name__} needs are not in it: {missing}",
    )
    torch.manual_seed(seed)
    if "score.weight" in report["missing_keys"]:
        torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    # torch gives the input embedding of this id no gradient, and where pad == eos it is the EOS.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def freeze_layers(model: torch.nn.Module, train_layers: str | int) -> None:
    """Leave only the head and the last `train_layers` layers to be trained; "all" freezes none."""
    if train_layers == "all":
        return
    layers = decoder_layers(model)
    count = len(layers)
    require(
        0 <= train_layers <= count,
        f"--train-layers {train_layers}: all, or a number from 0 to the model's {count} layers",
    )
    model.requires_grad_(False)
    for module in (model.score, *layers[count - train_layers :]):
        module.requires_grad_(True)


def separate_padding(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> None:
    """Give the model a padding id that ends no completion, a new token if need be.

    Our own scores do not depend on it. But other programs find the last token of a padded row by
    looking for the last id that is not the padding id: with pad == eos they would score another
    token than we do, and without any they refuse a batch.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


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


@dataclass
class Preference:
    """Token ids of a prompt and its two completions, each ending with its first stop id."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


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


def load_preferences(
    args: Args, split: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int]
) -> list[Preference]:
    """The pairs of a split; says what was dropped and why."""
    dataset = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    pairs, empty, merged, equal, too_long = [], 0, 0, 0, 0
    for index, row in enumerate(dataset):
        where = f"--dataset {args.dataset}, row {index} of {split}"
        prompt, *sides = to_preference(args, row, where)
        if any(map(is_blank, (prompt, *sides))):
            empty += 1
            continue
        encoded = [encode_pair(tokenizer, prompt, side, stop_ids, where) for side in sides]
        if None in encoded:
            merged += 1
            continue
        (prompt_ids, chosen), (_, rejected) = encoded
        optional = args.margin_column in ("margin", "none")
        margin = row.get(args.margin_column, 0.0 if optional else None)
        require(
            isinstance(margin, float | int) and math.isfinite(margin),
            f"{where}: --margin-column {args.margin_column} must be a number, found {margin!r}",
        )
        if chosen == rejected:
            equal += 1
        elif len(prompt_ids) + max(len(chosen), len(rejected)) > args.max_length:
            too_long += 1
        else:
            pairs.append(Preference(prompt_ids, chosen, rejected, float(margin)))
    found = (
        f"{split}: {len(pairs)} of {len(dataset)} pairs; dropped {empty} with an empty prompt or "
        f"side, {merged} with one that changes the prompt's tokens, {equal} with chosen equal to "
        f"rejected and {too_long} longer than --max-length {args.max_length}"
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


# --- training ----------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """What can be seen to be wrong before anything is loaded."""
    for name in (
        "save_every max_length batch_size micro_batch_size eval_every eval_rows eval_samples "
        "epochs learning_rate max_grad_norm"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, found {value}")
    for name in ("seed", "warmup_ratio", "weight_decay", "center_coef"):
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


def score_pairs(
    model: torch.nn.Module, pairs: list[Preference], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (B,) of the chosen and (B,) of the rejected completions, from one forward pass."""
    rows = [pair.prompt + pair.chosen for pair in pairs]
    rows += [pair.prompt + pair.rejected for pair in pairs]
    ids, mask = pad_rows(rows, pad_id, "right", model.device)  # (2B, L)
    with autocast(model.device):
        scores = reward_model_scores(model, ids, mask)
    return scores[: len(pairs)], scores[len(pairs) :]


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
    train_pairs = load_preferences(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_preferences(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]

    model = load_classifier("--model", args.model, args.seed)
    positions = getattr(model.config, "max_position_embeddings", math.inf)
    require(
        args.max_length <= positions,
        f"--max-length {args.max_length} is more than the {positions} positions of --model",
    )
    separate_padding(model, tokenizer, stop_ids)
    freeze_layers(model, args.train_layers)
    model = shard(model, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        args.learning_rate,
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # CUDA-only: no temporaries of the weights' size
    )
    total_steps = math.ceil(args.epochs * len(train_pairs) / args.batch_size)
    warmup_steps = int(args.warmup_ratio * total_steps)
    scheduler = get_scheduler(args.lr_schedule, optimizer, warmup_steps, total_steps)

    def lengths(pairs: list[Preference]) -> list[int]:
        """Tokens of each pair's longer row."""
        return [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs]

    def losses(pairs: list[Preference]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, score of the chosen and score of the rejected completion, each (B,)."""
        chosen, rejected = score_pairs(model, pairs, tokenizer.pad_token_id)
        margin = torch.tensor([pair.margin for pair in pairs], device=device)
        return bradley_terry_loss(chosen, rejected, margin, args.center_coef), chosen, rejected

    @torch.no_grad()
    def evaluate(run_dir: Path) -> tuple[dict, list[dict]]:
        """Metrics and scored samples of the held-out pairs; writes calibration.json."""
        values = torch.zeros(3, len(eval_pairs), device=device)
        for rows in micro_batches(lengths(eval_pairs), args.micro_batch_size):
            values[:, rows] = torch.stack(losses([eval_pairs[i] for i in rows]))
        loss, chosen, rejected = total(values)  # (N,) each
        table, error = calibration(chosen - rejected)
        if RANK == 0:
            (run_dir / "calibration.json").write_text(json.dumps(table, indent=2) + "\n")
        metrics = {
            "eval/loss": loss.mean().item(),
            "eval/pair_accuracy": (chosen > rejected).float().mean().item(),
            "eval/margin": (chosen - rejected).mean().item(),
            "eval/calibration_error": error,
            "eval/score_chosen": chosen.mean().item(),
            "eval/score_rejected": rejected.mean().item(),
        }
        samples = [
            {
                "prompt": tokenizer.decode(pair.prompt, skip_special_tokens=True),
                "chosen": tokenizer.decode(pair.chosen, skip_special_tokens=True),
                "rejected": tokenizer.decode(pair.rejected, skip_special_tokens=True),
                "score_chosen": chosen[i].item(),
                "score_rejected": rejected[i].item(),
            }
            for i, pair in enumerate(eval_pairs[: args.eval_samples])
        ]
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
    print_models({"reward model": model})
    print(f"{run_dir}: on {device}, {total_steps} steps")
    if not args.resume:
        log(run_dir, tracker, 0, *evaluate(run_dir))

    progress = tqdm(
        range(first_step, total_steps), initial=first_step, total=total_steps, disable=RANK > 0
    )
    for step in progress:
        started = time.perf_counter()

        # 1. draw the pairs of this step
        picked = batch_rows(step, args.batch_size, len(train_pairs), args.seed)
        pairs = [train_pairs[i] for i in picked]

        # 2. optimise: one step, its gradient summed over micro-batches
        values = torch.zeros(3, len(pairs), device=device)
        for rows in micro_batches(lengths(pairs), args.micro_batch_size):
            pair_losses, chosen, rejected = losses([pairs[i] for i in rows])
            (pair_losses.sum() / len(pairs)).backward()
            values[:, rows] = torch.stack([pair_losses, chosen, rejected]).detach()
        pair_losses, chosen, rejected = total(values)  # (B,) each
        loss = pair_losses.mean().item()
        grad_norm = clip_gradients(trained, args.max_grad_norm)
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
        tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs)
        metrics = {
            "objective/loss": loss,
            "reward/accuracy": (chosen > rejected).float().mean().item(),
            "reward/margin": (chosen - rejected).mean().item(),
            "reward/chosen": chosen.mean().item(),
            "reward/rejected": rejected.mean().item(),
            "reward/grad_norm": grad_norm,
            "reward/learning_rate": scheduler.get_last_lr()[0],
            "time/epoch": done * args.batch_size / len(train_pairs),
            "time/tokens_per_second": tokens / (time.perf_counter() - started),
        }
        scheduler.step()
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate(run_dir)
            metrics |= eval_metrics
        log(run_dir, tracker, done, metrics, samples)
        progress.set_postfix(loss=f"{loss:.3f}", accuracy=f"{metrics['reward/accuracy']:.2f}")
        if done % args.save_every == 0 or last:
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: whole_state(part.state_dict()) for name, part in state.items()}
            save_checkpoint(run_dir, state | {"step": done})

    # What a good completion scores, for the algorithms that want it to be 0.
    score_mean = evaluate(run_dir)[0]["eval/score_chosen"]
    with gathered(model, to_save=True) as whole:
        whole.config.score_mean = score_mean
        save_model(run_dir, whole.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    if RANK == 0:
        print_evaluations(run_dir)
        print("calibration of the last evaluation: the predicted winner wins")
        for row in json.loads((run_dir / "calibration.json").read_text()):
            print(
                "  predicted {predicted:.2f}, observed {observed:.2f} in {pairs} pairs".format(
                    **row
                )
            )
    print(f"model: {run_dir / 'model'}")
    print(f"next: python ppo_rlhf.py --reward-model {run_dir / 'model'} (with --model its policy)")
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
