r"""Reward modelling (Bradley-Terry): learn from pairs of completions which one people prefer.

Of two completions of a prompt x, y_w was preferred to y_l. Give each a score r(x, y), read at its
last token, such that p(y_w beats y_l) = sigmoid(r_w - r_l) is high (Bradley and Terry 1952):

    minimise the mean over pairs of  - log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2

(InstructGPT, arXiv 2203.02155, equation 1), with an optional margin m (Llama 2, arXiv 2307.09288)
and a term that keeps the sum of the scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244).
Deviations from the paper: pairs, not rankings of K completions; no dropout; a warm-up and a linear
decay; the scores are not shifted, but the mean score of held-out preferred completions is saved as
`score_mean`, which ppo_rlhf.py and grpo.py subtract (InstructGPT: the demonstrations' mean).

    python rm_bradley_terry.py                             # tiny/reviews, half a minute on a CPU
    python rm_bradley_terry.py --model Qwen/Qwen2.5-0.5B-Instruct --max-length 1024 \
        --dataset trl-lib/ultrafeedback_binarized --batch-size 64 --micro-batch-size 8 \
        --epochs 1 --learning-rate 1e-5                    # one GPU, a model and chats from the hub
    torchrun --nproc_per_node=8 rm_bradley_terry.py ...    # eight GPUs: docs/processes.md
    python rm_bradley_terry.py --resume runs/rm_bradley_terry__1__...      # resume after a crash

A healthy run: with a new head and no margin the first loss is near chance level, ln 2 = 0.69;
`eval/pair_accuracy` rises to the rate at which people agree (InstructGPT: 0.73);
`eval/calibration_error` ends below 0.1 (without margins). If `eval/loss` rises again: fewer epochs.
"""

import json
import math
import os
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
import wandb
from datasets import load_dataset
from filelock import FileLock
from torch import Generator, Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import AutoConfig, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast
from common.generation import checkpoint_activations, find_stop_ids, pad_rows, shard
from common.generation import transformer_layers
from common.logprobs import UnusableRow, encode_pair

FULL_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "rm_bradley_terry"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order and of the new head
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 50  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the model; its head of scores is used, or a new one is added
    model: str = "tiny/reviews/policy"
    dataset: str = "tiny/reviews/preferences"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    # column of the prompt; `none`: the prompt is what chosen and rejected begin with
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"  # column of the preferred completion, a string or chat messages
    rejected_column: str = "rejected"  # column of the other completion
    # column of the margin m, which is 0 where the data has none; `none` ignores it
    margin_column: str = "margin"
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    max_length: int = 128  # limit of prompt + completion in tokens; longer pairs are dropped
    # type of the weights in model/; training is in float32
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    # --- training and evaluation ---
    # train the head and this many of the last layers, 0: the head alone; default: all weights
    train_layers: int | None = None
    # c, coefficient of the term that keeps r_w + r_l near 0 (Eisenstein: 0.01)
    center_coef: float = 0.0
    epochs: float = 3.0  # passes over the training pairs
    batch_size: int = 32  # pairs per optimiser step
    micro_batch_size: int = 32  # pairs per forward pass: sets memory and speed, not the result
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    # how the learning rate changes after its warm-up
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    warmup_ratio: float = 0.2  # fraction of the steps over which the learning rate rises
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 50  # optimiser steps between evaluations; always one at the start and the end
    eval_rows: int = 500  # held-out pairs, at most
    eval_samples: int = 20  # held-out pairs that go into samples.jsonl with their scores


class Comparison(NamedTuple):
    texts: dict  # prompt, chosen and rejected: strings or lists of chat messages
    chosen_ids: list[int]  # token ids of the prompt and the preferred completion
    rejected_ids: list[int]  # token ids of the prompt and the other completion
    margin: float  # m


