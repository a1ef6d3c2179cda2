r"""On-policy distillation: learn from a teacher on the student's own completions.

Sample a completion y of a prompt x from the student pi. The reward of a token is how much more
probable the teacher tau finds it, and every token has an advantage of its own:

    r_t = log tau(y_t | x, y_<t) - log pi(y_t | x, y_<t),   A_t = sum_{s >= t} discount^(s - t) r_s,
    gradient = E[ sum_t A_t grad log pi(y_t | x, y_<t) ],    y ~ pi(. | x).

With --teacher-prompt-column the teacher reads more than x, such as a solution. Then it may be the
student itself as it was at the start (arXiv 2601.18734, 2601.19897, 2601.20802).

--discount 1: the gradient of -KL(pi || tau) over completions. 0, the default: the sum over tokens
of the gradient of -KL(pi || tau) of the next token with the prefix held fixed. That is less noisy,
but gives no credit for reaching prefixes at which the teacher agrees. r_t depends on pi too; the
gradient of that has mean 0.
--divergence reverse, forward or jsd: at the same prefixes, a divergence between pi and tau of the
next token, summed over the whole vocabulary. `reverse` is the mean of `sampled` at discount 0.

Lu et al. 2025 (thinkingmachines.ai/blog/on-policy-distillation); after GKD (arXiv 2306.13649) and
MiniLLM (2306.08543). Deviations from these two:

1. By default the divergence is estimated from sampled tokens.
2. All completions are the student's: none are from a dataset (GKD) or the teacher (MiniLLM).
3. Nothing is divided by the length of completions.

A healthy run: the held-out KL, `eval/kl`, falls towards 0.

    python distill.py                                    # tiny/arithmetic, half a minute on a CPU
    torchrun --nproc_per_node=8 distill.py ...           # eight GPUs: docs/processes.md
"""

import json
import math
import os
import sys
import time
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.logprobs import OutputHead, Sequences, completion_logprobs, completion_states
from common.logprobs import head_logits, map_logits, micro_batches, output_head, rollout_logprobs
from common.logprobs import sampling_metrics
from common.tokens import as_chat, encode, find_stop_ids
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.checks import check_flags, check_training
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, forward_method
from runtime.model import load_model, load_tokenizer, shard
from runtime.processes import RANK, WORLD_SIZE, from_rank_0, join_processes, leave_processes
from runtime.processes import peak_memory_gb
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, rollout_row, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "distill"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of all sampling
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 20  # rollouts between checkpoints; there is always one at the end
    log_rollouts_every: NonNegativeInt = 1  # rollouts between lines of rollouts.jsonl; 0: none
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- models and data ---
    model: str = "tiny/arithmetic/policy"  # folder or hub name of the student and its tokenizer
    # folder or hub name of the teacher, which knows the student's tokens; default: tiny/'s; with
    # --teacher-prompt-column, --model as it is at the start
    teacher: str | None = None
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/arithmetic/prompts"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    teacher_prompt_column: str | None = None  # column of what the teacher reads in its place
    chat: bool = False  # turn string prompts into a user's chat message
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_prompt_length: PositiveInt = 64  # student's and teacher's, in tokens; longer ones: dropped
    # --- distillation ---
    total_rollouts: PositiveInt = 160  # rollouts, each followed by one optimiser step
    prompts_per_rollout: PositiveInt = 32  # prompts per rollout, with one completion each
    max_new_tokens: PositiveInt = 24  # longest completion in tokens
    # weight of a token's advantage in that of the token before it: 0 counts only its own reward
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    # what is minimised at each prefix. sampled: KL(pi || tau), estimated from the sampled token;
    # over the whole vocabulary: reverse: KL(pi || tau), forward: KL(tau || pi), jsd: Jensen-Shannon
    divergence: Literal["sampled", "reverse", "forward", "jsd"] = "sampled"
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5  # jsd: the teacher's share of the mixture
    # --- optimisation and evaluation ---
    micro_batch_size: PositiveInt = 64  # completions per forward pass: sets memory, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's first rate, which falls linearly to 0; default: 5e-4 below 10M
    # parameters, else 1e-5 (adapters: 1e-4)
    learning_rate: PositiveFloat | None = None
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 40  # rollouts between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out prompts, at most; one completion each

    def __post_init__(self):
        if self.teacher is None and self.teacher_prompt_column is None:
            self.teacher = "tiny/arithmetic/teacher"
        if self.discount > 0 and self.divergence != "sampled":
            raise ValueError(f"--discount belongs to --divergence sampled, not {self.divergence}")


class StudentPrompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: array  # its token ids
    teacher_ids: array  # those of what the teacher reads


# --- the mathematics ---------------------------------------------------------------------------
def token_rewards(
    policy: Any, teacher: Any, sequences: Sequences, teacher_sequences: Sequences, batches: list
) -> tuple[Tensor, Tensor]:
    """r_t = log tau(y_t | x, y_<t) - log pi(y_t | x, y_<t) (B, T) in nats, 0 after a completion,
    and log pi. The teacher reads the same completions, after prompts x of its own.
    """
    policy_logprobs = rollout_logprobs(policy, sequences, batches, temperature=1.0)  # (B, T)
    with as_at_start(policy):  # without another teacher, it is the policy as it was at the start
        teacher_logprobs = rollout_logprobs(teacher, teacher_sequences, batches, temperature=1.0)
    return teacher_logprobs - policy_logprobs, policy_logprobs


def discounted_sums(rewards: Tensor, discount: float) -> Tensor:
    """A_t = sum_{s >= t} discount^(s - t) r_s (B, T) of rewards r (B, T), 0 after a completion."""
    advantages = rewards.clone()
    for t in reversed(range(rewards.shape[1] - 1)):
        advantages[:, t] += discount * advantages[:, t + 1]
    return advantages


def distillation_loss(logprobs: Tensor, advantages: Tensor, num_completions: int) -> Tensor:
    """-(1/B) sum_i sum_t A_it log pi(y_it) over some of a step's B completions.

    Both are (b, T), 0 after a completion's end. Its gradient is the estimate; its value has no
    meaning.
    """
    return -(advantages * logprobs).sum() / num_completions


