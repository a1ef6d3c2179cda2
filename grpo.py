r"""Group Relative Policy Optimization (GRPO): reinforcement learning without a critic.

For each prompt q sample a group of G completions o_1..o_G from the policy, reward each, and let the
group's own mean be the baseline. Maximise (DeepSeekMath, arXiv 2402.03300, equation 3)

    J(theta) = E[ (1/G) sum_i (1/|o_i|) sum_t
                  min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it ],

    rho_it = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t),
    A_i    = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-4),   the same for every token of o_i,
    KL_it  = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1,        the k3 estimator, at token t.

Deviations from the paper:
1. `beta` is 0 by default (paper: 0.04): a rule cannot be hacked as a learned reward can, and no
   reference model then uses memory. DAPO and Dr. GRPO drop the term too.
2. Outcome rewards only; no process rewards, and the reference is not replaced by the policy
   between iterations.
3. The standard deviation is that of a sample (divided by G - 1), with 1e-4 added; the paper says
   neither. Equal rewards give an advantage of exactly 0.
4. Later papers' variants are flags: DAPO's (2503.14476) clip-higher, token mean and masking of cut-off
   completions, Dr. GRPO's (2503.20783) constant length and no division by the standard deviation.

Run it:
    python grpo.py                                       # tiny/arithmetic, a minute on a CPU
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --dataset-config main \
        --prompt-column question --chat --max-prompt-length 256 --max-new-tokens 512 \
        --prompts-per-rollout 16 --num-minibatches 1 --micro-batch-size 8 --learning-rate 1e-6
    python grpo.py --resume runs/grpo__1__...            # go on after a crash, bit for bit

A healthy run: `reward/mean` and `eval/accuracy` rise together; `reward/zero_variance_groups` falls
at first, then rises as prompts are solved; entropy falls slowly, not to 0 at once; clip fractions stay
below a few per cent; `completions/truncated_fraction` stays low.
"""

import importlib.util
import inspect
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from datasets import load_dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
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
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the saved model; training is in float32."""

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
    """Different prompts a rollout."""
    group_size: int = 8
    """G, completions a prompt (DeepSeekMath: 64)."""
    max_new_tokens: int = 24
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; it divides the logits in all log-probabilities too."""
    beta: float = 0.0
    """Coefficient of the KL term (DeepSeekMath: 0.04); at 0 no reference model is loaded."""
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
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up."""
    warmup_steps: int = 0
    """Rollouts over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
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


# --- the reward --------------------------------------------------------------------------------

# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII
)


