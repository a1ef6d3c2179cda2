"""docs/sampler.md: GRPO whose completions another policy has sampled, without and with a cap."""

import tempfile
from functools import partial
from typing import Any

import common.generation
import grpo_variants
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import average, last
from docs.experiments.lib.runs import train
from docs.experiments.lib.tables import spread
from docs.samplers import known
from docs.samplers.known import Sampler

ACCURACY, SAMPLING_KL = last("eval/accuracy"), average("policy/sampling_kl")
SAMPLERS = {
    "the policy itself": Sampler,
    "temperature 0.7": partial(Sampler, known.colder),
    "the two most likely tokens": partial(Sampler, known.top_two),
    "the weights of four rollouts ago": partial(Sampler, age=4),
}
CAPS = (0, 2)  # 0: none


def label_of(name: str, cap: int) -> str:
    return f"{name}, `--importance-cap {cap}`"


def in_rollouts(sampler: Sampler, model: Any, prompts: list, **options: Any) -> tuple:
    """Evaluations are the policy's own."""
    is_evaluation = len(prompts) == grpo_variants.Args.eval_rows
    generate = common.generation.generate if is_evaluation else sampler.generate
    return generate(model, prompts, **options)


def measure_run(name: str, cap: int, seed: int) -> dict[str, float]:
    sampler = SAMPLERS[name]()
    grpo_variants.generate = partial(in_rollouts, sampler)
    flags = dict(importance_cap=cap, eval_every=grpo_variants.Args.total_rollouts)
    with tempfile.TemporaryDirectory() as folder:
        run = train(grpo_variants, output_dir=folder, seed=seed, **flags)
        return {metric.name: metric.of_run(run) for metric in (ACCURACY, SAMPLING_KL)}


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    found = {}
    for name in SAMPLERS:
        for cap in CAPS[:1] if name == "the policy itself" else CAPS:
            found[label_of(name, cap)] = measure_run(name, cap, seed)
    return found


def tables(results: dict) -> dict[str, dict]:
    """A row for each sampler, with its accuracy without the cap and with it."""
    numbers, rows = results["numbers"], []
    for name in SAMPLERS:
        row = [name, spread(numbers[label_of(name, 0)][SAMPLING_KL.name], 4)]
        for cap in CAPS:
            found = numbers.get(label_of(name, cap))
            row.append(spread(found[ACCURACY.name], 2) if found else "")
        rows.append(row)
    columns = ["rollouts are drawn from", "`policy/sampling_kl`", "no cap", "`--importance-cap 2`"]
    return {"sampler": {"columns": columns, "rows": rows}}


EXPERIMENTS = (Experiment("sampler", measure_seed=measure_seed, more_tables=tables),)
