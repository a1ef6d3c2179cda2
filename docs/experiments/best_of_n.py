"""Best of n, and rejection sampling as training: tables and figure of docs/best_of_n.md.

    python docs/experiments/figures.py best_of_n       # 6 minutes on two cores

Best of n samples n completions of a prompt and keeps the one with the highest reward; nothing is
trained. Rejection sampling samples completions, keeps the right ones or the best ones, and
fine-tunes on them with sft.py, in one round or in several. Each plan samples as many completions
as the run in the same table: 15,360 as GRPO on the arithmetic task, 3,840 as PPO on the reviews.
"""

import contextlib
import io
import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from paths import RESULTS
from runs import GOLD, SEEDS
from tables import spread
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM

import grpo
import ppo_rlhf
import sft
from common.generation import generate
from common.logprobs import Sequences, micro_batches, rollout_logprobs
from tiny.arithmetic.reward import find_last_number, last_number
from tiny.reviews.gold import grammatical

# The two tasks, as flags of grpo.py: a rule on the answer, and a learned reward.
SUMS = grpo.Args(reward_fn=[grpo.LAST_NUMBER])
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
    "right of 8, 1 round": Plan(SUMS, SUM_BUDGET, 1, 8),
    "right of 8, 4 rounds": Plan(SUMS, SUM_BUDGET, 4, 8),
    "right of 8, 4 rounds, fewer steps": Plan(SUMS, SUM_BUDGET, 4, 8, epochs=0.64),
}
REVIEW_PLANS = {
    "best of 8, 1 round": Plan(REVIEWS, REVIEW_BUDGET, 1, 8),
    "best of 8, 4 rounds": Plan(REVIEWS, REVIEW_BUDGET, 4, 8),
}


# --- the mathematics ---------------------------------------------------------------------------
def kl_bound(n: int) -> float:
    """log n - (n - 1)/n nats: KL(best of n || policy) is at most that (arXiv 2401.01879)."""
    return math.log(n) - (n - 1) / n


def right_kl(p: float, n: int) -> float:
    """KL(best of n || policy) in nats for a reward of 0 or 1 that the policy gets with probability
    p: best of n is right with probability q = 1 - (1 - p)^n, and among the right ones, and among
    the wrong ones, it is the policy.
    """
    q = 1 - (1 - p) ** n
    kl = 0.0
    for new, old in ((q, p), (1 - q, 1 - p)):
        if new > 0:
            kl += new * math.log(new / old)
    return kl


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


def majority_is_right(answers: Sequence, right_answer: float, n: int) -> float:
    """How often the most frequent of n answers is right, over disjoint groups of n; among equally
    frequent answers the first counts (self-consistency, arXiv 2203.11171)."""
    votes = []
    for start in range(0, len(answers), n):
        ((answer, _),) = Counter(answers[start : start + n]).most_common(1)
        votes.append(float(answer == right_answer))
    return mean(votes)


def tie_probability(scores: Sequence[float]) -> float:
    """How probable it is that two of the samples have the same score."""
    num_samples = len(scores)
    equal_pairs = sum(math.comb(count, 2) for count in Counter(scores).values())
    return equal_pairs / math.comb(num_samples, 2)


# --- sampling ----------------------------------------------------------------------------------
class Policy(NamedTuple):
    model: Any
    tokenizer: Any
    stop_ids: list[int]


def load_policy(folder: str) -> Policy:
    tokenizer, stop_ids = grpo.load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Policy(model, tokenizer, stop_ids)


def load_prompts(task: grpo.Args, split: str, tokenizer: Any) -> list[grpo.Prompt]:
    with contextlib.redirect_stdout(io.StringIO()):
        return grpo.load_prompts(task, split, tokenizer)


def sample(
    policy: Policy, prompts: list[grpo.Prompt], max_new_tokens: int, rng: Generator
) -> tuple[Sequences, list[str]]:
    """A completion for each prompt at temperature 1, in the batches of an evaluation of grpo.py."""
    batch_size = SUMS.prompts_per_rollout * SUMS.group_size
    sequences, texts = [], []
    for start in range(0, len(prompts), batch_size):
        prompt_ids = [prompt.ids for prompt in prompts[start : start + batch_size]]
        completion_ids = generate(
            policy.model,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            stop_ids=policy.stop_ids,
            rng=rng,
        )
        sequences += zip(prompt_ids, completion_ids, strict=True)
        texts += policy.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    return sequences, texts


