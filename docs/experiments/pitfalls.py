"""docs/pitfalls.md: runs on tiny/ with each symptom and without."""

from typing import NamedTuple

from docs.experiments.lib.runs import GRPO_REVIEWS, Numbers, experiment_of_runs


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
        {"reward/zero_variance_groups": 2, "reward/group_std": 2, "eval/accuracy": 2},
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


def tables(numbers: Numbers) -> dict:
    made = {}
    for name, symptom in SYMPTOMS.items():
        ways = ("sick", "healthy")
        rows = [[way, *numbers.spreads(f"{name}, {way}", symptom.metrics)] for way in ways]
        headings = [f"`{metric}`" for metric in symptom.metrics]
        made[f"pitfalls {name}"] = {"columns": ["", *headings], "rows": rows}
    return made


EXPERIMENTS = (experiment_of_runs("pitfalls", COMMANDS, tables),)
