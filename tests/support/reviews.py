"""Runs on the reviews for the tests of dpo.py and kto.py, and the same with plain transformers: one
completion at a time, without padding.
"""

import functools

import torch
from datasets import Dataset
from plain import plain_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = "tiny/reviews/policy"
EOS = 2
# Why a row whose completion goes on with its prompt's last word is dropped.
MERGED = "whose prompt's last token changes with the completion: a space?"


def dataset(tmp_path, train, test=None):
    (tmp_path / "data").mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test or train)):
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    return str(tmp_path / "data")


def batch_rows(step, size, count, seed):
    """Row numbers of a step: a slice of an endless row of epochs, each shuffled anew."""
    generator, order = torch.Generator().manual_seed(seed), []
    while len(order) < (step + 1) * size:
        order += torch.randperm(count, generator=generator).tolist()
    return order[step * size : (step + 1) * size]


def plain_model(folder=POLICY, kind=AutoModelForCausalLM):
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@functools.cache
def vocabulary():
    return AutoTokenizer.from_pretrained(POLICY).get_vocab()


def ids(words):
    """The tokens of a review: one for each word."""
    return [vocabulary()[word] for word in words.split()]


def sampled_ids(sample):
    """The tokens of a sampled completion: its words, and the stop token where there was one."""
    words = ids(sample["completion"])
    assert sample["length"] - len(words) in (0, 1)
    return words + [EOS] * (sample["length"] - len(words))


@torch.no_grad()
def plain_kl(policy, reference, samples, temperature):
    """The mean over samples of log pi - log pi_ref, summed over tokens."""
    total = 0.0
    for sample in samples:
        sequence = (ids("<bos> " + sample["prompt"]), sampled_ids(sample))
        total += plain_logprobs(policy, *sequence, temperature)[0].sum().item()
        total -= plain_logprobs(reference, *sequence, temperature)[0].sum().item()
    return total / len(samples)
