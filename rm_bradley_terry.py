r"""Reward modelling (Bradley-Terry): learn from pairs of completions what people prefer.

Of two completions of a prompt x, y_w was preferred to y_l. Give each a score r(x, y), read at its
last token, such that p(y_w beats y_l) = sigmoid(r_w - r_l) is high (Bradley and Terry 1952):

    minimise the mean over pairs of  - log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2

(InstructGPT, arXiv 2203.02155, equation 1), with an optional margin m (Llama 2, arXiv 2307.09288)
and a term that keeps the sum of the scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244).
Deviations from the paper: pairs, not rankings of K completions; no dropout; a warm-up, and a linear
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
`eval/calibration_error` ends below 0.1. If `eval/loss` rises again: fewer epochs.
"""

import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
import wandb
from datasets import load_dataset
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers import get_scheduler, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast, find_stop_ids
from common.generation import pad_rows, shard
from common.logprobs import encode_pair, micro_batches

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "rm_bradley_terry"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order and of the new head
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 50  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name; its head is used, or a new one added
    dataset: str = "tiny/reviews/preferences"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # `none`: the prompt is what chosen and rejected begin with
    chosen_column: str = "chosen"  # column of the preferred completion, a string or chat messages
    rejected_column: str = "rejected"  # column of the other completion
    margin_column: str = "margin"  # column of m, if there is one; `none` to do without
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    max_length: int = 128  # of prompt and completion, in tokens; longer pairs are dropped, counted
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the saved model; trains in float32
    # --- training and evaluation ---
    center_coef: float = 0.0  # c, weight of the term that keeps r_w + r_l near 0 (Eisenstein: 0.01)
    epochs: float = 3.0  # passes over the training pairs
    batch_size: int = 32  # pairs per optimiser step
    micro_batch_size: int = 32  # pairs per forward pass: memory and speed, not the result
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.2  # part of the run over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 50  # optimiser steps between evaluations; always one at the start and the end
    eval_rows: int = 500  # held-out pairs, at most
    eval_samples: int = 20  # how many of them go into samples.jsonl with their scores


# --- the mathematics ---------------------------------------------------------------------------
def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, c: float) -> Tensor:
    """- log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2 of each pair; all (B,), m 0 for none.

    The slope in r_w, without c, is sigmoid(r_w - r_l - m) - 1, and in r_l the opposite: a pair far
    apart in the right order teaches nothing more. `logsigmoid` is finite where log(sigmoid) is not.
    """
    preference = -torch.nn.functional.logsigmoid(chosen - rejected - margin)
    return preference + c * (chosen + rejected).square()


