"""docs/lora.md: adapters beside all weights, and frozen embeddings."""

from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import dpo
import grpo
from docs.experiments.lib.experiment import Experiment, saved_numbers
from docs.experiments.lib.metrics import last
from docs.experiments.lib.runs import train
from docs.experiments.lib.tables import spread


class Method(NamedTuple):
    script: str  # also the name of the results that have the default run, with all weights
    rate: str  # flag of the adapters' learning rate
    metric: str


METHODS = {
    "GRPO, accuracy": Method("grpo", "--learning-rate 5e-3", "eval/accuracy"),
    "DPO, gold reward": Method("dpo", "--learning-rate 2e-3", "eval/reward"),
}
COMMANDS = {
    name: f"{method.script}.py --lora-rank 8 {method.rate}" for name, method in METHODS.items()
}
METRICS = {name: [last(method.metric)] for name, method in METHODS.items()}


def without_embeddings(script: Any, seed: int, metric: str) -> dict[str, float]:
    """The default run, with all weights trained but the embeddings, which are also the head."""

    def load_and_freeze(*arguments: Any) -> Any:
        model = load_model(*arguments)
        model.get_input_embeddings().weight.requires_grad_(False)
        return model

    load_model = script.load_model
    with TemporaryDirectory() as folder, patch.object(script, "load_model", load_and_freeze):
        return {metric: last(metric).of_run(train(script, seed=seed, output_dir=folder))}


def measure_seed(seed: int) -> dict:
    return {
        "GRPO, accuracy, frozen embeddings": without_embeddings(grpo, seed, "eval/accuracy"),
        "DPO, gold reward, frozen embeddings": without_embeddings(dpo, seed, "eval/reward"),
    }


def tables(results: dict) -> dict:
    numbers, rows = results["numbers"], []
    for name, method in METHODS.items():
        all_weights = saved_numbers(method.script, "(default)", method.metric)
        frozen, adapters = (
            numbers[label][method.metric] for label in (f"{name}, frozen embeddings", name)
        )
        rows.append([name, *(spread(found, 2) for found in (all_weights, frozen, adapters))])
    columns = ["", "all weights", "all but the embeddings", "adapters, rank 8"]
    return {"lora": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment("lora", COMMANDS, metrics=METRICS, measure_seed=measure_seed, more_tables=tables),
)
