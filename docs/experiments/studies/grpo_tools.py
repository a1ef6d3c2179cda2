"""docs/grpo_tools.md: accuracy and calls over training, and what the mask changes."""

import tempfile
from statistics import mean
from typing import Any

import torch

import grpo_tools
from docs.experiments.lib.drawing import ALGORITHM_STYLES, HEALTHY, Lines, Series
from docs.experiments.lib.experiment import Experiment, Table
from docs.experiments.lib.metrics import Metric, at, last, late
from docs.experiments.lib.runs import Run, train
from docs.experiments.lib.tables import spread

sample_turns = grpo_tools.sample_turns


def all_tokens(*arguments: Any) -> tuple:
    """A rollout whose mask says that the policy has sampled the environment's tokens too."""
    sequences, logprobs, _, ended = sample_turns(*arguments)
    lengths = torch.tensor([len(completion) for _, completion in sequences])
    mask = torch.arange(lengths.max()) < lengths[:, None]  # (B, T)
    return sequences, logprobs, mask, ended


CALLS = Metric("calls", lambda run: mean(";" in s["completion"] for s in run.samples()))
METRICS = (last("eval/reward"), CALLS, late("policy/entropy"), late("policy/sampling_kl"))
TABLE = Table(
    {
        "accuracy": (METRICS[0], 3),
        "share of calls": (METRICS[1], 2),
        "entropy": (METRICS[2], 2),
        "`policy/sampling_kl`": (METRICS[3], 2),
    },
    {"(default)": ("no",), "all tokens": ("yes",)},
    heading=("trained on the environment's tokens",),
)


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        grpo_tools.sample_turns = all_tokens
        run: Run = train(grpo_tools, output_dir=folder, seed=seed)
        return {"all tokens": {metric.name: metric.of_run(run) for metric in METRICS}}


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
STEPS = (0, 4)
REAL_METRICS = [
    at(f"eval/{name}", step) for name in ("reward", "called_fraction") for step in STEPS
]


def real_tables(results: dict) -> dict[str, dict]:
    numbers, rows = results["numbers"]["SmolLM2"], []
    for name, metric in (("right", "reward"), ("call the calculator", "called_fraction")):
        rows.append([name, *(spread(numbers[f"eval/{metric} at {step}"], 2) for step in STEPS)])
    columns = ["", "after SFT", "after 4 rollouts"]
    return {"real_tools": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment(
        "real_tools",
        {"SmolLM2": REAL},
        metrics={"SmolLM2": REAL_METRICS},
        more_tables=real_tables,
        seeds=(1, 2, 3),
    ),
    Experiment(
        "grpo_tools",
        {"(default)": "grpo_tools.py --eval-every 5"},
        {"grpo_tools": TABLE},
        {"grpo_tools": FIGURE},
        measure_seed=measure_seed,
    ),
)
