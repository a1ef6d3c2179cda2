"""Memory of a run by algorithm, from one table of constants, and how near it is to measured peaks.

    python docs/experiments/figures.py choosing     # five minutes on two cores
    python docs/experiments/choosing.py             # writes docs/explorer.html too

`CONSTANTS` stands in docs/explorer.html as JSON; tests/test_choosing.py compares the two, and
what the page shows with what `memory` computes. A GB is 10^9 bytes.
"""

import json
import sys
import tempfile
from math import ceil
from pathlib import Path
from typing import Any

import measuring
import paths
import torch
from scripts import SCRIPTS
from subprocesses import run_for_json
from transformers import Qwen2Config

import common.logprobs
from common.generation import generate, pad_rows

RESULTS, PAGE = paths.RESULTS / "choosing.json", paths.DOCS / "explorer.html"
GB = 1e9


# --- the constants -----------------------------------------------------------------------------
def shape(hidden: int, layers: int, query: int, kv: int, ffn: int, vocab: int, tied: bool) -> dict:
    """`query` and `kv` are widths, heads times the size of a head; `tied` embeddings are the head's
    weights too."""
    return dict(hidden=hidden, layers=layers, query=query, kv=kv, ffn=ffn, vocab=vocab, tied=tied)


def needs(
    name: str, trained: list[str], frozen: list[str] | None = None, samples: str = "", rows: int = 1
) -> dict:
    """The models of an algorithm; what it samples: nothing, one completion for each prompt, or a
    group; and the rows of one element of a micro-batch: a pair has two."""
    return dict(name=name, trained=trained, frozen=frozen or [], samples=samples, rows=rows)


def sizes(name: str, weights: int, gradients: int, adamw: int, frozen: int, compute: int) -> dict:
    """Bytes of a parameter, and of a number that a matrix product reads and writes."""
    return dict(
        name=name,
        weights=weights,
        gradients=gradients,
        adamw=adamw,
        frozen=frozen,
        compute=compute,
    )


def card(gb: int, name: str, bfloat16: bool = True) -> dict:
    """A GPU's memory in GB, and whether it computes in bfloat16; the scripts use float32 if not."""
    return dict(gb=gb, name=name, bfloat16=bfloat16)


CONSTANTS = {
    "models": {  # hidden, layers, query, kv, ffn, vocab, tied
        "Qwen2.5-0.5B": shape(896, 24, 896, 128, 4_864, 151_936, True),
        "Qwen2.5-1.5B": shape(1_536, 28, 1_536, 256, 8_960, 151_936, True),
        "Qwen2.5-3B": shape(2_048, 36, 2_048, 256, 11_008, 151_936, True),
        "Qwen2.5-7B": shape(3_584, 28, 3_584, 512, 18_944, 152_064, False),
        "Llama-3.1-8B": shape(4_096, 32, 4_096, 1_024, 14_336, 128_256, False),
        "Qwen2.5-14B": shape(5_120, 48, 5_120, 1_024, 13_824, 152_064, False),
        "Qwen2.5-32B": shape(5_120, 64, 5_120, 1_024, 27_648, 152_064, False),
        "Llama-3.1-70B": shape(8_192, 80, 8_192, 1_024, 28_672, 128_256, False),
    },
    "algorithms": {  # by the first word of their script's name, and variants
        "sft": needs("SFT", ["policy"]),
        "rm": needs("Reward model", ["reward"], rows=2),
        "reinforce": needs("REINFORCE, RLOO", ["policy"], samples="group"),
        "reinforce_kl": needs(
            "REINFORCE, RLOO with a KL", ["policy"], ["reference"], samples="group"
        ),
        "ppo": needs("PPO", ["policy", "critic"], ["reference", "reward"], samples="one"),
        "ppo_rule": needs("PPO with a rule", ["policy", "critic"], ["reference"], samples="one"),
        "ppo_shared": needs(
            "PPO, value head on the policy", ["policy"], ["reference", "reward"], samples="one"
        ),
        "grpo": needs("GRPO, GSPO, GDPO", ["policy"], ["reference"], samples="group"),
        "grpo_no_kl": needs("GRPO without a KL (DAPO, Dr. GRPO)", ["policy"], samples="group"),
        "grpo_rm": needs(
            "GRPO with a reward model", ["policy"], ["reference", "reward"], samples="group"
        ),
        "dpo": needs("DPO, IPO", ["policy"], rows=2),
        "dpo_online": needs("DPO, IPO with an online reference", ["policy"], ["reference"], rows=2),
        "simpo": needs("SimPO, ORPO", ["policy"], rows=2),
        "kto": needs("KTO", ["policy"]),
    },
    "precisions": {  # weights, gradients, AdamW's moments, frozen weights, compute
        "mixed": sizes("float32, bfloat16 products (GPUs)", 4, 4, 8, 4, 2),
        "float32": sizes("float32 throughout (CPUs)", 4, 4, 8, 4, 4),
        "master": sizes("bfloat16, float32 master weights", 2, 2, 12, 2, 2),
        "bfloat16": sizes("bfloat16 throughout", 2, 2, 4, 2, 2),
    },
    # Bytes that autograd keeps for a token of a layer, per unit of each width.
    "activations": {
        "float32": dict(hidden=24, query=8, kv=8, ffn=16),
        "autocast": dict(hidden=26, query=4, kv=4, ffn=8),
        "bfloat16": dict(hidden=16, query=4, kv=4, ffn=8),
    },
    # Bytes of a layer's input, per unit of the hidden size: what checkpointing keeps of a layer.
    "layer_input": dict(float32=4, autocast=4, bfloat16=2),
    "prefill": dict(hidden=6, ffn=3),  # numbers that are in use at one time for a token of a prompt
    "logits_chunk": 2**26,  # MAX_LOGITS of common/logprobs.py
    "logit": 4,  # bytes; and of the head's gradient, per weight, before it is added to the others
    "sampled_logit": 16,  # bytes: the logit, its softmax, and the cumulative sum in float64
    "cards": [
        card(16, "T4", bfloat16=False),
        card(24, "RTX 4090"),
        card(48, "L40S"),
        card(80, "H100"),
        card(96, "RTX PRO 6000"),
        card(141, "H200"),
        card(192, "B200"),
    ],
    "most_gpus": 4_096,  # the page takes no more, and looks no further
    "most": 1_000_000,  # of any other number
}
PARTS = {
    "policy": "policy",
    "reference": "reference",
    "critic": "critic",
    "reward": "reward model",
    "gradients": "gradients",
    "adamw": "AdamW",
    "copies": "copies of weights",
    "activations": "activations",
    "cache": "KV cache",
    "logits": "a step's logits",
    "reading": "reading the prompts",
}
DEFAULTS = dict(gpus=1, micro_batch=1, prompt=512, completion=512, rollout=128, group=8)


