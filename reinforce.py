r"""REINFORCE: the policy gradient itself, the first lesson.

Sample a completion o of a prompt q from the policy and reward it with r. The log-derivative trick
turns the gradient of the expected reward into an expectation that samples estimate (Williams 1992):

    grad E[r] = E[ (r - b) grad log pi(o|q) ],    log pi(o|q) = sum_t log pi(o_t | q, o_<t).

E[grad log pi(o|q)] is 0, so a baseline b that does not depend on o leaves the mean as it is, and a
good one lowers the variance. Leave-one-out (RLOO, arXiv 2402.14740): the mean of the prompt's other
k - 1 samples. --beta takes beta log(pi(o|q) / pi_ref(o|q)) off r and so maximises E[r] - beta KL.

grpo.py with --num-minibatches 1 --no-scale-rewards --beta 0 --loss-norm constant has the gradient
of leave-one-out times (k - 1) / (k max_new_tokens). Deviations from RLOO: no KL by default, a rule
for the reward, AdamW with a linear decay. A healthy run: `reward/mean` and `eval/reward` rise.

    python reinforce.py                                  # tiny/arithmetic, half a minute on a CPU
    python reinforce.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k \
        --dataset-config main --prompt-column question --chat --max-new-tokens 512 \
        --eval-split "test[:200]" --micro-batch-size 8 --learning-rate 1e-6
    torchrun --nproc_per_node=8 reinforce.py ...         # eight GPUs: docs/processes.md
    python reinforce.py --resume runs/reinforce__1__...  # resume after a crash
"""

import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Iterator
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

from common.generation import RANK, WORLD_SIZE, all_gather, encode, find_stop_ids, generate, shard
from common.logprobs import Pairs, completion_logprobs, micro_batches, rollout_logprobs

NUMBER = r"((?:(?<![\w.)])[-+])?)\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Args:
    exp_name: str = "reinforce"  # name of the run's folder, with the seed and the time
    seed: int = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to resume; its flags hold unless given again
    save_every: int = 20  # rollouts between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/arithmetic/policy"  # folder or hub name of policy, reference and tokenizer
    dataset: str = "tiny/arithmetic/prompts"  # folder with train.jsonl and test.jsonl, or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows, a completion each; slices such as test[:500] work
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column of the right answer, which ends in a number
    chat: bool = False  # turn string prompts into a user's chat message
    # --- REINFORCE ---
    total_rollouts: int = 60  # rollouts, each followed by one optimiser step
    prompts_per_rollout: int = 32  # prompts per rollout
    group_size: int = 8  # k, completions per prompt; leave_one_out needs two
    baseline: Literal["none", "batch_mean", "leave_one_out"] = "leave_one_out"  # the baseline b
    beta: float = 0.0  # coefficient of the KL in the reward; 0 loads no reference
    max_new_tokens: int = 24  # longest completion in tokens
    # --- optimisation and evaluation ---
    micro_batch_size: int = 64  # completions per forward pass: memory and speed, not the result
    learning_rate: float = 1e-3  # AdamW's learning rate in the first step; it falls linearly to 0
    eval_every: int = 20  # rollouts between evaluations; always one at the start and at the end


# --- the mathematics ---------------------------------------------------------------------------
def baseline_advantages(returns: Tensor, k: int, baseline: str) -> Tensor:
    """r - b (B,) of returns (B,), the k samples of a prompt being neighbours. b is 0, the mean of
    the batch, or the mean of the prompt's other k - 1 samples (RLOO).
    """
    groups = returns.double().view(-1, k)  # float64: exactly 0 where all returns are equal
    others = (groups.sum(dim=1, keepdim=True) - groups) / max(1, k - 1)
    b = {"none": 0.0, "batch_mean": groups.mean(), "leave_one_out": others}[baseline]
    return (groups - b).view(-1).float()


