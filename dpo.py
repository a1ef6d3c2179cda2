r"""Direct Preference Optimization (DPO): learn from preference pairs without a reward model.

The optimum of E[r(x, y)] - beta KL(pi || pi_ref) is pi_ref(y|x) exp(r(x, y) / beta) / Z(x). So each
policy is optimal for an implicit reward, beta log(pi(y|x) / pi_ref(y|x)), and the Bradley-Terry
loss of `rm_bradley_terry.py` can train it (arXiv 2305.18290, equation 7, where eps = 0):

    h = log(pi(y_w|x) / pi_ref(y_w|x)) - log(pi(y_l|x) / pi_ref(y_l|x)),   y_w chosen, y_l rejected,
    L = mean over pairs of  - (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h).

`--loss ipo` (2310.12036) aims at a finite h per token. Two losses need no reference; with the mean
per token m(y) = log pi(y|x) / |y|, and odds(y) = e^m(y) / (1 - e^m(y)), they are

    simpo:  - log sigmoid(beta m(y_w) - beta m(y_l) - gamma)              (2405.14734, equation 6),
    orpo:   - m(y_w) - beta log sigmoid(log odds(y_w) - log odds(y_l))    (2403.07691, equation 6).

Deviations from the papers: AdamW and a linear schedule. eps > 0 says that a label is wrong that
often (conservative DPO, Mitchell 2023). `--nll-coef` gives other losses ORPO's first term, the loss
of SFT (2404.19733); with it ORPO starts from a base model.

    python dpo.py                                          # tiny/reviews, half a minute on a CPU
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized \
        --max-length 1024 --max-new-tokens 256 --batch-size 64 --micro-batch-size 4 --epochs 1 \
        --beta 0.1 --learning-rate 1e-6                    # one GPU, a model and chats from the hub
    torchrun --nproc_per_node=8 dpo.py ...                 # eight GPUs: docs/processes.md
    python dpo.py --resume runs/dpo__1__...                # resume after a crash

A healthy run: the first loss is ln 2 = 0.693 (IPO: 1 / (4 beta^2); plus the NLL), `reward/margin`
and `reward/accuracy` rise then. If `policy/logprob_chosen` falls by tens of nats: raise beta
(SimPO: lower the learning rate). With ORPO it rises.
"""

import gc
import inspect
import json
import math
import os
import re
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
from torch.nn.functional import logsigmoid
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationConfig, get_scheduler, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, find_stop_ids, generate
from common.generation import shard
from common.logprobs import completion_logprobs, encode_pair, micro_batches, rollout_logprobs

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
REFERENCED = ["sigmoid", "ipo"]  # the losses that compare the policy with a reference


@dataclass
class Args:
    exp_name: str = "dpo"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 50  # optimiser steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy, reference and tokenizer
    dataset: str = "tiny/reviews/preferences"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # `none`: the prompt is what chosen and rejected begin with
    chosen_column: str = "chosen"  # column of the preferred completion, a string or chat messages
    rejected_column: str = "rejected"  # column of the other completion
    answer_column: str = "answer"  # column given to the rule of --eval-reward-fn as `answer`
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    max_length: int = 128  # of prompt and completion together, in tokens; the rest is cut off
    # --- DPO ---
    loss: Literal["sigmoid", "ipo", "simpo", "orpo"] = "sigmoid"  # of DPO, IPO, SimPO or ORPO
    beta: float = 0.3  # cost of leaving the reference (LLMs: 0.1); SimPO's scale (2); ORPO's lambda
    gamma: float = 0.0  # target margin of SimPO's rewards; not gamma / beta (paper: 0.3 to 1.6)
    label_smoothing: float = 0.0  # eps, the probability that a label is wrong (conservative DPO)
    nll_coef: float = 0.0  # coefficient of the chosen completion's NLL, in nats per token
    online_reference: bool = False  # run the reference in every step, not once before training
    # --- optimisation and evaluation ---
    epochs: float = 3.0  # passes over the training pairs
    batch_size: int = 32  # pairs per optimiser step
    micro_batch_size: int = 32  # pairs per forward pass: memory and speed, not the result
    learning_rate: float = 5e-4  # AdamW's peak learning rate
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.1  # part of the run over which the learning rate rises from 0
    weight_decay: float = 0.0  # AdamW's weight decay
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 100  # steps between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out pairs, at most; their prompts are completed too
    eval_reward_fn: str | None = "tiny/reviews/gold.py:sentiment"  # judges samples of its dataset
    max_new_tokens: int = 40  # longest sampled completion in tokens
    temperature: float = 1.0  # of sampling at evaluation; it divides the logits in eval/kl too


