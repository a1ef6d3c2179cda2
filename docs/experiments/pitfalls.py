"""docs/pitfalls.md: runs on tiny/ with each symptom and without."""

from typing import NamedTuple

from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import GRPO_REVIEWS, runs_of, value
from docs.experiments.lib.tables import rounded, spread


class Symptom(NamedTuple):
    sick: str  # the command that has the symptom
    healthy: str  # the command that has not
    metrics: dict[str, int]  # digits by name, see `value`


SYMPTOMS = {
    "entropy": Symptom(
        f"{GRPO_REVIEWS} --beta 0 --learning-rate 2e-3 --lr-schedule constant_with_warmup",
        f"{GRPO_REVIEWS} --beta 0.2 --kl-placement reward",
        {"policy/entropy": 2, "reward/mean": 2, "eval/reward": 2},
    ),
    "kl": Symptom(
        f"{GRPO_REVIEWS} --beta 0.0001 --learning-rate 2e-3",
        f"{GRPO_REVIEWS} --beta 0.2 --kl-placement reward",
        {"objective/kl": 1, "reward/mean": 2, "eval/reward": 2},
    ),
    "zero": Symptom(
        "grpo.py --beta 0 --total-rollouts 15 --model tiny/arithmetic/base",
        "grpo.py --beta 0 --total-rollouts 15",
        {"reward/zero_variance_groups": 2, "reward/std": 2, "eval/accuracy": 2},
    ),
    "critic": Symptom(
        "ppo_rlhf.py --critic-learning-rate 1e-6",
        "ppo_rlhf.py",
        {"value/explained_variance": 2, "value/loss": 2, "reward/mean": 2, "eval/reward": 2},
    ),
    "chosen": Symptom(
        "dpo.py --beta 0.1 --learning-rate 2e-3 --epochs 2",
        "dpo.py --beta 0.1 --learning-rate 2e-3 --epochs 2 --nll-coef 0.5",
        {"policy/logprob_chosen": 1, "eval/pair_accuracy": 2, "eval/kl": 1, "eval/reward": 2},
    ),
}
COMMANDS = {
    f"{name}, {way}": getattr(symptom, way)
    for name, symptom in SYMPTOMS.items()
    for way in ("sick", "healthy")
}


def measure() -> dict:
    runs = runs_of(COMMANDS.values())
    numbers = {}
    for label, command in COMMANDS.items():
        metrics = SYMPTOMS[label.partition(",")[0]].metrics
        numbers[label] = {
            metric: [value(run.rows, metric) for run in runs[command]] for metric in metrics
        }
    return {"numbers": rounded(numbers, 6)}


def tables(results: dict) -> dict:
    made = {}
    for name, symptom in SYMPTOMS.items():
        rows = []
        for way in ("sick", "healthy"):
            numbers = results["numbers"][f"{name}, {way}"]
            cells = [spread(numbers[metric], digits) for metric, digits in symptom.metrics.items()]
            rows.append([way, *cells])
        headings = [f"`{metric}`" for metric in symptom.metrics]
        made[f"pitfalls {name}"] = {"columns": ["", *headings], "rows": rows}
    return made


EXPERIMENTS = (Experiment("pitfalls", tables, measure, commands=COMMANDS),)
