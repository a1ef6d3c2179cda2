"""docs/memory.md: memory by algorithm and model size, and how near the formula is to measured peaks
at the sizes of Qwen2.5-0.5B and SmolLM2-135M.
"""

import os
import tempfile
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.logprobs import Sequences
from docs.experiments.cost.memory_model import (
    CONSTANTS,
    DEFAULTS,
    GB,
    llama_sizes,
    memory,
    peak,
)
from docs.experiments.lib import measuring
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import train

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
BFLOAT16, FLOAT32 = CONSTANTS["precisions"]["mixed"], CONSTANTS["precisions"]["float32"]
NAMES = [name for name in MODELS if name != "Llama-3.1-8B"]  # of the tables
CARDS = (12, 16, 24, 48, 80)  # GB
FITS = 0.92  # of a card, as in docs/explorer.html
RANK = 16
WORK = DEFAULTS | {"generation_batch": 16}
METHODS = {  # by their column: with all weights, and with adapters
    "SFT": ("sft", "sft"),
    "reward model": ("rm", "rm"),
    "DPO": ("dpo", "dpo"),
    "GRPO": ("grpo_no_kl", "grpo"),
    "PPO": ("ppo", "ppo"),
}


def largest_fitting(algorithm: str, card: int, **adapters: int) -> str:
    """The size of the largest model whose peak is at most `FITS` of the card."""
    work = WORK | {"checkpointing": True} | adapters
    fitting = [
        name.rpartition("-")[2]  # 7B of Qwen2.5-7B
        for name, model in MODELS.items()
        if name in NAMES
        and peak(model, ALGORITHMS[algorithm], BFLOAT16, **work) <= FITS * card * GB
    ]
    return fitting[-1] if fitting else "none"


def tables(_: dict) -> dict[str, dict]:
    """What one card holds: with all weights / with adapters / with adapters on 4 bits."""
    rows = []
    for card in CARDS:
        cells = []
        for full, adapted in METHODS.values():
            sizes = [
                largest_fitting(full, card),
                largest_fitting(adapted, card, lora_rank=RANK),
                largest_fitting(adapted, card, lora_rank=RANK, bits=4),
            ]
            cells.append(" / ".join(sizes))
        rows.append([f"{card} GB", *cells])
    fits = {"columns": ["one card", *METHODS], "rows": rows}
    return {"model_sizes fits": fits, "model_sizes stages": stages_table()}


STAGES = {  # of docs/one_card.md: algorithm, and its --micro-batch-size
    "`sft.py`": ("sft", 4),
    "`dpo.py`": ("dpo", 2),
    "`grpo.py`": ("grpo_no_kl", 4),
}


def stages_table() -> dict:
    """GB of each stage by size, without / with --activation-checkpointing."""
    rows = []
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B"):
        cells = []
        for algorithm, micro_batch in STAGES.values():
            work = DEFAULTS | {"prompt": 256, "lora_rank": RANK, "generation_batch": 64}
            work |= {"micro_batch": micro_batch}
            peaks = (
                peak(
                    MODELS[name],
                    ALGORITHMS[algorithm],
                    BFLOAT16,
                    checkpointing=checkpointing,
                    **work,
                )
                for checkpointing in (False, True)
            )
            cells.append(" / ".join(f"{bytes / GB:.1f}" for bytes in peaks))
        rows.append([name, *cells])
    return {"columns": ["GB", *STAGES], "rows": rows}


# --- real_size ---------------------------------------------------------------------------------
SIZES = {
    "Qwen2.5-0.5B": MODELS["Qwen2.5-0.5B"],
    "SmolLM2-135M": dict(
        hidden=576, layers=30, query=576, kv=192, ffn=1536, vocab=49_152, tied=True
    ),
}
REAL_RUNS = {  # script and flags, by the algorithm of memory_model.py
    "sft": ("sft", dict(max_length=64)),
    "dpo": ("dpo", dict(max_length=64)),
    "grpo": (
        "grpo",
        dict(max_new_tokens=48, group_size=2, prompts_per_rollout=4, micro_batch_size=2),
    ),
    "ppo_shared": ("ppo_rlhf", dict(max_new_tokens=48, critic_init="policy")),
}


