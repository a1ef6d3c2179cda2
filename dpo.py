r"""Direct Preference Optimization (DPO): learn from preference pairs without a reward model.

The optimum of E[r(x, y)] - beta KL(pi || pi_ref) is pi_ref(y|x) exp(r(x, y) / beta) / Z(x). So each
policy is optimal for an implicit reward, beta log(pi(y|x) / pi_ref(y|x)), up to a term of only x,
and the Bradley-Terry loss of `rm_bradley_terry.py` can train the policy itself (arXiv 2305.18290,
equation 7, where eps = 0):

    h = log(pi(y_w|x) / pi_ref(y_w|x)) - log(pi(y_l|x) / pi_ref(y_l|x)),   y_w chosen, y_l rejected,
    L = mean over pairs of  - (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h).

With eps > 0, labels are taken to be wrong with this probability (conservative DPO, Mitchell 2023).
`--loss sigmoid_norm` takes h of means per token, and so does `ipo` (2310.12036), which pulls it to
1 / (2 beta). `apo_zero` (2408.06266) raises the chosen log-ratio above 0 and lowers the other. Two
losses need no reference. With the mean per token m(y) = log pi(y|x) / |y|, and odds =
e^m / (1 - e^m), they are

    simpo:  - log sigmoid(beta m(y_w) - beta m(y_l) - gamma)              (2405.14734, equation 6),
    orpo:   - m(y_w) - beta log sigmoid(log odds(y_w) - log odds(y_l))    (2403.07691, equation 6).

ORPO's first term is the loss of SFT, so it can start from a base model; `--nll-coef` adds this term
to any loss (2404.19733). Deviations from the papers:

1. IPO's log-ratios are means per token, not sums.
2. The optimiser is AdamW, not RMSprop, and after the warm-up the learning rate decays linearly.
3. By default beta is 0.3, not 0.1.

    python dpo.py                                          # tiny/reviews, half a minute on a CPU
    python dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/ultrafeedback_binarized \
        --max-length 1024 --max-new-tokens 256 --batch-size 64 --micro-batch-size 2 --epochs 1 \
        --beta 0.1                                         # a GPU of 24 GB
    torchrun --nproc_per_node=8 dpo.py ...                 # eight GPUs: docs/processes.md

A healthy run: the first loss is ln 2 = 0.693 (IPO: 1 / (4 beta^2); apo_zero: 1; SimPO, ORPO,
--reference and --nll-coef: any), then `reward/margin` and `reward/accuracy` rise. If
`policy/logprob_chosen` falls by tens of nats, raise beta (SimPO: lower the learning rate).
"""

import json
import math
import os
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
import wandb
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid
from torch.optim import AdamW
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.generation import generate
from common.logprobs import Sequences, completion_logprobs, micro_batches, rollout_logprobs
from common.logprobs import sampling_metrics
from common.tokens import as_chat, encode_completions, find_stop_ids
from runtime.adapters import add_adapters, as_at_start, freeze
from runtime.chats import UnusableRow
from runtime.checks import check_flags, check_training
from runtime.functions import call_reward, load_function
from runtime.model import checkpoint_activations, clip_grad_norm, find_rate, load_model
from runtime.model import load_tokenizer, shard
from runtime.processes import RANK, from_rank_0, join_processes, leave_processes, peak_memory_gb
from runtime.processes import sums_over_ranks
from runtime.rows import encode_rows, load_rows
from runtime.saving import checksum, read_checkpoint, save_model, write_checkpoint


