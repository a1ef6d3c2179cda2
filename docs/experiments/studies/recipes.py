"""docs/recipes.md: recipes; docs/beyond.md: pass@k."""

from statistics import mean

import numpy as np

from docs.experiments.lib.experiment import Experiment, saved_numbers
from docs.experiments.lib.metrics import at, average, last
from docs.experiments.lib.tables import spread

RECIPES = {
    "DeepSeekMath": "--group-size 64 --prompts-per-rollout 4 --num-minibatches 1 "
    "--learning-rate 1e-3",
    "Dr. GRPO": "--beta 0 --loss-norm constant --scale-rewards none",
    "DAPO": "--beta 0 --clip-coef-high 0.28 --loss-norm token --overlong-buffer 5 "
    "--max-sampling-rounds 10",
    "GSPO": "--beta 0 --importance-sampling-level sequence --clip-coef 3e-4 --clip-coef-high 4e-4",
    "LUSPO": "--beta 0 --importance-sampling-level sequence --loss-norm constant --clip-coef 3e-4 "
    "--clip-coef-high 4e-4",
    "GDPO": "--multi-objective-aggregation normalize_then_sum",
    "CISPO": "--beta 0 --loss cispo --clip-coef 1 --clip-coef-high 4 --loss-norm token",
    "ScaleRL": "--beta 0 --loss cispo --clip-coef 1 --clip-coef-high 4 --loss-norm token "
    "--scale-rewards batch --max-sampling-rounds 2",
    "SAPO": "--beta 0 --loss sapo",
    "DPPO": "--beta 0 --loss dppo --clip-coef 0.15",
    "prime-rl": "--beta 0 --loss ipo --clip-coef 0.3 --scale-rewards none --loss-norm token",
    "MaxRL": "--beta 0 --scale-rewards mean",
    "REINFORCE++-baseline": "--scale-rewards batch",
    "unbiased KL": "--kl-placement unbiased",
}
PASS_AT_K = "grpo_variants.py --eval-rows 100 --eval-samples 64"
COMMANDS = {name: f"grpo_variants.py {flags}" for name, flags in RECIPES.items()}
COMMANDS |= {"pass@k": PASS_AT_K}


def difference(values: list[float], others: list[float]) -> str:
    """The difference of two means and its standard error, with one variance for both."""
    sizes = np.array([len(values), len(others)])
    variance = np.dot([np.var(values), np.var(others)], sizes) / (sizes.sum() - 2)
    error = (variance * (1 / sizes).sum()) ** 0.5
    return f"{mean(values) - mean(others):+.3f} ± {error:.3f}"


STEPS = (0, 20, 40, 60)
PASSES = {"pass@1": "accuracy", "pass@8": "pass_at_8", "pass@64": "pass_at_64"}


def tables(results: dict) -> dict:
    numbers = results["numbers"]
    default, without_kl = (
        saved_numbers("grpo", label, "eval/accuracy") for label in ("(default)", "`--beta 0`")
    )
    rows = [["(default)", spread(default, 3), "", "32"]]
    rows.append(["(default), `--beta 0`", spread(without_kl, 3), "", "32"])
    for name, flags in RECIPES.items():
        accuracy = numbers[name]["eval/accuracy"]
        base = without_kl if "--beta 0" in flags else default
        sampled = spread(numbers[name]["average prompts/sampled"], 0)
        rows.append([name, spread(accuracy, 3), difference(accuracy, base), sampled])
    steps = []
    for step in STEPS:
        passes = [numbers["pass@k"][f"eval/{metric} at {step}"] for metric in PASSES.values()]
        steps.append([str(step), *(spread(of_seeds, 2) for of_seeds in passes)])
    columns = ["recipe", "accuracy", "minus the default's", "prompts per rollout"]
    return {
        "recipes": {"columns": columns, "rows": rows},
        "pass at k": {"columns": ["rollouts", *PASSES], "rows": steps},
    }


METRICS = {name: [last("eval/accuracy"), average("prompts/sampled")] for name in RECIPES}
METRICS["pass@k"] = [at(f"eval/{metric}", step) for step in STEPS for metric in PASSES.values()]
EXPERIMENTS = (Experiment("recipes", COMMANDS, metrics=METRICS, more_tables=tables),)
