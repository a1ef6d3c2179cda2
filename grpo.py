r"""Group Relative Policy Optimization (GRPO): reinforcement learning without a critic.

For each prompt q sample a group of G completions o_1..o_G from the policy, reward each, and let the
group's own mean be the baseline. Maximise (DeepSeekMath, arXiv 2402.03300, equation 3)

    J(theta) = E[ (1/G) sum_i (1/|o_i|) sum_t
                  { min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) - beta KL_it } ],
    rho_it = pi_theta(o_it | q, o_i<t) / pi_old(o_it | q, o_i<t),
    A_i    = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-4),   the same for every token of o_i,
    KL_it  = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1,        the k3 estimator, at token t.

pi_old being the policy that sampled. Deviations from the paper: outcome supervision only; one
reference; std is that of a sample, plus 1e-4; four optimiser steps per rollout by default. Flags
for later papers: clip-higher, token mean, masking of cut-off completions, --beta 0 (DAPO, arXiv
2503.14476); --no-scale-rewards --loss-norm constant --beta 0 (Dr. GRPO, 2503.20783); a ratio per
completion (GSPO, 2507.18071); each of several rewards normalised first (GDPO, 2601.05242).

    python grpo.py                                       # tiny/arithmetic, half a minute on a CPU
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k --dataset-config main \
        --prompt-column question --chat --max-prompt-length 256 --max-new-tokens 512 \
        --prompts-per-rollout 16 --num-minibatches 1 --micro-batch-size 8 --learning-rate 1e-6
    torchrun --nproc_per_node=8 grpo.py ...              # eight GPUs: docs/processes.md
    python grpo.py --resume runs/grpo__1__...            # resume after a crash

A healthy run: `reward/mean` and `eval/accuracy` rise together; `policy/entropy` falls slowly;
`reward/zero_variance_groups` rises; clip fractions and `completions/truncated_fraction` stay low.
"""

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
from dataclasses import dataclass, field
from functools import partial
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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import GenerationConfig, get_scheduler, logging

from common.generation import RANK, WORLD_SIZE, all_gather, all_reduce_sum, autocast, content
from common.generation import encode, find_stop_ids, generate, pad_rows, shard
from common.logprobs import Pairs, completion_logprobs, micro_batches, rollout_logprobs

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass
class Args:
    exp_name: str = "grpo"  # name of the run's folder, with the seed and the time
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
    eval_split: str = "test"  # held-out rows; or train[95%:], beside --train-split train[:95%]
    prompt_column: str = "prompt"  # column of the prompt, a string or chat messages
    answer_column: str = "answer"  # column given to the reward functions as `answer`
    chat: bool = False  # turn string prompts into a user's chat message
    max_prompt_length: int = 64  # in tokens; rows with longer prompts are dropped and counted
    # --- reward ---
    reward_fn: list[str] = field(default_factory=list)  # `last_number` or path/to/file.py:function
    reward_model: str | None = None  # a sequence classifier with one label and --model's tokenizer
    reward_weights: list[float] = field(default_factory=list)  # of each rule, then the model
    eval_reward_fn: str | None = None  # rule for eval/reward; the training reward if left out
    # --- GRPO ---
    total_rollouts: int = 60  # rollouts, each followed by its optimiser steps
    prompts_per_rollout: int = 32  # prompts per rollout
    group_size: int = 8  # G, completions per prompt (DeepSeekMath: 64)
    max_new_tokens: int = 24  # longest completion in tokens
    temperature: float = 1.0  # of sampling; it divides the logits in all log-probs too
    beta: float = 0.04  # coefficient of the KL (DeepSeekMath: 0.04); 0 loads no reference
    kl_placement: Literal["loss", "reward"] = "loss"  # k3, or the log-ratio (k1) in the reward
    clip_coef: float = 0.2  # eps: no gradient below ratio 1 - eps where A < 0 (PPO)
    clip_coef_high: float | None = None  # none above 1 + this where A > 0; else eps
    update_epochs: int = 1  # passes over a rollout; in the very first step the ratio is 1
    num_minibatches: int = 4  # optimiser steps per pass
    scale_rewards: bool = True  # divide advantages by the group's deviation (Dr. GRPO: do not)
    loss_norm: Literal["sequence", "token", "constant"] = "sequence"  # GRPO, DAPO or Dr. GRPO
    mask_truncated: bool = False  # leave cut-off completions out of the loss (DAPO)
    importance_sampling_level: Literal["token", "sequence"] = "token"  # sequence: GSPO
    multi_objective_aggregation: Aggregation = "sum_then_normalize"  # or each reward first: GDPO
    # --- optimisation and evaluation ---
    micro_batch_size: int = 64  # completions per forward pass: memory and speed, not the result
    learning_rate: float = 5e-4  # AdamW's peak learning rate
    lr_schedule: Literal["linear", "cosine", "constant_with_warmup"] = "linear"  # after warm-up
    warmup_ratio: float = 0.0  # fraction of the rollouts over which the rate rises from 0
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    eval_every: int = 20  # rollouts between evaluations; always one at the start and at the end
    eval_rows: int = 500  # held-out prompts, at most; one completion each
    eval_temperature: float = 1.0  # sampling temperature at evaluation; 0 is greedy