def divergence(log_pi: Tensor, log_teacher: Tensor, kind: str, beta: float) -> Tensor:
    """D(pi, T) of the next token (n,), in nats, from the log-probs of all tokens (n, V). GKD's
    Jensen-Shannon: beta KL(tau || M) + (1 - beta) KL(pi || M), where M = beta tau + (1 - beta) pi.
    """

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(dim=1)

    if kind == "reverse":
        return kl(log_pi, log_teacher)
    if kind == "forward":
        return kl(log_teacher, log_pi)
    log_mixture = torch.logaddexp(log_teacher + math.log(beta), log_pi + math.log1p(-beta))
    return beta * kl(log_teacher, log_mixture) + (1 - beta) * kl(log_pi, log_mixture)


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    stop_ids = find_stop_ids(args.model, tokenizer)
    if args.teacher:  # the student learns to end as its teacher does
        teacher_ids = find_stop_ids(args.teacher, load_tokenizer(args.teacher))
        stop_ids = [*dict.fromkeys(stop_ids + teacher_ids)]  # each once
    train_prompts = load_student_prompts(args, args.train_split, tokenizer)
    eval_prompts = load_student_prompts(args, args.eval_split, tokenizer, args.eval_rows)
    positions = args.max_prompt_length + args.max_new_tokens
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    teacher = policy  # with --teacher-prompt-column and LoRA: as it was at the start
    if args.teacher or args.lora_rank == 0:
        teacher = load_model(AutoModelForCausalLM, args.teacher or args.model, tokenizer, positions)
        sizes = [model.get_input_embeddings().num_embeddings for model in (policy, teacher)]
        policy.resize_token_embeddings(min(sizes))  # ids that one alone has are padding, not tokens
        shard(freeze(teacher, merged=not args.teacher), device)
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=5e-4, real=1e-5)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    optimizer = AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)

    # --- the loop ---
    sample = partial(sample_for_both, args, policy, stop_ids)
    training = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": checksum(train_prompts, args.model, args.teacher)}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate(args, sample, policy, teacher, tokenizer, eval_prompts)
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    progress = tqdm(range(state["step"] + 1, args.total_rollouts + 1), disable=RANK > 0)
    for step in progress:  # a rollout, and the optimiser step on it
        # 1. Roll out: a completion per prompt, from the student as it is now. Random numbers
        # depend on the seed and the step alone, so resume is exact.
        start_time = time.perf_counter()
        rng = Generator().manual_seed(args.seed + 1_000_003 * step)  # far from other seeds
        prompt_inds = torch.randint(len(train_prompts), [args.prompts_per_rollout], generator=rng)
        prompts = [train_prompts[i] for i in prompt_inds]
        sequences, teacher_sequences, sampler_logprobs = sample(prompts, rng)  # B of each
        batches = [*micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)]

        # 2. Rewards: how much more probable than the student the teacher finds each token.
        rewards, policy_logprobs = token_rewards(
            policy, teacher, sequences, teacher_sequences, batches
        )  # (B, T) each
        advantages = discounted_sums(rewards, args.discount)  # (B, T)

        # 3. Optimise: one step, its gradient summed over micro-batches and ranks.
        remaining = 1 - (step - 1) / args.total_rollouts
        optimizer.param_groups[0]["lr"] = args.learning_rate * remaining
        for inds in batches:
            if args.divergence == "sampled":
                logprobs = completion_logprobs(policy, sequences, inds)  # (b, T)
                device_inds = inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
                loss = distillation_loss(
                    logprobs, advantages[device_inds], num_completions=len(sequences)
                )
            else:
                with as_at_start(policy):
                    states, head = states_and_head(teacher, teacher_sequences, inds)
                kind, beta = args.divergence, args.jsd_beta
                loss = divergence_loss(policy, sequences, inds, states, head, kind, beta)
            loss.backward()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 4. Log, evaluate, save.
        lengths = torch.tensor([len(completion) for _, completion in sequences], device=device)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        truncated = [completion[-1] not in stop_ids for _, completion in sequences]
        completion_rewards = rewards.sum(dim=1)  # (B,)
        metrics = sampling_metrics(policy_logprobs, sampler_logprobs, mask) | {
            "objective/kl": -completion_rewards.mean().item(),  # KL(pi || tau), nats per completion
            "policy/grad_norm": grad_norm,
            "completions/length_mean": lengths.float().mean().item(),
            "completions/truncated_fraction": np.mean(truncated),
        }
        num_tokens = sum(len(x) + len(y) for x, y in sequences)
        metrics["time/tokens_per_second"] = num_tokens / (time.perf_counter() - start_time)
        metrics["time/peak_memory_gb"] = peak_memory_gb()
        rollouts, samples = [], []
        if args.log_rollouts_every and step % args.log_rollouts_every == 0:
            columns = {"reward": completion_rewards, "advantage": advantages}
            columns |= {"log_ratio": -rewards, "truncated": torch.tensor(truncated)}
            rollouts = [rollout_row(tokenizer, sequences[:4], columns)]
        is_last = step == args.total_rollouts
        if is_last or step % args.eval_every == 0:
            eval_metrics, samples = evaluate(args, sample, policy, teacher, tokenizer, eval_prompts)
            metrics |= eval_metrics
        log(args, run_dir, step, metrics, samples, rollouts)
        progress.set_postfix({"objective/kl": metrics["objective/kl"]})
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    save_model(run_dir, policy, tokenizer, stop_ids)
    return run_dir


