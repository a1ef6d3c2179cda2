"""Peak memory: of log-probabilities over a large vocabulary, of activations, of training runs.

    python docs/experiments/memory.py logprobs
    python docs/experiments/memory.py activations
    python docs/experiments/memory.py scripts

Each figure comes from a process of its own. On a CPU it is the most resident memory that Linux has
seen since the measurement began, less what was resident then; on a GPU what torch has allocated.

`scripts` trains random models of 27M parameters for two steps, few and short rows at a time, so
that weights, gradients and AdamW's moments are most of the memory: a trained model needs four times
its weights, a frozen one its weights. The tiny models are trained before the measurement begins, to
have made what is made once.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from measuring import (
    DEVICE,
    large_models,
    median_seconds,
    peak,
    random_model,
    reset_peak,
    two_steps,
)
from subprocesses import run_for_json
from transformers import LlamaConfig

from common.generation import autocast, checkpoint_activations
from common.logprobs import MAX_LOGITS, completion_logprobs

VOCABULARY, HIDDEN, TOKENS = 151_936, 896, 2_048  # Qwen2.5-0.5B's head
WAYS = ("plain", "ours", "ours with entropy")
MB = 1e6


# --- in a process of its own -------------------------------------------------------------------
def measure_logprobs(way: str) -> dict:
    """Extra bytes and seconds of log-probs, forward and backward, through the head of a model."""
    # Hardly a layer, and embeddings that are not trained: what is left to measure is the head.
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=1,
        num_attention_heads=14,
        max_position_embeddings=TOKENS + 1,
    )
    model = random_model(config, device=DEVICE)
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), device=DEVICE)

    def forward(length: int) -> torch.Tensor:
        """The sum of what is computed for all tokens but the first."""
        if way == "plain":  # the usual lines: logits of all positions, log_softmax, gather
            with autocast(model.device):
                logits = model(input_ids=ids[:, : length - 1], use_cache=False).logits.float()
            return torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:length, None]).sum()
        row = ids[0, :length].tolist()
        sequences = [(row[:1], row[1:])]
        if way == "ours":
            return completion_logprobs(model, sequences, [0]).sum()
        logprobs, _ = completion_logprobs(model, sequences, [0], entropy=True)
        return logprobs.sum()

    def forward_and_backward(length: int = TOKENS + 1) -> None:
        forward(length).backward()
        model.zero_grad()

    forward_and_backward(64)  # what is made once, such as the threads' own memory
    before = reset_peak()
    forward_and_backward()
    extra = peak() - before
    return {"extra": extra, "seconds": median_seconds(forward_and_backward, repeats=3)}


def measure_activations(way: str) -> dict:
    """Extra bytes and seconds of a forward and backward pass over 8 rows of 1,024 tokens."""
    config = LlamaConfig(
        vocab_size=50_257,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=1_024,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = random_model(config, device=DEVICE)
    if way == "checkpointing":
        checkpoint_activations(model)
    ids = torch.randint(config.vocab_size, (8, 1_024)).tolist()
    sequences = [(row[:128], row[128:]) for row in ids]
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def forward_and_backward(num_rows: int = 8) -> None:
        completion_logprobs(model, sequences[:num_rows], range(num_rows)).sum().backward()

    forward_and_backward(1)
    before = reset_peak()
    forward_and_backward()
    extra = peak() - before
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
    return {"extra": extra, "seconds": median_seconds(forward_and_backward, 3), "norm": norm}


def measure_script(name: str) -> dict:
    """Bytes of the trained model's weights, and the peak of each stage of a run."""
    from scripts import SCRIPTS

    script, stage_peaks, before = SCRIPTS[name], {}, 0

    def end_stage(stage: str) -> None:
        stage_peaks[stage] = max(peak() - before, stage_peaks.get(stage, 0))
        reset_peak()

    def ends_stage(stage: str, function: Callable) -> Callable:
        """The function; where it is called, the stage ends."""

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            end_stage(stage)
            return function(*args, **kwargs)

        return wrapper

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = two_steps(script, micro_batch_size=4) | {"output_dir": folder}
        large_flags = flags | large_models(script, Path(folder))
        script.main(script.Args(**flags))
        script.AdamW = ends_stage("loading", script.AdamW)
        script.save_checkpoint = ends_stage("training", script.save_checkpoint)
        script.save_model = ends_stage("checkpoint", script.save_model)
        before = reset_peak()
        script.main(script.Args(**large_flags))
        end_stage("model")
        weights = (Path(large_flags["model"]) / "model.safetensors").stat().st_size
    return {"weights": weights, "stages": stage_peaks}


# --- the tables --------------------------------------------------------------------------------
def print_logprobs() -> None:
    gradients = 4 * HIDDEN * (VOCABULARY + TOKENS)  # of the head's weights and the hidden states
    chunk = 4 * (MAX_LOGITS // VOCABULARY) * VOCABULARY
    print(f"{TOKENS} tokens, vocabulary {VOCABULARY}, hidden {HIDDEN}, forward and backward")
    print(f"gradients {gradients / MB:,.0f} MB, chunk {chunk / MB:,.0f} MB")
    for way in WAYS:
        measured = run_for_json([__file__, "logprobs", "--one", way])
        extra, seconds = measured["extra"], measured["seconds"]
        chunks = (extra - gradients) / chunk
        print(
            f"{way}: {extra / MB:,.0f} MB extra (gradients and {chunks:.2f} chunks), "
            f"{seconds:.2f} s"
        )


def print_activations() -> None:
    for way in ("plain", "checkpointing"):
        measured = run_for_json([__file__, "activations", "--one", way])
        extra, seconds = measured["extra"] / MB, measured["seconds"]
        print(f"{way}: {extra:,.0f} MB extra, {seconds:.2f} s, gradient norm {measured['norm']}")


def print_scripts() -> None:
    from scripts import SCRIPTS

    for name in SCRIPTS:
        # Freed memory goes back to the system at once; it would be counted as resident else.
        measured = run_for_json(
            [__file__, "scripts", "--one", name], MALLOC_MMAP_THRESHOLD_="65536"
        )
        weights, stages = measured["weights"], measured["stages"]
        highest = max(stages.values())
        cells = [f"{stage} {size / MB:,.0f}" for stage, size in stages.items()]
        print(
            f"{name}: peak {highest / MB:,.0f} MB, {highest / weights:.2f} times the trained "
            f"model's weights of {weights / MB:,.0f} MB ({', '.join(cells)})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["logprobs", "activations", "scripts"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one and args.what == "logprobs":
        print(json.dumps(measure_logprobs(args.one)))
    elif args.one and args.what == "activations":
        print(json.dumps(measure_activations(args.one)))
    elif args.one:
        print(json.dumps(measure_script(args.one)))
    elif args.what == "logprobs":
        print_logprobs()
    elif args.what == "activations":
        print_activations()
    else:
        print_scripts()


if __name__ == "__main__":
    main()