def policy_gradient_loss(logprobs: Tensor, advantages: Tensor, size: int) -> Tensor:
    """-(1/size) sum (r - b) log pi(o|q), from log-probs (n, T) in nats and advantages (n,) of
    n of a step's `size` completions. Its gradient is the estimate; its value means nothing.
    """
    return -(advantages * logprobs.sum(dim=1)).sum() / size


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_rows(args, args.train_split, tokenizer)
    eval_rows = load_rows(args, args.eval_split, tokenizer)
    longest = max(len(row["ids"]) for row in train_rows + eval_rows) + args.max_new_tokens
    source = ("--model", args.model, AutoModelForCausalLM, longest, device)
    policy = load_model(*source)
    ref_model = load_model(*source) if args.beta > 0 else None
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    trained = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": zlib.crc32(repr(train_rows).encode())}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    print(f"{run_dir}: {policy.num_parameters():,} parameters on {device}")

    def roll_out(rows: list[dict], rng: torch.Generator) -> tuple[Pairs, list[dict]]:
        """A completion for each row: token ids, and its text with reward and length."""
        prompts = [row["ids"] for row in rows]
        sampled = generate(policy, prompts, args.max_new_tokens, 1.0, stop_ids, rng)
        samples = []
        for row, ids in zip(rows, sampled, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            r = float(reward(text, row["answer"]))
            samples.append(dict(prompt=row["prompt"], completion=text, reward=r, length=len(ids)))
        return list(zip(prompts, sampled, strict=True)), samples

    def evaluate() -> tuple[dict, list[dict]]:
        _, samples = roll_out(eval_rows, torch.Generator().manual_seed(args.seed))
        mean = {key: sum(s[key] for s in samples) / len(samples) for key in ("reward", "length")}
        return {"eval/reward": mean["reward"], "eval/length_mean": mean["length"]}, samples

    if not args.resume:
        log(run_dir, 0, *evaluate())
    progress = tqdm(range(state["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:
        # 1. roll out: k completions per prompt, from the policy as it is now
        rng = torch.Generator().manual_seed(args.seed + 1_000_003 * (step + 1))
        picked = torch.randint(len(train_rows), [args.prompts_per_rollout], generator=rng)
        rows = [train_rows[i] for i in picked for _ in range(args.group_size)]  # B
        pairs, samples = roll_out(rows, rng)
        batches = [*micro_batches(pairs, torch.arange(len(pairs)), args.micro_batch_size)]

        # 2. advantages (B,): rewards, less beta times the log-ratio to the reference, less b
        rewards = torch.tensor([sample["reward"] for sample in samples], device=device)  # (B,)
        kl = torch.zeros_like(rewards)
        if ref_model is not None:
            fixed = (pairs, batches, 1.0)
            kl = (rollout_logprobs(policy, *fixed) - rollout_logprobs(ref_model, *fixed)).sum(dim=1)
        advantages = baseline_advantages(rewards - args.beta * kl, args.group_size, args.baseline)

        # 3. optimise: one step, its gradient summed over micro-batches
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.total_rollouts)
        for some in batches:
            logprobs = completion_logprobs(policy, pairs, some)  # (b, T)
            policy_gradient_loss(logprobs, advantages[some], len(pairs)).backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), math.inf)  # no clipping
        norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
        with explain(f"rollout {step + 1}: no step was taken; is --learning-rate too high?"):
            require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
        optimizer.step()
        optimizer.zero_grad()

        # 4. log, evaluate, save
        metrics = {
            "reward/mean": rewards.mean().item(),
            "objective/kl": kl.mean().item(),
            "policy/grad_norm": norm,
            "completions/length_mean": sum(len(o) for _, o in pairs) / len(pairs),
        }
        done, due = step + 1, (step + 1) % args.eval_every == 0 or step + 1 == args.total_rollouts
        found = evaluate() if due else ({}, [])
        log(run_dir, done, metrics | found[0], found[1])
        if done % args.save_every == 0 or done == args.total_rollouts:
            save_checkpoint(run_dir, trained, state | {"step": done})

    finish(run_dir, policy, tokenizer, stop_ids)
    return run_dir


# --- the reward, model and data ----------------------------------------------------------------
def reward(completion: str, answer: str) -> float:
    """1 where the last number is the answer's, `3,0,1,3,5#5` and `5`, else 0. Write yours here."""
    last = [re.findall(NUMBER, text, re.ASCII)[-1:] for text in (completion, answer)]
    found, right = ([float("".join(n).replace(",", "")) for n in one] for one in last)
    return float(found == right != [])


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


def load_rows(args: Args, split: str, tokenizer: Any) -> list[dict]:
    """Rows of `prompt`, its token `ids` and `answer`."""
    rows = []
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                prompt, answer = row.get(args.prompt_column), str(row.get(args.answer_column))
                told = f"no --prompt-column or no number in --answer-column, {answer}, of {[*row]}"
                require(str(prompt or "").strip() and re.search(NUMBER, answer), told)
                if args.chat and isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                ids = encode(tokenizer, prompt, add_generation_prompt=True)
                rows.append({"prompt": prompt, "ids": ids, "answer": answer})
        require(rows, "it has no rows")
    return rows


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
            zero = value == 0 and name in ("seed", "beta")
            known = type(value) not in (int, float) or zero or 0 < value < math.inf
            alone = name == "group_size" and value == 1 and args.baseline == "leave_one_out"
            require(known and not alone, f"--{name.replace('_', '-')} must not be {value}")


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
