r"""Group Relative Policy Optimization (GRPO): reinforcement learning without a critic.

For each prompt q sample a group of G completions o_1..o_G from the policy, reward each, and let the
group's own mean be the baseline. Maximise (DeepSeekMath, arXiv 2402.03300, equation 3)

    J(theta) = E[ (1/G) sum_i (1/|o_i|) sum_t
                  min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it ],

    rho_it = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t),
    A_i    = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-4),   the same for every token of o_i,
    KL_it  = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1,        the k3 estimator, at token t.

Deviations from the paper:
1. Outcome rewards only (the paper's process rewards need a reward model that judges steps).
2. The reference stays the starting policy; the paper may replace it between iterations.
3. The standard deviation is that of a sample (divided by G - 1), with 1e-4 added; the paper says
   neither. Equal rewards give an advantage of exactly 0.
4. `--kl-placement reward` subtracts beta times the summed log-ratio of the whole completion from
   its reward instead, as PPO does. k3 in the loss sees each token by itself, and as a loss it has
   the gradient of KL(pi_ref || pi). Against a learned reward that holds the policy less well. Where
   a rule gives a whole group one reward, though, the KL alone ranks it, and --scale-rewards blows
   that up whatever beta; take --no-scale-rewards with it there.
5. Later papers' variants are flags: DAPO's (arXiv 2503.14476) clip-higher, token mean and masking
   of cut-off completions; Dr. GRPO's (arXiv 2503.20783) constant length and undivided advantages.

To read it: the mathematics comes after the flags, the algorithm is `main`, at the end. What lies
between turns files into tensors and back; most of it is the same in every script.

Run it:
    python grpo.py                                       # tiny/arithmetic, a minute on a CPU
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --dataset-config main \
        --prompt-column question --chat --max-prompt-length 256 --max-new-tokens 512 \
        --prompts-per-rollout 16 --num-minibatches 1 --micro-batch-size 8 --learning-rate 1e-6
    torchrun --nproc_per_node=8 grpo.py ...              # eight GPUs: docs/processes.md
    python grpo.py --resume runs/grpo__1__...            # go on after a crash

A healthy run: `reward/mean` and `eval/accuracy` rise together; `policy/entropy` falls slowly, not
to 0 at once; `reward/zero_variance_groups` rises as prompts are solved; clip fractions stay below a
few per cent; `completions/truncated_fraction` stays low.
"""

import copy
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
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    get_scheduler,
)
from transformers.utils import logging as transformers_logging

from common.generation import find_stop_ids, generate, pad_rows, use_bfloat16
from common.logprobs import as_forward, completion_logprobs, compute_dtype