def calibration(margins: Tensor, bins: int = 5) -> tuple[list[dict[str, float]], float]:
    """Does the completion that is said to win with 80 % win in 80 % of such pairs?

    By margins r_w - r_l (N,) the higher score wins with p = sigmoid(|r_w - r_l|). Returns a row for
    each bin of p in use, and the expected calibration error (Guo et al. 2017, arXiv 1706.04599).
    """
    p = margins.double().abs().sigmoid()
    right = (margins.double().sign() + 1) / 2  # a tie counts half
    index, table = ((p - 0.5) * 2 * bins).long().clamp(max=bins - 1), []
    for number in index.unique().tolist():
        inside = index == number
        row = {"from": 0.5 + 0.5 * number / bins, "to": 0.5 + 0.5 * (number + 1) / bins}
        row |= {"pairs": inside.sum().item(), "predicted": p[inside].mean().item()}
        table.append(row | {"observed": right[inside].mean().item()})
    gaps = [row["pairs"] * abs(row["predicted"] - row["observed"]) for row in table]
    return table, sum(gaps) / len(margins)


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_preferences(args, args.train_split, tokenizer, stop_ids)
    eval_rows = load_preferences(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    model = load_classifier(args, tokenizer, stop_ids, device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=args.weight_decay, fused=True)
    steps = math.ceil(args.epochs * len(train_rows) / args.batch_size)
    schedule = get_scheduler(args.lr_schedule, optimizer, int(args.warmup_ratio * steps), steps)
    trained = {"model": (model, optimizer)}
    state = {"step": 0, "data": zlib.crc32(repr(train_rows).encode()), "score_mean": 0.0}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    size = model.num_parameters()  # with gradient and Adam's state four times
    print(f"{run_dir}: {size:,} parameters, {4 * size * 4e-9:.3f} GB on {device}")

    def score(rows: list[dict]) -> Tensor:
        """Loss, r_w and r_l of each pair (3, B); adds up the mean loss's gradient, if enabled."""
        values = torch.zeros(3, len(rows), device=device)
        longer = [([], max(row["sequences"], key=len)) for row in rows]
        for part in micro_batches(longer, torch.arange(len(rows)), args.micro_batch_size):
            both = [rows[i]["sequences"][side] for side in (0, 1) for i in part]  # in one pass
            chosen, rejected = last_token_scores(model, both).view(2, len(part))  # (b,) each
            margins = torch.tensor([rows[i]["margin"] for i in part], device=device)
            losses = bradley_terry_loss(chosen, rejected, margins, args.center_coef)
            if torch.is_grad_enabled():
                (losses.sum() / len(rows)).backward()
            values[:, part] = torch.stack([losses, chosen, rejected]).detach()
        return all_reduce_sum(values)

    if not args.resume:
        log(run_dir, 0, *evaluate(args, run_dir, eval_rows, score))
    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(steps * args.batch_size / len(train_rows))
    order = torch.cat([torch.randperm(len(train_rows), generator=rng) for _ in range(epochs)])
    progress = tqdm(range(state["step"], steps), disable=RANK > 0)
    for step in progress:
        started = time.perf_counter()
        # 1. draw the pairs of this step, and score both completions of each
        rows = [train_rows[i] for i in order[step * args.batch_size :][: args.batch_size]]
        losses, chosen, rejected = score(rows)  # (B,) each; and the gradient

        # 2. optimise
        rate = args.learning_rate * schedule.lr_lambdas[0](step)
        optimizer.param_groups[0].update(lr=rate, weight_decay=args.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
        with explain(f"step {step + 1}: no step was taken; is --learning-rate too high?"):
            require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
        optimizer.step()
        optimizer.zero_grad()

        # 3. log, evaluate, save
        tokens = sum(len(ids) for row in rows for ids in row["sequences"])
        done, samples = step + 1, []
        metrics = {
            "objective/loss": losses.mean().item(),
            "reward/accuracy": (chosen > rejected).float().mean().item(),
            "reward/margin": (chosen - rejected).mean().item(),
            "reward/chosen": chosen.mean().item(),
            "reward/rejected": rejected.mean().item(),
            "reward/grad_norm": norm,
            "reward/learning_rate": rate,
            "time/epoch": done * args.batch_size / len(train_rows),
            "time/tokens_per_second": tokens / (time.perf_counter() - started),
        }
        if done % args.eval_every == 0 or done == steps:
            eval_metrics, samples = evaluate(args, run_dir, eval_rows, score)
            metrics |= eval_metrics
            state["score_mean"] = eval_metrics["eval/score_chosen"]
        log(run_dir, done, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], accuracy=metrics["reward/accuracy"])
        if done % args.save_every == 0 or done == steps:
            save_checkpoint(run_dir, trained, state | {"step": done})

    model.config.score_mean = state["score_mean"]  # what ppo_rlhf.py and grpo.py make 0
    finish(run_dir, model.to(getattr(torch, args.save_dtype)), tokenizer, stop_ids)
    print(f"next: python ppo_rlhf.py --reward-model {run_dir / 'model'}", flush=True)
    return run_dir


@torch.no_grad()
def evaluate(args: Args, run_dir: Path, rows: list[dict], score: Callable) -> tuple:
    """Metrics and samples of the held-out pairs; writes calibration.json."""
    losses, chosen, rejected = score(rows).cpu()
    table, error = calibration(chosen - rejected)
    if RANK == 0:
        (run_dir / "calibration.json").write_text(json.dumps(table, indent=2) + "\n")
    metrics = {
        "eval/loss": losses.mean().item(),
        "eval/pair_accuracy": (chosen > rejected).float().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/calibration_error": error,
        "eval/score_chosen": chosen.mean().item(),
        "eval/score_rejected": rejected.mean().item(),
    }
    scored = zip(rows[: args.eval_samples], chosen.tolist(), rejected.tolist(), strict=False)
    return metrics, [row["texts"] | dict(score_chosen=a, score_rejected=b) for row, a, b in scored]


# --- model and data ----------------------------------------------------------------------------
def last_token_scores(model: Any, sequences: list[list[int]]) -> Tensor:
    """Scores (b,) float32: the head's output at the last token of each list of token ids."""
    # A rank without rows reads a blank one: those of a sharded model run all passes together.
    ids, mask = pad_rows(sequences or [[0]], model.device)
    with autocast(model.device):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
    return model.score(last.float()).squeeze(1)[: len(sequences)]  # in bfloat16 near ones are equal


def load_classifier(args: Args, tokenizer: Any, stop_ids: list, device: Any) -> torch.nn.Module:
    """A transformer with a head of one output, in float32 and in eval mode: dropout is off."""
    with explain(f"--model {args.model}"):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            args.model, dtype=torch.float32, num_labels=1, output_loading_info=True
        )
        missing = sorted({*info["missing_keys"]} - {"score.weight"})
        found = f"{type(model).__name__} has no linear head `score`, or weights are not in it: "
        require(hasattr(model, "score") and not missing, f"{found}{missing}")
        positions = getattr(model.config, "max_position_embeddings", args.max_length)
        require(args.max_length <= positions, f"--max-length: it has {positions} positions only")
    torch.manual_seed(args.seed)
    if "score.weight" in info["missing_keys"]:  # N(0, 1/(d + 1)), arXiv 2009.01325, B.1
        torch.nn.init.normal_(model.score.weight, std=(model.score.in_features + 1) ** -0.5)
    # transformers scores the last id that is not the padding, so the padding must not end a text.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in stop_ids:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return shard(model, device)


