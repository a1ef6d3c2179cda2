"""docs/best_of_n.md: best of n, and rejection sampling as training.

Best of n samples n completions of a prompt and keeps the one with the highest reward; nothing is
trained. Rejection sampling samples completions, keeps the correct ones or the best ones, and
fine-tunes on them with sft.py, in one round or in several. Each plan samples as many completions
as the run in the same table: 15,360 as GRPO on the arithmetic task, 3,840 as PPO on the reviews.
"""

import math
import tempfile
from collections import Counter
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
from docs.experiments.lib.drawing import ALGORITHM_STYLES, COLOURS, Style, draw_evaluations, panel
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.runs import for_each_seed, train, write_jsonl
from docs.experiments.lib.tables import rounded, spread
from tiny.arithmetic.reward import find_last_number, last_number
from tiny.reviews.gold import grammatical, sentiment

# The two tasks, as flags of grpo.py: a rule on the answer, and a learned reward.
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
SUM_SIZES = (1, 2, 4, 8, 16, 32)
REVIEW_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Plan(NamedTuple):
    task: grpo.Args
    budget: int  # completions, over all rounds
    num_rounds: int  # each samples, selects and fine-tunes
    num_samples: int  # k, completions per prompt
    epochs: float = 2.0  # of each round's fine-tuning