# --- the mathematics ---------------------------------------------------------------------------
def group_advantages(rewards: Tensor, group_size: int, scale: bool = True) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) within each group (DeepSeekMath, section 4.1.2).

    The G completions of a prompt are neighbours in the rewards (N * G,). Without `scale`: Dr. GRPO.
    """
    groups = rewards.double().view(-1, group_size)
    groups = groups - groups[:, :1]  # all exactly 0 where rewards are equal, and so is their mean
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.view(-1).float()


def gdpo_advantages(rewards: list[Tensor], weights: list, group_size: int) -> Tensor:
    """a = sum_k w_k A^k, then A = (a - mean(a)) / (std(a) + 1e-4) of the batch (arXiv 2601.05242):
    A^k (N * G,) are the advantages of reward k alone, so its scale cannot drown the others.
    """
    total = sum(w * group_advantages(r, group_size) for w, r in zip(weights, rewards, strict=True))
    return (total - total.mean()) / (total.std() + 1e-4)


def k3_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref/pi - log(pi_ref/pi) - 1 at each token (Schulman 2020; DeepSeekMath, equation 4).

    On tokens from pi, which those of pi_old are in the first step, an unbiased estimate of
    KL(pi || pi_ref). As a loss it has the expected gradient of KL(pi_ref || pi).
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def token_weights(loss_mask: Tensor, loss_norm: str, max_new_tokens: int) -> Tensor:
    """The weight (B, T) of each token in a step's loss, sum(weight * term). The mask
    (B, T) is of the whole step, so that micro-batches add up to it, however it is split.
    """
    lengths = loss_mask.sum(dim=1, keepdim=True)  # (B, 1)
    completions = (lengths > 0).sum().clamp(min=1)
    if loss_norm == "sequence":  # 1/|o_i| and a mean over completions (GRPO)
        return loss_mask / (lengths.clamp(min=1) * completions)
    if loss_norm == "token":  # the mean over all tokens (DAPO)
        return loss_mask / lengths.sum().clamp(min=1)
    return loss_mask / (max_new_tokens * completions)  # instead of |o_i| (Dr. GRPO)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    beta: float,
    level: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J(theta) (equation 3), over some completions of a step, and sums for the metrics.

    Log-probs (B, T) are of the sampled tokens under pi_theta, pi_old and pi_ref, in nats, all 0
    after a completion's end. Advantages are (B,), weights (B, T) those of `token_weights`.
    """
    advantages, log_ratio = advantages[:, None], logprobs - old_logprobs
    if level == "sequence":  # GSPO, arXiv 2507.18071, equation 7: the mean of a completion's tokens
        real = weights > 0
        means = (real * log_ratio).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        log_ratio = real * means[:, None]
    ratio = log_ratio.exp()  # rho
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # No gradient once the ratio has left the interval as its advantage pushes (PPO, equation 7).
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    sums = {
        "policy/approx_kl": (ratio - 1 - log_ratio).sum(),  # k3 of KL(pi_old || pi_theta)
        "policy/clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).sum(),
        "policy/clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).sum(),
    }
    if ref_logprobs is not None:
        kl = k3_kl(logprobs, ref_logprobs)
        sums["objective/kl"] = kl.sum()
        objective = objective - beta * kl if beta > 0 else objective
    return -(weights * objective).sum(), sums