def load_reward(task: grpo.Args, tokenizer: Any, columns: dict) -> Any:
    """The reward of a task as a function of (prompts, sequences, texts), which returns (B,)."""
    if task.reward_model:
        max_length = task.max_prompt_length + task.max_new_tokens
        return grpo.load_reward_model(task, tokenizer, max_length, torch.device("cpu"))
    (reward_fn,) = grpo.load_reward_fns("--reward-fn", task.reward_fn, columns).values()
    return reward_fn


def load_gold(columns: dict) -> Any:
    (gold_fn,) = grpo.load_reward_fns("--eval-reward-fn", [GOLD], columns).values()
    return gold_fn


# --- best of n ---------------------------------------------------------------------------------
def best_of_sums(seed: int) -> dict[str, list[float]]:
    """Of the held-out sums, for each of SUM_SIZES: accuracy of best of n and of the majority, and
    the KL of best of n."""
    num_samples = max(SUM_SIZES)
    policy = load_policy(SUMS.model)
    prompts = load_prompts(SUMS, "test", policy.tokenizer)
    rng = Generator().manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    _, texts = sample(policy, repeated, SUMS.max_new_tokens, rng)
    measured = {"best of n": [], "majority": [], "KL": []}
    for n in SUM_SIZES:
        best, majority, kls = [], [], []
        for i, prompt in enumerate(prompts):
            of_prompt = texts[i * num_samples : (i + 1) * num_samples]
            answer = prompt.columns["answer"]
            rewards = last_number([], of_prompt, [answer] * num_samples)
            best.append(expected_best(rewards, rewards, n))
            answers = [find_last_number(text) for text in of_prompt]
            majority.append(majority_is_right(answers, find_last_number(answer), n))
            kls.append(right_kl(mean(rewards), n))
        measured["best of n"].append(mean(best))
        measured["majority"].append(mean(majority))
        measured["KL"].append(mean(kls))
    return measured


def best_of_reviews(seed: int) -> dict[str, Any]:
    """Of the held-out review prompts, for each of REVIEW_SIZES: learned and gold reward and grammar
    of the completion with the highest learned reward."""
    num_samples = max(REVIEW_SIZES)
    policy = load_policy(REVIEWS.model)
    # Each prompt is in the file eight times: once is enough, because each gets many samples.
    prompts = load_prompts(REVIEWS, "test", policy.tokenizer)
    prompts = [*{prompt.text: prompt for prompt in prompts}.values()]
    reward_fn = load_reward(REVIEWS, policy.tokenizer, prompts[0].columns)
    gold_fn = load_gold(prompts[0].columns)
    rng = Generator().manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    sequences, texts = sample(policy, repeated, REVIEWS.max_new_tokens, rng)
    learned = reward_fn(repeated, sequences, texts).tolist()
    quantities = {
        "learned": learned,
        "gold": gold_fn(repeated, sequences, texts).tolist(),
        "grammatical": grammatical([], texts),
    }
    groups = [slice(i * num_samples, (i + 1) * num_samples) for i in range(len(prompts))]
    measured = {"ties": mean(tie_probability(learned[group]) for group in groups)}
    for name, values in quantities.items():
        measured[name] = []
        for n in REVIEW_SIZES:
            best = [expected_best(learned[group], values[group], n) for group in groups]
            measured[name].append(mean(best))
    return measured


