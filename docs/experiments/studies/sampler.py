"""docs/sampler.md: GRPO whose completions another policy has sampled, and what helps.

Score centering and kept tokens are the changes of docs/variants.md, in a copy of the script.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import common.generation
import grpo_variants
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import average, kl_of_samples, last
from docs.experiments.lib.runs import load_script, train
from docs.experiments.lib.tables import spread
from docs.experiments.lib.variants import write_variant
from docs.samplers import known
from docs.samplers.known import Sampler

METRICS = (last("eval/accuracy"), average("policy/sampling_kl"))
SAMPLERS = {
    "the policy itself": Sampler,
    "temperature 0.7": partial(Sampler, known.colder),
    "the two most likely tokens": partial(Sampler, known.top_two),
    "the weights of four rollouts ago": partial(Sampler, age=4),
}
# By label the sampler, the change of docs/variants.md, and the cap.
RUNS = {"the policy itself, `--importance-cap 0`": ("the policy itself", None, 0)}
for name in [*SAMPLERS][1:]:
    for cap in (0, 2):
        RUNS[f"{name}, `--importance-cap {cap}`"] = (name, None, cap)
    RUNS[f"{name}, centred"] = (name, "score_centering", 0)
    RUNS[f"{name}, both"] = (name, "score_centering", 2)
RUNS["the two most likely tokens, kept"] = ("the two most likely tokens", "kept_tokens", 0)


def in_rollouts(sampler: Sampler, model: Any, prompts: list, **options: Any) -> tuple:
    """Evaluations are the policy's own."""
    is_evaluation = len(prompts) == grpo_variants.Args.eval_rows
    generate = common.generation.generate if is_evaluation else sampler.generate
    return generate(model, prompts, **options)


def measure_run(label: str, seed: int) -> dict[str, float]:
    name, variant, cap = RUNS[label]
    sampler = SAMPLERS[name]()
    known.use(sampler)
    with tempfile.TemporaryDirectory() as folder:
        script = grpo_variants
        if variant:
            script = load_script(write_variant(variant, Path(folder)).name, Path(folder))
        script.generate = partial(in_rollouts, sampler)
        flags = dict(importance_cap=cap, eval_every=script.Args.total_rollouts)
        run = train(script, output_dir=folder, seed=seed, **flags)
        found = {metric.name: metric.of_run(run) for metric in METRICS}
        return found | {"KL": kl_of_samples(run)}


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    return {label: measure_run(label, seed) for label in RUNS}


def tables(results: dict) -> dict[str, dict]:
    """A row for each sampler, with the accuracies of each remedy."""
    remedies = {
        "no remedy": ", `--importance-cap 0`",
        "`--importance-cap 2`": ", `--importance-cap 2`",
        "centred": ", centred",
        "both": ", both",
        "kept tokens": ", kept",
    }
    numbers, rows = results["numbers"], []
    for name in SAMPLERS:
        spreads = [spread(numbers[f"{name}, `--importance-cap 0`"][METRICS[1].name], 4)]
        for remedy in remedies.values():
            found = numbers.get(f"{name}{remedy}")
            spreads.append(spread(found[METRICS[0].name], 2) if found else "")
        rows.append([name, *spreads])
    return {
        "sampler": {
            "columns": ["rollouts are drawn from", "`policy/sampling_kl`", *remedies],
            "rows": rows,
        }
    }


EXPERIMENTS = (Experiment("sampler", measure_seed=measure_seed, more_tables=tables),)
