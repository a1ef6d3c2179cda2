"""docs/choosing.md: memory by algorithm and model size, and how near the formula is to measured
peaks, small and at the size of Qwen2.5-0.5B.
"""

import json
import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

import common.logprobs
from common.generation import generate
from common.tokens import pad_rows
from docs.experiments.cost.memory_model import (
    CONSTANTS,
    DEFAULTS,
    GB,
    PARTS,
    memory,
    peak,
    shape,
    write_explorer,
)
from docs.experiments.lib import measuring
from docs.experiments.lib.drawing import GREY, TEXT, panels
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import train


# --- the peaks that are measured, each in a process of its own ---------------------------------
ROWS = 16  # of a micro-batch
CHECKED = shape(512, 8, 512, 128, 1_536, 32_768, True)


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


def measure_script(
    name: str,
    sizes: dict[str, int] = measuring.MEDIUM,
    micro_batch_size: int = ROWS,
    more_flags: dict[str, Any] | None = None,
) -> dict:
    """Peak of two optimiser steps with random models of these sizes, and their micro-batches."""
    script = import_module(name)
    recorder = MicroBatchRecorder(script)
    flags = measuring.two_steps(script, micro_batch_size) | (more_flags or {})
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


def random_checked_model(layers: int = CHECKED["layers"]) -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=CHECKED["vocab"],
        hidden_size=CHECKED["hidden"],
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=CHECKED["ffn"],
        tie_word_embeddings=CHECKED["tied"],
    )
    return measuring.random_model(config)


def update(model: torch.nn.Module, rows: int, prompt: int, completion: int) -> None:
    """Two optimiser steps of two micro-batches, of which the second meets the gradients of the
    first."""
    ids = torch.randint(CHECKED["vocab"], (rows, prompt + completion)).tolist()
    sequences = [(row[:prompt], row[prompt:]) for row in ids]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _step in range(2):
        for _micro_batch in range(2):
            logprobs = common.logprobs.completion_logprobs(model, sequences, range(rows))
            logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def roll_out(model: torch.nn.Module, rows: int, prompt: int, completion: int) -> None:
    generate(
        model,
        torch.randint(CHECKED["vocab"], (rows, prompt)).tolist(),
        max_new_tokens=completion,
        temperature=1.0,
        stop_ids=[],
        rng=torch.Generator(),
    )


# What is measured of a model with a real vocabulary: a moment of `memory`, and its rows and tokens.
PARTS_CHECKED = {
    "an update": ("update", update, 4, 256, 256),
    "a rollout": ("sampling", roll_out, 48, 224, 32),
}


def measure_part(name: str) -> dict:
    """Peak of making a model of the shape `CHECKED`, and of a part of a run with it."""
    moment, run, rows, prompt, completion = PARTS_CHECKED[name]
    run(random_checked_model(layers=1), rows=2, prompt=8, completion=2)  # what is made once
    before = measuring.reset_peak()
    run(random_checked_model(), rows, prompt, completion)
    work = dict(micro_batch=rows, prompt=prompt, completion=completion, rollout=rows, group=1)
    return {
        "run": f"{name}, {rows} x {prompt + completion} tokens",
        "model": CHECKED,
        "algorithm": moment,
        "work": work,
        "peak": measuring.peak() - before,
    }