@dataclass
class Args:
    # --- run ---
    exp_name: str = "grpo"
    """Name of the run's folder, with the seed and the time."""
    seed: int = 1
    """Seed of the data order and of all sampling."""
    output_dir: str = "runs"
    """Where the run's folder is made."""
    resume: str | None = None
    """Folder of a run to go on with from its last checkpoint; its flags are taken from there."""
    save_every: int = 20
    """Rollouts between checkpoints; there is always one at the end."""
    track: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str = "plainrlhf"
    """Project for --track."""

    # --- model and data ---
    model: str = "tiny/arithmetic/policy"
    """Folder or hub name of the policy and its tokenizer; also the reference."""
    dataset: str = "tiny/arithmetic/prompts"
    """Folder with train.jsonl and test.jsonl, or hub name. Rows have `prompt` (a string or chat
    messages) and the columns that the reward functions ask for."""
    dataset_config: str | None = None
    """Configuration of a hub dataset that has several."""
    train_split: str = "train"
    """Rows to train on; slices such as train[:95%] work."""
    eval_split: str = "test"
    """Held-out rows; for a dataset without a test split, a slice such as train[95%:]."""
    prompt_column: str = "prompt"
    """Column that holds the prompt."""
    answer_column: str = "answer"
    """Column given to the reward functions as `answer`."""
    chat: bool = False
    """Turn string prompts into one chat message of a user each."""
    max_prompt_length: int = 64
    """Longest prompt in tokens; rows with longer ones are dropped and counted."""

    # --- reward ---
    reward_fn: tuple[str, ...] = ()
    """Rules that score completions: `last_number`, or your own as path/to/file.py:function. With
    neither this nor --reward-model it is `last_number`."""
    reward_model: str | None = None
    """Folder or hub name of a sequence classifier with one label, over the policy's tokenizer."""
    reward_weights: tuple[float, ...] = ()
    """A weight for each of --reward-fn, then one for --reward-model; all 1 if left out."""
    eval_reward_fn: str | None = None
    """Rule for eval/reward and eval/accuracy; the training reward if left out."""

    # --- GRPO ---
    total_rollouts: int = 60
    """Rollouts, each followed by its optimiser steps."""
    prompts_per_rollout: int = 32
    """Prompts a rollout."""
    group_size: int = 8
    """G, completions a prompt (DeepSeekMath: 64)."""
    max_new_tokens: int = 24
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; it divides the logits in all log-probabilities too."""
    beta: float = 0.04
    """Coefficient of the KL term (DeepSeekMath: 0.04); at 0 no reference model is loaded."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL term stands: k3 in the loss (GRPO), or k1 of the whole completion in its reward
    (as in PPO); see above, and the results in docs/grpo.md."""
    clip_coef: float = 0.2
    """eps: the ratio counts down to 1 - eps (PPO, arXiv 1707.06347)."""
    clip_coef_high: float | None = None
    """The ratio counts up to 1 + this; --clip-coef if left out (DAPO's clip-higher: 0.28)."""
    update_epochs: int = 1
    """Passes over each rollout. With one pass and one minibatch the ratio is always 1."""
    num_minibatches: int = 4
    """Optimiser steps a pass."""
    scale_rewards: bool = True
    """Divide advantages by the group's standard deviation (Dr. GRPO, arXiv 2503.20783: do not)."""
    loss_norm: Literal["sequence", "token", "constant"] = "sequence"
    """Average over a completion's tokens, then over completions (GRPO); over all tokens (DAPO,
    arXiv 2503.14476); or divide by completions x --max-new-tokens (Dr. GRPO)."""
    mask_truncated: bool = False
    """Leave completions that were cut off at --max-new-tokens out of the loss (DAPO)."""

    # --- optimisation ---
    micro_batch_size: int = 64
    """Completions a forward pass: memory and speed, never the result."""
    learning_rate: float = 5e-4
    """AdamW's peak learning rate."""
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"
    """How the learning rate falls to 0 after the warm-up, or stays."""
    warmup_ratio: float = 0.0
    """Part of the run over which the learning rate rises from 0."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""

    # --- evaluation ---
    eval_every: int = 20
    """Rollouts between evaluations; there is always one at the start and one at the end."""
    eval_rows: int = 500
    """Held-out prompts, at most; one completion each."""
    eval_temperature: float = 1.0
    """Sampling temperature at evaluation; 0 is greedy."""


# --- the mathematics ---------------------------------------------------------------------------


def group_advantages(rewards: torch.Tensor, group_size: int, scale: bool = True) -> torch.Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group (DeepSeekMath, section 4.1.2).

    Args:
        rewards: (N * G,) float32, the G completions of a prompt next to each other.
        group_size: G, at least 2.
        scale: divide by the sample standard deviation; off, A_i = r_i - mean(r) (Dr. GRPO).

    Returns:
        (N * G,) float32. Exactly 0 in a group of equal rewards: a float64 sum of G equal float32
        numbers is exact, so the mean is that number.
    """
    groups = rewards.double().view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.view(-1).float()


def clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), to be maximised (PPO, equation 7).

    Args:
        log_ratio: (B, L) log rho = log pi_theta - log pi_old.
        advantages: (B, 1) or (B, L).

    Returns:
        (B, L). Where a token's ratio has left the interval in the direction that its advantage
        pushes, the value is constant and the gradient 0.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def k3_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    An estimate, from tokens sampled from pi, of KL(pi || pi_ref) in nats: unbiased, never negative,
    0 where the two agree. As a loss its expected gradient on tokens of the current policy is that
    of the other direction, KL(pi_ref || pi); both pull pi towards pi_ref.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def shaped_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """r_t = - beta (log pi_old - log pi_ref)_t + 1[t = last] score (InstructGPT, equation 2).

    The log-ratio is k1, the plain estimate of KL(pi_old || pi_ref). As part of the reward it needs
    no gradient of its own.

    Args:
        scores: (B,), one for each completion, given at its last sampled token.
        logprobs, ref_logprobs: (B, L) of the sampled tokens, in nats, as they were at sampling.
        mask: (B, L) bool, the sampled tokens.

    Returns:
        (B, L), 0 outside the mask.
    """
    rewards = -beta * (logprobs - ref_logprobs).masked_fill(~mask, 0.0)
    tokens = mask.cumsum(dim=1)
    last = mask & (tokens == tokens[:, -1:])
    return rewards + last * scores[:, None]