# --- the algorithm -----------------------------------------------------------------------------
def main(args: Args) -> Path:
    """Train; returns the run's folder. Under torchrun rank 0 alone prints and writes."""
    check_args(args)
    run_dir, device = start_run(args)
    with explain(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        stop_ids = find_stop_ids(args.model, tokenizer)
        require(stop_ids, "neither tokenizer nor generation config has an EOS")
    train_rows = load_prompts(args, args.train_split, tokenizer)
    eval_rows = load_prompts(args, args.eval_split, tokenizer)[: args.eval_rows]
    specs = args.reward_fn or ([] if args.reward_model else ["last_number"])
    judges = dict(load_rule("--reward-fn", spec, train_rows[0]) for spec in specs)
    load = partial(load_model, longest=args.max_prompt_length + args.max_new_tokens, device=device)
    policy = load("--model", args.model, AutoModelForCausalLM)
    ref_model = load("--model", args.model, AutoModelForCausalLM) if args.beta > 0 else None
    models = [*[policy] * 4, ref_model]  # a gradient and Adam's moments: 4 times the weights
    if args.reward_model:
        with explain(f"--reward-model {args.reward_model}"):
            known = AutoTokenizer.from_pretrained(args.reward_model).get_vocab().items()
            require(tokenizer.get_vocab().items() <= known, "its tokenizer is not that of --model")
        reward_model = load("--reward-model", args.reward_model, AutoModelForSequenceClassification)
        models.append(reward_model)
        judges["reward_model"] = partial(reward_model_scores, reward_model, args.micro_batch_size)
    with explain(f"--reward-weights: give one for each of {[*judges]}"):
        require(len(judges) == len(specs) + bool(args.reward_model), "two --reward-fn of one name")
        weights = dict(zip(judges, args.reward_weights or [1.0] * len(judges), strict=True))
    rules = [args.eval_reward_fn] if args.eval_reward_fn else []
    rules = dict(load_rule("--eval-reward-fn", spec, eval_rows[0]) for spec in rules)
    eval_judges = (rules, dict.fromkeys(rules, 1.0)) if rules else (judges, weights)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True)
    warmup_steps = int(args.warmup_ratio * args.total_rollouts)
    schedule = get_scheduler(args.lr_schedule, optimizer, warmup_steps, args.total_rollouts)
    trained = {"policy": (policy, optimizer)}
    state = {"step": 0, "data": zlib.crc32(repr(train_rows).encode())}
    state = load_checkpoint(args, run_dir, trained, state) if args.resume else state
    size = sum(model.num_parameters() for model in models if model is not None)
    print(f"{run_dir}: {policy.num_parameters():,} parameters, {size * 4e-9:.3f} GB on {device}")

    def sample(rows: list[dict], temperature: float, rng: Any) -> tuple[Pairs, list[str]]:
        prompts = [row["ids"] for row in rows]
        sampled = generate(policy, prompts, args.max_new_tokens, temperature, stop_ids, rng)
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return list(zip(prompts, sampled, strict=True)), texts

    if not args.resume:
        log(run_dir, 0, *evaluate(args, sample, eval_rows, *eval_judges))
    kl_in_reward = args.beta > 0 and args.kl_placement == "reward"
    needs_old = kl_in_reward or args.update_epochs * args.num_minibatches > 1
    coefs = dict(clip_low=args.clip_coef, clip_high=args.clip_coef_high or args.clip_coef)
    coefs |= dict(beta=0.0 if kl_in_reward else args.beta, level=args.importance_sampling_level)
    rng = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(args.total_rollouts * args.prompts_per_rollout / len(train_rows))
    order = torch.cat([torch.randperm(len(train_rows), generator=rng) for _ in range(epochs)])
    progress = tqdm(range(state["step"], args.total_rollouts), disable=RANK > 0)
    for step in progress:
        # 1. roll out: G completions per prompt, from the policy as it is now
        started = time.perf_counter()
        rng = torch.Generator().manual_seed(args.seed + 1_000_003 * (step + 1))
        picked = order[step * args.prompts_per_rollout :][: args.prompts_per_rollout]
        rows = [train_rows[i] for i in picked for _ in range(args.group_size)]  # B = prompts x G
        pairs, texts = sample(rows, args.temperature, rng)  # B pairs of token ids
        lengths = torch.tensor([len(sampled) for _, sampled in pairs], device=device)  # (B,)
        finished = torch.tensor([sampled[-1] in stop_ids for _, sampled in pairs], device=device)
        mask = torch.arange(lengths.max(), device=device) < lengths[:, None]  # (B, T)
        rolled_out = time.perf_counter()

        # 2. score: every reward by name, and their weighted sum
        rewards_by_name = {name: judge(rows, pairs, texts) for name, judge in judges.items()}
        rewards = sum(weights[name] * values for name, values in rewards_by_name.items())  # (B,)
        scored = time.perf_counter()

        # 3. log-probs under the old policy and the reference: they stay fixed during the update
        passes = [torch.randperm(len(pairs), generator=rng) for _ in range(args.update_epochs)]
        minibatches = [part for rows in passes for part in rows.tensor_split(args.num_minibatches)]
        batches = [[*micro_batches(pairs, rows, args.micro_batch_size)] for rows in minibatches]
        # The micro-batches of the first pass, so that the first ratio is 1, rounding included.
        first_pass = [rows for parts in batches[: args.num_minibatches] for rows in parts]
        fixed = (pairs, first_pass, args.temperature)
        old_logprobs = rollout_logprobs(policy, *fixed) if needs_old else None  # (B, T)
        ref_logprobs = rollout_logprobs(ref_model, *fixed) if ref_model is not None else None

        # 4. advantages against the group's mean, the same for every token of a completion
        returns = rewards.to(device)  # (B,)
        if kl_in_reward:  # k1, the log-ratio of a completion (DeepSeekMath, equation 2)
            returns = returns - args.beta * (old_logprobs - ref_logprobs).sum(dim=1)
        advantages = group_advantages(returns, args.group_size, args.scale_rewards)  # (B,)
        if args.multi_objective_aggregation == "normalize_then_sum":
            each = ([*rewards_by_name.values()], [*weights.values()])
            advantages = gdpo_advantages(*each, args.group_size).to(device)

        # 5. optimise: an optimiser step per minibatch, its gradient summed over micro-batches
        optimizer.param_groups[0]["lr"] = args.learning_rate * schedule.lr_lambdas[0](step)
        loss_mask = mask & finished[:, None] if args.mask_truncated else mask
        w = torch.zeros(mask.shape, device=device)  # (B, T)
        grad_norms, sums = [], defaultdict(float)
        for minibatch, parts in zip(minibatches, batches, strict=True):
            w[minibatch] = token_weights(loss_mask[minibatch], args.loss_norm, args.max_new_tokens)
            for some in parts:
                logprobs, entropy = completion_logprobs(policy, pairs, some, args.temperature, True)
                old = old_logprobs[some] if needs_old else logprobs.detach()
                ref = ref_logprobs[some] if ref_model is not None else None
                loss, terms = grpo_loss(logprobs, old, ref, advantages[some], w[some], **coefs)
                loss.backward()
                terms |= {"objective/loss": loss, "policy/entropy": entropy.sum()}
                for name, value in terms.items():
                    sums[name] += value.detach().double()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            norm = (norm.full_tensor() if WORLD_SIZE > 1 else norm).item()
            with explain(f"rollout {step + 1}: no step was taken; is --learning-rate too high?"):
                require(math.isfinite(norm), f"gradient norm {norm}; stopped run: {run_dir}")
            grad_norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
        updated = time.perf_counter()

        # 6. log, evaluate, save
        tokens, groups = lengths.sum().item(), rewards.view(-1, args.group_size)
        metrics = {
            "reward/mean": rewards.mean().item(),
            **{f"reward/{name}": values.mean().item() for name, values in rewards_by_name.items()},
            "reward/std": groups.std(dim=1).mean().item(),
            "reward/zero_variance_groups": (groups == groups[:, :1]).all(1).float().mean().item(),
            "completions/length_mean": lengths.float().mean().item(),
            "completions/length_min": lengths.min().item(),
            "completions/length_max": lengths.max().item(),
            "completions/truncated_fraction": 1 - finished.float().mean().item(),
            "policy/grad_norm": np.mean(grad_norms),
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            "time/rollout_seconds": rolled_out - started,
            "time/score_seconds": scored - rolled_out,
            "time/update_seconds": updated - scored,
            "time/tokens_per_second": tokens / (updated - started),
        }
        counts = {"objective/loss": len(grad_norms), "objective/kl": len(pairs) * len(passes)}
        for name, value in sums.items():  # per optimiser step, per completion, or else per token
            metrics[name] = all_reduce_sum(value).item() / counts.get(name, tokens * len(passes))
        done, due = step + 1, (step + 1) % args.eval_every == 0 or step + 1 == args.total_rollouts
        found = evaluate(args, sample, eval_rows, *eval_judges) if due else ({}, [])
        log(run_dir, done, metrics | found[0], found[1])
        progress.set_postfix(reward=metrics["reward/mean"], entropy=metrics["policy/entropy"])
        if done % args.save_every == 0 or done == args.total_rollouts:
            save_checkpoint(run_dir, trained, state | {"step": done})

    finish(run_dir, policy, tokenizer, stop_ids)
    print(f"next: generate with it, or train on with --model {run_dir / 'model'}", flush=True)
    return run_dir