# --- the mathematics ---------------------------------------------------------------------------
def preference_loss(args: Args, logprobs: Tensor, ref_logprobs: Tensor, lengths: Tensor) -> tuple:
    """The loss of each pair (B,), and its metrics (B,).

    logprobs, ref_logprobs: (B, 2) log pi(y|x) and log pi_ref(y|x) of chosen and rejected, sums over
    tokens, in nats, the latter 0 for SimPO and ORPO; lengths: (B, 2) in tokens. DPO's derivative by
    h, beta (sigmoid(beta h) - (1 - eps)), is 0 where the policy is as certain as the label. IPO's
    loss is (h - 1 / (2 beta))^2 (equation 17, tau = beta). Only DPO's h is of sums, not of means.
    """
    logratios = (logprobs - ref_logprobs) / (1 if args.loss == "sigmoid" else lengths)
    chosen_logratios, rejected_logratios = logratios.unbind(dim=1)
    h, beta, eps = chosen_logratios - rejected_logratios, args.beta, args.label_smoothing
    if args.loss == "ipo":
        losses = (h - 1 / (2 * beta)).square()
    elif args.loss == "orpo":
        # log(1 - e^m): what lies nearer to 0 than 1e-7 is rounding, and 0 itself would give inf.
        log_odds = logratios - (-torch.expm1(logratios.clamp(max=-1e-7))).log()
        losses = -chosen_logratios - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])
    else:
        margin = beta * h - args.gamma
        losses = -(1 - eps) * logsigmoid(margin) - eps * logsigmoid(-margin)
    if args.nll_coef > 0:
        losses = losses - args.nll_coef * logprobs[:, 0] / lengths[:, 0]
    metrics = {"reward/margin": beta * h, "reward/accuracy": 0.5 + 0.5 * h.sign()}  # a tie is half
    metrics["reward/chosen"], metrics["reward/rejected"] = (beta * logratios).unbind(dim=1)
    metrics["policy/logprob_chosen"], metrics["policy/logprob_rejected"] = logprobs.unbind(dim=1)
    return losses, {name: values.detach() for name, values in metrics.items()}


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_preference_pairs(args, args.train_split, tokenizer, stop_ids)
    eval_rows = load_preference_pairs(args, args.eval_split, tokenizer, stop_ids)[: args.eval_rows]
    # The default rule judges the default dataset alone.
    judged = args.eval_reward_fn != Args.eval_reward_fn or args.dataset == Args.dataset
    rule = args.eval_reward_fn if judged else None
    judge = load_judge(rule, eval_rows[0]) if rule else None
    longest = max(args.max_length, *(len(row["ids"]) + args.max_new_tokens for row in eval_rows))
    source = ("--model", args.model, AutoModelForCausalLM, longest, device)
    policy = load_model(*source)
    ref_model = load_model(*source) if args.online_reference else None
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=args.weight_decay, fused=True)
    steps = math.ceil(args.epochs * len(train_rows) / args.batch_size)
    schedule = get_scheduler(args.lr_schedule, optimizer, int(args.warmup_ratio * steps), steps)
    trained = {"policy": (policy, optimizer)}
    size, models = policy.num_parameters(), 4 + (ref_model is not None)  # Adam: 4 times the weights
    print(f"{run_dir}: {size:,} parameters, {models * size * 4e-9:.3f} GB on {device}")

    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(steps * args.batch_size / len(train_rows))
    order = torch.cat([torch.randperm(len(train_rows), generator=rng) for _ in range(epochs)])
    batches = order.split(args.batch_size)[:steps]

    # The policy is still the reference, also on resume. The last batches go first, so that what the
    # first ones give stays: step 1 runs the same micro-batches, and its h is exactly 0.
    kept, eval_kept = (torch.zeros(len(x), 2, device=device) for x in (train_rows, eval_rows))
    if args.loss in REFERENCED:
        first_epoch = batches[: math.ceil(len(train_rows) / args.batch_size)]
        for picked in [] if ref_model else tqdm(first_epoch[::-1], "reference", disable=RANK > 0):
            kept[picked] = all_logprobs(args, policy, [train_rows[i] for i in picked])
        eval_kept = all_logprobs(args, policy, eval_rows)
    eval_lengths = torch.tensor([row["lengths"] for row in eval_rows], device=device)  # (N, 2)

    def evaluate() -> tuple[dict, list[dict]]:
        """Metrics of the held-out pairs and of one completion per prompt, and the samples."""
        logprobs = all_logprobs(args, policy, eval_rows)
        losses, terms = preference_loss(args, logprobs, eval_kept, eval_lengths)
        found = (losses, terms["reward/accuracy"], terms["reward/margin"])
        loss, accuracy, margin = (values.double().mean().item() for values in found)
        metrics = {"eval/loss": loss, "eval/pair_accuracy": accuracy, "eval/margin": margin}
        rng = torch.Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
        prompts, sampled, size = [row["ids"] for row in eval_rows], [], 2 * args.batch_size
        for some in (prompts[start : start + size] for start in range(0, len(prompts), size)):
            sampled += generate(policy, some, args.max_new_tokens, args.temperature, stop_ids, rng)
        if args.loss in REFERENCED:
            pairs = list(zip(prompts, sampled, strict=True))
            parts = [*micro_batches(pairs, torch.arange(len(pairs)), 2 * args.micro_batch_size)]
            fixed = (pairs, parts, args.temperature)
            logratios = rollout_logprobs(policy, *fixed)  # (N, T)
            logratios -= rollout_logprobs(ref_model or load_model(*source), *fixed)
            if WORLD_SIZE > 1:
                gc.collect()  # frees the reference: sharded, it and its hooks refer to each other
            metrics["eval/kl"] = logratios.double().sum().item() / len(pairs)  # k1: unbiased
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        told = zip(eval_rows, texts, sampled, strict=True)
        samples = [dict(prompt=row["prompt"], completion=x, length=len(y)) for row, x, y in told]
        metrics["eval/length_mean"] = np.mean([sample["length"] for sample in samples])
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
        # 1. draw the pairs of this step
        started = time.perf_counter()
        rows = [train_rows[i] for i in batches[step]]
        lengths = torch.tensor([row["lengths"] for row in rows], device=device)  # (B, 2)

        # 2. the reference's log-probs (B, 2), which stay fixed
        ref_logprobs = all_logprobs(args, ref_model, rows) if ref_model else kept[batches[step]]

        # 3. optimise: one step, its gradient summed over micro-batches
        rate = args.learning_rate * schedule.lr_lambdas[0](step)
        optimizer.param_groups[0].update(lr=rate, weight_decay=args.weight_decay)
        sums = defaultdict(float)
        for some, logprobs in pair_logprobs(args, policy, rows):  # (b,) and (b, 2)
            losses, terms = preference_loss(args, logprobs, ref_logprobs[some], lengths[some])
            (losses.sum() / args.batch_size).backward()
            for name, values in {"objective/loss": losses, **terms}.items():
                sums[name] += values.detach().double().sum()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
        with explain(f"step {step + 1}: no step was taken; is --learning-rate too high?"):
            require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
        optimizer.step()
        optimizer.zero_grad()

        # 4. log, evaluate, save
        done, due = step + 1, (step + 1) % args.eval_every == 0 or step + 1 == steps
        tokens = lengths.sum().item() + 2 * sum(len(row["ids"]) for row in rows)
        metrics = {
            **{name: all_reduce_sum(value).item() / len(rows) for name, value in sums.items()},
            "policy/grad_norm": norm,
            "policy/learning_rate": rate,
            "time/epoch": done * args.batch_size / len(train_rows),
            "time/tokens_per_second": tokens / (time.perf_counter() - started),
        }
        found = evaluate() if due else ({}, [])
        log(run_dir, done, metrics | found[0], found[1])
        progress.set_postfix(loss=metrics["objective/loss"], accuracy=metrics["reward/accuracy"])
        if done % args.save_every == 0 or done == steps:
            save_checkpoint(run_dir, trained, state | {"step": done})

    finish(run_dir, policy, tokenizer, stop_ids)
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


