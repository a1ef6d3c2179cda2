"""docs/best_of_n.md: best of n, and rejection sampling as training.

Each plan samples as many completions as the run in the same table: 15,360 as GRPO on the arithmetic
task, 3,840 as PPO on the reviews.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

import grpo
import ppo_rlhf
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.drawing import ALGORITHM_STYLES, panel
from docs.experiments.lib.experiment import Experiment, Table, saved_numbers, saved_results
from docs.experiments.lib.metrics import measured
from docs.experiments.lib.runs import train, write_jsonl
from docs.experiments.lib.tables import spread
from tiny.reviews.gold import score

SUMS = grpo.Args()
REVIEWS = grpo.Args(
    model="tiny/reviews/policy",
    dataset="tiny/reviews/prompts",
    max_new_tokens=40,
    reward_model="tiny/reviews/reward_model",
)
PPO = ppo_rlhf.Args()
# Completions that `python grpo.py` samples, 15,360, and `python ppo_rlhf.py`, 3,840.
SUM_BUDGET = SUMS.total_rollouts * SUMS.prompts_per_rollout * SUMS.group_size
REVIEW_BUDGET = PPO.total_rollouts * PPO.prompts_per_rollout
SIZES = (1, 4, 16, 64, 256)


class Plan(NamedTuple):
    task: grpo.Args
    budget: int  # completions, over all rounds
    num_rounds: int  # each samples, selects and fine-tunes
    num_samples: int = 8  # k, completions per prompt
    epochs: float = 2.0  # of each round's fine-tuning


SUM_PLANS = {
    "correct of 8, 1 round": Plan(SUMS, SUM_BUDGET, 1),
    "correct of 8, 4 rounds": Plan(SUMS, SUM_BUDGET, 4),
    "correct of 8, 4 rounds, fewer steps": Plan(SUMS, SUM_BUDGET, 4, epochs=0.64),
}
REVIEW_PLANS = {
    "best of 8, 1 round": Plan(REVIEWS, REVIEW_BUDGET, 1),
    "best of 8, 4 rounds": Plan(REVIEWS, REVIEW_BUDGET, 4),
}


# --- the mathematics ---------------------------------------------------------------------------
def kl_bound(n: int) -> float:
    """log n - (n - 1)/n nats: KL(best of n || policy) is at most that (arXiv 2401.01879)."""
    return math.log(n) - (n - 1) / n


def expected_best(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """Expected value of the completion with the highest score among n, from N >= n samples.

    The mean over all subsets of n: the i-th lowest score (from 0) is the highest in C(i, n - 1) of
    the C(N, n) subsets. With values = scores of 0 and 1 it is pass@n (arXiv 2107.03374).
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    num_subsets = math.comb(len(scores), n)
    shares = [math.comb(rank, n - 1) / num_subsets for rank in range(len(scores))]
    return sum(share * values[i] for share, i in zip(shares, order, strict=True))


# --- best of n ---------------------------------------------------------------------------------
def best_of_reviews(seed: int) -> dict[str, dict[str, float]]:
    """By n, what the completion with the highest learned reward is worth, mean over prompts."""
    num_samples = max(SIZES)
    policy = sampling.load_policy(REVIEWS.model)
    # Each prompt is in the file eight times: once is enough, because each gets many samples.
    prompts = sampling.load_prompts(REVIEWS, "test", policy.tokenizer)
    prompts = [*{prompt.text: prompt for prompt in prompts}.values()]
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    sequences, texts = sample(REVIEWS, policy, repeated, seed)
    reward_fn = sampling.load_reward_model(REVIEWS.reward_model)
    learned = reward_fn(repeated, sequences, texts).tolist()
    gold = [score(text) for text in texts]
    groups = [slice(i * num_samples, (i + 1) * num_samples) for i in range(len(prompts))]
    found = {}
    for n in SIZES:
        found[str(n)] = {"bound of the KL": kl_bound(n)}
        for name, values in (("learned", learned), ("gold", gold)):
            best = [expected_best(learned[group], values[group], n) for group in groups]
            found[str(n)][name] = mean(best)
    return found