def last_number(
    prompts: list, completions: list[str], answer: list, **columns: list
) -> list[float | None]:
    """1 where the completion's last number equals the answer's last number, else 0.

    Serves answers such as `5` and GSM8K's `... #### 1,234`. An answer without a number gives
    None, which ends the run with the row's prompt.
    """

    def find(text: Any) -> Decimal | None:
        last = None
        for last in NUMBER.finditer(str(text)):
            pass
        if last is None:
            return None
        number = Decimal(last[1].replace(",", ""))
        return -number if last[0].startswith("-") else number

    return [
        None if find(right) is None else float(find(completion) == find(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


def load_reward_fn(flag: str, spec: str) -> Callable:
    """A rule of this file by its name, or a function from path/to/file.py:function."""
    if spec == "last_number":
        return last_number
    path, _, name = spec.rpartition(":")
    require(
        Path(path).is_file(), f"{flag} {spec}: neither last_number nor path/to/file.py:function"
    )
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    require(callable(function), f"{flag} {spec}: there is no function {name} in {path}")
    return function


def check_reward_fn(name: str, function: Callable, row: dict) -> None:
    """The function must accept the dataset's columns, which are known before any model is."""
    columns = {column: [value] for column, value in row.items() if column != "prompt"}
    try:
        inspect.signature(function).bind(prompts=[], completions=[], **columns)
    except TypeError as error:
        raise SystemExit(
            f"error: reward function {name}: {error}; it is called with prompts, completions and "
            f"the columns {sorted(columns)} (see --answer-column)"
        ) from None


def apply_reward_fn(
    name: str, function: Callable, rows: list[dict], completions: list[str]
) -> torch.Tensor:
    """Rewards (B,) float32 of the completions of rows, one of each."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    prompts = columns.pop("prompt")
    values = function(prompts=prompts, completions=completions, **columns)
    require(
        hasattr(values, "__len__") and len(values) == len(completions),
        f"reward function {name} must return a list of {len(completions)} numbers, one for each "
        f"completion; it returned {values!r:.200}",
    )
    for row, completion, value in zip(rows, completions, values, strict=True):
        require(
            value is not None and math.isfinite(value),
            f"reward function {name} returned {value} for the completion {completion!r} of {row}",
        )
    return torch.tensor([float(value) for value in values])


@torch.no_grad()
def reward_model_scores(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Scores (B,) of rows of tokens (B, L): the head's output at the last real token.

    That token is found from the mask. transformers looks for the last id that is not the padding
    id, which misses a real EOS where the tokenizer has one id for both.
    """
    attention_mask = attention_mask.long()
    positions = attention_mask.cumsum(dim=1)
    hidden = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(positions - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    last = (positions * attention_mask).argmax(dim=1)
    rows = torch.arange(len(last), device=last.device)
    return model.score(hidden[rows, last]).squeeze(1).float()


# --- data --------------------------------------------------------------------------------------


def require(condition: Any, message: str) -> None:
    """End the program with a message instead of a traceback, unless the condition holds."""
    if not condition:
        raise SystemExit(f"error: {message}")


def load(flag: str, source: str, loader: Callable, **options: Any) -> Any:
    """`loader(source, **options)` from a folder or the hub; a failure is a message naming the flag."""
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and source[0] not in "./~"
    require(
        Path(source).is_dir() or is_hub_name,
        f"{flag} {source}: there is no such folder here, and it is not a hub name (owner/name)",
    )
    try:
        return loader(source, **options)
    except Exception as error:  # whatever is wrong with it, it is the user's input
        raise SystemExit(f"error: {flag} {source}: {error.__cause__ or error}") from None


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


@dataclass
class Prompt:
    ids: list[int]
    """Token ids."""
    row: dict[str, Any]
    """What the reward functions get: `prompt` as it is in the dataset, and its other columns."""


def load_prompts(args: Args, split: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The usable prompts of a split; says how many were dropped and why."""
    rows = load(
        "--dataset", args.dataset, load_dataset, name=args.dataset_config, split=split
    ).to_list()
    prompts, empty, too_long = [], 0, 0
    for index, row in enumerate(rows):
        where = f"row {index} of --dataset {args.dataset} ({split})"
        require(
            args.prompt_column in row,
            f"--prompt-column {args.prompt_column}: {where} has only the columns {sorted(row)}",
        )
        row["prompt"] = row.pop(args.prompt_column)
        if args.answer_column in row:
            row["answer"] = row.pop(args.answer_column)
        if args.chat and isinstance(row["prompt"], str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        ids = encode_prompt(tokenizer, row["prompt"], where) if row["prompt"] else []
        if not ids:
            empty += 1
        elif len(ids) > args.max_prompt_length:
            too_long += 1
        else:
            prompts.append(Prompt(ids, row))
    dropped = (
        f"dropped {empty} empty and {too_long} longer than --max-prompt-length "
        f"{args.max_prompt_length}"
    )
    print(f"{split}: {len(prompts)} prompts from {len(rows)} rows, {dropped}")
    require(prompts, f"--dataset {args.dataset}: no row of {split} is left ({dropped})")
    return prompts


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
        "save_every max_prompt_length total_rollouts prompts_per_rollout max_new_tokens "
        "temperature update_epochs num_minibatches micro_batch_size learning_rate max_grad_norm "
        "eval_every eval_rows"
    ).split():
        value = getattr(args, name)
        require(value > 0, f"--{name.replace('_', '-')} must be more than 0, found {value}")
    for name in ("beta", "warmup_steps", "weight_decay", "eval_temperature"):
        value = getattr(args, name)
        require(value >= 0, f"--{name.replace('_', '-')} must not be negative, found {value}")
    require(args.group_size >= 2, f"--group-size must be at least 2, found {args.group_size}")
    require(0 < args.clip_coef < 1, f"--clip-coef must lie in (0, 1), found {args.clip_coef}")
    completions = args.prompts_per_rollout * args.group_size
    require(
        args.num_minibatches <= completions,
        f"--num-minibatches {args.num_minibatches} is more than the {completions} completions of a "
        "rollout (--prompts-per-rollout x --group-size)",
    )
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    require(world_size == 1, f"started as {world_size} processes, but this script runs as one")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU; the weights, and all of the mathematics, are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@dataclass
class Rollout:
    """Completions of B prompts, L columns: the prompt padded on the left, then the completion."""

    prompts: list[Prompt]
    sequences: torch.Tensor  # (B, L) token ids
    attention_mask: torch.Tensor  # (B, L) bool, prompt and completion
    completion_mask: torch.Tensor  # (B, L) bool, sampled tokens, the stop token included
    finished: torch.Tensor  # (B,) bool, ended at a stop id
    texts: list[str]  # completions, decoded


def roll_out(
    args: Args,
    policy: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    prompts: list[Prompt],
    temperature: float,
    generator: torch.Generator,
) -> Rollout:
    """Sample one completion for each prompt."""
    device = policy.device
    # Any id will do for padding: the masks come from lengths.
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids, mask = pad_rows([prompt.ids for prompt in prompts], pad_id, "left", device)
    with autocast(device):
        sequences, completion_mask, finished = generate(
            policy, ids, mask, args.max_new_tokens, temperature, stop_ids, pad_id, generator
        )
    attention_mask = completion_mask.clone()
    attention_mask[:, : mask.shape[1]] = mask
    tokens = [row[real] for row, real in zip(sequences, completion_mask, strict=True)]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return Rollout(prompts, sequences, attention_mask, completion_mask, finished, texts)


def score(
    args: Args,
    rollout: Rollout,
    functions: dict[str, Callable],
    reward_model: torch.nn.Module | None = None,
    weights: tuple[float, ...] = (),
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of all rewards (B,), and each of them by name (B,), before weighting."""
    device = rollout.sequences.device
    rows = [prompt.row for prompt in rollout.prompts]
    components = {
        name: apply_reward_fn(name, function, rows, rollout.texts).to(device)
        for name, function in functions.items()
    }
    if reward_model is not None:
        sequences = rollout.sequences.split(args.micro_batch_size)
        masks = rollout.attention_mask.split(args.micro_batch_size)
        with autocast(device):
            scores = [reward_model_scores(reward_model, *batch) for batch in zip(sequences, masks)]
        components["reward_model"] = torch.cat(scores)
    stacked = torch.stack(list(components.values()))  # (rewards, B)
    weights = torch.tensor(weights or [1.0] * len(components), device=device)
    return weights @ stacked, components


def evaluate(
    args: Args,
    policy: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: list[int],
    prompts: list[Prompt],
    reward: Callable[[Rollout], tuple[torch.Tensor, dict]],
    is_rule: bool,
) -> tuple[dict, list[dict]]:
    """Metrics and samples of one completion for each held-out prompt."""
    # A generator of its own, so that every evaluation draws with the same random numbers.
    generator = torch.Generator(policy.device).manual_seed(args.seed)
    samples, lengths = [], []
    size = args.prompts_per_rollout * args.group_size
    for start in range(0, len(prompts), size):
        chunk = prompts[start : start + size]
        rollout = roll_out(
            args, policy, tokenizer, stop_ids, chunk, args.eval_temperature, generator
        )
        rewards = reward(rollout)[0].tolist()
        lengths += rollout.completion_mask.sum(dim=1).tolist()
        for prompt, text, r in zip(chunk, rollout.texts, rewards, strict=True):
            samples.append({"prompt": prompt.row["prompt"], "completion": text, "reward": r})
    rewards = [sample["reward"] for sample in samples]
    metrics = {"eval/reward": sum(rewards) / len(rewards)}
    if is_rule:
        metrics["eval/accuracy"] = sum(r >= 1 for r in rewards) / len(rewards)
    return metrics | {"eval/completion_length": sum(lengths) / len(lengths)}, samples


def main(args: Args) -> Path:
    """Train; returns the run's folder."""
    check_args(args)
    transformers_logging.disable_progress_bar()
    specs = args.reward_fn if args.reward_fn or args.reward_model else ("last_number",)
    functions = {spec.rpartition(":")[2]: load_reward_fn("--reward-fn", spec) for spec in specs}
    eval_functions = functions
    if args.eval_reward_fn:
        name = args.eval_reward_fn.rpartition(":")[2]
        eval_functions = {name: load_reward_fn("--eval-reward-fn", args.eval_reward_fn)}
    require(len(functions) == len(specs), f"--reward-fn: two functions of one name in {specs}")
    rewards_expected = len(specs) + bool(args.reward_model)
    require(
        len(args.reward_weights) in (0, rewards_expected),
        f"--reward-weights: {len(args.reward_weights)} weights for {rewards_expected} rewards",
    )
    tokenizer = load("--model", args.model, AutoTokenizer.from_pretrained)
    stop_ids = find_stop_ids(tokenizer, args.model)
    prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    for name, function in (functions | eval_functions).items():
        check_reward_fn(name, function, prompts[0].row)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load_causal_lm() -> torch.nn.Module:
        loader = AutoModelForCausalLM.from_pretrained
        model = load("--model", args.model, loader, dtype=torch.float32)
        return model.to(device).eval()  # eval: dropout is off, while sampling and while training

    policy = load_causal_lm()
    reference = load_causal_lm().requires_grad_(False) if args.beta > 0 else None
    reward_model = None
    if args.reward_model:
        reward_model = load_reward_model(args, tokenizer).to(device)
    positions = getattr(policy.config, "max_position_embeddings", math.inf)
    require(
        args.max_prompt_length + args.max_new_tokens <= positions,
        f"--max-prompt-length {args.max_prompt_length} + --max-new-tokens {args.max_new_tokens} is "
        f"more than the {positions} positions of --model",
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay
    )
    generator = torch.Generator(device).manual_seed(args.seed)
    clip_high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high

    def reward(rollout: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return score(args, rollout, functions, reward_model, args.reward_weights)

    def eval_reward(rollout: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return score(args, rollout, eval_functions) if args.eval_reward_fn else reward(rollout)

    is_rule = bool(args.eval_reward_fn) or rewards_expected == len(functions) == 1

    if args.resume:
        run_dir = Path(args.resume)
        state = load_checkpoint(run_dir)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        first_step, before = state["step"], state["before"]
    else:
        run_dir = make_run_dir(args)
        first_step, before = 0, None
    tracker = start_tracking(args, run_dir)
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    print(f"{run_dir}: {num_parameters:,} parameters on {device}, {args.total_rollouts} rollouts")

    def log(step: int, metrics: dict, samples: list[dict]) -> None:
        log_rows(run_dir, "metrics.jsonl", [{"step": step, **metrics}])
        log_rows(run_dir, "samples.jsonl", [{"step": step, **sample} for sample in samples])
        if tracker:
            tracker.log(metrics, step=step)

    def evaluate_now() -> tuple[dict, list[dict]]:
        return evaluate(args, policy, tokenizer, stop_ids, eval_prompts, eval_reward, is_rule)

    if before is None:
        metrics, samples = evaluate_now()
        before = {"metrics": metrics, "sample": samples[0]}
        log(0, metrics, samples)

    progress = tqdm(
        range(first_step, args.total_rollouts), initial=first_step, total=args.total_rollouts
    )
    for step in progress:
        # 1. roll out: G completions of each prompt, from the policy as it is now
        started = time.perf_counter()
        numbers = batch_rows(step, args.prompts_per_rollout, len(prompts), args.seed)
        batch = [prompts[i] for i in numbers for _ in range(args.group_size)]
        rollout = roll_out(args, policy, tokenizer, stop_ids, batch, args.temperature, generator)
        lengths = rollout.completion_mask.sum(dim=1)  # (B,)
        rolled_out = time.perf_counter()

        # 2. score
        rewards, components = reward(rollout)  # (B,)
        scored = time.perf_counter()

        # 3. advantages: against the mean of the group, the same for every token of a completion
        advantages = group_advantages(rewards, args.group_size, args.scale_rewards)  # (B,)
        loss_mask = rollout.completion_mask  # (B, L)
        if args.mask_truncated:
            loss_mask = loss_mask & rollout.finished[:, None]

        # 4. log-probs that stay fixed during the update: of the old policy and of the reference
        def plan_epoch() -> list[list[torch.Tensor]]:
            """A pass over the rollout: minibatches of micro-batches of row numbers."""
            order = torch.randperm(len(batch), generator=generator, device=device)
            return [
                [rows[i] for i in micro_batches(lengths[rows].tolist(), args.micro_batch_size)]
                for rows in order.chunk(args.num_minibatches)
            ]

        def view(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Index of some rows of the rollout, without columns that are padding in all."""
            return rows[:, None], rollout.attention_mask[rows].any(dim=0).nonzero().squeeze(1)

        def logprobs_of(model: torch.nn.Module, at: tuple, **options: Any) -> Any:
            """Log-probs of the completions at an index of the rollout, as they were sampled."""
            with autocast(device):
                return completion_logprobs(
                    model,
                    rollout.sequences[at],
                    rollout.attention_mask[at],
                    rollout.completion_mask[at],
                    args.temperature,
                    **options,
                )

        epochs = [plan_epoch() for _ in range(args.update_epochs)]
        several_steps = args.update_epochs * args.num_minibatches > 1
        old_logprobs = torch.zeros(rollout.sequences.shape, device=device)  # (B, L)
        ref_logprobs = torch.zeros_like(old_logprobs)
        with torch.no_grad():
            # Over the first pass's own micro-batches: its first ratio is then exactly 1.
            for at in (view(rows) for minibatch in epochs[0] for rows in minibatch):
                if several_steps:
                    old_logprobs[at] = logprobs_of(policy, at)
                if reference is not None:
                    ref_logprobs[at] = logprobs_of(reference, at)

        # 5. optimise the clipped surrogate
        sums: dict[str, Any] = defaultdict(float)
        for minibatch in (minibatch for epoch in epochs for minibatch in epoch):
            step_rows = torch.cat(minibatch)
            weights = torch.zeros_like(old_logprobs)  # (B, L)
            weights[step_rows] = token_weights(
                loss_mask[step_rows], args.loss_norm, args.max_new_tokens
            )
            loss = 0.0
            for rows in minibatch:
                at = view(rows)
                mask = rollout.completion_mask[at]  # (b, l)
                logprobs, entropy = logprobs_of(policy, at, return_entropy=True)
                old = old_logprobs[at] if several_steps else logprobs.detach()
                log_ratio = (logprobs - old).masked_fill(~mask, 0.0)
                a = advantages[rows, None]  # (b, 1)
                objective = clipped_surrogate(log_ratio, a, args.clip_coef, clip_high)
                if reference is not None:
                    kl = k3_kl(logprobs, ref_logprobs[at])  # (b, l), 0 where both are 0
                    objective = objective - args.beta * kl
                    sums["objective/kl"] += kl.detach().sum()
                micro_loss = -(weights[at] * objective).sum()
                micro_loss.backward()
                loss += micro_loss.detach()

                ratio = log_ratio.detach().exp()
                sums["policy/entropy"] += entropy.detach().sum()
                sums["policy/approx_kl"] += (ratio - 1 - log_ratio.detach()).sum()
                sums["policy/clip_fraction_low"] += ((ratio < 1 - args.clip_coef) & (a < 0)).sum()
                sums["policy/clip_fraction_high"] += ((ratio > 1 + clip_high) & (a > 0)).sum()

            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            check_finite(step, float(loss), float(grad_norm), run_dir)
            learning_rate = scheduled_learning_rate(
                step, args.total_rollouts, args.learning_rate, args.lr_schedule, args.warmup_steps
            )
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sums["objective/loss"] += float(loss)
            sums["policy/grad_norm"] += float(grad_norm)
        updated = time.perf_counter()

        # 6. log, evaluate, save
        steps = args.update_epochs * args.num_minibatches
        tokens = int(lengths.sum())
        groups = rewards.view(-1, args.group_size)
        metrics = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/zero_variance_groups": float((groups.amax(1) == groups.amin(1)).float().mean()),
            **{f"reward/{name}": float(values.mean()) for name, values in components.items()},
            "objective/loss": sums["objective/loss"] / steps,
            "policy/entropy": float(sums["policy/entropy"]) / (tokens * args.update_epochs),
            "policy/approx_kl": float(sums["policy/approx_kl"]) / (tokens * args.update_epochs),
        }
        for name in ("clip_fraction_low", "clip_fraction_high"):
            metrics[f"policy/{name}"] = float(sums[f"policy/{name}"]) / (
                tokens * args.update_epochs
            )
        if reference is not None:
            metrics["objective/kl"] = float(sums["objective/kl"]) / (
                len(batch) * args.update_epochs
            )
        metrics |= {
            "policy/grad_norm": sums["policy/grad_norm"] / steps,
            "policy/learning_rate": learning_rate,
            "completions/length_mean": float(lengths.float().mean()),
            "completions/length_min": int(lengths.min()),
            "completions/length_max": int(lengths.max()),
            "completions/truncated_fraction": float((~rollout.finished).float().mean()),
            "time/rollout_seconds": rolled_out - started,
            "time/score_seconds": scored - rolled_out,
            "time/update_seconds": updated - scored,
            "time/tokens_per_second": tokens / (updated - started),
        }
        done, last = step + 1, step + 1 == args.total_rollouts
        samples = []
        if done % args.eval_every == 0 or last:
            eval_metrics, samples = evaluate_now()
            metrics |= eval_metrics
        log(done, metrics, samples)
        progress.set_postfix(
            reward=f"{metrics['reward/mean']:.2f}",
            length=f"{metrics['completions/length_mean']:.1f}",
        )
        if done % args.save_every == 0 or last:
            state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"generator": generator.get_state(), "step": done, "before": before}
            save_checkpoint(run_dir, state)

    metrics, samples = evaluate_now()
    policy.to(getattr(torch, args.save_dtype)).save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")
    for name, value in metrics.items():
        print(f"held-out {name}: {before['metrics'][name]:.3f} -> {value:.3f}")
    for when, sample in (("before", before["sample"]), ("after", samples[0])):
        print(f"{when}: {sample['prompt']!r} -> {sample['completion']!r}")
    print(f"model: {run_dir / 'model'}")
    return run_dir


if __name__ == "__main__":
    main(parse_args())