# --- the formula -------------------------------------------------------------------------------
def parameters(model: dict) -> dict[str, int]:
    """Of a layer, of the embeddings with the output head, of the policy, and of a classifier. The
    biases of Qwen2.5's queries, keys and values, a ten-thousandth of all, are left out."""
    hidden, embedding = model["hidden"], model["vocab"] * model["hidden"]
    layer = hidden * (2 * model["query"] + 2 * model["kv"] + 3 * model["ffn"] + 2)
    ends = embedding * (1 if model["tied"] else 2) + hidden
    layers = model["layers"] * layer
    backbone = layers + embedding + hidden
    return dict(layer=layer, ends=ends, policy=layers + ends, backbone=backbone)


def weighted_widths(model: dict, per_unit: dict[str, int]) -> int:
    """The sum over widths of the model, each times what there is per unit of it."""
    return sum(amount * model[width] for width, amount in per_unit.items())


def memory(
    model: dict,
    algorithm: dict,
    precision: dict,
    gpus: int,
    micro_batch: int,
    prompt: int,
    completion: int,
    rollout: int,
    group: int,
    checkpointing: bool = False,
    train_layers: int | None = None,
) -> dict[str, dict[str, float]]:
    """Bytes on one GPU by part, while the script updates, and while it samples (if it does).

    micro_batch: rows or pairs that a GPU computes at a time; prompt, completion: tokens; rollout:
    completions of all GPUs together; group: completions of a prompt; checkpointing: with
    --activation-checkpointing; train_layers: the last layers of a reward model that are trained,
    None for all weights.
    """
    counts = parameters(model)
    embedding = model["vocab"] * model["hidden"]
    compute_bytes = precision["compute"]
    has_policy = "policy" in algorithm["trained"]  # which has an output head over the vocabulary
    freezes_layers = train_layers is not None and algorithm["trained"] == ["reward"]
    trained_layers = train_layers if freezes_layers else model["layers"]

    # 1. Weights, gradients and moments, sharded over the GPUs.
    model_sizes = {
        "policy": counts["policy"],
        "reference": counts["policy"],
        "critic": counts["backbone"],
        "reward": counts["backbone"],
    }
    update = dict.fromkeys(PARTS, 0.0)
    for name in algorithm["trained"]:
        trained = model_sizes[name]
        if freezes_layers:
            trained = trained_layers * counts["layer"]
        frozen = model_sizes[name] - trained
        update[name] = (precision["weights"] * trained + precision["frozen"] * frozen) / gpus
        update["gradients"] += precision["gradients"] * trained / gpus
        update["adamw"] += precision["adamw"] * trained / gpus
    for name in algorithm["frozen"]:
        update[name] = precision["frozen"] * model_sizes[name] / gpus
    sampling = dict(update)

    # 2. Copies of weights: on one GPU autocast keeps a copy in low precision of the trained weights
    # that it multiplies by; several gather two layers at a time, and what stands at the ends.
    uses_autocast = compute_bytes < precision["weights"]
    autocast_copies = 0
    if uses_autocast:
        multiplied = counts["backbone"] - (0 if has_policy else embedding)
        if freezes_layers:
            multiplied = trained_layers * counts["layer"]
        autocast_copies = compute_bytes * multiplied
    if gpus == 1:
        update["copies"] = autocast_copies
    else:
        gathered_ends = counts["ends"] if has_policy else embedding
        update["copies"] = compute_bytes * (gathered_ends + 2 * counts["layer"])

    # 3. Activations of a micro-batch, and the logits of a chunk with the gradient of the head.
    # Nothing is kept below the first trained layer. Checkpointing keeps the inputs of the layers.
    # The backward pass has the logits first, and then, one after another, the layers' activations.
    kind = "bfloat16"
    if compute_bytes == 4:
        kind = "float32"
    elif uses_autocast and gpus == 1:
        kind = "autocast"
    rows = micro_batch * algorithm["rows"]
    bytes_per_token = weighted_widths(model, CONSTANTS["activations"][kind])
    tokens = rows * (prompt + completion)
    chunk_bytes = head_gradient = 0
    if has_policy:
        positions = min(rows * completion, CONSTANTS["logits_chunk"] // model["vocab"])
        chunk_bytes = CONSTANTS["logit"] * model["vocab"] * positions
        head_gradient = CONSTANTS["logit"] * model["vocab"] * model["hidden"]
    if checkpointing:
        inputs = tokens * trained_layers * CONSTANTS["layer_input"][kind] * model["hidden"]
        one_layer = tokens * bytes_per_token if trained_layers > 0 else 0
        update["activations"] = float(inputs + max(one_layer, chunk_bytes) + head_gradient)
    else:
        kept = tokens * trained_layers * bytes_per_token
        update["activations"] = float(kept + chunk_bytes + head_gradient)
    if not algorithm["samples"]:
        return {"update": update}

    # 4. Sampling: all weights on each GPU, and the larger of what reading the prompts takes and
    # what the completions take. Each prompt is read once, before the rows of its group are made.
    completions = ceil(rollout / gpus)
    prompts = completions
    if algorithm["samples"] == "group":
        prompts = ceil(completions / group)
    cache_bytes = 2 * model["layers"] * model["kv"] * (prompt + completion) * compute_bytes
    logits = completions * CONSTANTS["sampled_logit"] * model["vocab"]
    reading = prompts * prompt * weighted_widths(model, CONSTANTS["prefill"]) * compute_bytes
    sampling["gradients"] = 0.0
    sampling["copies"] = autocast_copies if gpus == 1 else compute_bytes * counts["policy"]
    if prompts * cache_bytes + reading > completions * cache_bytes + logits:
        sampling["cache"], sampling["reading"] = float(prompts * cache_bytes), float(reading)
    else:
        sampling["cache"], sampling["logits"] = float(completions * cache_bytes), float(logits)
    return {"update": update, "sampling": sampling}


def peak(model: dict, algorithm: dict, precision: dict, **work: int) -> float:
    """Bytes at the moment that needs most; `work` is what `memory` wants to know else."""
    moments = memory(model, algorithm, precision, **work)
    return max(sum(parts.values()) for parts in moments.values())


def peak_on(card: dict, model: dict, algorithm: dict, precision: dict, **work: int) -> float:
    """`peak` on such a card: without bfloat16 the matrix products are in float32."""
    if precision["compute"] == 2 and not card["bfloat16"]:
        precision = CONSTANTS["precisions"]["float32"]
    return peak(model, algorithm, precision, **work)


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
    name: str, sizes: dict[str, int] = measuring.MEDIUM, micro_batch_size: int = ROWS, **more: Any
) -> dict:
    """Peak of two optimiser steps with random models of these sizes, and their micro-batches."""
    script = SCRIPTS[name]
    recorder = MicroBatchRecorder(script)
    flags = measuring.two_steps(script, micro_batch_size) | more
    with tempfile.TemporaryDirectory() as folder:
        large_models = measuring.large_models(script, Path(folder), sizes)
        script.main(script.Args(output_dir=folder, **flags))  # what is made once
        recorder.clear()
        before = measuring.reset_peak()
        script.main(script.Args(output_dir=folder, **flags | large_models))
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