def evaluate(args: Args, sample: Callable, rows: list, judges: dict, weights: dict) -> tuple:
    """Metrics and samples of one completion per held-out prompt."""
    rng = torch.Generator().manual_seed(args.seed)  # every evaluation draws the same numbers
    samples, right, size = [], [], args.prompts_per_rollout * args.group_size
    for some in (rows[start : start + size] for start in range(0, len(rows), size)):
        pairs, texts = sample(some, args.eval_temperature, rng)
        rewards_by_name = {name: judge(some, pairs, texts) for name, judge in judges.items()}
        rewards = sum(weights[name] * values for name, values in rewards_by_name.items())  # (b,)
        if len(judges) == 1 and "reward_model" not in judges:  # a single rule: full marks are 1
            right += (sum(rewards_by_name.values()) >= 1).tolist()
        for row, text, r, (_, y) in zip(some, texts, rewards.tolist(), pairs, strict=True):
            samples.append(dict(prompt=row["prompt"], completion=text, reward=r, length=len(y)))
    metrics = {"eval/reward": np.mean([sampled["reward"] for sampled in samples])}
    metrics |= {"eval/accuracy": np.mean(right)} if right else {}
    return metrics | {"eval/length_mean": np.mean([s["length"] for s in samples])}, samples


# --- the reward --------------------------------------------------------------------------------
# 72, -3, +4, 1,234.50, $5, .5; a sign right behind a digit, a letter or a bracket is an operator.
NUMBER = r"((?:(?<![\w.)])[-+])?)\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"


