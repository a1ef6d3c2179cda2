r"""Kahneman-Tversky Optimization (KTO): learn from single completions that are good or bad.

Prospect theory: people value an outcome by its distance from a reference point, less and less so
the farther off it is. Here the outcome is the log-ratio of `dpo.py`, r = log(pi(y|x) /
pi_ref(y|x)), and the reference point z0 an estimate of KL(pi || pi_ref) (arXiv 2402.01306, 4.1):

    z0 = max(0, mean of r(x_i, y_j) over mismatched pairs), without gradient,
    v(x, y) = w_D sigmoid(beta (r - z0)) if y is desirable, w_U sigmoid(beta (z0 - r)) if not,
    L = mean over completions of w - v(x, y), where w is w_D or w_U.

Deviations from the paper: z0 is that of the whole optimiser step, not of a micro-batch; who is
mismatched with whom is settled once for all of the data; AdamW and a linear schedule, not RMSprop.

    python kto.py                                          # tiny/reviews, half a minute on a CPU
    python kto.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/kto-mix-14k --beta 0.1 \
        --max-length 1024 --max-new-tokens 256 --micro-batch-size 4 --learning-rate 1e-6  # one GPU
    torchrun --nproc_per_node=8 kto.py ...                 # eight GPUs: docs/processes.md
    python kto.py --resume runs/kto__1__...                # resume after a crash

A healthy run: the first loss is half the mean weight, and `reward/margin` rises from 0. If
`reward/desirable` sinks and `eval/kl` passes ten nats: a lower learning rate, more w_D or beta.
"""

import gc
import inspect
import json
import math
import os
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationConfig, get_scheduler, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, find_stop_ids, generate
from common.generation import shard
from common.logprobs import Pairs, completion_logprobs, encode_pair, micro_batches, rollout_logprobs

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "kto"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 50  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy, reference and tokenizer
    dataset: str = "tiny/reviews/labels"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    completion_column: str = "completion"  # without it chosen and rejected are taken apart
    label_column: str = "label"  # column that tells desirable completions (true or 1) from others
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    max_length: int = 128  # of prompt and completion together, in tokens; the rest is cut off
    # --- KTO ---
    beta: float = 0.1  # cost of leaving the reference
    desirable_weight: float = 1.33  # w_D; w_D n_D should be 1 to 3/2 times w_U n_U, of n rows each
    undesirable_weight: float = 1.0  # w_U, weight of the undesirable completions
    # --- optimisation and evaluation ---
    epochs: float = 2.0  # passes over the training completions
    batch_size: int = 32  # completions per optimiser step
    micro_batch_size: int = 32  # completions per forward pass: memory and speed, not the result
    learning_rate: float = 1e-3  # AdamW's peak learning rate
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.1  # part of the run over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 100  # steps between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out completions, at most; their prompts are completed too
    eval_reward_fn: str | None = "tiny/reviews/gold.py:sentiment"  # judges samples of its dataset
    max_new_tokens: int = 40  # longest sampled completion in tokens
    temperature: float = 1.0  # of sampling at evaluation; it divides the logits in eval/kl too


# --- the mathematics ---------------------------------------------------------------------------
def reference_point(logratios: Tensor) -> Tensor:
    """z0 = max(0, mean of r), in nats, of mismatched pairs (B,): what it estimates is >= 0."""
    return logratios.mean().clamp(min=0)


def kto_loss(logratios: Tensor, z0: Tensor, labels: Tensor, beta: float, *weights: float) -> Tensor:
    """w - v (B,): w_D sigmoid(-beta (r - z0)) if desirable, and if not w_U sigmoid(beta (r - z0)).

    logratios: (B,) r = log pi(y|x) - log pi_ref(y|x), sums over tokens, in nats; labels: (B,) bool;
    weights: w_D, w_U. The derivative, -+ beta (w - v) v / w, is largest at z0 and 0 far from it.
    """
    gains = torch.where(labels, logratios - z0, z0 - logratios)
    return torch.where(labels, *weights) * torch.sigmoid(-beta * gains)