def token_weights(loss_mask: torch.Tensor, loss_norm: str, max_new_tokens: int) -> torch.Tensor:
    """The weight of each token in the loss of one optimiser step, so that loss = sum(w * term).

    Args:
        loss_mask: (B, L) bool over all completions of the step, not of a micro-batch: the
            micro-batches' losses and gradients then add up to the step's, however it is split.
        loss_norm: sequence, 1 / (|o_i| x number of completions): GRPO; token, 1 / number of
            tokens: DAPO; constant, 1 / (max_new_tokens x number of completions): Dr. GRPO.

    Returns:
        (B, L) float32, 0 outside the mask. A completion without any token in the mask is not
        counted among the completions.
    """
    lengths = loss_mask.sum(dim=1, keepdim=True)  # (B, 1)
    completions = (lengths > 0).sum().clamp(min=1)
    if loss_norm == "sequence":
        return loss_mask / (lengths.clamp(min=1) * completions)
    if loss_norm == "token":
        return loss_mask / lengths.sum().clamp(min=1)
    return loss_mask / (max_new_tokens * completions)


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    beta: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-J(theta) of the module's docstring, over some completions of an optimiser step.

    Args:
        logprobs, old_logprobs, ref_logprobs: (B, L) log pi_theta, log pi_old and log pi_ref of the
            sampled tokens, in nats. Only the first carries a gradient; without a reference the
            last is None.
        advantages: (B,).
        mask: (B, L) bool, the sampled tokens; nothing outside it reaches the loss or a metric.
        weights: (B, L) from `token_weights`.
        beta: coefficient of the KL term; 0 leaves it out.

    Returns:
        The loss, a scalar, and sums over the sampled tokens for the metrics: the k3 estimates of
        KL(pi_theta || pi_ref) and of KL(pi_old || pi_theta), and how many tokens are clipped.
    """
    # Filled before the exponential: garbage at padding could overflow, and 0 x inf is NaN.
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    advantages = advantages[:, None]
    objective = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    with torch.no_grad():
        ratio = log_ratio.exp()
        sums = {
            "policy/approx_kl": (ratio - 1 - log_ratio).sum(),
            "policy/clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).sum(),
            "policy/clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).sum(),
        }
    if ref_logprobs is not None:
        kl = k3_kl(logprobs.masked_fill(~mask, 0.0), ref_logprobs.masked_fill(~mask, 0.0))
        sums["objective/kl"] = kl.detach().sum()
        if beta > 0:
            objective = objective - beta * kl
    return -(weights * objective).sum(), sums


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


def load_reward_model(source: str, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """A frozen classifier with one label that knows the policy's tokens: it scores their ids."""
    own = load("--reward-model", source, AutoTokenizer.from_pretrained)
    same = tokenizer.get_vocab().items() <= own.get_vocab().items()  # it may have one for padding
    require(same, f"--reward-model {source}: its tokenizer is not that of --model")
    model = load_model("--reward-model", source, AutoModelForSequenceClassification)
    require(
        model.config.num_labels == 1 and hasattr(model, "score"),
        f"--reward-model {source}: {type(model).__name__} with {model.config.num_labels} labels; "
        "one label and a head called `score` are expected",
    )
    return model.requires_grad_(False)


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


