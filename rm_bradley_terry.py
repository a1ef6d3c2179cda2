r"""Reward modelling (Bradley-Terry): learn from pairs of completions which one people prefer.

Of two completions of a prompt x, y_w was preferred to y_l. Give each a score r(x, y), read at its
last token, such that p(y_w beats y_l) = sigmoid(r_w - r_l) is high (Bradley and Terry 1952):

    minimise the mean over pairs of  - log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2

(InstructGPT, arXiv 2203.02155, equation 1), with an optional margin m (Llama 2, arXiv 2307.09288)
and a term that keeps the sum of the scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244).
Deviations from InstructGPT:

1. Rows are pairs, not rankings of K completions.
2. There are 3 epochs, not 1, with a linear decay, not a cosine decay to 10 %.
3. AdamW's beta2 is 0.999, not 0.95.
4. The scores are not shifted, but the mean score of held-out preferred completions is saved as
   `score_mean`, which ppo_rlhf.py and grpo.py subtract; the paper's is that of demonstrations.

    python rm_bradley_terry.py                             # tiny/reviews, half a minute on a CPU
    python rm_bradley_terry.py --model Qwen/Qwen2.5-0.5B-Instruct --max-length 1024 \
        --dataset trl-lib/ultrafeedback_binarized --batch-size 64 --micro-batch-size 2 \
        --epochs 1                                         # a GPU of 24 GB
    torchrun --nproc_per_node=8 rm_bradley_terry.py ...    # eight GPUs: docs/processes.md

A healthy run: with a new head and no margin the first loss is near chance level, ln 2 = 0.69;
`eval/pair_accuracy` rises to the rate at which people agree (InstructGPT: 0.73);
`eval/calibration_error` ends below 0.1 (without margins). If `eval/loss` rises again: fewer epochs.
"""

import json
import math
import os
import sys
import time
from array import array
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
import wandb
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

from common.logprobs import Sequences, last_states, micro_batches
from common.tokens import as_chat, encode_completions, find_stop_ids
from runtime.adapters import add_adapters
from runtime.chats import UnusableRow
from runtime.checks import check_flags, check_training
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard, transformer_layers
from runtime.processes import RANK, all_reduce_sum, from_rank_0, join_processes, leave_processes
from runtime.processes import peak_memory_gb
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "rm_bradley_terry"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of the new head
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 50  # steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name; a head of scores is added if missing
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/reviews/preferences"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt; conversations that begin alike need none
    chosen_column: str = "chosen"  # column of the preferred completion, a string or chat messages
    rejected_column: str = "rejected"  # column of the other completion
    margin_column: str | None = "margin"  # column of m, which is 0 without one; None: always 0
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_length: PositiveInt = 128  # limit of prompt + completion in tokens; longer ones are dropped
    # --- training and evaluation ---
    train_layers: NonNegativeInt | None = None  # last layers trained; 0: only the head; None: all
    center_coef: NonNegativeFloat = 0.0  # c, which keeps r_w + r_l near 0 (Eisenstein: 0.01)
    epochs: PositiveFloat = 3.0  # passes over the training pairs
    batch_size: PositiveInt = 32  # pairs per optimiser step
    micro_batch_size: PositiveInt = 32  # pairs per forward pass: sets memory, not the result
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak; default: 1e-3 below 10M parameters, else 1e-5 (adapters: 1e-4)
    learning_rate: PositiveFloat | None = None
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after the warm-up
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.2  # warm-up, as a fraction of all steps
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 50  # steps between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out pairs, at most

    def __post_init__(self):
        if self.train_layers is not None and self.lora_rank > 0:
            raise ValueError("--train-layers and --lora-rank: give one of the two")


class Comparison(NamedTuple):
    prompt_ids: array  # token ids of the prompt
    chosen_ids: array  # token ids of the preferred completion
    rejected_ids: array  # token ids of the other one
    margin: float  # m

    def sequences(self) -> Sequences:
        """The prompt with the preferred completion, then with the other one."""
        prompt_ids = list(self.prompt_ids)
        return [(prompt_ids, list(self.chosen_ids)), (prompt_ids, list(self.rejected_ids))]