# --- the mathematics ---------------------------------------------------------------------------
def bradley_terry_loss(r_w: Tensor, r_l: Tensor, margins: Tensor, center_coef: float) -> Tensor:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2 of each pair; tensors are (B,), m may be 0.

    For c = 0 the slope is sigmoid(r_w - r_l - m) - 1 in r_w, and the opposite in r_l: it vanishes
    for pairs far apart in the right order. `logsigmoid` is finite where log(sigmoid) is not.
    """
    preference_loss = -torch.nn.functional.logsigmoid(r_w - r_l - margins)
    return preference_loss + center_coef * (r_w + r_l).square()


def calibration(score_gaps: Tensor, bins: int = 5) -> tuple[list[dict[str, float]], float]:
    """Do completions that are predicted to win with 80 % win in 80 % of such pairs?

    The higher score of a pair is predicted to win with p = sigmoid(|r_w - r_l|), from gaps
    r_w - r_l (N,). Returns a row for each bin of p that has pairs, and the expected calibration
    error (Guo et al. 2017, arXiv 1706.04599).
    """
    predicted = score_gaps.double().abs().sigmoid()  # p
    # r_w is always the winner's: 1 where the prediction is right, 0 where not, 1/2 at a tie.
    observed = (score_gaps.double().sign() + 1) / 2
    bin_inds = ((predicted - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    table = []
    for bin_ind in bin_inds.unique().tolist():
        in_bin = bin_inds == bin_ind
        row = {
            "from": 0.5 + 0.5 * bin_ind / bins,
            "to": 0.5 + 0.5 * (bin_ind + 1) / bins,
            "pairs": in_bin.sum().item(),
            "predicted": predicted[in_bin].mean().item(),
            "observed": observed[in_bin].mean().item(),
        }
        table.append(row)
    gaps = [row["pairs"] * abs(row["predicted"] - row["observed"]) for row in table]
    return table, sum(gaps) / len(score_gaps)


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    args = check_args(args)
    run_dir, device, wandb_run = start_run(args)

    # --- data and model ---
    tokenizer, stop_ids = load_tokenizer(args.model)
    train_pairs = load_preferences(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_preferences(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    model = load_classifier(args, tokenizer, stop_ids, device)
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(model)

    # --- optimiser, and where an interrupted run stopped ---
    optimizer = AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    total_steps = math.ceil(args.epochs * len(train_pairs) / args.batch_size)
    training = {"model": (model, optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_pairs).encode()), "score_mean": 0.0}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, total_steps)
    # Set last: a checkpoint brings its own.
    optimizer.param_groups[0]["weight_decay"] = args.weight_decay
    trained = f"{model.num_parameters(only_trainable=True):,} of them trained"
    print(f"{run_dir}: {model.num_parameters():,} parameters, {trained}, on {device}")

    # --- the loop ---
    if not args.resume:
        metrics, samples = evaluate(args, run_dir, model, eval_pairs)
        log(run_dir, wandb_run, 0, metrics, samples)
    rng = Generator().manual_seed(args.seed)
    data_epochs = math.ceil(total_steps * args.batch_size / len(train_pairs))
    shuffles = [torch.randperm(len(train_pairs), generator=rng) for _ in range(data_epochs)]
    batches = torch.cat(shuffles).split(args.batch_size)
    progress = tqdm(range(checkpoint["step"], total_steps), disable=RANK > 0)
    for step in progress:
        # 1. Draw the pairs of this step.
        start_time = time.perf_counter()
        pairs = [train_pairs[i] for i in batches[step]]

        # 2. Optimise: one step, its gradient summed over micro-batches and ranks.
        optimizer.param_groups[0]["lr"] = args.learning_rate * lr_factor(args, step, total_steps)
        results = torch.zeros(3, len(pairs), device=device)  # of each pair: loss, r_w, r_l
        for inds in comparison_micro_batches(pairs, args.micro_batch_size):
            micro_batch = [pairs[i] for i in inds]
            r_w, r_l = pair_scores(model, micro_batch)  # (b,) each
            margins = torch.tensor([pair.margin for pair in micro_batch], device=device)
            pair_losses = bradley_terry_loss(r_w, r_l, margins, args.center_coef)  # (b,)
            loss = pair_losses.sum() / len(pairs)
            loss.backward()
            results[:, inds] = torch.stack([pair_losses, r_w, r_l]).detach()
        grad_norm = clip_grad_norm(model, args.max_grad_norm, run_dir, step)
        optimizer.step()
        optimizer.zero_grad()

        # 3. Log, evaluate, save.
        losses, chosen, rejected = all_reduce_sum(results)  # (B,) each
        num_tokens = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
        metrics = {
            "objective/loss": losses.mean().item(),
            "reward/accuracy": (chosen > rejected).float().mean().item(),
            "reward/margin": (chosen - rejected).mean().item(),  # r_w - r_l, not m
            "reward/chosen": chosen.mean().item(),
            "reward/rejected": rejected.mean().item(),
            "reward/grad_norm": grad_norm,
            "reward/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": (step + 1) * args.batch_size / len(train_pairs),
            "time/tokens_per_second": num_tokens / (time.perf_counter() - start_time),
        }
        samples = []
        is_last = step + 1 == total_steps
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, run_dir, model, eval_pairs)
            metrics |= eval_metrics
            checkpoint["score_mean"] = metrics["eval/score_chosen"]
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], accuracy=metrics["reward/accuracy"])
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, checkpoint | {"step": step + 1})

    model.config.score_mean = checkpoint["score_mean"]  # ppo_rlhf.py and grpo.py subtract it
    save_model(run_dir, model.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    if wandb_run:
        wandb_run.finish()
    print(f"next: python ppo_rlhf.py --reward-model {run_dir / 'model'}", flush=True)
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
    args: Args, run_dir: Path, model: Any, pairs: list[Comparison]
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of the held-out pairs; writes calibration.json."""
    chosen, rejected = score_held_out(model, pairs, args.micro_batch_size).cpu()  # (B,) each
    margins = torch.tensor([pair.margin for pair in pairs])
    losses = bradley_terry_loss(chosen, rejected, margins, args.center_coef)
    table, calibration_error = calibration(chosen - rejected)
    if RANK == 0:
        (run_dir / "calibration.json").write_text(json.dumps(table, indent=2) + "\n")
    metrics = {
        "eval/loss": losses.mean().item(),
        "eval/pair_accuracy": (chosen > rejected).float().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/calibration_error": calibration_error,
        "eval/score_chosen": chosen.mean().item(),
        "eval/score_rejected": rejected.mean().item(),
    }
    samples = []
    for i, pair in enumerate(pairs[: args.eval_samples]):
        scores = {"score_chosen": chosen[i].item(), "score_rejected": rejected[i].item()}
        samples.append(pair.texts | scores)
    return metrics, samples