# --- log-probs of pairs, and the rule that judges samples --------------------------------------
def pair_logprobs(args: Args, model: Any, rows: list[dict]) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers (b,), and log pi(y|x) (b, 2) of chosen and rejected, of each micro-batch."""
    sides = [(row["ids"], row[side]) for side in ("chosen", "rejected") for row in rows]  # 2B
    longer = [(row["ids"], max(row["chosen"], row["rejected"], key=len)) for row in rows]
    for some in micro_batches(longer, torch.arange(len(rows)), args.micro_batch_size):
        both = torch.cat([some, some + len(rows)])  # in one forward pass
        yield some, completion_logprobs(model, sides, both).sum(dim=1).view(2, len(some)).T


@torch.no_grad()
def all_logprobs(args: Args, model: Any, rows: list[dict]) -> Tensor:
    """`pair_logprobs` (B, 2) of all rows, from all ranks and without gradient."""
    logprobs = torch.zeros(len(rows), 2, device=model.device)
    for some, values in pair_logprobs(args, model, rows):
        logprobs[some] = values
    return all_reduce_sum(logprobs)


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


def load_preference_pairs(args: Args, split: str, tokenizer: Any, stop_ids: list) -> list[dict]:
    """Rows of `prompt`, its token `ids`, those of `chosen` and `rejected`, and other `columns`."""
    rows, dropped, cut = [], defaultdict(list), 0
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                parts = prompt, *sides = to_preference(args, row)
                pairs = [encode_pair(tokenizer, prompt, side, stop_ids) for side in sides]
            why = [pair for pair in pairs if isinstance(pair, str)]
            if not why:
                (ids, chosen), (_, rejected) = pairs
                room = max(0, args.max_length - len(ids))
                kept = {"chosen": chosen[:room], "rejected": rejected[:room]}
                if kept["chosen"] == kept["rejected"]:
                    full = f"whose prompt leaves no room in --max-length {args.max_length}"
                    why = ["with chosen equal to rejected" if room else full]
            if why:
                dropped[why[0]].append(parts)
                continue
            cut += max(len(chosen), len(rejected)) > room
            used = (args.prompt_column, args.chosen_column, args.rejected_column)
            columns = {name: value for name, value in row.items() if name not in used}
            if args.answer_column in columns:
                columns["answer"] = columns.pop(args.answer_column)
            kept["lengths"] = [len(side) for side in kept.values()]
            rows.append({"prompt": prompt, "ids": ids, "columns": columns, **kept})
        report(split, rows, dropped)
    if cut:
        print(f"{split}: {cut} pairs are cut off at --max-length {args.max_length}")
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
    may_be_zero = "seed gamma label_smoothing nll_coef warmup_ratio weight_decay".split()
    belongs = {"label_smoothing": ["sigmoid"], "gamma": ["simpo"], "online_reference": REFERENCED}
    belongs["nll_coef"] = [*REFERENCED, "simpo"]  # ORPO's loss has it, with a coefficient of 1
    with explain("flags"):
        for name, value in vars(args).items():
            flag, zero = f"--{name.replace('_', '-')}", value == 0 and name in may_be_zero
            most = {"warmup_ratio": 1, "label_smoothing": 0.5}.get(name, math.inf)
            known = type(value) not in (int, float) or zero or 0 < value < most
            require(known, f"{flag} must not be {value}")
            losses = belongs.get(name, [args.loss])
            fits = not value or args.loss in losses
            require(fits, f"{flag} belongs to --loss {' or '.join(losses)}, not {args.loss}")


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
