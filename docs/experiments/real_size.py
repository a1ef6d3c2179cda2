"""Predicted and measured memory at a real size: the shape of Qwen2.5-0.5B, with random weights.

    python docs/experiments/figures.py real_size       # ten minutes on two cores, 16 GB of memory

Each script takes two optimiser steps of two micro-batches of one row (or pair), in float32 on a
CPU. The peak above what was in use before is compared with what `memory` of choosing.py predicts
for the lengths that the micro-batches had.
"""

import json
import sys

import choosing
from subprocesses import run_for_json

QWEN = dict(  # the shape of Qwen2.5-0.5B, but for the biases of queries, keys and values
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4_864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
)
RUNS = {  # flags of a script, by the algorithm of choosing.py
    "sft": ("sft", dict(max_length=64)),
    "dpo": ("dpo", dict(max_length=64)),
    "grpo": ("grpo", dict(max_new_tokens=48, group_size=2, prompts_per_rollout=2)),
    "ppo_shared": ("ppo_rlhf", dict(max_new_tokens=48, critic_init="policy")),
}


def measure(name: str) -> dict:
    script_name, flags = RUNS[name]
    case = choosing.measure_script(script_name, QWEN, micro_batch_size=1, **flags)
    return case | {"run": f"`{script_name}.py`", "algorithm": name}


def results() -> dict:
    """What docs/results/real_size.json holds."""
    rows, numbers = [], {}
    for name in RUNS:
        case = run_for_json([__file__, name], MALLOC_MMAP_THRESHOLD_="65536")
        _, _, predicted = choosing.expected(case)
        flags = " ".join(["--critic-init policy"] if name == "ppo_shared" else [])
        length = max(seen[1] for seen in case["seen"])
        ratio = f"{case['peak'] / predicted:.2f}"
        gigabytes = [f"{size / choosing.GB:.1f}" for size in (predicted, case["peak"])]
        rows.append([f"{case['run']} {flags}".strip(), str(length), *gigabytes, ratio])
        numbers[name] = {"predicted": predicted, "measured": case["peak"]}
        print(rows[-1], flush=True)
    columns = ["run", "tokens", "predicted, GB", "measured, GB", "measured / predicted"]
    return {"tables": {"real_size": {"columns": columns, "rows": rows}}, "numbers": numbers}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