# --- the mathematics ---------------------------------------------------------------------------
def bradley_terry_loss(r_w: Tensor, r_l: Tensor, margins: Tensor, center_coef: float) -> Tensor:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2 of each pair; tensors are (B,), m may be 0.

    `logsigmoid` is finite where log(sigmoid) is not.
    """
    preference_loss = -torch.nn.functional.logsigmoid(r_w - r_l - margins)
    return preference_loss + center_coef * (r_w + r_l).square()


def wins(score_gaps: Tensor) -> Tensor:
    """1 for each gap r_w - r_l (N,) above 0, 0 for each below 0, and 1/2 for a tie."""
    return 0.5 + 0.5 * score_gaps.sign()


def calibration_error(score_gaps: Tensor, bins: int = 5) -> float:
    """Of the pairs whose winner is predicted with p = 80 %, is the prediction right in 80 %?

    The higher score of a pair is predicted to win with p = sigmoid(|r_w - r_l|). The expected
    calibration error (Guo et al. 2017, arXiv 1706.04599) of gaps r_w - r_l (N,) is the mean over
    pairs of |mean predicted - mean observed rate| in the pair's bin of p.
    """
    predicted = score_gaps.double().abs().sigmoid()  # p, from 0.5 to 1
    observed = wins(score_gaps.double())
    bin_inds = ((predicted - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    excess = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_inds, predicted - observed)
    return excess.abs().sum().item() / len(score_gaps)


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- data and model ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_pairs = load_comparisons(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_comparisons(args, args.eval_split, tokenizer, stop_ids, args.eval_rows)
    model = load_classifier(args, tokenizer, stop_ids, device)
    check_training(args, model)
    args.learning_rate = find_rate(model, args.learning_rate, args.lora_rank, tiny=1e-3, real=1e-5)
    if args.activation_checkpointing:
        checkpoint_activations(model)
    optimizer = AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )

    # --- the loop ---
    rng = Generator().manual_seed(args.seed)
    num_shuffles = math.ceil(args.epochs)
    shuffles = [torch.randperm(len(train_pairs), generator=rng) for _ in range(num_shuffles)]
    num_rows = math.ceil(args.epochs * len(train_pairs))
    batches = torch.cat(shuffles)[:num_rows].split(args.batch_size)  # the last may be smaller
    total_steps = len(batches)
    warmup_steps = int(args.warmup_ratio * total_steps)
    training = {"model": (model, optimizer)}
    state = {"step": 0, "data": checksum(train_pairs, args.model), "score_mean": 0.0}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics = evaluate(args, model, eval_pairs)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics)
    progress = tqdm(range(state["step"] + 1, total_steps + 1), disable=RANK > 0)
    for step in progress:
        # 1. Draw the pairs of this step: 2B sequences, each rejected one after its chosen one.
        start_time = time.perf_counter()
        pairs = [train_pairs[i] for i in batches[step - 1]]
        sequences = [sequence for pair in pairs for sequence in pair.sequences()]

        # 2. Optimise: one step, its gradient summed over micro-batches and ranks.
        lr = args.learning_rate * lr_factor(step, warmup_steps, total_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        margins = torch.tensor([pair.margin for pair in pairs], device=device)  # (B,), m
        scores = torch.zeros(2, len(pairs), device=device)  # r_w and r_l; 0 in pairs of other ranks
        for pair_inds in micro_batches_of_pairs(sequences, args.micro_batch_size):
            r_w, r_l = pair_scores(model, sequences, pair_inds)  # (b,) each
            device_inds = pair_inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
            losses = bradley_terry_loss(r_w, r_l, margins[device_inds], args.center_coef)
            loss = losses.sum() / len(pairs)
            loss.backward()
            scores[:, device_inds] = torch.stack([r_w, r_l]).detach()
        grad_norm = clip_grad_norm(model, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 3. Log, evaluate, save.
        r_w, r_l = all_reduce_sum(scores)  # (B,) each
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics = {
            "objective/loss": bradley_terry_loss(r_w, r_l, margins, args.center_coef).mean().item(),
            "reward/accuracy": wins(r_w - r_l).mean().item(),
            "reward/margin": (r_w - r_l).mean().item(),  # not m
            "reward/chosen": r_w.mean().item(),
            "reward/rejected": r_l.mean().item(),
            "reward/grad_norm": grad_norm,
            "reward/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": min(args.epochs, step * args.batch_size / len(train_pairs)),
            "time/tokens_per_second": num_tokens / (time.perf_counter() - start_time),
            "time/peak_memory_gb": peak_memory_gb(),
        }
        is_last = step == total_steps
        if is_last or step % args.eval_every == 0:
            metrics |= evaluate(args, model, eval_pairs)
            state["score_mean"] = metrics["eval/score_chosen"]
        log(args, run_dir, step, metrics)
        progress.set_postfix(loss=metrics["objective/loss"], accuracy=metrics["reward/accuracy"])
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    # In config.json: ppo_rlhf.py and grpo.py read it there, and subtract it from each score.
    model.config.score_mean = state["score_mean"]
    save_model(run_dir, model, tokenizer, stop_ids)
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


@torch.no_grad()
def evaluate(args: Args, model: Any, pairs: list[Comparison]) -> dict[str, float]:
    """Metrics of the held-out pairs."""
    sequences = [sequence for pair in pairs for sequence in pair.sequences()]
    scores = torch.zeros(2, len(pairs), device=model.device)
    for pair_inds in micro_batches_of_pairs(sequences, args.micro_batch_size):
        device_inds = pair_inds.to(model.device, non_blocking=True)
        scores[:, device_inds] = pair_scores(model, sequences, pair_inds)
    r_w, r_l = all_reduce_sum(scores).cpu()  # (B,) each
    margins = torch.tensor([pair.margin for pair in pairs])
    return {
        "eval/loss": bradley_terry_loss(r_w, r_l, margins, args.center_coef).mean().item(),
        "eval/pair_accuracy": wins(r_w - r_l).mean().item(),
        "eval/margin": (r_w - r_l).mean().item(),
        "eval/calibration_error": calibration_error(r_w - r_l),
        "eval/score_chosen": r_w.mean().item(),
        "eval/score_rejected": r_l.mean().item(),
    }


# --- scores ------------------------------------------------------------------------------------
def micro_batches_of_pairs(sequences: Sequences, size: int) -> Iterator[Tensor]:
    """`micro_batches` of pairs, by the tokens of both completions. Pair i is the sequences 2i and
    2i + 1; what is yielded counts pairs.
    """
    sides = zip(sequences[::2], sequences[1::2], strict=True)
    pairs = [(prompt, chosen + rejected) for (prompt, chosen), (_, rejected) in sides]
    return micro_batches(pairs, torch.arange(len(pairs)), size)


def pair_scores(model: Any, sequences: Sequences, pair_inds: Tensor) -> Tensor:
    """r_w and r_l (2, b), float32: the head's output at the last token of both completions of some
    pairs, from one forward pass.
    """
    inds = torch.cat([2 * pair_inds, 2 * pair_inds + 1])  # all chosen ones, then all rejected ones
    last = last_states(model, [sequences[i] for i in inds])  # (2b, d)
    scores = model.score(last.float()).squeeze(1)  # bfloat16 would make close scores equal
    return scores.view(2, len(pair_inds))


# --- model and data ----------------------------------------------------------------------------
def load_classifier(
    args: Args, tokenizer: Any, stop_ids: list[int], device: torch.device
) -> torch.nn.Module:
    """A transformer with a head of one output, in eval mode: dropout is off."""
    kind = AutoModelForSequenceClassification
    model = load_model(kind, args.model, tokenizer, args.max_length, new_head=True)
    torch.manual_seed(args.seed)
    model.score.float()
    if model.head_is_new:  # N(0, 1/(d + 1)), arXiv 2009.01325, B.1
        torch.nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    # transformers scores the last id that is not the padding, so the padding must not end a text.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # A model that reads images too has a config of its own for its language model.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if args.train_layers is not None:
        layers = transformer_layers(model)
        if args.train_layers > len(layers):
            raise ValueError(f"--train-layers {args.train_layers}: there are {len(layers)} layers")
        model.requires_grad_(False)
        first_trained = len(layers) - args.train_layers
        for module in (model.score, *layers[first_trained:]):
            module.requires_grad_(True)
    if args.lora_rank > 0:
        add_adapters(model, args.lora_rank, args.seed)
        model.score.requires_grad_(True)
        model.peft_config["default"].modules_to_save = ["score"]  # for whoever loads adapter/
    print(f"trained: {model.num_parameters(only_trainable=True):,} parameters")
    return shard(model, device)


def load_comparisons(
    args: Args, split: str, tokenizer: Any, stop_ids: list[int], most: int | None = None
) -> list[Comparison]:
    """The pairs of a split, without those that are alike or empty, or longer than --max-length."""

    def encode_row(row: dict) -> tuple[Comparison, list[int]]:
        margin = row.pop(args.margin_column, 0.0)
        if margin is None or not math.isfinite(margin):
            raise ValueError(f"--margin-column {args.margin_column}: {margin} is no finite number")
        prompt, *completions = to_pair(args, row)
        prompt_ids, both = encode_completions(tokenizer, prompt, completions, stop_ids)
        if both[0] == both[1]:
            raise UnusableRow("with chosen equal to rejected")
        chosen_ids, rejected_ids = (array("i", ids) for ids in both)
        pair = Comparison(array("i", prompt_ids), chosen_ids, rejected_ids, margin)
        return pair, prompt_ids + max(both, key=len)

    columns = {args.chosen_column, args.rejected_column, args.prompt_column, args.margin_column}
    columns -= {"prompt", "margin", None}  # these need not be there
    rows = load_rows(args.dataset, args.dataset_config, split, columns)
    if args.margin_column in rows.column_names:
        print(f"{split}: margins m from the column `{args.margin_column}`")
    return encode_rows(rows, encode_row, tokenizer, args.max_length, most=most)


def to_pair(args: Args, row: dict) -> tuple[Any, Any, Any]:
    """The prompt, the preferred completion and the other one of a row, strings or chat messages."""
    chosen, rejected = row.pop(args.chosen_column), row.pop(args.rejected_column)
    prompt = row.pop(args.prompt_column, None)
    if isinstance(chosen, list) and len(chosen) > 1 and chosen[0].get("role") != "assistant":
        # Whole conversations: the prompt is what they share, whatever its own column says.
        if not rejected or chosen[:-1] != rejected[:-1]:
            raise UnusableRow("whose conversations begin differently")
        return chosen[:-1], chosen[-1:], rejected[-1:]
    if prompt is None and isinstance(chosen, str) and rejected:  # dialogues, such as hh-rlhf's
        before, assistant, _ = os.path.commonprefix([chosen, rejected]).rpartition("Assistant:")
        if assistant and args.chat:
            raise ValueError("--chat: a dialogue in one text would become a single user's turn")
        prompt = before + assistant
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        raise UnusableRow("with an empty prompt, or without --prompt-column")
    return as_chat(prompt) if args.chat else prompt, chosen, rejected


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
