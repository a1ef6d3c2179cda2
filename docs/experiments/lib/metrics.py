"""What a run is worth: numbers that are read off its logs, or measured on its model."""

import json
from collections.abc import Callable
from statistics import mean
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from common.logprobs import Sequences
from docs.experiments.lib import sampling
from docs.experiments.lib.runs import Run
from tiny.reviews.gold import grammatical


class Metric(NamedTuple):
    name: str  # in docs/results
    of_run: Callable[[Run], Any] | None  # None: what `measure_seed` returns under this name


def last(metric: str) -> Metric:
    return Metric(metric, lambda run: run.values(metric).iloc[-1])


def late(metric: str) -> Metric:
    """The mean over the last five steps: a rollout's own value is noisy."""
    return Metric(metric, lambda run: run.values(metric).iloc[-5:].mean())


def first(metric: str) -> Metric:
    return Metric(f"first {metric}", lambda run: run.values(metric).iloc[0])


def highest(metric: str) -> Metric:
    return Metric(f"highest {metric}", lambda run: run.values(metric).max())


def average(metric: str) -> Metric:
    return Metric(f"average {metric}", lambda run: run.values(metric).mean())


def at(metric: str, step: int) -> Metric:
    return Metric(f"{metric} at {step}", lambda run: run.values(metric)[step])


def measured(name: str) -> Metric:
    return Metric(name, None)


# --- what is not logged ------------------------------------------------------------------------
def grammar(run: Run) -> float:
    """The fraction of the sampled sentences that are grammatical."""
    return mean(grammatical([], [sample["completion"] for sample in run.samples()]))


def sampled_sequences(run: Run, tokenizer: PreTrainedTokenizerBase) -> Sequences:
    """The last evaluation's samples, as the tokens that were sampled."""
    sequences = []
    for sample in run.samples():
        ids = tokenizer(sample["completion"], add_special_tokens=False).input_ids
        ids += [tokenizer.eos_token_id] * (sample["length"] - len(ids))
        sequences.append((*sampling.encode_prompts(tokenizer, [sample["prompt"]]), ids))
    return sequences


def kl_of_samples(run: Run, start_model: str | None = None) -> float:
    """KL(policy || starting policy), nats per completion: k1 over the last evaluation's samples.
    The start is the run's --model, unless another one is named."""
    args = json.loads((run.folder / "args.json").read_text())
    start = sampling.load_policy(start_model or args["model"])
    policy = sampling.load_policy(run.folder)
    sequences = sampled_sequences(run, policy.tokenizer)
    return sampling.mean_log_ratio(policy, start, sequences)


def typical_sample(run: Run) -> dict:
    """Of the last evaluation, the sample whose reward is nearest to the mean."""
    samples = run.samples()
    mean_reward = mean(sample["reward"] for sample in samples)
    typical = min(samples, key=lambda sample: abs(sample["reward"] - mean_reward))
    return {name: typical[name] for name in ("completion", "reward")}


GRAMMATICAL = Metric("grammatical", grammar)
KL_OF_SAMPLES = Metric("KL of samples", kl_of_samples)
TYPICAL_SAMPLE = Metric("typical sample", typical_sample)