def last_number(prompts: list, completions: list[str], answer: list, **columns: list) -> list:
    """1 where the completion's last number is the answer's, such as `5` or `... #### 1,234`."""

    def find(text: Any) -> float | None:
        numbers = re.findall(NUMBER, str(text), re.ASCII)
        return float("".join(numbers[-1]).replace(",", "")) if numbers else None

    found = [(find(text), find(right)) for text, right in zip(completions, answer, strict=True)]
    return [None if right is None else float(number == right) for number, right in found]


def load_rule(flag: str, spec: str, row: dict) -> tuple[str, Callable]:
    """Name and judge of a rule: `last_number`, or a function as path/to/file.py:function."""
    path, _, name = spec.rpartition(":")
    with explain(f"{flag} {spec}, called with prompts, completions, {[*row['columns']]}"):
        function = last_number
        if spec != "last_number":
            require(Path(path).is_file(), "neither last_number nor path/to/file.py:function")
            sys.path.insert(0, str(Path(path).parent))
            module = import_module(Path(path).stem)
            require(Path(path).samefile(module.__file__), f"its name is that of {module.__file__}")
            function = getattr(module, name)
        inspect.signature(function).bind(prompts=[], completions=[], **row["columns"])
    return name, partial(apply_rule, name, function)


def apply_rule(name: str, rule: Callable, rows: list, pairs: Pairs, texts: list[str]) -> Tensor:
    """Rewards (B,) of a completion per row. Rank 0 alone calls: a rule may compare the rows."""
    rewards = []
    if RANK == 0:
        columns = {key: [row["columns"][key] for row in rows] for key in rows[0]["columns"]}
        rewards = rule(prompts=[row["prompt"] for row in rows], completions=texts, **columns)
        with explain(f"reward function {name} must return a list of {len(texts)} numbers"):
            for row, text, reward in zip(rows, texts, [*rewards], strict=True):
                finite = isinstance(reward, SupportsFloat) and math.isfinite(reward)
                require(finite, f"it returned {reward!r} for {text!r} after {row['prompt']!r}")
    return torch.tensor(all_gather([float(reward) for reward in rewards]))