# --- rejection sampling ------------------------------------------------------------------------
def select(rewards: Tensor, num_samples: int, has_rule: bool) -> list[int]:
    """Row numbers of the completions to train on: the right ones, or the best of each prompt.

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


def rejection_sampling(plan: Plan, seed: int, folder: Path) -> dict[str, float]:
    """Train as planned, in a folder; what the last model is worth."""
    task = plan.task
    start_policy = policy = load_policy(task.model)
    train_prompts = load_prompts(task, "train", policy.tokenizer)
    reward_fn = load_reward(task, policy.tokenizer, train_prompts[0].columns)
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
        sequences, texts = sample(policy, prompts, task.max_new_tokens, rng)

        # 2. Keep the right ones, or the best of each prompt.
        rewards = reward_fn(prompts, sequences, texts)
        kept = select(rewards, plan.num_samples, has_rule=not task.reward_model)

        # 3. Fine-tune on them.
        data = folder / f"round_{round_index}"
        data.mkdir()
        with open(data / "train.jsonl", "w") as file:
            for i in kept:
                completion = text_after_prompt(policy.tokenizer, *sequences[i])
                row = {"prompt": prompts[i].text, "completion": completion}
                file.write(json.dumps(row) + "\n")
        with contextlib.redirect_stdout(io.StringIO()):
            run_dir = sft.main(
                sft.Args(
                    model=model,
                    dataset=str(data),
                    eval_split="train[:8]",
                    epochs=plan.epochs,
                    seed=seed,
                    output_dir=str(folder),
                    eval_every=10_000,
                    save_every=10_000,
                )
            )
        model = str(run_dir / "model")
        policy = load_policy(model)
        num_kept += len(kept)
        num_steps += len((run_dir / "metrics.jsonl").read_text().splitlines()) - 1
    measured = evaluate(task, policy, start_policy, seed)
    return measured | {"kept": num_kept, "steps": num_steps}


def evaluate(task: grpo.Args, policy: Policy, start_policy: Policy, seed: int) -> dict[str, float]:
    """One completion per held-out prompt, with the random numbers of an evaluation of grpo.py.

    The KL to the starting policy is k1, in nats per completion.
    """
    prompts = load_prompts(task, "test", policy.tokenizer)[: task.eval_rows]
    rng = Generator().manual_seed(seed)
    sequences, texts = sample(policy, prompts, task.max_new_tokens, rng)
    reward_fn = load_reward(task, policy.tokenizer, prompts[0].columns)
    rewards = reward_fn(prompts, sequences, texts)
    log_ratio = total_logprob(policy, sequences) - total_logprob(start_policy, sequences)
    measured = {
        "KL": log_ratio / len(sequences),
        "tokens": mean(len(completion) for _, completion in sequences),
    }
    if task.reward_model:
        gold_fn = load_gold(prompts[0].columns)
        measured["learned"] = rewards.mean().item()
        measured["gold"] = gold_fn(prompts, sequences, texts).mean().item()
        measured["grammatical"] = mean(grammatical([], texts))
    else:
        measured["accuracy"] = rewards.mean().item()
    return measured


def total_logprob(policy: Policy, sequences: Sequences) -> float:
    batches = micro_batches(sequences, torch.arange(len(sequences)), 64)
    return rollout_logprobs(policy.model, sequences, batches, temperature=1.0).double().sum().item()


# --- results -----------------------------------------------------------------------------------
def measure(seed: int) -> dict:
    """All that is measured with one seed."""
    torch.set_num_threads(1)
    measured = {"sums": best_of_sums(seed), "reviews": best_of_reviews(seed), "training": {}}
    for label, plan in (SUM_PLANS | REVIEW_PLANS).items():
        with tempfile.TemporaryDirectory() as folder:
            measured["training"][label] = rejection_sampling(plan, seed, Path(folder))
    return measured


def results() -> dict:
    """What docs/results/best_of_n.json holds."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        measured = rounded(list(pool.map(measure, SEEDS)))
    return report(measured)


