"""Runs on the reviews for the tests of dpo.py and kto.py, and the same with plain transformers: one
completion at a time, without padding.
"""

import functools
import json
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

POLICY = "tiny/reviews/policy"
EOS = 2
# Nothing is learned, but all is computed: 1e-30 is lost in the rounding of every weight.
STILL = dict(learning_rate=1e-30)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def dataset(tmp_path, train, test=None):
    (tmp_path / "data").mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test or train)):
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    return str(tmp_path / "data")


def metrics_of(run_dir):
    return read(run_dir / "metrics.jsonl")


def weights_of(run_dir):
    return load_file(run_dir / "model.safetensors")


def watch_steps(monkeypatch):
    """Of each step, the weights with which it met its rows, and the gradient to be clipped."""
    steps, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        parameters = list(parameters)
        weights = [p.detach().clone() for p in parameters]
        steps.append((weights, [p.grad.clone() for p in parameters], max_norm))
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    return steps


def batch_rows(step, size, count, seed):
    """Row numbers of a step: a slice of an endless row of epochs, each shuffled anew."""
    generator, order = torch.Generator().manual_seed(seed), []
    while len(order) < (step + 1) * size:
        order += torch.randperm(count, generator=generator).tolist()
    return order[step * size : (step + 1) * size]


def plain_model(folder=POLICY):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@functools.cache
def vocabulary():
    return AutoTokenizer.from_pretrained(POLICY).get_vocab()


def ids(words):
    """The tokens of a review: one for each word."""
    return [vocabulary()[word] for word in words.split()]


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """log pi of each token of a completion, a list of 0-dimensional tensors."""
    logits = model(torch.tensor([prompt + completion])).logits[0] / temperature
    return [
        logits[len(prompt) + i - 1].log_softmax(dim=0)[token] for i, token in enumerate(completion)
    ]