def kto_metrics(logratios: Tensor, z0: Tensor, labels: Tensor, *coefs: float) -> dict[str, float]:
    """Means over the completions (B,) of a whole step; the margin if there are both kinds."""
    rewards = coefs[0] * logratios
    kinds = {"reward/desirable": rewards[labels], "reward/undesirable": rewards[~labels]}
    metrics = {name: some.double().mean().item() for name, some in kinds.items() if len(some)}
    if len(metrics) == 2:
        metrics["reward/margin"] = metrics["reward/desirable"] - metrics["reward/undesirable"]
    loss = kto_loss(logratios, z0, labels, *coefs).double().mean().item()
    return metrics | {"objective/loss": loss, "objective/kl": z0.item()}


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_labelled(args, args.train_split, tokenizer, stop_ids)
    eval_rows = load_labelled(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    # The default rule judges the default dataset alone.
    judged = args.eval_reward_fn != Args.eval_reward_fn or args.dataset == Args.dataset
    rule = args.eval_reward_fn if judged else None
    judge = load_judge(rule, eval_rows[0]) if rule else None
    longest = max(args.max_length, *(len(row["own"][0]) + args.max_new_tokens for row in eval_rows))
    source = ("--model", args.model, AutoModelForCausalLM, longest, device)
    policy = load_model(*source)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=args.weight_decay, fused=True)
    steps = math.ceil(args.epochs * len(train_rows) / args.batch_size)
    schedule = get_scheduler(args.lr_schedule, optimizer, int(args.warmup_ratio * steps), steps)
    trained = {"policy": (policy, optimizer)}
    size = policy.num_parameters()  # with gradient and Adam's state four times
    print(f"{run_dir}: {size:,} parameters, {4 * size * 4e-9:.3f} GB on {device}")
    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(steps * args.batch_size / len(train_rows))
    order = torch.cat([torch.randperm(len(train_rows), generator=rng) for _ in range(epochs)])
    batches = order.split(args.batch_size)[:steps]
    coefs = (args.beta, args.desirable_weight, args.undesirable_weight)

    # The policy is still the reference, also on resume. The last batches go first, so that what the
    # first ones give stays: step 1 runs the same micro-batches, and its r is exactly 0.
    kept = {side: torch.zeros(len(train_rows), device=device) for side in ("own", "mismatched")}
    first_epoch = batches[: math.ceil(len(train_rows) / args.batch_size)]
    for picked in tqdm(first_epoch[::-1], "reference", disable=RANK > 0):
        for side, values in kept.items():
            values[picked] = sum_logprobs(args, policy, [train_rows[i][side] for i in picked])
    held_out = {side: [row[side] for row in eval_rows] for side in kept}
    held_out_refs = {side: sum_logprobs(args, policy, pairs) for side, pairs in held_out.items()}
    eval_labels = torch.tensor([row["label"] for row in eval_rows], device=device)  # (N,)

    def evaluate() -> tuple[dict, list[dict]]:
        """Metrics of the held-out rows and of one completion per prompt, and the samples."""
        own, others = (sum_logprobs(args, policy, held_out[k]) - held_out_refs[k] for k in kept)
        found = kto_metrics(own, reference_point(others), eval_labels, *coefs)
        renamed = {"eval/loss": "objective/loss", "eval/margin": "reward/margin"}
        metrics = {name: found[old] for name, old in renamed.items() if old in found}
        rng = torch.Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
        prompts, sampled, size = [x for x, _ in held_out["own"]], [], 2 * args.batch_size
        for some in (prompts[start : start + size] for start in range(0, len(prompts), size)):
            sampled += generate(policy, some, args.max_new_tokens, args.temperature, stop_ids, rng)
        pairs = list(zip(prompts, sampled, strict=True))
        parts = [*micro_batches(pairs, torch.arange(len(pairs)), 2 * args.micro_batch_size)]
        fixed = (pairs, parts, args.temperature)
        logratios = rollout_logprobs(policy, *fixed)  # (N, T)
        logratios -= rollout_logprobs(load_model(*source), *fixed)
        if WORLD_SIZE > 1:
            gc.collect()  # frees the reference: sharded, it and its hooks refer to each other
        metrics["eval/kl"] = logratios.double().sum().item() / len(pairs)  # k1: unbiased
        metrics["eval/length_mean"] = np.mean([len(completion) for completion in sampled])
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        samples = []
        for row, text, completion in zip(eval_rows, texts, sampled, strict=True):
            samples.append(dict(prompt=row["prompt"], completion=text, length=len(completion)))
        if judge:
            rewards = np.array(judge(eval_rows, texts))
            metrics |= {"eval/reward": rewards.mean(), "eval/accuracy": (rewards >= 1).mean()}
            samples = [s | {"reward": r} for s, r in zip(samples, rewards.tolist(), strict=True)]
        return metrics, samples

    state = {"step": 0, "data": zlib.crc32(repr(train_rows).encode())}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    if not args.resume:
        log(run_dir, 0, *evaluate())
    progress = tqdm(range(state["step"], steps), disable=RANK > 0)
    for step in progress:
        # 1. draw the completions of this step
        started = time.perf_counter()
        rows = [train_rows[i] for i in batches[step]]
        own, others = ([row[side] for row in rows] for side in kept)  # (prompt, completion) each
        labels = torch.tensor([row["label"] for row in rows], device=device)  # (B,)
        ref_own, ref_others = (values[batches[step]] for values in kept.values())  # (B,) each

        # 2. the reference point, of the whole step and without gradient
        z0 = reference_point(sum_logprobs(args, policy, others) - ref_others)

        # 3. optimise: one step, its gradient summed over micro-batches
        rate = args.learning_rate * schedule.lr_lambdas[0](step)
        optimizer.param_groups[0].update(lr=rate, weight_decay=args.weight_decay)
        logratios = torch.zeros(len(rows), device=device)  # those of this rank
        for some in micro_batches(own, torch.arange(len(rows)), args.micro_batch_size):
            r = completion_logprobs(policy, own, some).sum(dim=1) - ref_own[some]  # (b,)
            (kto_loss(r, z0, labels[some], *coefs).sum() / args.batch_size).backward()
            logratios[some] = r.detach()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
        with explain(f"step {step + 1}: no step was taken; is --learning-rate too high?"):
            require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
        optimizer.step()
        optimizer.zero_grad()

        # 4. log, evaluate, save
        done, seconds = step + 1, time.perf_counter() - started
        metrics = kto_metrics(all_reduce_sum(logratios), z0, labels, *coefs) | {
            "policy/grad_norm": norm,
            "policy/learning_rate": rate,
            "time/epoch": done * args.batch_size / len(train_rows),
            "time/tokens_per_second": sum(len(x) + len(y) for x, y in own + others) / seconds,
        }
        found = evaluate() if done % args.eval_every == 0 or done == steps else ({}, [])
        log(run_dir, done, metrics | found[0], found[1])
        progress.set_postfix(loss=metrics["objective/loss"], kl=metrics["objective/kl"])
        if done % args.save_every == 0 or done == steps:
            save_checkpoint(run_dir, trained, state | {"step": done})

    finish(run_dir, policy, tokenizer, stop_ids)
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


