"""docs/sft.md and docs/grpo.md: how often completions show their working after three kinds of SFT,
and after GRPO from the last."""

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
from docs.experiments.lib.experiment import Experiment, Table
from docs.experiments.lib.metrics import first, last, measured
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl
from docs.rewards import formats


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
        return {
            OVER_TOKENS: {"share": share_with_working(over_tokens.samples())},
            OVER_COMPLETIONS: {"share": share_with_working(over_completions.samples())},
            "before": {
                "share": share_with_working(trained.samples(step=0)),
                "accuracy": first("eval/accuracy").of_run(trained),
            },
            "after": {
                "share": share_with_working(trained.samples()),
                "accuracy": last("eval/accuracy").of_run(trained),
            },
        }


SHARE = {"share of samples with working": (measured("share"), 2)}
EXPERIMENTS = (
    Experiment(
        "shown_working",
        tables={
            "shown_working": Table(
                SHARE,
                {label: (label,) for label in (OVER_TOKENS, OVER_COMPLETIONS)},
                heading=("mean of the loss over",),
            ),
            "shown_working grpo": Table(
                SHARE | {"accuracy": (measured("accuracy"), 2)},
                {label: (label,) for label in ("before", "after")},
                heading=("60 rollouts of GRPO",),
            ),
        },
        measure_seed=measure_seed,
    ),
)
