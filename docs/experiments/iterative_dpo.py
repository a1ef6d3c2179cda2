"""DPO in rounds, on pairs that the current policy has written: two tables of docs/dpo.md
(`python docs/experiments/figures.py iterative_dpo`, ten minutes on two cores).

A round takes three steps. The policy samples a group of completions for each prompt. The reward
model scores them, and the best and the worst of a group become a pair. `dpo.py` trains on the pairs
with `--model` set to the last round's model, which is therefore also the reference. The reward
model was trained on the pairs of tiny/reviews/preferences, so no round needs a new label by the
judge.
"""

import contextlib
import io
import json
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from runs import SEEDS, read_jsonl
from tables import spread
from torch import Generator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import dpo
from common.generation import encode, find_stop_ids, generate
from common.logprobs import Sequences, completion_logprobs, encode_pair
from grpo import reward_model_scores
from tiny.reviews import gold

POLICY = dpo.Args.model  # where every row of the table starts
OFFLINE_PAIRS = dpo.Args.dataset  # written by that policy, labelled by the judge
REWARD_MODEL = "tiny/reviews/reward_model"
TRAIN_PROMPTS = Path("tiny/reviews/prompts/train.jsonl")
TEST_PAIRS = Path(OFFLINE_PAIRS) / "test.jsonl"

GROUP_SIZE = 4  # completions per prompt, of which the best and the worst become a pair
BATCH_SIZE = 250  # sequences that are sampled or scored at a time


class Rounds(NamedTuple):
    """Rounds of DPO from the starting policy."""

    num_rounds: int
    pairs_per_round: int  # 0: those of `OFFLINE_PAIRS`


# 188 or 189 optimiser steps in all, whatever the number of rounds.
ROUNDS = {
    "offline": Rounds(num_rounds=1, pairs_per_round=0),
    "one round": Rounds(num_rounds=1, pairs_per_round=2_000),
    "three rounds": Rounds(num_rounds=3, pairs_per_round=667),
}
# Rows of the tables: what they are called, a key of `ROUNDS`, and after which round.
TABLE_ROWS = (
    ("the offline pairs", "offline", 1),
    ("one round of 2,000 pairs", "one round", 1),
    ("three rounds of 667 pairs: after one", "three rounds", 1),
    ("after two", "three rounds", 2),
    ("after three", "three rounds", 3),
)