@torch.no_grad()
def reward_model_scores(model: Any, size: int, rows: list, pairs: Pairs, texts: list) -> Tensor:
    """Scores (B,) of the last token, less the preferred completions' mean (after InstructGPT)."""
    scores = torch.zeros(len(pairs), device=model.device)
    for some in micro_batches(pairs, torch.arange(len(pairs)), size):
        # A rank without rows reads a blank one: those of a sharded model run all passes together.
        ids, mask = pad_rows([pairs[i][0] + pairs[i][1] for i in some] or [[0]], model.device)
        with autocast(model.device):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]  # (b, d)
        scores[some] = model.score(last.float()).squeeze(1)[: len(some)]
    return all_reduce_sum(scores).cpu() - getattr(model.config, "score_mean", 0.0)


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


def load_prompts(args: Args, split: str, tokenizer: Any) -> list[dict]:
    """Rows of `prompt`, its token `ids` and the other `columns`."""
    rows, dropped = [], defaultdict(list)
    with explain(f"--dataset {args.dataset}, {split}"):
        for index, row in enumerate(load_dataset(args.dataset, args.dataset_config, split=split)):
            with explain(f"--dataset {args.dataset}, row {index} of {split}"):
                require(args.prompt_column in row, f"no --prompt-column in {[*row]}")
                prompt = row.pop(args.prompt_column) or ""
                if args.answer_column in row:
                    row["answer"] = row.pop(args.answer_column)
                if args.chat and isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                empty = not (prompt if isinstance(prompt, str) else content(prompt[-1])).strip()
                ids = [] if empty else encode(tokenizer, prompt, add_generation_prompt=True)
                if 0 < len(ids) <= args.max_prompt_length:
                    rows.append({"prompt": prompt, "ids": ids, "columns": row})
                else:
                    long = f"longer than --max-prompt-length {args.max_prompt_length}"
                    dropped["empty" if empty else long].append(prompt)
        report(split, rows, dropped)
    return rows


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
            zero = value == 0 and name in ("seed", "beta", "warmup_ratio", "eval_temperature")
            most = 1 if name == "warmup_ratio" else math.inf
            known = type(value) not in (int, float) or zero or 0 < value < most
            require(known, f"--{name.replace('_', '-')} must not be {value}")
        require(args.group_size > 1, "--group-size must be at least 2")
        gdpo = args.multi_objective_aggregation == "normalize_then_sum"
        plain = args.kl_placement == "loss" and args.scale_rewards
        require(plain or not gdpo, "GDPO needs --kl-placement loss and --scale-rewards")
        completions = args.prompts_per_rollout * args.group_size
        require(args.num_minibatches <= completions, "--num-minibatches: too many for a rollout")


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
