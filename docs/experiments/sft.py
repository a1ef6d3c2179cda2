"""docs/sft.md and docs/grpo.md: the default run; and how often completions show their working after
three kinds of SFT, and after GRPO from the last.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import grpo
import sft
from common.logprobs import Sequences
from docs.experiments.lib.drawing import Metric, draw_metrics
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import (
    SEEDS,
    Numbers,
    Run,
    experiment_of_runs,
    for_each_seed,
    read_jsonl,
    train,
    write_jsonl,
)
from docs.experiments.lib.tables import rounded, spread
from docs.rewards import formats


def draw(numbers: Numbers) -> dict:
    loss = Metric(
        "eval/loss",
        "The loss ends near the data's entropy",
        "held-out loss, nats per token",
        limits=(0, None),
        # The entropy of the demonstrations. Which of the two forms: ln 2 = 0.69 nats. Which digit
        # is guessed in an answer at once: ln 10 = 2.30. Whether and how each of five digits of the
        # working is wrong: 2.72. So 0.69 + (2.30 + 2.72) / 2 = 3.21 for 7.5 tokens on average.
        best=0.43,
    )
    return draw_metrics(numbers, "SFT", {"sft": loss}, "optimiser step")


# --- shown_working -----------------------------------------------------------------------------
PLAIN_LOGPROBS = sft.completion_logprobs
PLAIN_LOSS = sft.negative_log_likelihood


def share_with_working(samples: list[dict]) -> float:
    return mean(formats.shown([], [sample["completion"] for sample in samples]))


def logprobs_over_length(model: Any, sequences: Sequences, inds: Sequence[int]) -> Tensor:
    """Log-probs (b, T), each divided by the number of tokens of its completion."""
    lengths = torch.tensor([len(sequences[i][1]) for i in inds])
    return PLAIN_LOGPROBS(model, sequences, inds) / lengths[:, None]


def mean_over_completions(logprobs: Tensor, num_tokens: int) -> Tensor:
    """The loss of a step's completions, given their log-probs over their lengths."""
    return -logprobs.sum() / logprobs.shape[0]


def train_over_completions(**flags: Any) -> Run:
    """sft.py with a mean over completions; its micro-batch is the whole step."""
    sft.completion_logprobs = logprobs_over_length
    sft.negative_log_likelihood = mean_over_completions
    run = train(sft, **flags)
    sft.completion_logprobs = PLAIN_LOGPROBS
    sft.negative_log_likelihood = PLAIN_LOSS
    return run


def write_data_without_working(folder: Path) -> None:
    """The demonstrations of tiny/arithmetic that give the answer at once."""
    folder.mkdir()
    for split in ("train", "test"):
        rows = read_jsonl(Path(f"tiny/arithmetic/sft/{split}.jsonl"))
        at_once = [row for row in rows if row["completion"].startswith("#")]
        write_jsonl(folder / f"{split}.jsonl", at_once)


def measure_seed(seed: int) -> dict[str, float]:
    """Shares of completions with working, and of the last policy the accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_data_without_working(data)
        flags = dict(output_dir=folder, seed=seed, eval_samples=500)
        over_tokens = train(sft, **flags)
        over_completions = train_over_completions(**flags)
        # Twice the epochs, of half the data.
        at_once = train(sft, **flags, dataset=str(data), epochs=8.0)
        trained = train(grpo, output_dir=folder, seed=seed, model=str(at_once.folder))
        samples = read_jsonl(trained.folder / "samples.jsonl")
        before = [sample for sample in samples if sample["step"] == 0]
        first, last = trained.evaluations[0], trained.evaluations[-1]
        return {
            "mean over tokens": share_with_working(over_tokens.samples),
            "mean over completions": share_with_working(over_completions.samples),
            "never shown, before": share_with_working(before),
            "never shown, after": share_with_working(trained.samples),
            "never shown, accuracy before": first["eval/accuracy"],
            "never shown, accuracy after": last["eval/accuracy"],
        }


def measure_shown_working() -> dict:
    measured = [*for_each_seed(measure_seed).values()]
    numbers = {name: [of_seed[name] for of_seed in measured] for name in measured[0]}
    return {"seeds": SEEDS, "numbers": rounded(numbers)}


def shown_working_tables(results: dict) -> dict:
    numbers = results["numbers"]
    shares = [
        ["tokens of the optimiser step (`sft.py`)", spread(numbers["mean over tokens"], 2)],
        ["tokens of each completion first", spread(numbers["mean over completions"], 2)],
    ]
    never_shown = []
    for moment in ("before", "after"):
        share = spread(numbers[f"never shown, {moment}"], 2)
        accuracy = spread(numbers[f"never shown, accuracy {moment}"], 2)
        never_shown.append([moment, share, accuracy])
    return {
        "shown_working": {
            "columns": ["mean of the loss over", "share of samples with working"],
            "rows": shares,
        },
        "shown_working grpo": {
            "columns": ["60 rollouts of GRPO", "share of samples with working", "accuracy"],
            "rows": never_shown,
        },
    }


EXPERIMENTS = (
    experiment_of_runs("sft", {"(default)": "sft.py"}, lambda _: {}, draw),
    Experiment("shown_working", shown_working_tables, measure_shown_working),
)
