"""docs/memory.md: memory by model size and algorithm."""

from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, GB, peak
from docs.experiments.lib.experiment import Experiment

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
BFLOAT16 = CONSTANTS["precisions"]["mixed"]
NAMES = [name for name in MODELS if name != "Llama-3.1-8B"]
WORK = DEFAULTS | {"generation_batch": 16, "checkpointing": True}
WEIGHTS = ({}, {"lora_rank": 16}, {"lora_rank": 16, "bits": 4})  # all, adapters, on 4 bits
METHODS = {  # by their column: with all weights, and with adapters
    "SFT": ("sft", "sft"),
    "reward model": ("rm", "rm"),
    "DPO": ("dpo", "dpo"),
    "GRPO": ("grpo_no_kl", "grpo"),
    "PPO": ("ppo", "ppo"),
}


def tables(_: dict) -> dict[str, dict]:
    """GB at the peak: with all weights / with adapters / with adapters on 4 bits."""
    rows = []
    for name in NAMES:
        cells = []
        for full, adapted in METHODS.values():
            sizes = []
            for algorithm, weights in zip((full, adapted, adapted), WEIGHTS, strict=True):
                needed = peak(MODELS[name], ALGORITHMS[algorithm], BFLOAT16, **WORK | weights)
                sizes.append(f"{needed / GB:,.0f}")
            cells.append(" / ".join(sizes))
        rows.append([name.rpartition("-")[2], *cells])  # 7B of Qwen2.5-7B
    sizes = {"columns": ["parameters", *METHODS], "rows": rows}
    return {"model_sizes": sizes, "model_sizes stages": stages_table()}


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
            work = DEFAULTS | {"prompt": 256, "lora_rank": 16, "generation_batch": 64}
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


EXPERIMENTS = (Experiment("model_sizes", more_tables=tables),)