def sample(
    task: grpo.Args, policy: sampling.Policy, prompts: list[grpo.Prompt], seed: int
) -> tuple[list, list[str]]:
    """A completion for each prompt: pairs (prompt, completion) of token ids, and texts."""
    rng = Generator().manual_seed(seed)
    return sampling.sample(policy, [prompt.ids for prompt in prompts], task.max_new_tokens, rng)


# --- rejection sampling ------------------------------------------------------------------------
def select(rewards: Tensor, num_samples: int, has_rule: bool) -> list[int]:
    """Row numbers of the completions to train on: the correct ones, or the best of each prompt.

    The completions of a prompt are neighbours in the rewards (B,).
    """
    if has_rule:
        return (rewards == 1).nonzero().squeeze(1).tolist()
    best = rewards.view(-1, num_samples).argmax(dim=1)
    return (best + num_samples * torch.arange(len(best))).tolist()


def text_after_prompt(tokenizer: Any, prompt_ids: list[int], completion_ids: list[int]) -> str:
    """A completion as SFT data needs it: with the space, if any, that separates it from the
    prompt; decoding the completion alone drops it."""
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    text = tokenizer.decode(prompt_ids + completion_ids, skip_special_tokens=True)
    return text.removeprefix(prompt)


def load_reward(task: grpo.Args) -> Callable:
    """The reward of a task as a function of (prompts, sequences, texts), which returns (B,)."""
    if task.reward_model:
        return sampling.load_reward_model(task.reward_model)
    (spec,) = task.reward_fn
    rule = grpo.load_reward_fn(spec)
    return lambda prompts, sequences, texts: grpo.rule_rewards(rule, prompts, texts)


def rejection_sampling(plan: Plan, seed: int, folder: Path) -> dict[str, float]:
    """Train as planned, in a folder; what the last model is worth."""
    task, reward_fn = plan.task, load_reward(plan.task)
    start_policy = policy = sampling.load_policy(task.model)
    train_prompts = sampling.load_prompts(task, "train", policy.tokenizer)
    num_prompts = plan.budget // (plan.num_rounds * plan.num_samples)  # per round
    rng = Generator().manual_seed(seed)
    epochs = [torch.randperm(len(train_prompts), generator=rng) for _ in range(2)]
    prompt_batches = torch.cat(epochs).split(num_prompts)
    model = task.model
    num_kept = num_steps = 0
    for round_index in range(plan.num_rounds):
        # 1. Sample k completions of each prompt, from the policy as it is now.
        prompts = []
        for i in prompt_batches[round_index]:
            prompts += [train_prompts[i]] * plan.num_samples
        sequences, texts = sample(task, policy, prompts, seed + 1_000_003 * (round_index + 1))

        # 2. Keep the correct ones, or the best of each prompt.
        rewards = reward_fn(prompts, sequences, texts)
        selected = select(rewards, plan.num_samples, has_rule=not task.reward_model)

        # 3. Fine-tune on them.
        data = folder / f"round_{round_index}"
        data.mkdir()
        rows = []
        for i in selected:
            completion = text_after_prompt(policy.tokenizer, *sequences[i])
            rows.append({"prompt": prompts[i].text, "completion": completion})
        write_jsonl(data / "train.jsonl", rows)
        run = train(
            sft,
            model=model,
            dataset=str(data),
            eval_split="train[:8]",
            epochs=plan.epochs,
            seed=seed,
            output_dir=str(folder),
            eval_every=10_000,
            save_every=10_000,
        )
        model = str(run.folder)
        policy = sampling.load_policy(model)
        num_kept += len(selected)
        num_steps += len(run.metrics) - 1
    numbers = evaluate(task, reward_fn, policy, start_policy, seed)
    return numbers | {"kept": num_kept, "steps": num_steps}


def evaluate(
    task: grpo.Args,
    reward_fn: Callable,
    policy: sampling.Policy,
    start_policy: sampling.Policy,
    seed: int,
) -> dict[str, float]:
    """One completion per held-out prompt, with the random numbers of an evaluation of grpo.py."""
    prompts = sampling.load_prompts(task, "test", policy.tokenizer)[: task.eval_rows]
    sequences, texts = sample(task, policy, prompts, seed)
    mean_reward = reward_fn(prompts, sequences, texts).mean().item()
    if not task.reward_model:
        return {"accuracy": mean_reward}
    return {
        "learned": mean_reward,
        "gold": mean(score(text) for text in texts),
        "KL": sampling.mean_log_ratio(policy, start_policy, sequences),
    }