# --- a round -----------------------------------------------------------------------------------
def load_policy(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """A causal model, its tokenizer, and the ids that end a completion."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return policy, tokenizer, find_stop_ids(folder, tokenizer)


def load_reward_model() -> PreTrainedModel:
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL, dtype=torch.float32)
    return model.eval()


def sample(
    policy: PreTrainedModel, prompt_ids: list[list[int]], stop_ids: list[int], rng: Generator
) -> list[list[int]]:
    """A completion (token ids) of each prompt, at temperature 1 and of the length that dpo.py
    evaluates."""
    completion_ids = []
    for start in range(0, len(prompt_ids), BATCH_SIZE):
        completion_ids += generate(
            policy,
            prompt_ids[start : start + BATCH_SIZE],
            max_new_tokens=dpo.Args.max_new_tokens,
            temperature=1.0,
            stop_ids=stop_ids,
            rng=rng,
        )
    return completion_ids


def best_and_worst(
    prompts: list[str], completions: list[str], scores: list[float], group_size: int
) -> list[dict[str, str]]:
    """A pair for each group of completions: of the highest score against the lowest.

    Entries i * group_size to (i + 1) * group_size - 1 of each list are of one group, with one
    prompt. Empty completions are left out, because dpo.py cannot use them, and so is a group in
    which all scores are equal.
    """
    pairs = []
    for start in range(0, len(prompts), group_size):
        group = [i for i in range(start, start + group_size) if completions[i]]
        best = max(group, key=lambda i: scores[i], default=start)
        worst = min(group, key=lambda i: scores[i], default=start)
        if scores[best] > scores[worst]:
            pair = {
                "prompt": prompts[best],
                "chosen": completions[best],
                "rejected": completions[worst],
            }
            pairs.append(pair)
    return pairs


def sample_pairs(model: str, num_pairs: int, rng: Generator) -> list[dict[str, str]]:
    """Pairs that the policy in folder `model` writes, and that the reward model labels.

    The reward model reads the tokens that dpo.py will train on: those of the text, and an EOS.
    """
    policy, tokenizer, stop_ids = load_policy(model)
    train_prompts = [row["prompt"] for row in read_jsonl(TRAIN_PROMPTS)]
    prompt_inds = torch.randint(len(train_prompts), [num_pairs], generator=rng)
    prompts = [train_prompts[i] for i in prompt_inds for _ in range(GROUP_SIZE)]
    prompt_ids = [encode(tokenizer, prompt) for prompt in prompts]
    completion_ids = sample(policy, prompt_ids, stop_ids, rng)
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    # With a space in front, as in tiny/reviews/preferences.
    completions = [f" {text}" if text else "" for text in texts]
    not_empty = [i for i, completion in enumerate(completions) if completion]
    sequences = []
    for i in not_empty:
        sequences.append(encode_pair(tokenizer, prompts[i], completions[i], stop_ids))
    scores = torch.zeros(len(completions))
    scores[not_empty] = reward_model_scores(load_reward_model(), BATCH_SIZE, [], sequences, [])
    return best_and_worst(prompts, completions, scores.tolist(), GROUP_SIZE)


def write_dataset(folder: Path, pairs: list[dict[str, str]]) -> None:
    """A folder for `--dataset`: these pairs, and the held-out pairs of `OFFLINE_PAIRS`."""
    folder.mkdir(parents=True)
    lines = [json.dumps(pair) + "\n" for pair in pairs]
    (folder / "train.jsonl").write_text("".join(lines))
    shutil.copy(TEST_PAIRS, folder / "test.jsonl")


def train_round(model: str, dataset: str, seed: int, output_dir: Path) -> str:
    """dpo.py with its default flags but for these; returns the folder of the new model."""
    args = dpo.Args(
        model=model,
        dataset=dataset,
        seed=seed,
        output_dir=str(output_dir),
        eval_rows=8,  # `measure` evaluates
        eval_every=10_000,
        save_every=10_000,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return str(dpo.main(args) / "model")


def train_rounds(rounds: Rounds, seed: int, folder: Path) -> list[str]:
    """The model's folder after each round."""
    model, models = POLICY, []
    rng = Generator().manual_seed(seed)
    for i in range(rounds.num_rounds):
        dataset = OFFLINE_PAIRS
        if rounds.pairs_per_round > 0:
            dataset = str(folder / f"pairs {i}")
            write_dataset(Path(dataset), sample_pairs(model, rounds.pairs_per_round, rng))
        model = train_round(model, dataset, seed, folder)
        models.append(model)
    return models


# --- what is measured --------------------------------------------------------------------------
@torch.no_grad()
def mean_log_ratio(policy: PreTrainedModel, start: PreTrainedModel, sequences: Sequences) -> float:
    """The mean over completions of log(pi(y|x) / pi_start(y|x)), nats per completion."""
    inds = range(len(sequences))
    logprobs = completion_logprobs(policy, sequences, inds)  # (N, T)
    start_logprobs = completion_logprobs(start, sequences, inds)
    return (logprobs - start_logprobs).sum().item() / len(sequences)


def measure(model: str, seed: int) -> dict[str, float]:
    """Means over one completion for each held-out prompt of dpo.py, drawn with its numbers, and
    over the held-out pairs.

    gold: the gold reward; learned: the reward model's score minus its mean on held-out preferred
    completions; KL: to the starting policy, by k1, nats per completion; tokens: with the EOS.
    Of log(pi(y|x) / pi_start(y|x)), in nats: chosen, rejected: its means over the sides of the
    pairs; start's samples: over completions of the starting policy.
    """
    policy, tokenizer, stop_ids = load_policy(model)
    start, _, _ = load_policy(POLICY)
    pairs = read_jsonl(TEST_PAIRS)
    prompts = [pair["prompt"] for pair in pairs]
    prompt_ids = [encode(tokenizer, prompt) for prompt in prompts]
    completion_ids = sample(policy, prompt_ids, stop_ids, Generator().manual_seed(seed))
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    sequences = list(zip(prompt_ids, completion_ids, strict=True))
    scores = reward_model_scores(load_reward_model(), BATCH_SIZE, prompts, sequences, texts)
    start_completion_ids = sample(start, prompt_ids, stop_ids, Generator().manual_seed(seed))
    start_sequences = list(zip(prompt_ids, start_completion_ids, strict=True))
    sides = {}
    for side in ("chosen", "rejected"):
        sides[side] = [encode_pair(tokenizer, p["prompt"], p[side], stop_ids) for p in pairs]
    return {
        "gold": mean(gold.sentiment(prompts, texts)),
        "learned": scores.mean().item(),
        "KL": mean_log_ratio(policy, start, sequences),
        "grammatical": mean(gold.grammatical(prompts, texts)),
        "tokens": mean(len(completion) for completion in completion_ids),
        "chosen": mean_log_ratio(policy, start, sides["chosen"]),
        "rejected": mean_log_ratio(policy, start, sides["rejected"]),
        "start's samples": mean_log_ratio(policy, start, start_sequences),
    }


def measure_rounds(name: str, seed: int) -> list[dict[str, float]]:
    """What is measured after each of these rounds of `ROUNDS`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = train_rounds(ROUNDS[name], seed, Path(folder))
        return [measure(model, seed) for model in models]


def with_seed(seed: int) -> dict[str, list[dict[str, float]]]:
    """What is measured with one seed: of the starting policy, and after each round of `ROUNDS`."""
    torch.set_num_threads(1)
    measured = {"start": [measure(POLICY, seed)]}
    return measured | {name: measure_rounds(name, seed) for name in ROUNDS}


# --- the table ---------------------------------------------------------------------------------
def results() -> dict:
    """What docs/results/iterative_dpo.json holds."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return report(list(pool.map(with_seed, SEEDS)))


def num_steps(name: str, num_rounds: int) -> int:
    """Optimiser steps of these rounds of `ROUNDS`, if every group gives a pair."""
    num_pairs = ROUNDS[name].pairs_per_round or len(read_jsonl(Path(OFFLINE_PAIRS) / "train.jsonl"))
    return num_rounds * ceil(dpo.Args.epochs * num_pairs / dpo.Args.batch_size)


def report(measured: list[dict[str, list[dict[str, float]]]]) -> dict:
    """The tables of what `with_seed` returns for each seed, and that with four digits."""
    measured = [rounded(of_seed) for of_seed in measured]

    def of_seeds(name: str, num_rounds: int, metric: str) -> list[float]:
        return [of_seed[name][num_rounds - 1][metric] for of_seed in measured]

    digits = {"gold": 2, "learned": 1, "KL": 1, "grammatical": 2, "tokens": 1}
    rows = []
    for label, name, num_rounds in TABLE_ROWS:
        cells = [spread(of_seeds(name, num_rounds, metric), digits[metric]) for metric in digits]
        rows.append([label, str(num_steps(name, num_rounds)), *cells])
    table = {"columns": ["trained on", "optimiser steps", *digits], "rows": rows}

    shift_rows = []
    for label, name, num_rounds in TABLE_ROWS:
        chosen = of_seeds(name, num_rounds, "chosen")
        rejected = of_seeds(name, num_rounds, "rejected")
        both = [(c + r) / 2 for c, r in zip(chosen, rejected, strict=True)]
        start_samples = of_seeds(name, num_rounds, "start's samples")
        cells = [spread(values, digits=1) for values in (chosen, rejected, both, start_samples)]
        shift_rows.append([label, *cells])
    shift_columns = ["trained on", "chosen", "rejected", "mean of the two", "start's samples"]

    tables = {
        "iterative dpo": table,
        "dpo shift": {"columns": shift_columns, "rows": shift_rows},
    }
    seeds = [str(seed) for seed in SEEDS]
    return {"tables": tables, "numbers": dict(zip(seeds, measured, strict=True))}


def rounded(of_seed: dict[str, list[dict[str, float]]]) -> dict:
    """What `with_seed` returns, with four digits."""
    return {
        name: [{metric: round(value, 4) for metric, value in row.items()} for row in after_rounds]
        for name, after_rounds in of_seed.items()
    }