def load_prompts(args: Args, split: str, tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Rows of `prompt`, its token `ids` and the other `columns`; says what was dropped and why."""
    dataset = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    rows, empty, too_long = [], 0, 0
    for index, columns in enumerate(dataset):
        where = f"--dataset {args.dataset}, row {index} of {split}"
        require(
            args.prompt_column in columns,
            f"{where}: no --prompt-column {args.prompt_column}, only {sorted(columns)}",
        )
        prompt = columns.pop(args.prompt_column)
        if args.answer_column in columns:
            columns["answer"] = columns.pop(args.answer_column)
        if args.chat and prompt and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = encode_prompt(tokenizer, prompt, where) if prompt else []
        empty += not ids
        too_long += len(ids) > args.max_prompt_length
        if 0 < len(ids) <= args.max_prompt_length:
            rows.append({"prompt": prompt, "ids": ids, "columns": columns})
    found = (
        f"{split}: {len(rows)} of {len(dataset)} prompts; dropped {empty} empty and {too_long} "
        f"longer than --max-prompt-length {args.max_prompt_length}"
    )
    print(found)
    require(rows, f"--dataset {args.dataset}: nothing is left of {found}")
    return rows


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
        "save_every max_prompt_length total_rollouts prompts_per_rollout max_new_tokens "
        "temperature update_epochs num_minibatches micro_batch_size learning_rate max_grad_norm "
        "eval_every eval_rows"
    ).split():
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, found {value}")
    for name in ("seed", "beta", "warmup_ratio", "eval_temperature"):
        value = getattr(args, name)
        name = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{name} must not be negative or infinite, found {value}")
    require(args.group_size >= 2, f"--group-size must be at least 2, found {args.group_size}")
    require(0 < args.clip_coef < 1, f"--clip-coef must lie between 0 and 1, found {args.clip_coef}")
    require(
        args.clip_coef_high is None or args.clip_coef_high > 0,
        f"--clip-coef-high must be more than 0, found {args.clip_coef_high}",
    )
    completions = args.prompts_per_rollout * args.group_size
    require(
        args.num_minibatches <= completions,
        f"--num-minibatches {args.num_minibatches} is more than the {completions} completions of a "
        "rollout (--prompts-per-rollout x --group-size)",
    )
    rewards = max(1, len(args.reward_fn) + bool(args.reward_model))
    require(
        len(args.reward_weights) in (0, rewards),
        f"--reward-weights: {len(args.reward_weights)} weights for {rewards} rewards",
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


def score(
    args: Args,
    rollout: Rollout,
    functions: dict[str, Callable],
    reward_model: torch.nn.Module | None,
    weights: tuple[float, ...],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of all rewards (B,), and each of them by name (B,), before weighting.

    `rm_bradley_terry.py` leaves with its models the mean score of preferred completions; it is
    subtracted, so that such a completion scores about 0 (after InstructGPT, section 3.5).
    """
    device, parts = rollout.ids.device, {}
    for name, function in functions.items():
        parts[name] = apply_reward_fn(name, function, rollout.rows, rollout.completions).to(device)
    if reward_model is not None:
        scores = torch.zeros(len(rollout.rows), device=device)
        lengths = rollout.attention_mask.sum(dim=1).tolist()
        for rows in micro_batches(lengths, args.micro_batch_size):
            rows = torch.tensor(rows, dtype=torch.long, device=device)
            at = rollout.index(rows)
            with autocast(device):
                scores[rows] = reward_model_scores(
                    reward_model, rollout.ids[at], rollout.attention_mask[at]
                )
        parts["reward_model"] = total(scores) - getattr(reward_model.config, "score_mean", 0.0)
    weights = torch.tensor(weights or [1.0] * len(parts), dtype=torch.float32, device=device)
    return weights @ torch.stack(list(parts.values())), parts


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


def plan_pass(
    args: Args, lengths: torch.Tensor, generator: torch.Generator
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """A pass over a rollout in random order: row numbers of each minibatch, and its micro-batches.

    Of several processes each gets all of the former, but micro-batches of its own rows.
    """
    order = torch.randperm(len(lengths), generator=generator).to(lengths.device)
    return [
        (
            rows,
            [rows[some] for some in micro_batches(lengths[rows].tolist(), args.micro_batch_size)],
        )
        for rows in order.tensor_split(args.num_minibatches)
    ]


def completion_metrics(
    rewards: torch.Tensor, parts: dict[str, torch.Tensor], rollout: Rollout
) -> dict[str, float]:
    """What is logged of a rollout itself."""
    lengths = rollout.completion_mask.sum(dim=1).float()
    return {
        "reward/mean": rewards.mean().item(),
        **{f"reward/{name}": values.mean().item() for name, values in parts.items()},
        "completions/length_mean": lengths.mean().item(),
        "completions/length_min": lengths.min().item(),
        "completions/length_max": lengths.max().item(),
        "completions/truncated_fraction": 1 - rollout.finished.float().mean().item(),
    }


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
    train_rows = load_prompts(args, args.train_split, tokenizer)
    eval_rows = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    specs = args.reward_fn if args.reward_fn or args.reward_model else ("last_number",)
    functions = load_reward_fns("--reward-fn", specs, train_rows[0])
    if args.eval_reward_fn:
        specs = (args.eval_reward_fn,)
        eval_functions = load_reward_fns("--eval-reward-fn", specs, eval_rows[0])

    policy = shard(load_model("--model", args.model, AutoModelForCausalLM), device)
    reference = reward_model = None
    if args.beta > 0:
        reference = load_model("--model", args.model, AutoModelForCausalLM)
        reference = shard(reference.requires_grad_(False), device)
    if args.reward_model:
        reward_model = shard(load_reward_model(args.reward_model, tokenizer), device)
        require(
            reward_model.config.vocab_size >= policy.config.vocab_size,
            f"--reward-model {args.reward_model} has fewer embeddings than the policy may sample",
        )
    for flag, model in (("--model", policy), ("--reward-model", reward_model or policy)):
        positions = getattr(model.config, "max_position_embeddings", math.inf)
        require(
            args.max_prompt_length + args.max_new_tokens <= positions,
            f"--max-prompt-length {args.max_prompt_length} + --max-new-tokens "
            f"{args.max_new_tokens} is more than the {positions} positions of {flag}",
        )
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        args.learning_rate,
        weight_decay=0.0,
        fused=device.type == "cuda",  # CUDA-only: no temporaries of the weights' size
    )
    warmup = int(args.warmup_ratio * args.total_rollouts)
    scheduler = get_scheduler(args.lr_schedule, optimizer, warmup, args.total_rollouts)
    generator = torch.Generator().manual_seed(args.seed)
    kl_in_reward = args.beta > 0 and args.kl_placement == "reward"
    needs_old = kl_in_reward or args.update_epochs * args.num_minibatches > 1
    clip_high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high

    def evaluate() -> tuple[dict, list[dict]]:
        """Metrics and samples of one completion for each held-out prompt."""
        # A generator of its own, so that every evaluation draws with the same random numbers.
        draws = torch.Generator().manual_seed(args.seed)
        samples, right, size = [], [], args.prompts_per_rollout * args.group_size
        for start in range(0, len(eval_rows), size):
            rows = eval_rows[start : start + size]
            rollout = roll_out(
                args, policy, tokenizer, stop_ids, rows, args.eval_temperature, draws
            )
            if args.eval_reward_fn:
                rewards, parts = score(args, rollout, eval_functions, None, ())
            else:
                rewards, parts = score(args, rollout, functions, reward_model, args.reward_weights)
            if len(parts) == 1 and "reward_model" not in parts:  # a single rule: full marks are 1
                right += (next(iter(parts.values())) >= 1).tolist()
            lengths = rollout.completion_mask.sum(dim=1)
            samples += [
                {"prompt": row["prompt"], "completion": text, "reward": reward, "length": length}
                for row, text, reward, length in zip(
                    rows, rollout.completions, rewards.tolist(), lengths.tolist(), strict=True
                )
            ]
        metrics = {"eval/reward": np.mean([sample["reward"] for sample in samples])}
        if right:
            metrics["eval/accuracy"] = np.mean(right)
        metrics["eval/length_mean"] = np.mean([sample["length"] for sample in samples])
        return metrics, samples

    first_step = 0
    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        load_state(policy, state["policy"])
        load_state(optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        generator.set_state(state["generator"])
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
    print_models({"policy": policy, "reference": reference, "reward model": reward_model})
    print(f"{run_dir}: on {device}")
    if not args.resume:
        log(run_dir, tracker, 0, *evaluate())

    progress = tqdm(
        range(first_step, args.total_rollouts),
        initial=first_step,
        total=args.total_rollouts,
        disable=RANK > 0,
    )
    for step in progress:
        started = time.perf_counter()

        # 1. roll out: G completions of each prompt, from the policy as it is now
        picked = batch_rows(step, args.prompts_per_rollout, len(train_rows), args.seed)
        rows = [train_rows[i] for i in picked for _ in range(args.group_size)]  # B = prompts x G
        rollout = roll_out(args, policy, tokenizer, stop_ids, rows, args.temperature, generator)
        rolled_out = time.perf_counter()

        # 2. score
        rewards, parts = score(args, rollout, functions, reward_model, args.reward_weights)  # (B,)
        scored = time.perf_counter()

        # 3. log-probs that stay fixed during the update: under the old policy and the reference
        lengths = rollout.completion_mask.sum(dim=1)  # (B,)
        passes = [plan_pass(args, lengths, generator) for _ in range(args.update_epochs)]
        old_logprobs, ref_logprobs = torch.zeros(2, *rollout.ids.shape, device=device)  # (B, L)
        with torch.no_grad():
            # Over the micro-batches of the first pass: the first ratio is then exactly 1. With one
            # optimiser step a rollout the old policy is the current one, and needs no pass.
            for rows in itertools.chain(*(micro for _, micro in passes[0])):
                at = rollout.index(rows)
                if needs_old:
                    old_logprobs[at] = rollout_logprobs(args, policy, rollout, at)
                if reference is not None:
                    ref_logprobs[at] = rollout_logprobs(args, reference, rollout, at)
        for values in (old_logprobs, ref_logprobs):
            total(values)

        # 4. advantages against the group's mean, the same for every token of a completion
        returns = rewards  # (B,)
        if kl_in_reward:
            logprobs = (old_logprobs, ref_logprobs, rollout.completion_mask)
            returns = shaped_rewards(rewards, *logprobs, args.beta).sum(dim=1)
        advantages = group_advantages(returns, args.group_size, args.scale_rewards)  # (B,)

        # 5. optimise: an optimiser step a minibatch, its gradient summed over micro-batches
        loss_mask = rollout.completion_mask  # (B, L)
        if args.mask_truncated:
            loss_mask = loss_mask & rollout.finished[:, None]
        losses, grad_norms, sums = [], [], defaultdict(float)
        for step_rows, minibatch in itertools.chain(*passes):
            weights = torch.zeros(loss_mask.shape, device=device)  # (B, L)
            weights[step_rows] = token_weights(
                loss_mask[step_rows], args.loss_norm, args.max_new_tokens
            )
            step_loss = torch.zeros((), dtype=torch.float64, device=device)
            for rows in minibatch:
                at = rollout.index(rows)
                logprobs, entropy = rollout_logprobs(args, policy, rollout, at, return_entropy=True)
                loss, loss_sums = grpo_loss(
                    logprobs,
                    old_logprobs[at] if needs_old else logprobs.detach(),
                    ref_logprobs[at] if reference is not None else None,
                    advantages[rows],
                    rollout.completion_mask[at],
                    weights[at],
                    args.clip_coef,
                    clip_high,
                    0.0 if kl_in_reward else args.beta,
                )
                loss.backward()
                step_loss += loss.detach()
                sums["policy/entropy"] += entropy.detach().sum()
                for name, value in loss_sums.items():
                    sums[name] += value
            losses.append(total(step_loss).item())
            grad_norms.append(clip_gradients(policy.parameters(), args.max_grad_norm))
            require(
                math.isfinite(losses[-1]) and math.isfinite(grad_norms[-1]),
                f"rollout {step + 1}: loss {losses[-1]}, gradient norm {grad_norms[-1]}; no step "
                "was taken. Likely causes: --learning-rate too high, extreme rewards, a broken "
                f"--model. The last checkpoint, if any, is in {run_dir / 'checkpoint'}",
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        updated = time.perf_counter()

        # 6. log, evaluate, save
        tokens = lengths.sum().item()
        groups = rewards.view(-1, args.group_size)
        equal = (groups == groups[:, :1]).all(dim=1)
        metrics = completion_metrics(rewards, parts, rollout) | {
            "reward/std": groups.std(dim=1).mean().item(),
            "reward/zero_variance_groups": equal.float().mean().item(),
            "objective/loss": np.mean(losses),
            "policy/grad_norm": np.mean(grad_norms),
            "policy/learning_rate": scheduler.get_last_lr()[0],
            "time/rollout_seconds": rolled_out - started,
            "time/score_seconds": scored - rolled_out,
            "time/update_seconds": updated - scored,
            "time/tokens_per_second": tokens / (updated - started),
        }
        if reference is not None:  # a completion; the others are means a token
            kl = total(sums.pop("objective/kl")).item()
            metrics["objective/kl"] = kl / (len(lengths) * args.update_epochs)
        for name, value in sums.items():
            metrics[name] = total(value).item() / (tokens * args.update_epochs)
        scheduler.step()
        done, last = step + 1, step + 1 == args.total_rollouts
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate()
            metrics |= eval_metrics
        log(run_dir, tracker, done, metrics, samples)
        shown = ("reward/mean", "completions/length_mean", "policy/entropy")
        progress.set_postfix({name: f"{metrics[name]:.2f}" for name in shown})
        if done % args.save_every == 0 or last:
            state = {"policy": policy, "optimizer": optimizer, "scheduler": scheduler}
            state = {name: whole_state(part.state_dict()) for name, part in state.items()}
            save_checkpoint(run_dir, state | {"generator": generator.get_state(), "step": done})

    with gathered(policy, to_save=True) as whole:
        save_model(run_dir, whole, tokenizer, stop_ids)
    if RANK == 0:
        print_evaluations(run_dir)
        print_example(run_dir)
    print(f"model: {run_dir / 'model'}")
    print(
        f"next: generate with it, or train on with --model {run_dir / 'model'}, also as reference"
    )
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
