"""docs/sampler.md: GRPO whose completions another policy has sampled."""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

import common.generation
import grpo_variants
from docs.experiments.lib.experiment import Experiment, Table
from docs.experiments.lib.metrics import average, kl_of_samples, last, measured
from docs.experiments.lib.runs import train

METRICS = (last("eval/accuracy"), average("policy/sampling_kl"))
generate, sample_tokens = common.generation.generate, common.generation.sample_tokens


def colder(model: Any, prompts: list, *, temperature: float, **options: Any) -> tuple:
    return generate(model, prompts, temperature=0.7 * temperature, **options)


def top_two(model: Any, prompts: list, **options: Any) -> tuple:
    """Of the two most likely tokens alone."""

    def restricted(logits: torch.Tensor, *rest: Any) -> tuple:
        second = logits.topk(2).values[:, 1:]
        return sample_tokens(logits.masked_fill(logits < second, -torch.inf), *rest)

    common.generation.sample_tokens = restricted
    made = generate(model, prompts, **options)
    common.generation.sample_tokens = sample_tokens
    return made


def stale() -> Callable:
    """With the weights of four rollouts ago."""
    past = []

    def sampler(model: Any, prompts: list, **options: Any) -> tuple:
        past.append(copy.deepcopy(model))
        return generate(past.pop(0) if len(past) > 4 else past[0], prompts, **options)

    return sampler


def in_rollouts(sampler: Callable, model: Any, prompts: list, **options: Any) -> tuple:
    """Evaluations are the policy's own."""
    is_evaluation = len(prompts) == grpo_variants.Args.eval_rows
    return (generate if is_evaluation else sampler)(model, prompts, **options)


SAMPLERS = {
    "the policy itself": lambda: generate,
    "temperature 0.7": lambda: colder,
    "the two most likely tokens": lambda: top_two,
    "the weights of four rollouts ago": stale,
}


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    numbers = {}
    for name, cap in product(SAMPLERS, (0, 2)):
        if name == "the policy itself" and cap > 0:
            continue
        grpo_variants.generate = partial(in_rollouts, SAMPLERS[name]())
        with tempfile.TemporaryDirectory() as folder:
            run = train(grpo_variants, output_dir=folder, seed=seed, importance_cap=cap)
            found = {metric.name: metric.of_run(run) for metric in METRICS}
            numbers[f"{name}, `--importance-cap {cap}`"] = found | {"KL": kl_of_samples(run)}
    return numbers


COLUMNS = {
    "accuracy": (METRICS[0], 2),
    "KL to the start": (measured("KL"), 1),
    "`policy/sampling_kl`": (METRICS[1], 4),
}
TABLE = Table(COLUMNS, heading=("rollouts are drawn from",))
EXPERIMENTS = (Experiment("sampler", tables={"sampler": TABLE}, measure_seed=measure_seed),)