@dataclass(config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Args:
    exp_name: str = "dpo"  # name of the run's folder, before the seed and the time
    seed: NonNegativeInt = 1  # seed of the data order and of the sampled completions
    output_dir: str = "runs"  # where the run's folder is made
    resume: str | None = None  # folder of a run to continue with its saved flags; no other flags
    save_every: PositiveInt = 50  # steps between checkpoints; there is always one at the end
    track: bool = False  # also log to Weights & Biases, in the project WANDB_PROJECT
    # --- model and data ---
    model: str = "tiny/reviews/policy"  # folder or hub name of policy and tokenizer
    reference: str | None = None  # folder or hub name of pi_ref; default: --model
    lora_rank: NonNegativeInt = 0  # train only adapters of this rank (LoRA); 0: all weights
    dataset: str = "tiny/reviews/preferences"  # file, folder (train.jsonl, test.jsonl) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    train_split: str = "train"  # rows to train on; slices such as train[:95%] work
    eval_split: str = "test"  # held-out rows; or train[95%:], with --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt; conversations that begin alike need none
    chosen_column: str = "chosen"  # column of the preferred completion, a string or chat messages
    rejected_column: str = "rejected"  # column of the other completion
    chat: bool = False  # turn strings into chat messages of a user and an assistant
    chat_template_kwargs: str = "{}"  # for the chat template, such as '{"enable_thinking": false}'
    max_length: PositiveInt = 128  # prompt and completion, in tokens; longer pairs are dropped
    # --- DPO ---

    # sigmoid: DPO's own; sigmoid_norm: with log-ratios per token (OLMo 2, Tulu 3)
    loss: Literal["sigmoid", "sigmoid_norm", "apo_zero", "ipo", "simpo", "orpo"] = "sigmoid"
    # coefficient of the KL to the reference (simpo: scale of the rewards; orpo: lambda); default,
    # tuned on tiny/: 0.3 (sigmoid, apo_zero), 1 (ipo), 5 (sigmoid_norm, simpo, orpo)
    beta: PositiveFloat | None = None
    gamma: NonNegativeFloat = 0.5  # target margin of simpo, not divided by beta (paper: 0.3 to 1.6)
    # eps of the sigmoid losses, the probability that a label is wrong (conservative DPO)
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    nll_coef: NonNegativeFloat = 0.0  # coefficient of the chosen completion's NLL (nats per token)
    # --- optimisation and evaluation ---
    epochs: PositiveFloat = 3.0  # passes over the training pairs
    batch_size: PositiveInt = 32  # pairs per optimiser step
    micro_batch_size: PositiveInt = 32  # pairs per forward pass: memory and speed, not the result
    generation_batch_size: PositiveInt = 256  # completions sampled at a time
    activation_checkpointing: bool = False  # recompute activations: less memory, a third slower
    # AdamW's peak; default: 5e-4 below 10M parameters, else 1e-6 (orpo: 8e-6), and ten times
    # that with --lora-rank
    learning_rate: PositiveFloat | None = None
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after the warm-up
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1  # warm-up, as a fraction of the steps
    weight_decay: NonNegativeFloat = 0.0  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: PositiveInt = 100  # steps between evaluations; also at the start and at the end
    eval_rows: PositiveInt = 500  # held-out pairs, at most; their prompts are completed too
    # path/to/file.py:function for eval/reward; default: gold on the default --dataset, else none
    eval_reward_fn: str | None = None
    max_new_tokens: PositiveInt = 40  # longest sampled completion in tokens
    temperature: PositiveFloat = 1.0  # of the sampled completions, and of the logits in eval/kl

    def __post_init__(self):
        if self.beta is None:
            self.beta = {"sigmoid": 0.3, "apo_zero": 0.3, "ipo": 1.0}.get(self.loss, 5.0)
        if self.eval_reward_fn is None and self.dataset == "tiny/reviews/preferences":
            self.eval_reward_fn = "tiny/reviews/gold.py:sentiment"
        if self.label_smoothing > 0 and self.loss not in ("sigmoid", "sigmoid_norm"):
            raise ValueError("--label-smoothing belongs to --loss sigmoid and sigmoid_norm")


class Prompt(NamedTuple):
    text: str | list[dict]  # a string or chat messages
    ids: array  # its token ids
    columns: dict  # the row's other columns, for the reward functions


class PreferencePair(NamedTuple):
    prompt: Prompt
    chosen_ids: array  # token ids of the preferred completion
    rejected_ids: array  # token ids of the other one

    def sequences(self) -> Sequences:
        """The prompt with the preferred completion, then with the other one."""
        prompt_ids = list(self.prompt.ids)
        return [(prompt_ids, list(self.chosen_ids)), (prompt_ids, list(self.rejected_ids))]


# --- the mathematics ---------------------------------------------------------------------------
def dpo_loss(logratios: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """- (1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h) (B,) (DPO, equation 7; cDPO).

    h is the difference of the log-ratios (B, 2) log(pi(y|x) / pi_ref(y|x)) of chosen and rejected,
    sums over tokens, in nats, or means per token (sigmoid_norm: arXiv 2411.15124). The derivative
    by h, beta (sigmoid(beta h) - (1 - eps)), is 0 where the policy is as certain as the label.
    """
    margin = beta * (logratios[:, 0] - logratios[:, 1])  # beta h
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def apo_zero_loss(logratios: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta h_w) + sigmoid(beta h_l) (B,) (APO-zero, arXiv 2408.06266, equation 7), with
    the log-ratios (B, 2) of `dpo_loss`: h_w is to rise above 0, the reference, and h_l to fall.
    """
    return 1 - torch.sigmoid(beta * logratios[:, 0]) + torch.sigmoid(beta * logratios[:, 1])


def ipo_loss(mean_logratios: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2 (B,) (IPO, arXiv 2310.12036, equation 17, tau = beta).

    The log-ratios (B, 2) of chosen and rejected, and so h, are means per token here.
    """
    h = mean_logratios[:, 0] - mean_logratios[:, 1]
    return (h - 1 / (2 * beta)).square()


def simpo_loss(mean_logprobs: Tensor, beta: float, gamma: float) -> Tensor:
    """- log sigmoid(beta m(y_w) - beta m(y_l) - gamma) (B,) (SimPO, arXiv 2405.14734, equation 6).

    mean_logprobs: (B, 2) m(y) = log pi(y|x) / |y| of chosen and rejected, nats per token.
    """
    return -logsigmoid(beta * (mean_logprobs[:, 0] - mean_logprobs[:, 1]) - gamma)


def orpo_loss(mean_logprobs: Tensor, beta: float) -> Tensor:
    """- m(y_w) - beta log sigmoid(log odds(y_w) - log odds(y_l)) (B,) (ORPO, arXiv 2403.07691,
    equation 6, lambda = beta), with the m(y) (B, 2) of `simpo_loss`.
    """
    nll = -mean_logprobs[:, 0]
    # float32 may round m to 0, where log(1 - e^m) would be -inf.
    clamped = mean_logprobs.clamp(max=-1e-7)
    log_odds = mean_logprobs - (-torch.expm1(clamped)).log()  # m - log(1 - e^m)
    return nll - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun only rank 0 prints and writes."""
    device = join_processes()
    print(f"{args.model} on {args.dataset}, {device}")

    # --- the reward, data and models ---
    tokenizer = load_tokenizer(args.model, args.chat_template_kwargs)
    reward_fn = load_reward_fn(args.eval_reward_fn, tokenizer) if args.eval_reward_fn else None
    stop_ids = find_stop_ids(args.model, tokenizer)
    train_pairs = load_preference_pairs(args, args.train_split, tokenizer, stop_ids)
    eval_pairs = load_preference_pairs(args, args.eval_split, tokenizer, stop_ids, args.eval_rows)
    longest_prompt = max(len(pair.prompt.ids) for pair in eval_pairs)
    positions = max(args.max_length, longest_prompt + args.max_new_tokens)
    policy = load_model(AutoModelForCausalLM, args.model, tokenizer, positions)
    real = 8e-6 if args.loss == "orpo" else 1e-6
    args.learning_rate = find_rate(policy, args.learning_rate, args.lora_rank, tiny=5e-4, real=real)
    add_adapters(policy, args.lora_rank, args.seed)
    check_training(args, policy, stop_ids[0])
    shard(policy, device)
    if args.activation_checkpointing:
        checkpoint_activations(policy)
    if args.loss in ("simpo", "orpo"):
        ref_model = None
    elif args.reference or args.lora_rank == 0:
        source = args.reference or args.model
        ref_model = load_model(AutoModelForCausalLM, source, tokenizer, positions)
        shard(freeze(ref_model, merged=not args.reference), device)
    else:
        ref_model = policy  # `as_at_start`
    optimizer = AdamW(
        policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )

    # --- the loop ---
    evaluate_policy = partial(
        evaluate, args, policy, ref_model, tokenizer, stop_ids, reward_fn, eval_pairs
    )
    rng = Generator().manual_seed(args.seed)
    num_shuffles = math.ceil(args.epochs)
    shuffles = [torch.randperm(len(train_pairs), generator=rng) for _ in range(num_shuffles)]
    num_rows = math.ceil(args.epochs * len(train_pairs))
    batches = torch.cat(shuffles)[:num_rows].split(args.batch_size)  # the last may be smaller
    total_steps = len(batches)
    warmup_steps = int(args.warmup_ratio * total_steps)
    training = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": checksum(train_pairs, args.model, args.reference)}
    if not args.resume:  # before there is a folder: a run that fails here leaves none
        metrics, samples = evaluate_policy()
    run_dir = open_run(args)
    if args.resume:
        state = load_checkpoint(run_dir, training, state)
    else:
        log(args, run_dir, 0, metrics, samples)
    progress = tqdm(range(state["step"] + 1, total_steps + 1), disable=RANK > 0)
    for step in progress:
        # 1. Draw the pairs of this step: 2B sequences, each rejected one after its chosen one.
        start_time = time.perf_counter()
        pairs = [train_pairs[i] for i in batches[step - 1]]
        sequences = [sequence for pair in pairs for sequence in pair.sequences()]
        lengths = torch.tensor([len(y) for _, y in sequences], device=device).view(-1, 2)  # (B, 2)

        # 2. Optimise: one step, its gradient summed over micro-batches and ranks.
        lr = args.learning_rate * lr_factor(step, warmup_steps, total_steps, args.lr_schedule)
        optimizer.param_groups[0]["lr"] = lr
        sums = defaultdict(float)
        for pair_inds in micro_batches_of_pairs(sequences, args.micro_batch_size):
            # The reference first: after the policy's pass, its memory would come on top of that of
            # the policy's activations.
            with torch.no_grad(), as_at_start(policy):
                ref_logprobs = pair_logprobs(ref_model, sequences, pair_inds) if ref_model else None
            logprobs = pair_logprobs(policy, sequences, pair_inds)  # (b, 2)
            device_inds = pair_inds.to(device, non_blocking=True)  # CPU indices make a GPU wait
            losses, pair_metrics = pair_losses(args, logprobs, ref_logprobs, lengths[device_inds])
            loss = losses.sum() / len(pairs)
            loss.backward()
            for name, values in pair_metrics.items():
                sums[name] += values.double().sum()
        grad_norm = clip_grad_norm(policy, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 3. Log, evaluate, save.
        num_tokens = sum(len(prompt) + len(completion) for prompt, completion in sequences)
        metrics = {name: total / len(pairs) for name, total in sums_over_ranks(sums).items()}
        metrics |= {
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/epoch": min(args.epochs, step * args.batch_size / len(train_pairs)),
            "time/tokens_per_second": num_tokens / (time.perf_counter() - start_time),
            "time/peak_memory_gb": peak_memory_gb(),
        }
        samples = []
        is_last = step == total_steps
        if is_last or step % args.eval_every == 0:
            eval_metrics, samples = evaluate_policy()
            metrics |= eval_metrics
        log(args, run_dir, step, metrics, samples)
        progress.set_postfix(loss=metrics["objective/loss"], accuracy=metrics["reward/accuracy"])
        if is_last or step % args.save_every == 0:
            save_checkpoint(run_dir, training, state | {"step": step})

    save_model(run_dir, policy, tokenizer, stop_ids)
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


def pair_losses(
    args: Args, logprobs: Tensor, ref_logprobs: Tensor | None, lengths: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each pair (B,), and its metrics (B,).

    logprobs, ref_logprobs: (B, 2) log pi(y|x) and log pi_ref(y|x) of chosen and rejected, sums over
    tokens, in nats, the latter None for SimPO and ORPO; lengths: (B, 2) in tokens.
    """
    if args.loss in ("simpo", "orpo"):
        scores = mean_logprobs = logprobs / lengths
    elif args.loss in ("sigmoid", "apo_zero"):
        scores = logratios = logprobs - ref_logprobs
    else:
        scores = mean_logratios = (logprobs - ref_logprobs) / lengths
    if args.loss == "sigmoid":
        losses = dpo_loss(logratios, args.beta, args.label_smoothing)
    elif args.loss == "sigmoid_norm":
        losses = dpo_loss(mean_logratios, args.beta, args.label_smoothing)
    elif args.loss == "apo_zero":
        losses = apo_zero_loss(logratios, args.beta)
    elif args.loss == "ipo":
        losses = ipo_loss(mean_logratios, args.beta)
    elif args.loss == "simpo":
        losses = simpo_loss(mean_logprobs, args.beta, args.gamma)
    else:
        losses = orpo_loss(mean_logprobs, args.beta)
    if args.nll_coef > 0:
        losses = losses - args.nll_coef * logprobs[:, 0] / lengths[:, 0]
    chosen, rejected = scores.detach().unbind(dim=1)  # (B,); the implicit reward is beta * score
    metrics = {
        "objective/loss": losses.detach(),
        "reward/margin": args.beta * (chosen - rejected),
        "reward/accuracy": 0.5 + 0.5 * (chosen - rejected).sign(),  # a tie counts half
        "reward/chosen": args.beta * chosen,
        "reward/rejected": args.beta * rejected,
        "policy/logprob_chosen": logprobs[:, 0].detach(),
        "policy/logprob_rejected": logprobs[:, 1].detach(),
    }
    return losses, metrics


# --- log-probs of pairs ------------------------------------------------------------------------
def pair_logprobs(model: Any, sequences: Sequences, pair_inds: Tensor) -> Tensor:
    """log pi(y|x) (b, 2) of some pairs, chosen and rejected, from one forward pass."""
    inds = torch.stack([2 * pair_inds, 2 * pair_inds + 1], dim=1).flatten()
    return completion_logprobs(model, sequences, inds).sum(dim=1).view(-1, 2)


def micro_batches_of_pairs(sequences: Sequences, size: int) -> Iterator[Tensor]:
    """`micro_batches` of pairs, by the tokens of both completions. Pair i is the sequences 2i and
    2i + 1; what is yielded counts pairs.
    """
    sides = zip(sequences[::2], sequences[1::2], strict=True)
    pairs = [(prompt, chosen + rejected) for (prompt, chosen), (_, rejected) in sides]
    return micro_batches(pairs, torch.arange(len(pairs)), size)


# --- the evaluation ----------------------------------------------------------------------------
@torch.no_grad()
def evaluate(
    args: Args,
    policy: Any,
    ref_model: Any | None,
    tokenizer: Any,
    stop_ids: list[int],
    reward_fn: Callable | None,
    pairs: list[PreferencePair],
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of the held-out pairs and of one sampled completion for each, and the samples."""
    sequences = [sequence for pair in pairs for sequence in pair.sequences()]
    lengths = torch.tensor([len(y) for _, y in sequences], device=policy.device).view(-1, 2)
    sums = defaultdict(float)
    for pair_inds in micro_batches_of_pairs(sequences, args.micro_batch_size):
        logprobs = pair_logprobs(policy, sequences, pair_inds)  # (b, 2)
        with as_at_start(policy):
            ref_logprobs = pair_logprobs(ref_model, sequences, pair_inds) if ref_model else None
        device_inds = pair_inds.to(policy.device, non_blocking=True)
        _, pair_metrics = pair_losses(args, logprobs, ref_logprobs, lengths[device_inds])
        for name, values in pair_metrics.items():
            sums[name] += values.double().sum()
    means = {name: total / len(pairs) for name, total in sums_over_ranks(sums).items()}
    prompts = [pair.prompt for pair in pairs]
    sequences, sampler_logprobs = generate(
        policy,
        [prompt.ids for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        stop_ids=stop_ids,
        rng=Generator().manual_seed(args.seed),  # every evaluation uses the same random numbers
        batch_size=args.generation_batch_size,
    )
    metrics = {
        "eval/loss": means["objective/loss"],
        "eval/pair_accuracy": means["reward/accuracy"],
        "eval/margin": means["reward/margin"],
    }
    if ref_model is not None:
        metrics |= kl_metrics(args, policy, ref_model, sequences, sampler_logprobs)
    sample_metrics, samples = rate_samples(reward_fn, tokenizer, prompts, sequences)
    return metrics | sample_metrics, samples


def kl_metrics(
    args: Args, policy: Any, ref_model: Any, sequences: Sequences, sampler_logprobs: Tensor
) -> dict[str, float]:
    """KL(pi || pi_ref), in nats per completion, by k1 on samples of pi, and how far pi is from what
    has sampled them, with log-probs (N, T).
    """
    size = 2 * args.micro_batch_size  # as many sequences as in a micro-batch of pairs
    batches = [*micro_batches(sequences, torch.arange(len(sequences)), size)]
    logprobs = rollout_logprobs(policy, sequences, batches, args.temperature)  # (N, T)
    with as_at_start(policy):
        ref_logprobs = rollout_logprobs(ref_model, sequences, batches, args.temperature)
    k1 = (logprobs - ref_logprobs).double().sum().item() / len(sequences)
    lengths = torch.tensor([len(y) for _, y in sequences])  # (N,)
    mask = (torch.arange(lengths.max()) < lengths[:, None]).to(policy.device)  # (N, T)
    return {"eval/kl": k1} | sampling_metrics(logprobs, sampler_logprobs, mask)


def rate_samples(
    reward_fn: Callable | None, tokenizer: Any, prompts: list, sequences: Sequences
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of sampled completions, and for each a row of samples.jsonl."""
    metrics = {"eval/length_mean": np.mean([len(ids) for _, ids in sequences])}
    samples = []
    for prompt, (_, ids) in zip(prompts, sequences, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        samples.append({"prompt": prompt.text, "completion": text, "length": len(ids)})
    if reward_fn is not None:
        rewards = reward_fn(prompts, sequences).tolist()
        metrics["eval/reward"] = np.mean(rewards)
        for sample, reward in zip(samples, rewards, strict=True):
            sample["reward"] = round(reward, 6)
    return metrics, samples


# --- rewards -----------------------------------------------------------------------------------
def load_reward_fn(spec: str, tokenizer: Any) -> Callable:
    """path/to/file.py:function as a function of prompts and sequences: B rewards (B,)."""
    return partial(rule_rewards, load_function("--(eval-)reward-fn", spec), tokenizer)


def rule_rewards(function: Callable, tokenizer: Any, prompts: list, sequences: Sequences) -> Tensor:
    """A function's rewards (B,). It gets all completions at once, so it can compare them."""
    completion_ids = [completion for _, completion in sequences]
    columns = {key: [prompt.columns[key] for prompt in prompts] for key in prompts[0].columns}
    columns["prompts"] = [prompt.text for prompt in prompts]
    columns["completions"] = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    columns["completion_ids"] = completion_ids  # as TRL does; texts lack special tokens
    return call_reward(function, columns)


# --- model and data ----------------------------------------------------------------------------
def load_preference_pairs(
    args: Args, split: str, tokenizer: Any, stop_ids: list[int], most: int | None = None
) -> list[PreferencePair]:
    """The pairs of a split, without those that are alike or empty, or longer than --max-length."""

    def encode_row(row: dict) -> tuple[PreferencePair, list[int]]:
        prompt, *completions = to_pair(args, row)
        prompt_ids, both = encode_completions(tokenizer, prompt, completions, stop_ids)
        if both[0] == both[1]:
            raise UnusableRow("with chosen equal to rejected")
        chosen_ids, rejected_ids = (array("i", ids) for ids in both)
        prompt = Prompt(prompt, array("i", prompt_ids), row)
        return PreferencePair(prompt, chosen_ids, rejected_ids), prompt_ids + max(both, key=len)

    columns = {args.chosen_column, args.rejected_column, args.prompt_column} - {"prompt"}
    rows = load_rows(args.dataset, args.dataset_config, split, columns)
    reader = "reward functions" if args.eval_reward_fn else None
    return encode_rows(rows, encode_row, tokenizer, args.max_length, most=most, reader=reader)


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
