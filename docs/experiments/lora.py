"""docs/lora.md: adapters beside all weights in each script, ranks and rates, frozen embeddings."""

from itertools import product
from typing import Any, NamedTuple

import dpo
import grpo
from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.runs import Numbers, experiment_of_runs, train, value
from docs.experiments.lib.tables import spread


class Method(NamedTuple):
    script: str
    rates: str  # flags of the adapters' learning rates
    metric: str
    digits: int
    stored: str | None  # the results that have the default run, with all weights
    label: str = "(default)"  # its label there


METHODS = {
    "SFT of random weights, loss": Method("sft", "--learning-rate 2e-3", "eval/loss", 2, None),
    "reward model, pair accuracy": Method(
        "rm_bradley_terry", "--learning-rate 5e-3", "eval/pair_accuracy", 2, "rm_bradley_terry"
    ),
    "REINFORCE, accuracy": Method(
        "reinforce",
        "--learning-rate 5e-3",
        "eval/reward",
        2,
        "reinforce",
        "`--baseline leave_one_out`",
    ),
    "GRPO, accuracy": Method("grpo", "--learning-rate 5e-3", "eval/accuracy", 2, "grpo"),
    "PPO, gold reward": Method(
        "ppo_rlhf",
        "--learning-rate 5e-3 --critic-learning-rate 5e-3",
        "eval/reward",
        2,
        "ppo_rlhf",
    ),
    "DPO, gold reward": Method("dpo", "--learning-rate 2e-3", "eval/reward", 2, "dpo"),
    "KTO, gold reward": Method("kto", "--learning-rate 5e-3", "eval/reward", 2, "kto"),
}
COMMANDS = {
    name: f"{method.script}.py --lora-rank 8 {method.rates}" for name, method in METHODS.items()
}
COMMANDS["SFT of random weights, loss, all weights"] = "sft.py"
RANKS, RATES = (1, 8, 32), ("2e-3", "5e-3", "1e-2")
for rank, rate in product(RANKS, RATES):
    COMMANDS[f"rank {rank}, rate {rate}"] = f"grpo.py --lora-rank {rank} --learning-rate {rate}"


def without_embeddings(script: Any, seed: int, folder: str, metric: str) -> float:
    """The default run, with all weights trained but the embeddings, which are also the head."""
    load_model = script.load_model

    def load_and_freeze(*arguments: Any) -> Any:
        model = load_model(*arguments)
        model.get_input_embeddings().weight.requires_grad_(False)
        return model

    script.load_model = load_and_freeze
    run = train(script, seed=seed, output_dir=folder)
    script.load_model = load_model
    return value(run.rows, metric)


def measure_seed(seed: int) -> dict:
    folder = f"runs/experiments/frozen_embeddings_{seed}"
    numbers = {
        "GRPO, accuracy, frozen embeddings": {
            "eval/accuracy": without_embeddings(grpo, seed, folder, "eval/accuracy")
        },
        "DPO, gold reward, frozen embeddings": {
            "eval/reward": without_embeddings(dpo, seed, folder, "eval/reward")
        },
    }
    return numbers


def tables(numbers: Numbers) -> dict:
    rows = []
    for name, (_, _, metric, digits, stored, label) in METHODS.items():
        if stored:
            all_weights = saved_results(stored)["numbers"][label][metric]
        else:
            all_weights = numbers.values(f"{name}, all weights", metric)
        frozen = "not run"
        if f"{name}, frozen embeddings" in numbers.numbers:
            frozen = spread(numbers.values(f"{name}, frozen embeddings", metric), digits)
        adapters = spread(numbers.values(name, metric), digits)
        rows.append([name, spread(all_weights, digits), frozen, adapters])
    columns = ["", "all weights", "all but the embeddings", "adapters, rank 8"]
    sweep = []
    for rank in RANKS:
        cells = []
        for rate in RATES:
            cells.append(spread(numbers.values(f"rank {rank}, rate {rate}", "eval/accuracy"), 2))
        sweep.append([str(rank), *cells])
    return {
        "lora": {"columns": columns, "rows": rows},
        "lora sweep": {"columns": ["rank", *RATES], "rows": sweep},
    }


EXPERIMENTS = (experiment_of_runs("lora", COMMANDS, tables, measure_seed=measure_seed),)
