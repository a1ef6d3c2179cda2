r"""REINFORCE: the policy gradient itself, the first lesson.

Sample a completion o of a prompt q from the policy and give it a reward r. The log-derivative trick
turns the gradient of the expected reward into an expectation that samples estimate (Williams 1992):

    grad E[r] = E[ (r - b) grad log pi(o|q) ],    log pi(o|q) = sum_t log pi(o_t | q, o_<t).

E[grad log pi(o|q)] is 0, so a baseline b that does not depend on o leaves the mean as it is, and a
good one lowers the variance. Leave-one-out (RLOO, arXiv 2402.14740): of a prompt's k completions,
b is the mean reward of the other k - 1. --beta subtracts beta log(pi(o|q) / pi_ref(o|q)) from r, a
constant in the gradient, and so maximises E[r] - beta KL(pi || pi_ref).

grpo.py with --num-minibatches 1 --no-scale-rewards --beta 0 --loss-norm constant has the gradient
of leave-one-out times (k - 1) / (k max_new_tokens). Deviations from RLOO: no KL by default, a rule
as the reward, AdamW with a linear decay. A healthy run: `reward/mean` and `eval/reward` rise.

    python reinforce.py                                  # tiny/arithmetic, half a minute on a CPU
    python reinforce.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k \
        --dataset-config main --prompt-column question --chat --max-prompt-length 256 \
        --max-new-tokens 512 --eval-split "test[:200]" --micro-batch-size 8 --learning-rate 1e-6
    torchrun --nproc_per_node=8 reinforce.py ...         # eight GPUs: docs/processes.md
    python reinforce.py --resume runs/reinforce__1__...  # resume after a crash
"""

import inspect
import json
import math
import os
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from filelock import FileLock
from torch import Generator, Tensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoConfig, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, checkpoint_activations, content, encode
from common.generation import find_stop_ids, generate, shard
from common.logprobs import Sequences, completion_logprobs, micro_batches, rollout_logprobs

FULL_STATE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "reinforce"  # name of the run's folder, before the seed and the time
    seed: int = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 20  # rollouts between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    # folder or hub name of the policy, the reference and their tokenizer
    model: str = "tiny/arithmetic/policy"
    dataset: str = "tiny/arithmetic/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows, a completion each; slices such as test[:500] work
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column that the reward function receives as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: int = 64  # longest prompt in tokens; rows with longer ones are dropped
    # --- REINFORCE ---
    # path/to/file.py:function that scores completions
    reward_fn: str = "tiny/arithmetic/reward.py:last_number"
    total_rollouts: int = 60  # rollouts, each followed by one optimiser step
    prompts_per_rollout: int = 32  # prompts per rollout
    group_size: int = 8  # k, completions per prompt; leave_one_out needs at least 2
    # b, subtracted from each return: 0, the rollout's mean, or the mean of the prompt's other k - 1
    baseline: Literal["none", "batch_mean", "leave_one_out"] = "leave_one_out"
    beta: float = 0.0  # coefficient of the KL in the reward; 0 loads no reference
    max_new_tokens: int = 24  # longest completion in tokens
    # --- optimisation and evaluation ---
    # completions per forward pass: sets memory and speed, not the result
    micro_batch_size: int = 64
    # recompute activations in the backward pass: much less memory, about a third slower
    activation_checkpointing: bool = False
    learning_rate: float = 1e-3  # AdamW's learning rate in the first step; it falls linearly to 0
    eval_every: int = 20  # rollouts between evaluations; always one at the start and at the end


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: list[int]  # its token ids
    columns: dict  # the row's other columns, for the reward functions