def rounded(value: Any) -> Any:
    """The same lists and dictionaries, with their numbers rounded to four digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4)


def saved_numbers(experiment: str) -> dict:
    """The numbers of another experiment."""
    return json.loads((RESULTS / f"{experiment}.json").read_text())["numbers"]


def report(measured: list[dict]) -> dict:
    """Tables of what is measured with each seed, beside GRPO's and PPO's results."""
    sum_rows = []
    for i, n in enumerate(SUM_SIZES):
        row = [str(n), f"{kl_bound(n):.2f}"]
        for quantity, digits in (("KL", 2), ("best of n", 3), ("majority", 3)):
            row.append(spread([of_seed["sums"][quantity][i] for of_seed in measured], digits))
        sum_rows.append(row)
    review_rows = []
    for i, n in enumerate(REVIEW_SIZES):
        row = [str(n), f"{kl_bound(n):.2f}"]
        for quantity, digits in (("learned", 2), ("gold", 3), ("grammatical", 2)):
            row.append(spread([of_seed["reviews"][quantity][i] for of_seed in measured], digits))
        review_rows.append(row)
    tables = {
        "best of n sums": {
            "columns": ["n", "bound of the KL", "KL", "best of n", "majority of n"],
            "rows": sum_rows,
        },
        "best of n reviews": {
            "columns": ["n", "bound of the KL", "learned", "gold", "grammatical"],
            "rows": review_rows,
        },
        **training_tables(measured),
    }
    seeds = [str(seed) for seed in SEEDS]
    return {"tables": tables, "numbers": dict(zip(seeds, measured, strict=True))}


def training_tables(measured: list[dict]) -> dict:
    """What rejection sampling gives, beside GRPO and PPO with as many sampled completions."""

    def row_of(label: str, digits: dict[str, int]) -> list[str]:
        row = [label]
        for quantity in digits:
            values = [of_seed["training"][label][quantity] for of_seed in measured]
            row.append(spread(values, digits[quantity]))
        return row

    sum_digits = {"kept": 0, "steps": 0, "accuracy": 3, "tokens": 1, "KL": 1}
    sum_rows = [row_of(label, sum_digits) for label in SUM_PLANS]
    numbers = saved_numbers("grpo")["(default)"]
    steps = SUMS.total_rollouts * SUMS.update_epochs * SUMS.num_minibatches
    accuracy, tokens = spread(numbers["accuracy"], 3), spread(numbers["tokens"], 1)
    sum_rows.append(
        ["[GRPO](grpo.md#results)", f"{SUM_BUDGET:,}", f"{steps}", accuracy, tokens, ""]
    )

    review_digits = {"kept": 0, "steps": 0, "learned": 2, "gold": 2, "grammatical": 2, "KL": 1}
    review_rows = [row_of(label, review_digits) for label in REVIEW_PLANS]
    numbers = saved_numbers("ppo")["(default)"]
    steps = PPO.total_rollouts * PPO.update_epochs * PPO.num_minibatches
    ppo_row = ["[PPO](ppo_rlhf.md#results), beta 0.2", f"{REVIEW_BUDGET:,}", f"{steps}"]
    for quantity in ("learned reward", "reward", "grammatical"):
        ppo_row.append(spread(numbers[quantity], 2))
    ppo_kls = saved_numbers("frontier")["PPO, KL in the reward, beta 0.2"]["KL of samples"]
    review_rows.append([*ppo_row, spread(ppo_kls, 1)])
    columns = ["", "trained on", "optimiser steps"]
    return {
        "rejection sampling sums": {
            "columns": [*columns, "accuracy", "tokens", "KL"],
            "rows": sum_rows,
        },
        "rejection sampling reviews": {
            "columns": [*columns, "learned", "gold", "grammatical", "KL"],
            "rows": review_rows,
        },
    }


def draw(results: dict) -> None:
    """docs/figures/best_of_n.svg: gold and learned reward on the reviews against the KL."""
    from drawing import ALGORITHM_STYLES, COLOURS, Style, draw_evaluations, panels, save

    measured = [*results["numbers"].values()]
    figure, axes = panels(2, height=3.4)
    bounds = [kl_bound(n) for n in REVIEW_SIZES]
    for axis, quantity in zip(axes, ("gold", "learned"), strict=True):
        ppo = ppo_curves(quantity)
        draw_evaluations(axis, ppo, "PPO, one per beta", *ALGORITHM_STYLES["PPO"])
        best = []
        for of_seed in measured:
            # n = 1 has a KL of 0, which a logarithmic scale cannot show.
            best.append([*zip(bounds[1:], of_seed["reviews"][quantity][1:], strict=True)])
        label = f"best of n, n = 2 to {REVIEW_SIZES[-1]}"
        draw_evaluations(axis, best, label, *ALGORITHM_STYLES["best of n"])
        for plan, marker in zip(REVIEW_PLANS, ("v", "h"), strict=True):
            trained = [of_seed["training"][plan] for of_seed in measured]
            points = [[(of_seed["KL"], of_seed[quantity])] for of_seed in trained]
            draw_evaluations(axis, points, f"trained on the {plan}", *Style(COLOURS[0], marker))
        axis.set(xscale="log", xlabel="KL to the starting policy, nats per completion")
        axis.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
        axis.minorticks_off()
    axes[0].set(title="gold reward")
    axes[1].set(title="learned reward")
    axes[0].legend(loc="lower left")
    save(
        figure,
        "best_of_n.svg",
        "Best of n, rejection sampling and PPO: reward against KL",
        "Gold and learned reward on the review task over the KL to the starting policy, for best "
        "of n with n from 2 to 256, for rejection sampling with 1 and 4 rounds, and for PPO with "
        "several beta.",
    )


def ppo_curves(quantity: str) -> list[list[tuple]]:
    """Points (KL, reward) of PPO with the KL in the rewards: a list for each seed, a point for each
    beta."""
    experiment, kl, reward = "frontier", "KL of samples", "reward"
    if quantity == "learned":
        experiment, kl, reward = "reward_hacking", "KL, last five rollouts", "learned reward"
    points = []  # for each beta a list, of each seed
    for label, of_label in saved_numbers(experiment).items():
        if experiment == "reward_hacking" or label.startswith("PPO, KL in the reward"):
            points.append([*zip(of_label[kl], of_label[reward], strict=True)])
    return [list(of_seed) for of_seed in zip(*points, strict=True)]