def measure_update() -> dict:
    """Two optimiser steps on 4 x 512 tokens, of a model with a real vocabulary."""

    def run(model: torch.nn.Module, rows: int, prompt: int, completion: int) -> None:
        ids = torch.randint(CHECKED["vocab"], (rows, prompt + completion)).tolist()
        sequences = [(row[:prompt], row[prompt:]) for row in ids]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _step in range(2):
            for _micro_batch in range(2):  # the second micro-batch meets the gradients of the first
                logprobs = common.logprobs.completion_logprobs(model, sequences, range(rows))
                logprobs.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return measure_part("update", run, rows=4, prompt=256, completion=256)


def measure_sampling() -> dict:
    """A rollout of 48 x 256 tokens, of a model with a real vocabulary."""

    def run(model: torch.nn.Module, rows: int, prompt: int, completion: int) -> None:
        prompts = torch.randint(CHECKED["vocab"], (rows, prompt)).tolist()
        generate(
            model,
            prompts,
            max_new_tokens=completion,
            temperature=1.0,
            stop_ids=[],
            rng=torch.Generator(),
        )

    return measure_part("sampling", run, rows=48, prompt=224, completion=32)


def measure_part(name: str, run: Any, rows: int, prompt: int, completion: int) -> dict:
    """Peak of making a model and of `run(model, rows, prompt, completion)`."""

    def make_model(layers: int) -> torch.nn.Module:
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

    run(make_model(layers=1), rows=2, prompt=8, completion=2)  # what is made once
    before = measuring.reset_peak()
    run(make_model(CHECKED["layers"]), rows, prompt, completion)
    measured = measuring.peak() - before
    what = {"update": "an update", "sampling": "a rollout"}[name]
    return {
        "run": f"{what}, {rows} x {prompt + completion} tokens",
        "model": CHECKED,
        "algorithm": name,
        "work": {
            "micro_batch": rows,
            "prompt": prompt,
            "completion": completion,
            "rollout": rows,
            "group": 1,
        },
        "peak": measured,
    }


