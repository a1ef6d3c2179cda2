"""docs/dpo.md: DPO in rounds, on pairs that the policy has written and the reward model labels."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator

import dpo
from common.tokens import encode, encode_pair
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment, Table
from docs.experiments.lib.metrics import (
    GRAMMATICAL,
    kl_of_samples,
    last,
    measured,
    sampled_sequences,
)
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl

POLICY = dpo.Args.model  # where every row of the table starts
REWARD_MODEL = "tiny/reviews/reward_model"
TRAIN_PROMPTS = Path("tiny/reviews/prompts/train.jsonl")
TEST_PAIRS = Path(dpo.Args.dataset) / "test.jsonl"
GROUP_SIZE = 4  # completions per prompt, of which the best and the worst become a pair


class Rounds(NamedTuple):
    """Rounds of DPO from the starting policy."""

    number: int
    num_pairs: int  # in each round
    beta: float | None = None  # dpo.py's default, 0.3


# 188 or 189 optimiser steps in all, whatever the number of rounds.
ROUNDS = {
    "2,000 pairs": Rounds(1, 2_000),
    "667 pairs per round": Rounds(3, 667),
    "667 pairs per round, `--beta 0.9`": Rounds(3, 667, beta=0.9),
}


def best_and_worst(
    prompts: list[str], completions: list[str], scores: list[float], group_size: int
) -> list[dict[str, str]]:
    """A pair for each group of neighbours, of the highest score against the lowest. Empty
    completions are left out, and so are groups in which all scores are equal."""
    pairs = []
    for start in range(0, len(prompts), group_size):
        group = [i for i in range(start, start + group_size) if completions[i]]
        best = max(group, key=lambda i: scores[i], default=start)
        worst = min(group, key=lambda i: scores[i], default=start)
        if scores[best] > scores[worst]:
            sides = {"chosen": completions[best], "rejected": completions[worst]}
            pairs.append({"prompt": prompts[best], **sides})
    return pairs


def sample_pairs(
    model: str, reward_fn: Callable, num_pairs: int, rng: Generator
) -> list[dict[str, str]]:
    """Pairs that the policy in folder `model` writes; the reward model reads the tokens that dpo.py
    will train on."""
    policy = sampling.load_policy(model)
    train_prompts = [row["prompt"] for row in read_jsonl(TRAIN_PROMPTS)]
    prompt_inds = torch.randint(len(train_prompts), [num_pairs], generator=rng)
    prompts = [train_prompts[i] for i in prompt_inds for _ in range(GROUP_SIZE)]
    prompt_ids = [encode(policy.tokenizer, prompt) for prompt in prompts]
    _, texts = sampling.sample(policy, prompt_ids, dpo.Args.max_new_tokens, rng)
    # With a space in front, as in tiny/reviews/preferences.
    completions = [f" {text}" if text else "" for text in texts]
    not_empty = [i for i, completion in enumerate(completions) if completion]
    sequences = []
    for i in not_empty:
        pair = encode_pair(policy.tokenizer, prompts[i], completions[i], policy.stop_ids)
        sequences.append(pair)
    scores = torch.zeros(len(completions))
    scores[not_empty] = reward_fn(sequences)
    return best_and_worst(prompts, completions, scores.tolist(), GROUP_SIZE)


def train_rounds(rounds: Rounds, reward_fn: Callable, seed: int, folder: Path) -> list[Run]:
    """The run of dpo.py of each round; other flags have their defaults."""
    model, runs = POLICY, []
    rng = Generator().manual_seed(seed)
    for i in range(rounds.number):
        dataset = folder / f"pairs {i}"
        dataset.mkdir()
        pairs = sample_pairs(model, reward_fn, rounds.num_pairs, rng)
        write_jsonl(dataset / "train.jsonl", pairs)
        shutil.copy(TEST_PAIRS, dataset)
        run = train(
            dpo,
            model=model,
            dataset=str(dataset),
            beta=rounds.beta,
            seed=seed,
            output_dir=str(folder),
            eval_every=10_000,
        )
        model = str(run.folder)
        runs.append(run)
    return runs


def evaluate(run: Run, reward_fn: Callable) -> dict[str, float]:
    """Means over the last evaluation's samples; the KL is to the start of all rounds."""
    tokenizer = sampling.load_policy(POLICY).tokenizer
    return {
        "gold": last("eval/reward").of_run(run),
        "learned": reward_fn(sampled_sequences(run, tokenizer)).mean().item(),
        "KL": kl_of_samples(run, start_model=POLICY),
        "grammatical": GRAMMATICAL.of_run(run),
    }


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """`evaluate` after each round."""
    reward_fn = sampling.load_reward_model(REWARD_MODEL)
    found = {}
    for name, rounds in ROUNDS.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = train_rounds(rounds, reward_fn, seed, Path(folder))
            for i, run in enumerate(runs, start=1):
                label = name if rounds.number == 1 else f"{name}, after round {i}"
                found[label] = evaluate(run, reward_fn)
    return found


COLUMNS = {
    "gold": (measured("gold"), 2),
    "learned": (measured("learned"), 1),
    "KL": (measured("KL"), 1),
    "grammatical": (measured("grammatical"), 2),
}
EXPERIMENTS = (
    Experiment(
        "iterative_dpo",
        tables={"iterative_dpo": Table(COLUMNS, heading=("trained on",))},
        measure_seed=measure_seed,
    ),
)
