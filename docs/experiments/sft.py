"""docs/sft.md and docs/grpo.md: the default run; and how often completions show their working after
three kinds of SFT, and after GRPO from the last.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import grpo
import sft
from common.logprobs import Sequences, completion_logprobs
from docs.experiments.lib.drawing import Metric, draw_metrics
from docs.experiments.lib.runs import (
    Numbers,
    Run,
    experiment_of_runs,
    read_jsonl,
    train,
    value,
    write_jsonl,
)
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
def share_with_working(samples: list[dict]) -> float:
    return mean(formats.shown([], [sample["completion"] for sample in samples]))


def logprobs_over_length(model: Any, sequences: Sequences, inds: Sequence[int]) -> Tensor:
    """Log-probs (b, T), each divided by the number of tokens of its completion."""
    lengths = torch.tensor([len(sequences[i][1]) for i in inds])
    return completion_logprobs(model, sequences, inds) / lengths[:, None]


def mean_over_completions(logprobs: Tensor, num_tokens: int) -> Tensor:
    """The loss of a step's completions, given their log-probs over their lengths."""
    return -logprobs.sum() / logprobs.shape[0]


def train_over_completions(**flags: Any) -> Run:
    """sft.py with a mean over completions; its micro-batch is the whole step."""
    with (
        patch.object(sft, "completion_logprobs", logprobs_over_length),
        patch.object(sft, "negative_log_likelihood", mean_over_completions),
    ):
        return train(sft, **flags)


def write_data_without_working(folder: Path) -> None:
    """The demonstrations of tiny/arithmetic that give the answer at once."""
    folder.mkdir()
    for split in ("train", "test"):
        rows = read_jsonl(Path(f"tiny/arithmetic/sft/{split}.jsonl"))
        at_once = [row for row in rows if row["completion"].startswith("#")]
        write_jsonl(folder / f"{split}.jsonl", at_once)


OVER_TOKENS = "tokens of the optimiser step (`sft.py`)"
OVER_COMPLETIONS = "tokens of each completion first"


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """Shares of completions with working; before and after GRPO also the accuracies."""
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
        samples_before = [sample for sample in samples if sample["step"] == 0]
        return {
            OVER_TOKENS: {"share": share_with_working(over_tokens.samples)},
            OVER_COMPLETIONS: {"share": share_with_working(over_completions.samples)},
            "before": {
                "share": share_with_working(samples_before),
                "accuracy": value(trained.rows, "first eval/accuracy"),
            },
            "after": {
                "share": share_with_working(trained.samples),
                "accuracy": value(trained.rows, "eval/accuracy"),
            },
        }


def shown_working_tables(numbers: Numbers) -> dict:
    share = {"share of samples with working": ("share", 2)}
    both = share | {"accuracy": ("accuracy", 2)}
    labels = (OVER_TOKENS, OVER_COMPLETIONS)
    return {
        "shown_working": numbers.table(share, "mean of the loss over", labels),
        "shown_working grpo": numbers.table(both, "60 rollouts of GRPO", ("before", "after")),
    }


EXPERIMENTS = (
    experiment_of_runs("sft", {"(default)": "sft.py"}, lambda _: {}, draw),
    experiment_of_runs("shown_working", {}, shown_working_tables, measure_seed=measure_seed),
)