def measure_case(name: str) -> dict:
    if name == "update":
        return measure_update()
    if name == "sampling":
        return measure_sampling()
    return measure_script(name)


def measure() -> list[dict]:
    """All cases; freed memory goes back to the system at once."""
    cases = []
    for name in [*SCRIPTS, "update", "sampling"]:
        case = run_for_json([__file__, name], MALLOC_MMAP_THRESHOLD_="65536")
        cases.append(case)
        print(f"{name}: {case['peak'] / 1e6:,.0f} MB", flush=True)
    return cases


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


def tables(measured: list[dict]) -> dict:
    """All tables, the numbers behind them, and those of the figure."""
    one, eight = peaks_in_gb(gpus=1), peaks_in_gb(gpus=8)
    return {
        "tables": {
            "choosing_bytes": bytes_table(),
            "choosing_one": peaks_table(one),
            "choosing_eight": peaks_table(eight),
            "choosing_measured": measured_table(measured),
        },
        "numbers": {"choosing_one": one, "choosing_eight": eight, "measured": measured},
        "bars": bars(),
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


def draw(results: dict) -> None:
    """docs/figures/choosing.svg: stacked bars, each part with its own tint, hatching and label."""
    from drawing import GREY, TEXT, panels, save

    bars = results["bars"]
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
    left_ends = dict.fromkeys(bars, 0.0)
    for part, (tint, hatching, written) in styles.items():
        with_part = [label for label in bars if part in bars[label]]
        if not with_part:
            continue
        widths = [bars[label][part] for label in with_part]
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
    save(figure, "choosing.svg", "Memory of a 7B model by algorithm", description)


def results() -> dict:
    """What docs/results/choosing.json holds."""
    return tables(measure())


def page_constants() -> str:
    """The JSON that stands in docs/explorer.html."""
    return json.dumps(CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}, indent=1)


def write_page() -> None:
    """Put the constants into docs/explorer.html."""
    text = PAGE.read_text()
    opening = '<script type="application/json" id="constants">\n'
    start, _, rest = text.partition(opening)
    end = rest[rest.index("</script>") :]
    PAGE.write_text(start + opening + page_constants() + "\n" + end)


def main() -> None:
    if len(sys.argv) > 1:  # in a process of its own
        print(json.dumps(measure_case(sys.argv[1])))
        return
    from tables import insert_tables

    made = results()
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")
    draw(made)
    write_page()
    insert_tables()


if __name__ == "__main__":
    main()
