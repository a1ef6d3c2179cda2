"""How many completions show their working after three kinds of SFT, and after GRPO from the last.

    python docs/experiments/figures.py shown_working      # seven minutes on two cores

Half of the demonstrations of tiny/arithmetic show their working. Per seed, the program trains

* with `python sft.py`, whose loss is a mean over the tokens of the optimiser step;
* with the same program and a mean over the tokens of each completion first;
* with `python sft.py` on the demonstrations without working alone (twice the epochs, so as many
  steps), and then with `python grpo.py` from there.

The share of completions with working is counted in one sample for each of 500 held-out prompts at
temperature 1. The tables are on docs/sft.md and docs/grpo.md.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rules import working
from runs import SEEDS, Run, read_jsonl
from tables import spread
from torch import Tensor

import grpo
import sft
from common.logprobs import Sequences

NUM_SAMPLES = 500  # held-out prompts, one completion each


def share_with_working(samples: list[dict]) -> float:
    rewards = working([], [sample["completion"] for sample in samples])
    return mean(reward > 0 for reward in rewards)


def train_sft(output_dir: str, seed: int, **flags: Any) -> Run:
    args = sft.Args(output_dir=output_dir, seed=seed, eval_samples=NUM_SAMPLES, **flags)
    with contextlib.redirect_stdout(io.StringIO()):
        return Run(sft.main(args))


def logprobs_over_length(model: Any, sequences: Sequences, inds: Sequence[int]) -> Tensor:
    """Log-probs (b, T), each divided by the number of tokens of its completion."""
    lengths = torch.tensor([len(sequences[i][1]) for i in inds])
    return PLAIN_LOGPROBS(model, sequences, inds) / lengths[:, None]


def mean_over_completions(logprobs: Tensor, num_tokens: int) -> Tensor:
    """The loss of a step's completions, given their log-probs over their lengths."""
    return -logprobs.sum() / logprobs.shape[0]


PLAIN_LOGPROBS = sft.completion_logprobs
PLAIN_LOSS = sft.negative_log_likelihood


def train_sft_over_completions(output_dir: str, seed: int) -> Run:
    """sft.py with a mean over completions; its micro-batch is the whole step."""
    sft.completion_logprobs = logprobs_over_length
    sft.negative_log_likelihood = mean_over_completions
    run = train_sft(output_dir, seed)
    sft.completion_logprobs = PLAIN_LOGPROBS
    sft.negative_log_likelihood = PLAIN_LOSS
    return run


def without_working(folder: Path) -> str:
    """Writes the demonstrations of tiny/arithmetic that give the answer at once to a folder."""
    folder.mkdir()
    for split in ("train", "test"):
        lines = Path(f"tiny/arithmetic/sft/{split}.jsonl").read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["completion"].startswith("#")]
        (folder / f"{split}.jsonl").write_text("\n".join(kept) + "\n")
    return str(folder)


def measure(seed: int) -> dict[str, float]:
    """Shares of completions with working, and of the last policy the accuracies."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        over_tokens = train_sft(folder, seed)
        over_completions = train_sft_over_completions(folder, seed)
        data = without_working(Path(folder, "data"))
        at_once = train_sft(folder, seed, dataset=data, epochs=8.0)
        args = grpo.Args(output_dir=folder, seed=seed, model=str(at_once.folder / "model"))
        with contextlib.redirect_stdout(io.StringIO()):
            trained = Run(grpo.main(args))
        samples = read_jsonl(trained.folder / "samples.jsonl")
        first, last = trained.evaluations[0], trained.evaluations[-1]
        return {
            "mean over tokens": share_with_working(over_tokens.samples),
            "mean over completions": share_with_working(over_completions.samples),
            "never shown, before": share_with_working(
                [sample for sample in samples if sample["step"] == 0]
            ),
            "never shown, after": share_with_working(trained.samples),
            "never shown, accuracy before": first["eval/accuracy"],
            "never shown, accuracy after": last["eval/accuracy"],
            "never shown, tokens after": last["eval/length_mean"],
        }


def results() -> dict:
    """What docs/results/shown_working.json holds."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        measured = list(pool.map(measure, SEEDS))
    numbers = {}
    for name in measured[0]:
        numbers[name] = [round(of_seed[name], 4) for of_seed in measured]
    return {"tables": tables(numbers), "seeds": SEEDS, "numbers": numbers}


def tables(numbers: dict[str, list[float]]) -> dict:
    shares = [
        ["tokens of the optimiser step (`sft.py`)", spread(numbers["mean over tokens"], 2)],
        ["tokens of each completion first", spread(numbers["mean over completions"], 2)],
    ]
    never_shown = []
    for moment in ("before", "after"):
        row = [moment, spread(numbers[f"never shown, {moment}"], 2)]
        row.append(spread(numbers[f"never shown, accuracy {moment}"], 2))
        never_shown.append(row)
    return {
        "shown working": {
            "columns": ["mean of the loss over", "share of samples with working"],
            "rows": shares,
        },
        "never shown": {
            "columns": ["60 rollouts of GRPO", "share of samples with working", "accuracy"],
            "rows": never_shown,
        },
    }