def measure() -> dict:
    """All cases, each in a process of its own; also the constants of docs/explorer.html."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back to the system at once
    cases = [measuring.in_own_process(measure_script, name) for name in measuring.SCRIPTS]
    cases += [measuring.in_own_process(measure_part, name) for name in PARTS_CHECKED]
    write_explorer()
    return {"numbers": {"measured": cases}}


def expected(case: dict) -> tuple[float, float, float]:
    """Bytes of weights, gradients and AdamW; of all that `memory` counts; and of what there was
    when the micro-batches came: in a step's first there are no gradients yet, in the first step
    no moments of AdamW."""
    model, precision = case["model"], CONSTANTS["precisions"]["float32"]
    work = DEFAULTS | case["work"]
    if case["algorithm"] in ("update", "sampling"):
        algorithm = CONSTANTS["algorithms"]["reinforce"]
        parts = memory(model, algorithm, precision, **work)[case["algorithm"]]
        if case["algorithm"] == "sampling":
            parts["adamw"] = 0.0  # no optimiser while it samples
        total = sum(parts.values())
        while_it_computes = ("activations", "cache", "logits", "reading")
        state = total - sum(parts[name] for name in while_it_computes)
        return state, total, total

    algorithm = CONSTANTS["algorithms"][case["algorithm"]]
    parts = memory(model, algorithm, precision, **work)["update"]
    total = sum(parts.values())
    totals_as_they_came = []
    for rows, length, has_moments, has_gradients in case["seen"]:
        batch_work = work | {"micro_batch": rows, "prompt": length}
        batch_parts = memory(model, algorithm | {"rows": 1}, precision, **batch_work)["update"]
        if not has_moments:
            batch_parts["adamw"] = 0.0
        if not has_gradients:
            batch_parts["gradients"] = 0.0
        totals_as_they_came.append(sum(batch_parts.values()))
    return total - parts["activations"], total, max(totals_as_they_came)


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


def bytes_table() -> dict:
    """The models that an algorithm has in memory, and what they take per parameter."""
    precision = CONSTANTS["precisions"]["mixed"]
    trained_bytes = precision["weights"] + precision["gradients"] + precision["adamw"]
    rows = []
    for algorithm in CONSTANTS["algorithms"].values():
        trained = [f"{PARTS[name]} (trained)" for name in algorithm["trained"]]
        frozen = [PARTS[name] for name in algorithm["frozen"]]
        total = trained_bytes * len(trained) + precision["frozen"] * len(frozen)
        rows.append([algorithm["name"], ", ".join(trained + frozen), str(total)])
    columns = ["algorithm", "models in memory while training", "bytes per parameter"]
    return {"columns": columns, "rows": rows}


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


def measured_table(cases: list[dict]) -> dict:
    rows = []
    for case in cases:
        state, total, as_they_came = expected(case)
        megabytes = [f"{x / 1e6:,.0f}" for x in (state, total, as_they_came, case["peak"])]
        rows.append([case["run"], *megabytes, f"{case['peak'] / as_they_came:.2f}"])
    columns = [
        "run",
        "weights, gradients, AdamW, MB",
        "with activations or cache, MB",
        "as the micro-batches came, MB",
        "measured peak, MB",
        "measured / as they came",
    ]
    return {"columns": columns, "rows": rows}


def tables(results: dict) -> dict:
    return {
        "choosing bytes": bytes_table(),
        "choosing one": peaks_table(peaks_in_gb(gpus=1)),
        "choosing eight": peaks_table(peaks_in_gb(gpus=8)),
        "choosing measured": measured_table(results["numbers"]["measured"]),
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


def draw(_: dict) -> tuple:
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
        "KV cache": ("#ffffff", "++", ""),
    }
    figure, (axis,) = panels(1, height=3.4)
    axis.grid(visible=False, axis="y")
    left_ends = dict.fromkeys(parts_by_label, 0.0)
    for part, (tint, hatching, written) in styles.items():
        with_part = [label for label in parts_by_label if part in parts_by_label[label]]
        if not with_part:
            continue
        widths = [parts_by_label[label][part] for label in with_part]
        axis.barh(
            with_part,
            widths,
            left=[left_ends[label] for label in with_part],
            color=tint,
            hatch=hatching,
            edgecolor=GREY,
            lw=0.8,
            label=part,
            height=0.62,
        )
        for label, width in zip(with_part, widths, strict=True):
            middle = left_ends[label] + width / 2
            axis.text(
                middle,
                label,
                written,
                ha="center",
                va="center",
                bbox=dict(facecolor=tint, lw=0, pad=1),
            )
            left_ends[label] += width
    for label, total in left_ends.items():
        axis.text(total + 3, label, f"{total:.0f} GB", va="center")
    axis.axvline(80, color=TEXT, ls="--", lw=1.2)
    axis.annotate(
        "80 GB",
        (80, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
    )
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.12 * max(left_ends.values())))
    axis.set_xlabel("GB on one GPU, 7B parameters, a micro-batch of 1 with 512 + 512 tokens")
    figure.legend(loc="outside lower center", ncols=4, handlelength=2.5)
    totals = [f"{label} {total:.0f} GB" for label, total in left_ends.items()]
    description = (
        "Stacked bars of the memory that six algorithms need for a model of 7B parameters on one "
        f"GPU, at the moment that needs most: {'; '.join(totals)}. A dashed line at 80 GB, the "
        "size of one card. AdamW's moments are the largest part of each bar."
    )
    return figure, "Memory of a 7B model by algorithm", description


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
        case = measuring.in_own_process(measure_script, script, QWEN, 1, flags)
        _, _, predicted = expected(case | {"algorithm": algorithm})
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
    Experiment("choosing", tables, measure, draw),
    Experiment("real_size", real_size_tables, measure_real_size),
)
