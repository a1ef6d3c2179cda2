"""docs/choosing.md: learning rates of adapters, for a real model that docs/real/unpack.py has put
into runs/.
"""

from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import at, last, late
from docs.experiments.lib.tables import spread

MODEL = "--model runs/SmolLM2-135M-Instruct --chat"
ADAPTERS = "--lora-rank 16 --micro-batch-size 8 --save-every 1000 --learning-rate"
# GRPO's start, with all weights trained: it knows the form of an answer, but many are wrong.
START = (
    f"sft.py {MODEL} --dataset docs/real/sums --train-split train[:64] --epochs 2 --batch-size 16 "
    "--micro-batch-size 8 --eval-rows 8 --eval-samples 1 --learning-rate 2e-5"
)
SFT = (
    f"sft.py {MODEL} --dataset docs/real/sums --train-split train[:128] --epochs 1 --batch-size 8 "
    f"--max-length 64 --eval-rows 60 --eval-samples 1 --max-new-tokens 16 {ADAPTERS}"
)
DPO = (
    f"dpo.py {MODEL} --dataset docs/real/pairs --train-split train[:64] --epochs 1 --batch-size 4 "
    "--beta 0.1 --warmup-ratio 0 --temperature 0.7 --eval-rows 24 --max-new-tokens 16 "
    f"{ADAPTERS}"
)
GRPO = (
    f"grpo.py --model {{{START}}} --chat --dataset docs/real/sums --beta 0 --num-minibatches 1 "
    "--prompts-per-rollout 4 --group-size 8 --max-new-tokens 16 --total-rollouts 8 --eval-rows 60 "
    f"{ADAPTERS}"
)
SEEDS = (1, 2, 3)
FOUR_RATES = ("3e-5", "1e-4", "3e-4", "1e-3")
RATES = {  # of each script its command and rates, the number of its steps, what they train on
    "SFT": (SFT, ("7e-5", "2e-4", "6e-4", "2e-3"), 16, "8 rows"),
    "DPO": (DPO, FOUR_RATES, 16, "4 pairs"),
    "GRPO": (GRPO, FOUR_RATES, 8, "4 prompts of 8 completions"),
}
COMMANDS = {
    f"{script} at {rate}": f"{command} {rate}"
    for script, (command, rates, _, _) in RATES.items()
    for rate in rates
}
METRICS_OF = {
    "SFT": [at("eval/loss", 0), last("eval/loss")],
    "DPO": [at("eval/loss", 0), last("eval/loss"), last("eval/margin"), last("eval/kl")],
    "GRPO": [at("eval/reward", 0), last("eval/reward"), late("reward/mean")],
}
METRICS = {label: METRICS_OF[label.split()[0]] for label in COMMANDS}


def tables(results: dict) -> dict[str, dict]:
    """Held-out numbers before and after training; rates that were not run have no row."""
    numbers, made = results["numbers"], []
    for script, (_, rates, steps, batch) in RATES.items():
        before, after, *others = METRICS_OF[script]
        for rate in rates:
            found = numbers.get(f"{script} at {rate}")
            if found:
                start, end = (spread(found[metric.name], 2) for metric in (before, after))
                cells = [f"{steps} of {batch}", rate, f"{after.name} {start}", f"**{end}**"]
                also = [f"{x.name} {spread(found[x.name], 2)}" for x in others]
                made.append([script, *cells, ", ".join(also), str(len(found[after.name]))])
    columns = ["", "steps", "rate", "before", "after", "also, at the end", "seeds"]
    return {"rates": {"columns": columns, "rows": made}}


EXPERIMENTS = (Experiment("rates", COMMANDS, metrics=METRICS, seeds=SEEDS, more_tables=tables),)