# --- log-probs of completions, and the rule that judges samples --------------------------------
def sum_logprobs(args: Args, model: Any, pairs: Pairs) -> Tensor:
    """log pi(y|x) (B,) of all pairs, from all ranks and without gradient."""
    parts = micro_batches(pairs, torch.arange(len(pairs)), args.micro_batch_size)
    return rollout_logprobs(model, pairs, parts, temperature=1.0).sum(dim=1)


def load_judge(spec: str, row: dict) -> Callable:
    """The function at path/to/file.py:function, called on rank 0 alone: it may compare samples."""
    path, _, name = spec.rpartition(":")
    with explain(f"--eval-reward-fn {spec}, called with prompts, completions, {[*row['columns']]}"):
        require(Path(path).is_file(), "not path/to/file.py:function")
        sys.path.insert(0, str(Path(path).parent))
        module = import_module(Path(path).stem)
        require(Path(path).samefile(module.__file__), f"its name is that of {module.__file__}")
        function = getattr(module, name)
        inspect.signature(function).bind(prompts=[], completions=[], **row["columns"])

    def judge(rows: list[dict], texts: list[str]) -> list[float]:
        prompts, rewards = [row["prompt"] for row in rows], []
        if RANK == 0:
            columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
            rewards = function(prompts=prompts, completions=texts, **columns)
            with explain(f"reward function {name} must return a list of {len(texts)} numbers"):
                for prompt, text, reward in zip(prompts, texts, [*rewards], strict=True):
                    finite = isinstance(reward, SupportsFloat) and math.isfinite(reward)
                    require(finite, f"it returned {reward!r} for {text!r} after {prompt!r}")
        return all_gather([float(reward) for reward in rewards])

    return judge