# --- scores ------------------------------------------------------------------------------------
def comparison_micro_batches(pairs: list[Comparison], size: int) -> Iterator[Tensor]:
    """This rank's indices (b,) into pairs, in groups of similar length. Every rank gets as many
    groups; the last may be empty. The longer completion counts: both are padded to one length.
    """
    lengths = [max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
    longest_first = torch.tensor(lengths).argsort(descending=True, stable=True)
    for group in longest_first.split(size * WORLD_SIZE):
        yield group[RANK::WORLD_SIZE]


def pair_scores(model: Any, pairs: list[Comparison]) -> Tensor:
    """r_w and r_l of b pairs, (2, b), from one forward pass over both completions of each."""
    chosen = [pair.chosen_ids for pair in pairs]
    rejected = [pair.rejected_ids for pair in pairs]
    return last_token_scores(model, chosen + rejected).view(2, len(pairs))


def last_token_scores(model: Any, sequences: list[list[int]]) -> Tensor:
    """Scores (b,) in float32: the head's output at the last token of each list of token ids."""
    # A rank without rows scores a dummy: sharded, all ranks must run every forward pass.
    ids, mask = pad_rows(sequences or [[0]], model.device)  # on the right: needs no attention mask
    with autocast(model.device):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
    scores = model.score(last.float()).squeeze(1)  # float32: in bfloat16 near scores are equal
    return scores[: len(sequences)]


@torch.no_grad()
def score_held_out(model: Any, pairs: list[Comparison], micro_batch_size: int) -> Tensor:
    """r_w and r_l of all pairs, (2, B), without a gradient."""
    scores = torch.zeros(2, len(pairs), device=model.device)
    for inds in comparison_micro_batches(pairs, micro_batch_size):
        scores[:, inds] = pair_scores(model, [pairs[i] for i in inds])
    return all_reduce_sum(scores)


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


def load_classifier(args: Args, tokenizer: Any, stop_ids: list, device: Any) -> torch.nn.Module:
    """A transformer with a head of one output, in float32 and in eval mode: dropout is off."""
    with explain(f"--model {args.model}"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            args.model, dtype=torch.float32, num_labels=1, output_loading_info=True
        )
        check(hasattr(model, "score"), f"{type(model).__name__} has no linear head `score`")
        missing = sorted({*info["missing_keys"]} - {"score.weight"})
        check(not missing, f"missing from it: {missing}")
        limit = getattr(model.config, "max_position_embeddings", args.max_length)
        message = f"it has {limit} positions, --max-length allows {args.max_length}"
        check(args.max_length <= limit, message)
    torch.manual_seed(args.seed)
    if "score.weight" in info["missing_keys"]:  # N(0, 1/(d + 1)), arXiv 2009.01325, B.1
        torch.nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    # transformers scores the last id that is not the padding, so the padding must not end a text.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if args.train_layers is not None:
        with explain("--train-layers"):
            layers = transformer_layers(model)
            check(args.train_layers <= len(layers), f"the model has only {len(layers)} layers")
        model.requires_grad_(False)
        for part in (model.score, *layers[len(layers) - args.train_layers :]):
            part.requires_grad_(True)
    return shard(model, device)


def load_preferences(args: Args, split: str, tokenizer: Any, stop_ids: list) -> list[Comparison]:
    """The pairs of a split; those that cannot be used are dropped, counted and reported."""
    pairs, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        check_folder(args.dataset)
        dataset = load_dataset(args.dataset, args.dataset_config, split=split)
    for index, row in enumerate(dataset):
        with explain(f"--dataset {args.dataset}, row {index} of {split}"):
            prompt, chosen, rejected = to_preference(args, row)
            texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            margin = find_margin(args, row)
            try:
                x, y_w = encode_pair(tokenizer, prompt, chosen, stop_ids)
                x, y_l = encode_pair(tokenizer, prompt, rejected, stop_ids)
                if len(x) + max(len(y_w), len(y_l)) > args.max_length:
                    raise UnusableRow(f"longer than --max-length {args.max_length}")
                if y_w == y_l:
                    raise UnusableRow("with chosen equal to rejected")
                pairs.append(Comparison(texts, x + y_w, x + y_l, margin))
            except UnusableRow as reason:
                dropped[str(reason)].append(texts)
    report_rows(args, split, pairs, dropped)
    return pairs


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


def find_margin(args: Args, row: dict) -> float:
    """m of a row: 0 with --margin-column none, or without a column of the default's name."""
    flag = f"--margin-column {args.margin_column}"
    if args.margin_column in row:
        margin = row[args.margin_column]
        is_number = isinstance(margin, float | int) and math.isfinite(margin)
        check(is_number, f"{flag}: no number, but {margin!r}")
        return float(margin)
    check(args.margin_column in ("margin", "none"), f"{flag}: no such column in {sorted(row)}")
    return 0.0


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
        check_numbers(args, "train_layers seed center_coef warmup_ratio weight_decay", zero=True)
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
