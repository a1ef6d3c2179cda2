"""docs/grpo.md: recipes, dynamic sampling where most groups fail, pass@k over training."""

from statistics import mean, stdev

from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.runs import Numbers, experiment_of_runs
from docs.experiments.lib.tables import spread

RECIPES = {
    "DeepSeekMath": "--group-size 64 --prompts-per-rollout 4 --num-minibatches 1 "
    "--learning-rate 1e-3",
    "Dr. GRPO": "--beta 0 --loss-norm constant --scale-rewards none",
    "DAPO": "--beta 0 --clip-coef-high 0.28 --loss-norm token --overlong-buffer 5 "
    "--max-sampling-rounds 10",
    "GSPO": "--beta 0 --importance-sampling-level sequence --clip-coef 3e-4 --clip-coef-high 4e-4",
    "GDPO": "--multi-objective-aggregation normalize_then_sum",
    "CISPO": "--beta 0 --loss cispo --clip-coef 1 --clip-coef-high 4 --loss-norm token",
    "ScaleRL": "--beta 0 --loss cispo --clip-coef 1 --clip-coef-high 4 --loss-norm token "
    "--scale-rewards batch --max-sampling-rounds 2",
    "unbiased KL": "--kl-placement unbiased",
}
PASS_AT_K = "grpo.py --eval-rows 100 --eval-samples 64"
# A policy that shows its working in 3 % of its samples, rewarded for showing it.
RARELY_SHOWN = (
    "grpo.py --model {grpo.py --max-new-tokens 3 --missing-eos-penalty 1 --total-rollouts 4} "
    "--reward-fn docs/rewards/formats.py:shown --prompts-per-rollout 16 --total-rollouts 20 "
    "--learning-rate 1e-4 --eval-every 2"
)
ROUNDS = {"1": RARELY_SHOWN, "10": f"{RARELY_SHOWN} --max-sampling-rounds 10"}
COMMANDS = {name: f"grpo.py {flags}" for name, flags in RECIPES.items()} | {"pass@k": PASS_AT_K}
COMMANDS |= {f"rounds {rounds}": command for rounds, command in ROUNDS.items()}


def difference(values: list[float], others: list[float]) -> str:
    """The difference of two means and its standard error."""
    error = (stdev(values) ** 2 / len(values) + stdev(others) ** 2 / len(others)) ** 0.5
    return f"{mean(values) - mean(others):+.3f} ± {error:.3f}"


def tables(numbers: Numbers) -> dict:
    saved = saved_results("grpo")["numbers"]
    default, without_kl = (saved[label]["eval/accuracy"] for label in ("(default)", "`--beta 0`"))
    rows = [["(default)", spread(default, 3), "", "32"]]
    rows.append(["(default), `--beta 0`", spread(without_kl, 3), "", "32"])
    for name in RECIPES:
        accuracy = numbers.values(name, "eval/accuracy")
        base = without_kl if "--beta 0" in RECIPES[name] else default
        sampled = spread(numbers.values(name, "average prompts/sampled"), 0)
        rows.append([name, spread(accuracy, 3), difference(accuracy, base), sampled])
    columns = ["recipe", "accuracy", "minus the default's of that β", "prompts per rollout"]
    steps = []
    for step in (0, 20, 40, 60):
        metrics = [f"eval/{name} at {step}" for name in ("accuracy", "pass_at_8", "pass_at_64")]
        steps.append([str(step), *(spread(numbers.values("pass@k", m), 2) for m in metrics)])
    of_rounds = []
    for rounds in ROUNDS:
        cells = []
        for step in (0, 4, 10, 20):
            shares = numbers.values(f"rounds {rounds}", f"eval/reward at {step}")
            cells.append(spread(shares, 2))
        for metric in ("average prompts/kept", "average prompts/sampled"):
            cells.append(spread(numbers.values(f"rounds {rounds}", metric), 1))
        of_rounds.append([rounds, *cells])
    steps_shown = [f"after {step} rollouts" for step in (4, 10, 20)]
    dynamic = ["rounds", "share at the start", *steps_shown, "kept per rollout", "sampled"]
    return {
        "dynamic sampling": {"columns": dynamic, "rows": of_rounds},
        "recipes": {"columns": columns, "rows": rows},
        "pass at k": {"columns": ["rollouts", "pass@1", "pass@8", "pass@64"], "rows": steps},
    }


EXPERIMENTS = (experiment_of_runs("recipes", COMMANDS, tables),)