# --- the mathematics ---------------------------------------------------------------------------
def baseline_advantages(returns: Tensor, group_size: int, baseline: str) -> Tensor:
    """r - b (B,) of returns r (B,), in which the k completions of a prompt are neighbours."""
    groups = returns.double().view(-1, group_size)  # float64: equal returns give exactly 0
    if baseline == "leave_one_out":  # the mean of the prompt's other completions (RLOO)
        b = (groups.sum(dim=1, keepdim=True) - groups) / (group_size - 1)
    elif baseline == "batch_mean":
        b = groups.mean()  # includes r itself: scales the expected gradient by (B - 1) / B
    else:
        b = torch.zeros_like(groups)
    return (groups - b).view(-1).float()


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, num_completions: int) -> Tensor:
    """-(1/B) sum (r - b) log pi(o|q) over n of a step's B completions; micro-batches add up.

    Log-probs (n, T) are in nats, advantages r - b (n,). The gradient is the estimate of -grad E[r];
    the value means nothing.
    """
    log_pi = logprobs.sum(dim=1)  # log pi(o|q), (n,)
    return -(advantages * log_pi).sum() / num_completions


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    args = check_args(args)
    run_dir, device, wandb_run = start_run(args)

    # --- data, models and the reward ---
    tokenizer, stop_ids = load_tokenizer(args.model)
    train_prompts = load_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_prompts(args, args.eval_split, tokenizer)
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model("--model", args.model, AutoModelForCausalLM, positions, device)
    if args.activation_checkpointing:
        with explain("--activation-checkpointing"):
            checkpoint_activations(policy)
    ref_model = None
    if args.beta > 0:
        ref_model = load_model("--model", args.model, AutoModelForCausalLM, positions, device)
    columns = train_prompts[0].columns
    (reward_fn,) = load_reward_fns("--reward-fn", [args.reward_fn], columns).values()

    # --- optimiser, and where an interrupted run stopped ---
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    training = {"policy": (policy, optimizer)}
    checkpoint = {"step": 0, "data": zlib.crc32(repr(train_prompts).encode())}
    if args.resume:
        checkpoint = load_checkpoint(args, run_dir, training, checkpoint, args.total_rollouts)
    print(f"{run_dir}: {policy.num_parameters():,} parameters on {device}")

    # --- the loop ---
    def sample(prompts: list[Prompt], rng: Generator) -> tuple[Sequences, list[str]]:
        """A completion for each prompt: pairs (prompt, completion) of token ids, and texts."""
        prompt_ids = [prompt.ids for prompt in prompts]
        completion_ids = generate(
            policy,
            prompt_ids,
            max_new_tokens=args.max_new_tokens,
            temperature=1.0,
            stop_ids=stop_ids,
            rng=rng,
        )
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return list(zip(prompt_ids, completion_ids, strict=True)), texts

    if not args.resume:
        metrics, samples = evaluate(sample, reward_fn, eval_prompts, seed=args.seed)
        log(run_dir, wandb_run, 0, metrics, samples)
    progress = tqdm(range(checkpoint["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser step on it
        # 1. Roll out: k completions per prompt, from the policy as it is now.
        rng = Generator().manual_seed(args.seed + 1_000_003 * (step + 1))  # so resume is exact
        prompt_inds = torch.randint(len(train_prompts), [args.prompts_per_rollout], generator=rng)
        prompts = [train_prompts[i] for i in prompt_inds for _ in range(args.group_size)]
        sequences, texts = sample(prompts, rng)  # B of each
        batches = [*micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)]

        # 2. Returns: rewards, minus beta times the log-ratio to the reference.
        rewards = reward_fn(prompts, sequences, texts).to(device)  # (B,)
        log_ratio = torch.zeros_like(rewards)  # log(pi(o|q) / pi_ref(o|q)), nats; no gradient
        if ref_model is not None:
            policy_logprobs = rollout_logprobs(policy, sequences, batches, temperature=1.0)
            ref_logprobs = rollout_logprobs(ref_model, sequences, batches, temperature=1.0)
            log_ratio = (policy_logprobs - ref_logprobs).sum(dim=1)
        returns = rewards - args.beta * log_ratio

        # 3. Optimise: one step, its gradient summed over micro-batches and ranks.
        advantages = baseline_advantages(returns, args.group_size, args.baseline)  # (B,)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_rollouts)
        for inds in batches:
            logprobs = completion_logprobs(policy, sequences, inds)  # (b, T)
            loss = policy_gradient_loss(logprobs, advantages[inds], num_completions=len(sequences))
            loss.backward()
        grad_norm = clip_grad_norm(policy, math.inf, run_dir, step)  # only measured: no clipping
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log, evaluate, save.
        metrics = {
            "reward/mean": rewards.mean().item(),
            "objective/kl": log_ratio.mean().item(),  # nats per completion; 0 without --beta
            "policy/grad_norm": grad_norm,
            "completions/length_mean": np.mean([len(completion) for _, completion in sequences]),
        }
        samples = []
        is_last = step + 1 == args.total_rollouts
        if is_last or (step + 1) % args.eval_every == 0:
            eval_metrics, samples = evaluate(sample, reward_fn, eval_prompts, seed=args.seed)
            metrics |= eval_metrics
        log(run_dir, wandb_run, step + 1, metrics, samples)
        progress.set_postfix(reward=metrics["reward/mean"])
        if is_last or (step + 1) % args.save_every == 0:
            save_checkpoint(run_dir, training, checkpoint | {"step": step + 1})

    save_model(run_dir, policy, tokenizer, stop_ids)
    if wandb_run:
        wandb_run.finish()
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


def evaluate(
    sample: Callable, reward_fn: Callable, prompts: list[Prompt], seed: int
) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    rng = Generator().manual_seed(seed)  # every evaluation draws the same numbers
    sequences, texts = sample(prompts, rng)
    rewards = reward_fn(prompts, sequences, texts).tolist()
    lengths = [len(completion) for _, completion in sequences]
    samples = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt.text, "completion": texts[i]}
        samples.append(row | {"reward": rewards[i], "length": lengths[i]})
    return {"eval/reward": np.mean(rewards), "eval/length_mean": np.mean(lengths)}, samples


# --- the reward --------------------------------------------------------------------------------
def load_reward_fns(flag: str, specs: list[str], columns: dict) -> dict[str, Callable]:
    """Reward functions by name, each from a path/to/file.py:function."""
    reward_fns = {}
    for spec in specs:
        path, _, name = spec.rpartition(":")
        with explain(f"{flag} {spec}"):
            check(Path(path).is_file(), f"no file {path!r}; give path/to/file.py:function")
        with explain(f"{flag} {spec}, called with prompts, completions, {[*columns]}"):
            module_spec = spec_from_file_location(Path(path).stem, path)
            module = module_from_spec(module_spec)
            sys.path.append(str(Path(path).parent))  # for modules beside it
            sys.modules.setdefault(module.__name__, module)  # for its dataclasses and processes
            module_spec.loader.exec_module(module)
            function = getattr(module, name)
            inspect.signature(function).bind(prompts=[], completions=[], **columns)
            is_taken = name in {*reward_fns, "reward_model", "mean", "std"}
            check(not is_taken, "another reward, or a metric, has this name")
        reward_fns[name] = partial(call_reward_fn, name, function)
    return reward_fns


def call_reward_fn(
    name: str, function: Callable, prompts: list, sequences: Sequences, texts: list[str]
) -> Tensor:
    """Rewards (B,) of texts[i], the completion of prompts[i], by a function that only rank 0 calls,
    once for all completions, because it may compare them. Reward models read `sequences` instead.
    """
    rewards = []
    if RANK == 0:
        columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
        prompt_texts = [prompt.text for prompt in prompts]
        rewards = function(prompts=prompt_texts, completions=[*texts], **columns)
        with explain(f"reward function {name} must return a list of {len(texts)} numbers"):
            is_list = isinstance(rewards, list | tuple | np.ndarray | Tensor)
            check(is_list, f"it returned a {type(rewards).__name__}")
            check(len(rewards) == len(texts), f"it returned {len(rewards)}")
            for prompt, text, reward in zip(prompt_texts, texts, rewards, strict=True):
                # Beyond 3e38 it would be infinite in float32.
                is_number = isinstance(reward, SupportsFloat) and abs(float(reward)) < 3e38
                check(is_number, f"it returned {reward!r} for {text!r} after {prompt!r}")
    return torch.tensor(all_gather([float(reward) for reward in rewards]))  # rank 0's, on all


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


def load_model(flag: str, source: str, kind: Any, positions: int, device: Any) -> torch.nn.Module:
    """A model in float32 and in eval mode: dropout is off, while sampling and while training."""
    with explain(f"{flag} {source}"):
        check_folder(source)
        model, info = kind.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        check(not wrong, f"weights missing or unknown to {type(model).__name__}: {wrong}")
        one_label = not hasattr(model, "score") or model.config.num_labels == 1
        check(one_label, "it has more than one label")
        limit = getattr(model.config, "max_position_embeddings", positions)
        check(positions <= limit, f"it has {limit} positions, the --max flags need {positions}")
    return shard(model, device)


def load_prompts(args: Args, split: str, tokenizer: Any) -> list[Prompt]:
    """The prompts of a split; rows that cannot be used are dropped, counted and reported."""
    prompts, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        check_folder(args.dataset)
        dataset = load_dataset(args.dataset, args.dataset_config, split=split)
    for index, row in enumerate(dataset):
        with explain(f"--dataset {args.dataset}, row {index} of {split}"):
            check(args.prompt_column in row, f"no --prompt-column in {[*row]}")
            text = row.pop(args.prompt_column) or ""
            message = f"a prompt is a string or a list of messages, not {text!r:.80}"
            check(isinstance(text, str | list), message)
            if args.answer_column in row:
                row["answer"] = row.pop(args.answer_column)
                check(row["answer"] is not None, f"--answer-column {args.answer_column} is null")
            if args.chat and isinstance(text, str):
                text = [{"role": "user", "content": text}]
            last_turn = text if isinstance(text, str) else content(text[-1])
            ids = []
            if last_turn.strip():
                ids = encode(tokenizer, text, add_generation_prompt=True)
        if not ids:
            dropped["empty"].append(text)
        elif len(ids) > args.max_prompt_length:
            dropped[f"longer than --max-prompt-length {args.max_prompt_length}"].append(text)
        else:
            prompts.append(Prompt(text, ids, row))
    report_rows(args, split, prompts, dropped)
    return prompts


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
        check_numbers(args, "save_every max_prompt_length total_rollouts prompts_per_rollout")
        check_numbers(args, "group_size max_new_tokens micro_batch_size learning_rate eval_every")
        check_numbers(args, "seed beta", zero=True)
        message = "--baseline leave_one_out needs a --group-size of at least 2"
        check(args.group_size > 1 or args.baseline != "leave_one_out", message)
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