def load_preferences(args: Args, split: str, tokenizer: Any, stop_ids: list[int]) -> list[dict]:
    """Each pair's `texts`, its `margin`, and two `sequences` of token ids."""
    rows, dropped = [], {}
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                parts = prompt, *sides = to_preference(args, row)
                pairs = [encode_pair(tokenizer, prompt, side, stop_ids) for side in sides]
                margin = ({"margin": 0.0, "none": 0.0} | row).get(args.margin_column)
                known = isinstance(margin, float | int) and math.isfinite(margin)
                require(known, f"--margin-column {args.margin_column}: no number, but {margin!r}")
            why = [pair for pair in pairs if isinstance(pair, str)]
            sequences = [] if why else [x + y for x, y in pairs]
            if not why and max(map(len, sequences)) > args.max_length:
                why = [f"longer than --max-length {args.max_length}"]
            if not why and sequences[0] == sequences[1]:
                why = ["with chosen equal to rejected"]
            texts = dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
            if why:
                dropped.setdefault(why[0], []).append(texts)
            else:
                rows.append({"texts": texts, "sequences": sequences, "margin": margin})
        report(split, rows, dropped)
    return rows


def to_preference(args: Args, row: dict) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected of a row; a prompt that is not given is what the two share."""
    names = (args.prompt_column, args.chosen_column, args.rejected_column)
    prompt, chosen, rejected = (row.get(name) or "" for name in names)
    allowed = {"none": True, "prompt": isinstance(chosen or rejected, list)}  # if no name was typed
    shared = names[0] not in row and allowed.get(names[0], False)
    for name in names[1:] if shared else names:
        require(name in row, f"no column {name} in {sorted(row)} (is it --prompt-column none?)")
    kinds = sorted({type(part).__name__ for part in (prompt, chosen, rejected) if part})
    told = f"prompt and sides must all be strings or all lists of messages, found {kinds}"
    require(kinds in ([], ["str"], ["list"]), f"{told} (or is it --prompt-column none?)")
    if not chosen or not rejected:
        return prompt, chosen, rejected
    if shared and kinds == ["list"]:
        prompt, chosen, other, rejected = chosen[:-1], chosen[-1:], rejected[:-1], rejected[-1:]
        require(prompt == other, "the two conversations must be equal up to their last message")
    elif shared:
        # Cut in front of white space, where most tokenizers do not merge.
        prompt = re.match(r"(.*\S(?=\s))?", os.path.commonprefix([chosen, rejected]), re.DOTALL)[0]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if args.chat and kinds == ["str"]:
        prompt = [{"role": "user", "content": prompt}]
        chosen, rejected = ([{"role": "assistant", "content": c}] for c in (chosen, rejected))
    return prompt, chosen, rejected


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
    may_be_zero = ("seed", "center_coef", "warmup_ratio", "weight_decay")
    with explain("flags"):
        for name, value in vars(args).items():
            zero = value == 0 and name in may_be_zero
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
