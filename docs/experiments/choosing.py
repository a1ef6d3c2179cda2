"""docs/memory.md: memory by algorithm and model size, and how near the formula is to measured peaks
at the size of Qwen2.5-0.5B.
"""

import json
import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import common.logprobs
from common.tokens import pad_rows
from docs.experiments.cost.memory_model import (
    CONSTANTS,
    DEFAULTS,
    GB,
    PARTS,
    memory,
    peak,
    shape,
)
from docs.experiments.lib import measuring
from docs.experiments.lib.drawing import GREY, TEXT, panel
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import train

# --- the peaks that are measured, each in a process of its own ---------------------------------


def algorithm_of(script_name: str) -> str:
    """What a script runs by default: the first word of its name."""
    return script_name.partition("_")[0]


class MicroBatchRecorder:
    """Notes the micro-batches that a script trains on: rows, tokens of each, whether AdamW has
    moments by then, and whether there are gradients."""

    def __init__(self, script: Any) -> None:
        self.clear()
        adamw_step = torch.optim.AdamW.step

        def noted_pad_rows(rows: list, device: Any, left: bool = False) -> tuple:
            ids, mask = pad_rows(rows, device, left)
            if torch.is_grad_enabled():
                self.micro_batches.append([*ids.shape, self.has_moments, self.has_gradients])
                self.has_gradients = True
            return ids, mask

        def noted_step(optimizer: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
            self.has_moments, self.has_gradients = True, False
            return adamw_step(optimizer, *args, **kwargs)

        torch.optim.AdamW.step = noted_step
        common.logprobs.pad_rows = noted_pad_rows
        if hasattr(script, "pad_rows"):
            script.pad_rows = noted_pad_rows

    def clear(self) -> None:
        self.micro_batches = []
        self.has_moments = self.has_gradients = False


def measure_script(name: str, sizes: dict[str, int], more_flags: dict[str, Any]) -> dict:
    """Peak of two optimiser steps with random models of these sizes, and their micro-batches."""
    script = import_module(name)
    recorder = MicroBatchRecorder(script)
    flags = measuring.two_steps(script, micro_batch_size=1) | more_flags
    with tempfile.TemporaryDirectory() as folder:
        large_models = measuring.large_models(script, Path(folder), sizes)
        train(script, output_dir=f"{folder}/first", **flags)  # what is made once
        recorder.clear()
        before = measuring.reset_peak()
        train(script, output_dir=f"{folder}/second", **flags | large_models)
        measured = measuring.peak() - before
        config = json.loads((Path(large_models["model"]) / "config.json").read_text())
    # The largest micro-batch.
    rows, length, _, _ = max(recorder.micro_batches, key=lambda batch: batch[0] * batch[1])
    model = shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        query=config["head_dim"] * config["num_attention_heads"],
        kv=config["head_dim"] * config["num_key_value_heads"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
    )
    algorithm = CONSTANTS["algorithms"][algorithm_of(name)]
    work = {"micro_batch": rows // algorithm["rows"], "prompt": length, "completion": 0}
    if algorithm["samples"]:
        group_size = flags.get("group_size", getattr(script.Args, "group_size", 1))
        work |= {"rollout": flags["prompts_per_rollout"] * group_size, "group": group_size}
    return {
        "run": f"`{name}.py`",
        "model": model,
        "algorithm": algorithm_of(name),
        "work": work,
        "seen": recorder.micro_batches,
        "peak": measured,
    }


def expected(case: dict) -> float:
    """Bytes of what there was when the micro-batches came: in a step's first there are no
    gradients yet, in the first step no moments of AdamW."""
    model, precision = case["model"], CONSTANTS["precisions"]["float32"]
    work = DEFAULTS | case["work"]
    algorithm = CONSTANTS["algorithms"][case["algorithm"]]
    totals_as_they_came = []
    for rows, length, has_moments, has_gradients in case["seen"]:
        batch_work = work | {"micro_batch": rows, "prompt": length}
        batch_parts = memory(model, algorithm | {"rows": 1}, precision, **batch_work)["update"]
        if not has_moments:
            batch_parts["adamw"] = 0.0
        if not has_gradients:
            batch_parts["gradients"] = 0.0
        totals_as_they_came.append(sum(batch_parts.values()))
    return max(totals_as_they_came)


# --- the tables --------------------------------------------------------------------------------
COLUMNS = {  # models, and their headings
    "Qwen2.5-0.5B": "0.5B",
    "Qwen2.5-1.5B": "1.5B",
    "Qwen2.5-3B": "3B",
    "Qwen2.5-7B": "7B",
    "Qwen2.5-14B": "14B",
    "Qwen2.5-32B": "32B",
    "Llama-3.1-70B": "70B",
}


def peaks_in_gb(gpus: int) -> dict[str, list[float]]:
    """By algorithm, for each model of `COLUMNS`."""
    peaks = {}
    for key, algorithm in CONSTANTS["algorithms"].items():
        peaks[key] = []
        for name in COLUMNS:
            model, precision = CONSTANTS["models"][name], CONSTANTS["precisions"]["mixed"]
            size = peak(model, algorithm, precision, **DEFAULTS | {"gpus": gpus})
            peaks[key].append(size / GB)
    return peaks


def peaks_table(peaks: dict[str, list[float]]) -> dict:
    """The algorithms that need the same share a row."""
    names_by_cells = {}
    for key, sizes_in_gb in peaks.items():
        cells = tuple(f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes_in_gb)
        names_by_cells.setdefault(cells, []).append(CONSTANTS["algorithms"][key]["name"])
    rows = [["; ".join(names), *cells] for cells, names in names_by_cells.items()]
    return {"columns": ["algorithm", *COLUMNS.values()], "rows": rows}


def tables(_: dict) -> dict:
    return {
        "choosing one": peaks_table(peaks_in_gb(gpus=1)),
        "choosing eight": peaks_table(peaks_in_gb(gpus=8)),
    }


def bars() -> dict[str, dict[str, float]]:
    """What the figure draws: the parts in GB of a 7B model on one GPU, at the moment that needs
    most, by the algorithm's label."""
    labels = {
        "sft": "SFT",
        "dpo": "DPO, IPO",
        "grpo_no_kl": "GRPO without a KL",
        "grpo": "GRPO, GSPO, GDPO",
        "grpo_rm": "GRPO with a reward model",
        "ppo": "PPO",
    }
    model, precision = CONSTANTS["models"]["Qwen2.5-7B"], CONSTANTS["precisions"]["mixed"]
    bars = {}
    for name, label in labels.items():
        moments = memory(model, CONSTANTS["algorithms"][name], precision, **DEFAULTS)
        highest = max(moments.values(), key=lambda parts: sum(parts.values()))
        bars[label] = {PARTS[part]: round(size / GB, 2) for part, size in highest.items() if size}
    return bars


def draw(_: dict) -> dict:
    """Stacked bars, each part with its own tint, hatching and label."""
    parts_by_label = bars()
    styles = {  # tint, hatching, and what is written into the part
        "policy": ("#9ecbf5", "", "policy"),
        "reference": ("#f5c9a3", "//", "ref"),
        "critic": ("#a9dcb8", "", "critic"),
        "reward model": ("#d8c1f0", "\\\\", "RM"),
        "gradients": ("#f6b9c4", "..", "grads"),
        "AdamW": ("#e3d08a", "", "AdamW"),
        "copies of weights": ("#c3c9d0", "xx", ""),
        "activations": ("#a5dde0", "", ""),
    }
    xlabel = "GB on one GPU, 7B parameters, a micro-batch of 1 with 512 + 512 tokens"
    axis = panel("PPO needs twice the memory of SFT", xlabel, width=8, height=3.4)
    axis.set_title(axis.get_title("left"), pad=20)
    axis.grid(visible=False, axis="y")
    left_ends = dict.fromkeys(parts_by_label, 0.0)
    for part, (tint, hatching, written) in styles.items():
        widths = [parts.get(part, 0.0) for parts in parts_by_label.values()]
        drawn = axis.barh(
            [*left_ends],
            widths,
            left=[*left_ends.values()],
            color=tint,
            hatch=hatching,
            edgecolor=GREY,
            lw=[0.8 if width else 0 for width in widths],
            label=part,
            height=0.62,
        )
        labels = [written if width else "" for width in widths]
        axis.bar_label(drawn, labels, label_type="center", bbox=dict(fc=tint, lw=0, pad=1))
        for label, width in zip(left_ends, widths, strict=True):
            left_ends[label] += width
    axis.bar_label(drawn, [f"{total:.0f} GB" for total in left_ends.values()], padding=4)
    axis.axvline(80, color=TEXT, ls="--", lw=1.2)
    axis.annotate("80 GB", (80, -0.75), ha="center", annotation_clip=False)
    axis.set(xlim=(0, 1.12 * max(left_ends.values())))
    axis.invert_yaxis()
    axis.figure.legend(loc="outside lower center", ncols=4, handlelength=2.5)
    return {"choosing": axis}


# --- real_size ---------------------------------------------------------------------------------
QWEN = dict(  # the shape of Qwen2.5-0.5B, but for the biases of queries, keys and values
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4_864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
)
REAL_RUNS = {  # script and flags, by the algorithm of memory_model.py
    "sft": ("sft", dict(max_length=64)),
    "dpo": ("dpo", dict(max_length=64)),
    "grpo": ("grpo", dict(max_new_tokens=48, group_size=2, prompts_per_rollout=2)),
    "ppo_shared": ("ppo_rlhf", dict(max_new_tokens=48, critic_init="policy")),
}


def measure_real_size() -> dict:
    """Two optimiser steps of two micro-batches of one row (or pair), in float32 on a CPU.

    What is predicted is for the lengths that the micro-batches had. Needs 16 GB of memory.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    numbers = {}
    for algorithm, (script, flags) in REAL_RUNS.items():
        case = measuring.in_own_process(measure_script, script, QWEN, flags)
        predicted = expected(case | {"algorithm": algorithm})
        length = max(length for _, length, _, _ in case["seen"])
        numbers[algorithm] = {
            "length": length,
            "predicted": predicted,
            "measured": case["peak"],
        }
    return {"numbers": numbers}


def real_size_tables(results: dict) -> dict:
    rows = []
    for algorithm, measured in results["numbers"].items():
        script, _ = REAL_RUNS[algorithm]
        run = f"`{script}.py`"
        if algorithm == "ppo_shared":
            run += " --critic-init policy"
        gigabytes = [f"{measured[size] / GB:.1f}" for size in ("predicted", "measured")]
        ratio = f"{measured['measured'] / measured['predicted']:.2f}"
        rows.append([run, str(measured["length"]), *gigabytes, ratio])
    columns = ["run", "tokens", "predicted, GB", "measured, GB", "measured / predicted"]
    return {"real_size": {"columns": columns, "rows": rows}}


EXPERIMENTS = (
    Experiment("choosing", tables, draw=draw),
    Experiment("real_size", real_size_tables, measure_real_size),
)
