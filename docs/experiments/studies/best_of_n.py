"""docs/best_of_n.md: best of n by a learned reward, and rejection sampling by a rule as training.

Each plan samples as many completions as the run of GRPO in the same table.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Generator

import grpo
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment, Table, saved_numbers
from docs.experiments.lib.metrics import measured
from docs.experiments.lib.runs import train, write_jsonl
from docs.experiments.lib.tables import spread
from tiny.arithmetic.reward import last_number
from tiny.reviews.gold import score

SUMS = grpo.Args()
REVIEWS = grpo.Args(model="tiny/reviews/policy", dataset="tiny/reviews/prompts", max_new_tokens=40)
REWARD_MODEL = "tiny/reviews/reward_model"
SIZES = (1, 4, 16, 64, 256)
# Completions that `python grpo.py` samples, 15,360.
BUDGET = SUMS.total_rollouts * SUMS.prompts_per_rollout * SUMS.group_size
NUM_SAMPLES = 8  # k, completions per prompt


class Plan(NamedTuple):
    num_rounds: int  # each samples, selects and fine-tunes
    epochs: float = 2.0  # of each round's fine-tuning


PLANS = {
    "correct of 8, 1 round": Plan(1),
    "correct of 8, 4 rounds": Plan(4),
    "correct of 8, 4 rounds, fewer steps": Plan(4, epochs=0.64),
}


# --- best of n ---------------------------------------------------------------------------------
def kl_bound(n: int) -> float:
    """log n - (n - 1)/n nats: KL(best of n || policy) is at most that (arXiv 2401.01879)."""
    return math.log(n) - (n - 1) / n


def expected_best(scores: Sequence[float], values: Sequence[float], n: int) -> float:
    """Expected value of the completion with the highest score among n, from N >= n samples.

    The mean over all subsets of n: the i-th lowest score (from 0) is the highest in C(i, n - 1) of
    the C(N, n) subsets.
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    num_subsets = math.comb(len(scores), n)
    shares = [math.comb(rank, n - 1) / num_subsets for rank in range(len(scores))]
    return sum(share * values[i] for share, i in zip(shares, order, strict=True))


def best_of_reviews(seed: int) -> dict[str, dict[str, float]]:
    """By n, what the completion with the highest learned reward is worth, mean over prompts."""
    num_samples = max(SIZES)
    policy = sampling.load_policy(REVIEWS.model)
    # Each prompt is in the file eight times: once is enough, because each gets many samples.
    prompts = sampling.load_prompts(REVIEWS, "test", policy.tokenizer)
    prompts = [*{prompt.text: prompt for prompt in prompts}.values()]
    repeated = [prompt.ids for prompt in prompts for _ in range(num_samples)]
    rng = Generator().manual_seed(seed)
    sequences, texts = sampling.sample(policy, repeated, REVIEWS.max_new_tokens, rng)
    learned = sampling.load_reward_model(REWARD_MODEL)(sequences).tolist()
    gold = [score(text) for text in texts]
    groups = [slice(i * num_samples, (i + 1) * num_samples) for i in range(len(prompts))]
    found = {}
    for n in SIZES:
        found[str(n)] = {"bound on the KL": kl_bound(n)}
        for name, values in (("learned", learned), ("gold", gold)):
            best = [expected_best(learned[group], values[group], n) for group in groups]
            found[str(n)][name] = mean(best)
    return found


# --- rejection sampling ------------------------------------------------------------------------
def sample_and_judge(
    policy: sampling.Policy, prompts: list[grpo.Prompt], seed: int
) -> tuple[list[str], list[float]]:
    """A completion of each prompt, and whether it is correct."""
    rng = Generator().manual_seed(seed)
    prompt_ids = [prompt.ids for prompt in prompts]
    _, texts = sampling.sample(policy, prompt_ids, SUMS.max_new_tokens, rng)
    return texts, last_number([], texts, [prompt.columns["answer"] for prompt in prompts])


def rejection_sampling(plan: Plan, seed: int, folder: Path) -> dict[str, float]:
    """Train as planned, in a folder; what the last model is worth."""
    model = SUMS.model
    policy = sampling.load_policy(model)
    train_prompts, test_prompts = (
        sampling.load_prompts(SUMS, split, policy.tokenizer) for split in ("train", "test")
    )
    num_prompts = BUDGET // (plan.num_rounds * NUM_SAMPLES)  # per round
    rng = Generator().manual_seed(seed)
    epochs = [torch.randperm(len(train_prompts), generator=rng) for _ in range(2)]
    prompt_batches = torch.cat(epochs).split(num_prompts)
    num_kept = num_steps = 0
    for round_index in range(plan.num_rounds):
        # 1. Sample k completions of each prompt, from the policy as it is now.
        prompts = []
        for i in prompt_batches[round_index]:
            prompts += [train_prompts[i]] * NUM_SAMPLES
        texts, rewards = sample_and_judge(policy, prompts, seed + 1_000_003 * (round_index + 1))

        # 2. Keep the correct ones.
        rows = []
        for prompt, text, reward in zip(prompts, texts, rewards, strict=True):
            if reward == 1:
                rows.append({"prompt": prompt.text, "completion": text})

        # 3. Fine-tune on them.
        data = folder / f"round_{round_index}"
        data.mkdir()
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
        num_kept += len(rows)
        num_steps += len(run.metrics) - 1
    # With the random numbers of an evaluation of grpo.py.
    _, rewards = sample_and_judge(policy, test_prompts[: SUMS.eval_rows], seed)
    return {"accuracy": mean(rewards), "kept": num_kept, "steps": num_steps}


# --- results -----------------------------------------------------------------------------------
def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    found = best_of_reviews(seed)
    for label, plan in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[label] = rejection_sampling(plan, seed, Path(folder))
    return found


REJECTION = Table(
    {
        "trained on": (measured("kept"), 0),
        "optimiser steps": (measured("steps"), 0),
        "accuracy": (measured("accuracy"), 3),
    },
    {label: (label,) for label in PLANS},
    heading=("",),
)


def tables(results: dict) -> dict:
    """Rejection sampling beside GRPO's result."""
    table = REJECTION.make(results["numbers"], [])
    accuracy = spread(saved_numbers("grpo", "(default)", "eval/accuracy"), 3)
    num_steps = SUMS.total_rollouts * SUMS.update_epochs * SUMS.num_minibatches
    table["rows"].append(["[GRPO](grpo.md#results)", f"{BUDGET:,}", str(num_steps), accuracy])
    return {"best_of_n rejection": table}


EXPERIMENTS = (
    Experiment(
        "best_of_n",
        measure_seed=measure_seed,
        more_tables=tables,
    ),
)
