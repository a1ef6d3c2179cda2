"""Majority vote and best of n on the arithmetic task, without training: docs/beyond.md.

    python -m docs.exercises.vote                             # the policy after SFT
    python -m docs.exercises.vote tiny/arithmetic/teacher     # after GRPO

It samples 64 completions for each of 100 held-out prompts, and answers from n of them, by vote or
by a rule that knows the answer. Each line has the mean (lowest to highest) of seeds 1 to 5.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import mean

import tyro
from torch import Generator

import grpo
from docs.experiments.lib import sampling
from docs.experiments.lib.tables import spread

NUM_SAMPLES, SIZES, SEEDS = 64, (1, 4, 16, 64), (1, 2, 3, 4, 5)


def majority(answers: Sequence[str]) -> str:
    """The most frequent answer; of equally frequent ones the first."""
    return Counter(answers).most_common(1)[0][0]


def voted_and_found(answers: Sequence[str], correct: str, n: int) -> tuple[float, float]:
    """How often the vote of n answers is correct, and how often any of n is: means over the groups
    of n into which the answers fall, in order."""
    groups = [answers[start : start + n] for start in range(0, len(answers), n)]
    voted = mean(majority(group) == correct for group in groups)
    return voted, mean(correct in group for group in groups)


def main(model: tyro.conf.Positional[str] = "tiny/arithmetic/policy") -> None:
    """Print how often a vote of n answers is correct, and how often one of n is.

    Args:
        model: folder of the policy
    """
    args = grpo.Args(model=model)
    policy = sampling.load_policy(model)
    prompts = sampling.load_prompts(args, "test", policy.tokenizer)[:100]
    repeated = [prompt.ids for prompt in prompts for _ in range(NUM_SAMPLES)]
    by_seed = []
    for seed in SEEDS:
        rng = Generator().manual_seed(seed)
        _, texts = sampling.sample(policy, repeated, args.max_new_tokens, rng)
        answers = [text.rpartition("#")[2] for text in texts]
        groups = [answers[i : i + NUM_SAMPLES] for i in range(0, len(answers), NUM_SAMPLES)]
        correct = [str(prompt.columns["answer"]) for prompt in prompts]
        pairs = list(zip(groups, correct, strict=True))
        by_seed.append({n: [voted_and_found(*pair, n) for pair in pairs] for n in SIZES})
    for n in SIZES:
        voted, found = ([mean(row[i] for row in of[n]) for of in by_seed] for i in (0, 1))
        print(f"n {n}: majority {spread(voted, 2)}, at least one {spread(found, 2)}")


if __name__ == "__main__":
    tyro.cli(main)