# --- model and data ----------------------------------------------------------------------------
def load_model(flag: str, source: str, kind: Any, longest: int, device: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    with explain(f"{flag} {source}"):
        model, info = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        wrong = sorted({*info["missing_keys"]} | {*info["unexpected_keys"]})
        require(not wrong, f"weights missing or of no use to {type(model).__name__}: {wrong}")
        require(not hasattr(model, "score") or model.config.num_labels == 1, "more than one label")
        positions = getattr(model.config, "max_position_embeddings", longest)
        told = f"the --max flags allow {longest} tokens, but it has only {positions} positions"
        require(longest <= positions, told)
    return shard(model, device)


def load_labelled(args: Args, split: str, tokenizer: Any, stop_ids: list) -> list[dict]:
    """Rows of `prompt`, `label`, other `columns`, and pairs of token ids, `own` and mismatched."""
    rows, dropped, cut, apart = [], defaultdict(list), 0, 0
    used = (args.prompt_column, args.completion_column, args.label_column, "chosen", "rejected")
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                parts = to_labelled(args, row)
                pairs = [encode_pair(tokenizer, *part[:2], stop_ids) for part in parts]
            apart += len(parts) == 2
            columns = {name: value for name, value in row.items() if name not in used}
            for (prompt, completion, label), pair in zip(parts, pairs, strict=True):
                if not isinstance(pair, str) and len(pair[0]) >= args.max_length:
                    pair = f"whose prompt leaves no room in --max-length {args.max_length}"
                if isinstance(pair, str):
                    dropped[pair].append((prompt, completion))
                    continue
                ids, own = pair[0], pair[1][: args.max_length - len(pair[0])]
                cut += len(own) < len(pair[1])
                rows.append(dict(prompt=prompt, label=label, columns=columns, own=(ids, own)))
        report(split, rows, dropped)
    # In the order of prompts, half of all rows further on stands another prompt, unless more than
    # half of them are one. So each completion is taken once.
    order, half = sorted(rows, key=lambda row: row["own"][0]), len(rows) // 2
    for row, other in zip(order, order[half:] + order[:half], strict=True):
        ids, completion = row["own"][0], other["own"][1]
        row["mismatched"] = (ids, completion[: args.max_length - len(ids)])
    good = f"{split}: {sum(row['label'] for row in rows)} of {len(rows)} desirable"
    print(f"{good}; {apart} pairs taken apart; {cut} cut off at --max-length {args.max_length}")
    return rows


def to_labelled(args: Args, row: dict) -> list[tuple[Any, Any, bool]]:
    """Prompt, completion and label of a row, or of each side of a preference pair."""
    names = (args.prompt_column, args.completion_column, args.label_column)
    if {names[1], "chosen", "rejected"} - row.keys() == {"completion"}:
        sides = [{"completion": row[k], names[2]: k == "chosen"} for k in ("chosen", "rejected")]
        return [part for side in sides for part in to_labelled(args, row | side)]
    turns = row.get(names[1])
    if names[0] not in row and isinstance(turns, list):
        row = row | {"prompt": turns[:-1], names[1]: turns[-1:]}  # of a whole conversation
    require({*names} <= row.keys(), f"needs the columns {[*names]}, found {sorted(row)}")
    prompt, completion, label = row[names[0]] or "", row[names[1]] or "", row[names[2]]
    require(label in (0, 1), f"{names[2]} must be true or false, not {label!r:.80}")
    kinds = {type(part).__name__ for part in (prompt, completion) if part}
    told = f"prompt and completion must both be strings or both lists, found {sorted(kinds)}"
    require(kinds in (set(), {"str"}, {"list"}), told)
    if args.chat and kinds == {"str"}:
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion}]
    return [(prompt, completion, bool(label))]


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
    with explain("flags"):
        for name, value in vars(args).items():
            zero = value == 0 and name in ("seed", "warmup_ratio", "weight_decay")
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
