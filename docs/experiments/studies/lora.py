"""docs/lora.md: adapters beside all weights in each script, and frozen embeddings."""

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
    script: str
    rates: str  # flags of the adapters' learning rates
    metric: str
    stored: str  # the results that have the default run, with all weights
    label: str = "(default)"  # its label there


METHODS = {
    "SFT of random weights, loss": Method("sft", "--learning-rate 2e-3", "eval/loss", "sft"),
    "reward model, pair accuracy": Method(
        "rm_bradley_terry", "--learning-rate 5e-3", "eval/pair_accuracy", "rm_bradley_terry"
    ),
    "REINFORCE, accuracy": Method(
        "reinforce",
        "--learning-rate 5e-3",
        "eval/reward",
        "reinforce",
        "`--baseline leave_one_out`",
    ),
    "GRPO, accuracy": Method("grpo", "--learning-rate 5e-3", "eval/accuracy", "grpo"),
    "PPO, gold reward": Method(
        "ppo_rlhf",
        "--learning-rate 5e-3 --critic-learning-rate 5e-3",
        "eval/reward",
        "ppo_rlhf",
    ),
    "DPO, gold reward": Method("dpo", "--learning-rate 2e-3", "eval/reward", "dpo"),
    "KTO, gold reward": Method("kto", "--learning-rate 5e-3", "eval/reward", "kto"),
}
COMMANDS = {
    name: f"{method.script}.py --lora-rank 8 {method.rates}" for name, method in METHODS.items()
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
    for name, (_, _, metric, stored, label) in METHODS.items():
        all_weights = saved_numbers(stored, label, metric)
        frozen = "not run"
        if f"{name}, frozen embeddings" in numbers:
            frozen = spread(numbers[f"{name}, frozen embeddings"][metric], 2)
        rows.append([name, spread(all_weights, 2), frozen, spread(numbers[name][metric], 2)])
    columns = ["", "all weights", "all but the embeddings", "adapters, rank 8"]
    return {"lora": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment("lora", COMMANDS, metrics=METRICS, measure_seed=measure_seed, more_tables=tables),
)