SUM_PLANS = {
    "correct of 8, 1 round": Plan(SUMS, SUM_BUDGET, 1, 8),
    "correct of 8, 4 rounds": Plan(SUMS, SUM_BUDGET, 4, 8),
    "correct of 8, 4 rounds, fewer steps": Plan(SUMS, SUM_BUDGET, 4, 8, epochs=0.64),
}
REVIEW_PLANS = {
    "best of 8, 1 round": Plan(REVIEWS, REVIEW_BUDGET, 1, 8),
    "best of 8, 4 rounds": Plan(REVIEWS, REVIEW_BUDGET, 4, 8),
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
    num_samples = len(scores)
    order = sorted(range(num_samples), key=lambda i: scores[i])
    num_subsets = math.comb(num_samples, n)
    total = 0.0
    for rank, i in enumerate(order):
        total += math.comb(rank, n - 1) / num_subsets * values[i]
    return total


def majority_is_correct(answers: Sequence, correct_answer: float, n: int) -> float:
    """How often the most frequent of n answers is correct, over disjoint groups of n; among equally
    frequent answers the first counts (self-consistency, arXiv 2203.11171)."""
    votes = []
    for start in range(0, len(answers), n):
        ((answer, _),) = Counter(answers[start : start + n]).most_common(1)
        votes.append(float(answer == correct_answer))
    return mean(votes)


# --- best of n ---------------------------------------------------------------------------------
def sample_each(
    task: grpo.Args, policy: sampling.Policy, prompts: list[grpo.Prompt], rng: Generator
) -> tuple[list, list[str]]:
    """A completion for each prompt: pairs (prompt, completion) of token ids, and texts."""
    prompt_ids = [prompt.ids for prompt in prompts]
    return sampling.sample(policy, prompt_ids, task.max_new_tokens, rng)


def rewards_of_sums(prompts: list[grpo.Prompt], texts: list[str]) -> list[float]:
    """The rewards of the arithmetic task."""
    return last_number([], texts, [prompt.columns["answer"] for prompt in prompts])


def best_of_sums(seed: int) -> dict[str, list[float]]:
    """Of the held-out sums, for each of SUM_SIZES: accuracy of best of n and of the majority."""
    num_samples = max(SUM_SIZES)
    policy = sampling.load_policy(SUMS.model)
    prompts = sampling.load_prompts(SUMS, "test", policy.tokenizer)
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    _, texts = sample_each(SUMS, policy, repeated, Generator().manual_seed(seed))
    all_rewards = rewards_of_sums(repeated, texts)
    measured = {"best of n": [], "majority": []}
    for n in SUM_SIZES:
        best, majority = [], []
        for i, prompt in enumerate(prompts):
            group = slice(i * num_samples, (i + 1) * num_samples)
            rewards = all_rewards[group]
            best.append(expected_best(rewards, rewards, n))
            answers = [find_last_number(text) for text in texts[group]]
            correct_answer = find_last_number(prompt.columns["answer"])
            majority.append(majority_is_correct(answers, correct_answer, n))
        measured["best of n"].append(mean(best))
        measured["majority"].append(mean(majority))
    return measured


def best_of_reviews(seed: int) -> dict[str, Any]:
    """Of the held-out review prompts, for each of REVIEW_SIZES: learned and gold reward and grammar
    of the completion with the highest learned reward."""
    num_samples = max(REVIEW_SIZES)
    policy = sampling.load_policy(REVIEWS.model)
    # Each prompt is in the file eight times: once is enough, because each gets many samples.
    prompts = sampling.load_prompts(REVIEWS, "test", policy.tokenizer)
    prompts = [*{prompt.text: prompt for prompt in prompts}.values()]
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    sequences, texts = sample_each(REVIEWS, policy, repeated, Generator().manual_seed(seed))
    reward_fn = sampling.load_reward_model(REVIEWS.reward_model)
    learned = reward_fn(repeated, sequences, texts).tolist()
    quantities = {
        "learned": learned,
        "gold": sentiment([], texts),
        "grammatical": grammatical([], texts),
    }
    groups = [slice(i * num_samples, (i + 1) * num_samples) for i in range(len(prompts))]
    measured = {}
    for name, values in quantities.items():
        measured[name] = []
        for n in REVIEW_SIZES:
            best = [expected_best(learned[group], values[group], n) for group in groups]
            measured[name].append(mean(best))
    return measured


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
    return lambda prompts, _, texts: torch.tensor(rewards_of_sums(prompts, texts))


def rejection_sampling(plan: Plan, seed: int, folder: Path) -> dict[str, float]:
    """Train as planned, in a folder; what the last model is worth."""
    task, reward_fn = plan.task, load_reward(plan.task)
    start_policy = policy = sampling.load_policy(task.model)
    train_prompts = sampling.load_prompts(task, "train", policy.tokenizer)
    num_prompts = plan.budget // (plan.num_rounds * plan.num_samples)  # per round
    data_epochs = math.ceil(plan.num_rounds * num_prompts / len(train_prompts))
    rng = Generator().manual_seed(seed)
    orders = [torch.randperm(len(train_prompts), generator=rng) for _ in range(data_epochs)]
    prompt_batches = torch.cat(orders).split(num_prompts)
    model = task.model
    num_kept = num_steps = 0
    for round_index in range(plan.num_rounds):
        # 1. Sample k completions of each prompt, from the policy as it is now.
        rng = Generator().manual_seed(seed + 1_000_003 * (round_index + 1))
        prompts = []
        for i in prompt_batches[round_index]:
            prompts += [train_prompts[i]] * plan.num_samples
        sequences, texts = sample_each(task, policy, prompts, rng)

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
        num_steps += len(run.rows) - 1
    measured = evaluate(task, reward_fn, policy, start_policy, seed)
    return measured | {"kept": num_kept, "steps": num_steps}


def evaluate(
    task: grpo.Args,
    reward_fn: Callable,
    policy: sampling.Policy,
    start_policy: sampling.Policy,
    seed: int,
) -> dict[str, float]:
    """One completion per held-out prompt, with the random numbers of an evaluation of grpo.py.

    The KL to the starting policy is k1, in nats per completion.
    """
    prompts = sampling.load_prompts(task, "test", policy.tokenizer)[: task.eval_rows]
    sequences, texts = sample_each(task, policy, prompts, Generator().manual_seed(seed))
    mean_reward = reward_fn(prompts, sequences, texts).mean().item()
    measured = {
        "KL": sampling.mean_log_ratio(policy, start_policy, sequences),
        "tokens": mean(len(completion) for _, completion in sequences),
    }
    if task.reward_model:
        measured["learned"] = mean_reward
        measured["gold"] = mean(sentiment([], texts))
        measured["grammatical"] = mean(grammatical([], texts))
    else:
        measured["accuracy"] = mean_reward
    return measured


# --- results -----------------------------------------------------------------------------------
def measure_seed(seed: int) -> dict:
    measured = {"sums": best_of_sums(seed), "reviews": best_of_reviews(seed), "training": {}}
    for label, plan in (SUM_PLANS | REVIEW_PLANS).items():
        with tempfile.TemporaryDirectory() as folder:
            measured["training"][label] = rejection_sampling(plan, seed, Path(folder))
    return measured


def measure() -> dict:
    return {"numbers": rounded(for_each_seed(measure_seed))}


def tables(results: dict) -> dict:
    """Tables of what is measured with each seed, beside GRPO's and PPO's results."""
    measured = results["numbers"].values()

    def by_size(task: str, sizes: Sequence[int], digits: dict[str, int]) -> dict:
        rows = []
        for i, n in enumerate(sizes):
            row = [str(n), f"{kl_bound(n):.2f}"]
            for quantity in digits:
                values = [of_seed[task][quantity][i] for of_seed in measured]
                row.append(spread(values, digits[quantity]))
            rows.append(row)
        return {"columns": ["n", "bound of the KL", *digits], "rows": rows}

    def row_of(label: str, digits: dict[str, int]) -> list[str]:
        row = [label]
        for quantity in digits:
            values = [of_seed["training"][label][quantity] for of_seed in measured]
            row.append(spread(values, digits[quantity]))
        return row

    best_of_sums = by_size("sums", SUM_SIZES, {"best of n": 3, "majority": 3})
    best_of_sums["columns"][-1] = "majority of n"
    digits = {"learned": 2, "gold": 3, "grammatical": 2}
    best_of_reviews = by_size("reviews", REVIEW_SIZES, digits)

    sum_digits = {"kept": 0, "steps": 0, "accuracy": 3, "tokens": 1, "KL": 1}
    sum_rows = [row_of(label, sum_digits) for label in SUM_PLANS]
    numbers = saved_results("grpo")["numbers"]["(default)"]
    steps = SUMS.total_rollouts * SUMS.update_epochs * SUMS.num_minibatches
    accuracy, tokens = spread(numbers["eval/accuracy"], 3), spread(numbers["eval/length_mean"], 1)
    sum_rows.append(
        ["[GRPO](grpo.md#results)", f"{SUM_BUDGET:,}", f"{steps}", accuracy, tokens, ""]
    )

    review_digits = {"kept": 0, "steps": 0, "learned": 2, "gold": 2, "grammatical": 2, "KL": 1}
    review_rows = [row_of(label, review_digits) for label in REVIEW_PLANS]
    learned = saved_results("reward_hacking")["numbers"]["0.2"]["reward/mean"]
    numbers = saved_results("frontier")["numbers"]["PPO, KL in the reward, beta 0.2"]
    steps = PPO.total_rollouts * PPO.update_epochs * PPO.num_minibatches
    ppo_row = ["[PPO](ppo_rlhf.md#results), beta 0.2", f"{REVIEW_BUDGET:,}", f"{steps}"]
    for values in (learned, numbers["eval/reward"], numbers["grammatical"]):
        ppo_row.append(spread(values, 2))
    review_rows.append([*ppo_row, spread(numbers["KL of samples"], 1)])
    columns = ["", "trained on", "optimiser steps"]
    return {
        "best_of_n sums": best_of_sums,
        "best_of_n reviews": best_of_reviews,
        "best_of_n rejection sums": {
            "columns": [*columns, "accuracy", "tokens", "KL"],
            "rows": sum_rows,
        },
        "best_of_n rejection reviews": {
            "columns": [*columns, "learned", "gold", "grammatical", "KL"],
            "rows": review_rows,
        },
    }


def draw(results: dict) -> dict:
    """Gold and learned reward on the reviews against the KL."""
    measured = [*results["numbers"].values()]
    titles = {
        "gold": "Best of n is not hacked: it stays near",
        "learned": "PPO gains more, further out",
    }
    offsets = {"0.5": (0, -15), "0.05": (-28, 3)}  # of a beta from its point
    axes = {}
    for quantity, title in titles.items():
        axis = panel(title, "KL to the start, nats", f"{quantity} reward", height=3.2)
        axes[f"best_of_n_{quantity}"] = axis
        ppo, style = ppo_points(quantity), ALGORITHM_STYLES["PPO"]
        draw_evaluations(axis, [*zip(*ppo.values(), strict=True)], "PPO, with its beta", style)
        for beta, points in ppo.items():
            kl, reward = (mean(values) for values in zip(*points, strict=True))
            axis.annotate(
                beta,
                (kl, reward),
                xytext=offsets.get(beta, (7, -2)),
                textcoords="offset points",
                color=style.colour,
            )
        best = []
        for of_seed in measured:
            # n = 1 has a KL of 0, which a logarithmic scale cannot show.
            kls = [kl_bound(n) for n in REVIEW_SIZES[1:]]
            best.append([*zip(kls, of_seed["reviews"][quantity][1:], strict=True)])
        label = f"best of n, n = 2 to {REVIEW_SIZES[-1]}"
        draw_evaluations(axis, best, label, ALGORITHM_STYLES["best of n"])
        for plan, marker in zip(REVIEW_PLANS, ("v", "h"), strict=True):
            trained = [of_seed["training"][plan] for of_seed in measured]
            points = [[(of_seed["KL"], of_seed[quantity])] for of_seed in trained]
            draw_evaluations(axis, points, f"trained: {plan}", Style(COLOURS[0], marker))
        axis.set(xscale="log")
        axis.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
        axis.minorticks_off()
    axes["best_of_n_gold"].legend(loc="lower left")
    return axes


def ppo_points(quantity: str) -> dict[str, list[tuple]]:
    """Points (KL, reward) of PPO with the KL in the rewards: by beta, one for each seed."""
    experiment, kl, reward = "frontier", "KL of samples", "eval/reward"
    if quantity == "learned":
        experiment, kl, reward = "reward_hacking", "objective/kl", "reward/mean"
    points = {}
    for label, of_label in saved_results(experiment)["numbers"].items():
        if experiment == "reward_hacking" or label.startswith("PPO, KL in the reward"):
            beta = label.rpartition(" ")[2].replace("e-0", "e-")
            points[beta] = [*zip(of_label[kl], of_label[reward], strict=True)]
    return points


EXPERIMENTS = (Experiment("best_of_n", tables, measure, draw),)