def sample_for_both(
    args: Args, policy: Any, stop_ids: list[int], prompts: list, rng: Generator
) -> tuple[Sequences, Sequences, Tensor]:
    """Completions after the student's prompts, the same after the teacher's, and the log-probs
    (B, T) with which their tokens were sampled.
    """
    sequences, sampler_logprobs = generate(
        policy,
        [prompt.ids for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=1.0,
        stop_ids=stop_ids,
        rng=rng,
        batch_size=args.generation_batch_size,
    )
    teacher_sequences = [
        (list(prompt.teacher_ids), ids) for prompt, (_, ids) in zip(prompts, sequences, strict=True)
    ]
    return sequences, teacher_sequences, sampler_logprobs


@torch.no_grad()
@forward_method
def states_and_head(teacher: Any, sequences: Sequences, inds: Tensor) -> tuple[Tensor, OutputHead]:
    """What tau's logits are computed from: its hidden states (n, d) before the n completion tokens
    of sequences[inds], and its head.
    """
    states, _, _ = completion_states(teacher, [sequences[i] for i in inds])
    head = output_head(teacher)
    if WORLD_SIZE > 1:  # sharded: its whole weights are freed when this returns
        head = head._replace(
            weight=head.weight.clone(),
            cast_weight=head.cast_weight.clone(),
            bias=None if head.bias is None else head.bias.clone(),
        )
    return states, head


@forward_method
def divergence_loss(
    policy: Any,
    sequences: Sequences,
    inds: Tensor,
    teacher_states: Tensor,
    teacher_head: OutputHead,
    kind: str,
    beta: float,
) -> Tensor:
    """(1/B) sum_i sum_t D(pi, T) at the fixed prefix y_i,<t, over some of a step's B completions.
    Logits (c, V) exist for a chunk of their tokens at a time.
    """

    def of_logits(logits: Tensor, chunk: slice) -> list[Tensor]:
        with torch.no_grad():
            teacher_logits = head_logits(teacher_states[chunk], teacher_head)
        vocab = min(logits.shape[1], teacher_logits.shape[1])  # ids beyond are no tokens
        log_pi, log_teacher = (x[:, :vocab].log_softmax(dim=1) for x in (logits, teacher_logits))
        return [divergence(log_pi, log_teacher, kind, beta)]

    states, _, _ = completion_states(policy, [sequences[i] for i in inds])
    (divergences,) = map_logits(policy, states, of_logits)  # (n,)
    return divergences.sum() / len(sequences)


def evaluate(
    args: Args, sample: Callable, policy: Any, teacher: Any, tokenizer: Any, prompts: list
) -> tuple[dict, list[dict]]:
    """Metrics and samples of one completion per held-out prompt."""
    # Every evaluation uses the same random numbers.
    sequences, teacher_sequences, _ = sample(prompts, Generator().manual_seed(args.seed))
    batches = [*micro_batches(sequences, torch.arange(len(sequences)), args.micro_batch_size)]
    rewards, _ = token_rewards(policy, teacher, sequences, teacher_sequences, batches)  # (B, T)
    rewards = rewards.sum(dim=1).tolist()  # (B,)
    completion_ids = [completion for _, completion in sequences]
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    samples = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt.text, "completion": texts[i]}
        samples.append(row | {"reward": round(rewards[i], 6), "length": len(completion_ids[i])})
    length_mean = np.mean([len(completion) for completion in completion_ids])
    return {"eval/kl": -np.mean(rewards), "eval/length_mean": length_mean}, samples


# --- model and data ----------------------------------------------------------------------------
def load_student_prompts(
    args: Args, split: str, tokenizer: Any, most: int | None = None
) -> list[StudentPrompt]:
    """The prompts of a split, without those that are empty or longer than --max-prompt-length."""

    def encode_row(row: dict) -> tuple[StudentPrompt, array]:
        prompt = row.pop(args.prompt_column)
        texts = [prompt, row.pop(args.teacher_prompt_column, prompt)]
        texts = [as_chat(text) for text in texts] if args.chat else texts
        ids = [array("i", encode(tokenizer, text, add_generation_prompt=True)) for text in texts]
        return StudentPrompt(texts[0], ids[0], ids[1]), max(ids, key=len)

    required = {args.prompt_column, args.teacher_prompt_column} - {None}
    rows = load_rows(args.dataset, args.dataset_config, split, required)
    flag = "--max-prompt-length"
    return encode_rows(rows, encode_row, tokenizer, args.max_prompt_length, flag, most)


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