# --- results -----------------------------------------------------------------------------------
def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    found = best_of_reviews(seed)
    for label, plan in (SUM_PLANS | REVIEW_PLANS).items():
        with tempfile.TemporaryDirectory() as folder:
            found[label] = rejection_sampling(plan, seed, Path(folder))
    return found


def num_steps(args: Any) -> str:
    """Optimiser steps of a run of grpo.py or ppo_rlhf.py."""
    return str(args.total_rollouts * args.update_epochs * args.num_minibatches)


BEST = Table(
    {
        "bound of the KL": (measured("bound of the KL"), 2),
        "learned": (measured("learned"), 2),
        "gold": (measured("gold"), 3),
    },
    {str(n): (str(n),) for n in SIZES},
    heading=("n",),
)
TRAINED = {"trained on": (measured("kept"), 0), "optimiser steps": (measured("steps"), 0)}
REJECTION_SUMS = Table(
    TRAINED | {"accuracy": (measured("accuracy"), 3)},
    {label: (label,) for label in SUM_PLANS},
    heading=("",),
)
REJECTION_REVIEWS = Table(
    TRAINED
    | {
        "learned": (measured("learned"), 2),
        "gold": (measured("gold"), 2),
        "KL": (measured("KL"), 1),
    },
    {label: (label,) for label in REVIEW_PLANS},
    heading=("",),
)


def tables(results: dict) -> dict:
    """Rejection sampling beside GRPO's and PPO's results."""
    sums, reviews = (
        table.make(results["numbers"], []) for table in (REJECTION_SUMS, REJECTION_REVIEWS)
    )
    accuracy = spread(saved_numbers("grpo", "(default)", "eval/accuracy"), 3)
    sums["rows"].append(["[GRPO](grpo.md#results)", f"{SUM_BUDGET:,}", num_steps(SUMS), accuracy])
    learned = spread(saved_numbers("reward_hacking", "0.2", "reward/mean"), 2)
    label = "PPO, KL in the reward, beta 0.2"
    gold = spread(saved_numbers("frontier", label, "eval/reward"), 2)
    kl = spread(saved_numbers("frontier", label, "KL of samples"), 1)
    ppo_row = ["[PPO](ppo_rlhf.md#results), beta 0.2", f"{REVIEW_BUDGET:,}", num_steps(PPO)]
    reviews["rows"].append([*ppo_row, learned, gold, kl])
    return {"best_of_n rejection sums": sums, "best_of_n rejection reviews": reviews}


def draw(results: dict) -> dict:
    """Gold reward on the reviews against the KL."""
    title = "Best of n stays below 5 nats,\nPPO goes on and is hacked"
    axis = panel(title, "KL to the start, nats", "gold reward", height=3, xscale="log")
    ppo = []
    for label, numbers in saved_results("frontier")["numbers"].items():
        if label.startswith("PPO, KL in the reward"):
            ppo.append((mean(numbers["KL of samples"]), mean(numbers["eval/reward"])))
    # n = 1 has a KL of 0, which log scales cannot show.
    best = [(kl_bound(n), mean(results["numbers"][str(n)]["gold"])) for n in SIZES[1:]]
    for points, name, label in (
        (ppo, "PPO", "PPO, beta 0.5 to 1e-9"),
        (best, "best of n", f"best of n, n = {SIZES[1]} to {SIZES[-1]}"),
    ):
        colour, marker = ALGORITHM_STYLES[name]
        xs, ys = zip(*sorted(points), strict=True)
        axis.plot(xs, ys, color=colour, marker=marker, label=label)
    axis.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axis.minorticks_off()
    axis.legend(loc="lower left")
    return {"best_of_n_gold": axis}


EXPERIMENTS = (
    Experiment(
        "best_of_n",
        tables={"best_of_n": BEST},
        measure_seed=measure_seed,
        more_tables=tables,
        draw=draw,
    ),
)
