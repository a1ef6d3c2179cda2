"""docs/grpo_tools.md: accuracy and calls over training."""

from docs.experiments.lib.drawing import ALGORITHM_STYLES, HEALTHY, Lines, Series
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import at

FIGURE = Lines(
    "It learns to call, and then is right",
    "fraction of held-out completions",
    {
        ("(default)", "eval/called_fraction"): Series("call the calculator", HEALTHY),
        ("(default)", "eval/reward"): Series("are right", ALGORITHM_STYLES["GRPO"]),
    },
    limits=(0, 1.03),
)
# --- a real model ------------------------------------------------------------------------------
REAL_SFT = (
    "sft.py --model runs/SmolLM2-135M-Instruct --dataset docs/real/calls --epochs 2 "
    "--batch-size 16 --micro-batch-size 8 --learning-rate 2e-5"
)
REAL = (
    f"grpo_tools.py --model {{{REAL_SFT}}} --chat --dataset docs/real/sums --beta 0 "
    "--environment docs/real/calculator.py:calculator "
    "--reward-fn docs/real/calculator.py:right --max-prompt-length 64 --max-new-tokens 64 "
    "--prompts-per-rollout 8 --num-minibatches 1 --micro-batch-size 8 --learning-rate 1e-5 "
    "--total-rollouts 4 --eval-split test[:60]"
)
REAL_METRICS = [at("eval/reward", step) for step in (0, 4)]

EXPERIMENTS = (
    Experiment(
        "real_tools",
        {"SmolLM2": REAL},
        metrics={"SmolLM2": REAL_METRICS},
        seeds=(1, 2, 3),
    ),
    Experiment(
        "grpo_tools",
        {"(default)": "grpo_tools.py --eval-every 5"},
        figures={"grpo_tools": FIGURE},
    ),
)