def measure_script(name: str, size: dict, more_flags: dict[str, Any]) -> tuple[int, int, int]:
    """Two optimiser steps with random models of a size: the tokens of the longest row, prompt and
    completion, and the peak of the second step, without what loading and saving need."""
    script = import_module(name)
    flags = measuring.two_steps(script, micro_batch_size=1) | more_flags
    completion_logprobs = script.completion_logprobs
    lengths = []

    def noted_logprobs(model: Any, sequences: Sequences, inds: Tensor, *rest: Any, **options: Any):
        if torch.is_grad_enabled():
            lengths.extend(tuple(map(len, sequences[i])) for i in inds)
        return completion_logprobs(model, sequences, inds, *rest, **options)

    def peak_of_step() -> int:
        highest = measuring.peak()
        measuring.reset_peak()
        return highest

    with tempfile.TemporaryDirectory() as folder:
        large_models = measuring.large_models(script, Path(folder), llama_sizes(size))
        train(script, output_dir=f"{folder}/first", **flags)  # what is made once
        script.completion_logprobs = noted_logprobs
        before = measuring.reset_peak()
        with measuring.noted_steps(peak_of_step) as peaks:
            train(script, output_dir=f"{folder}/second", **flags | large_models)
        return *max(lengths, key=sum), peaks[1] - before


def predicted_peak(size: dict, algorithm: str, measured: dict[str, int], lora_rank: int) -> float:
    """Bytes of the update with micro-batches whose rows are as long as measured."""
    work = DEFAULTS | {name: measured[name] for name in ("prompt", "completion")}
    _, flags = REAL_RUNS[algorithm]
    work |= {"lora_rank": lora_rank, "micro_batch": flags.get("micro_batch_size", 1)}
    return sum(memory(size, ALGORITHMS[algorithm], FLOAT32, **work)["update"].values())


def measure_real_size() -> dict:
    """Two micro-batches per step, in float32 on a CPU. Needs 16 GB, and half an hour."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    numbers = {name: {algorithm: {} for algorithm in REAL_RUNS} for name in SIZES}
    for name, algorithm, lora_rank in product(SIZES, REAL_RUNS, (0, RANK)):
        script, flags = REAL_RUNS[algorithm]
        all_flags = flags | {"lora_rank": lora_rank}
        measured = measuring.in_own_process(measure_script, script, SIZES[name], all_flags)
        keys = ("prompt", "completion", f"rank {lora_rank}")
        numbers[name][algorithm] |= dict(zip(keys, measured, strict=True))
    return numbers


def real_size_tables(results: dict) -> dict:
    """With all weights and with adapters: GB that are predicted, measured, and their ratio."""
    rows = []
    for name, algorithm in product(SIZES, REAL_RUNS):
        measured = results["numbers"][name][algorithm]
        script, flags = REAL_RUNS[algorithm]
        run = f"`{script}.py`"
        for flag in flags.keys() & {"critic_init", "micro_batch_size"}:
            run += f" --{flag.replace('_', '-')} {flags[flag]}"
        cells = []
        for lora_rank in (0, RANK):
            predicted = predicted_peak(SIZES[name], algorithm, measured, lora_rank)
            highest = measured[f"rank {lora_rank}"]
            found = f"{highest / GB:.1f} ({highest / predicted:.2f})"
            cells.append(f"{predicted / GB:.1f}, {found}")
        tokens = f"{measured['prompt']} + {measured['completion']}"
        rows.append([name, run, tokens, *cells])
    columns = [
        "model",
        "run",
        "tokens",
        "all weights: predicted, measured",
        f"`--lora-rank {RANK}`",
    ]
    return {"real_size": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment("model_sizes", more_tables=tables),
    Experiment("real_size", measure_all=measure_real_size, more_tables=real_size_tables),
)
