"""Memory of a run by algorithm, from one table of constants. A GB is 10^9 bytes.

`CONSTANTS` stands in docs/explorer.html as JSON, which has the same formula; tests compare the two.
`python -m docs.experiments --redraw` writes them there.
"""

import json
import re
from math import ceil
from pathlib import Path

GB = 1e9
EXPLORER = Path("docs/explorer.html")


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
        "dpo": needs("DPO, IPO", ["policy"], ["reference"], rows=2),
        "simpo": needs("SimPO, ORPO", ["policy"], rows=2),
        "kto": needs("KTO", ["policy"], ["reference"]),
    },
    "precisions": {  # weights, gradients, AdamW's moments, frozen weights, compute
        "mixed": sizes("Mixed (GPU default)", 4, 4, 8, 4, 2),
        "float32": sizes("float32 (CPU default)", 4, 4, 8, 4, 4),
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
DEFAULTS = dict(
    gpus=1, micro_batch=1, prompt=512, completion=512, rollout=128, group=8, generation_batch=256
)


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
    generation_batch: int = 256,
    checkpointing: bool = False,
    train_layers: int | None = None,
) -> dict[str, dict[str, float]]:
    """Bytes on one GPU by part, while the script updates, and while it samples (if it does).

    micro_batch: rows or pairs that a GPU computes at a time; prompt, completion: tokens; rollout:
    completions of all GPUs together, rounded up to whole groups; group: completions of a prompt;
    generation_batch: completions that a GPU samples at a time; checkpointing: with
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
    # what a batch of completions takes. Each prompt is read once, before the rows of its group are
    # made.
    group_size = group if algorithm["samples"] == "group" else 1
    whole_groups = ceil(rollout / group_size) * group_size
    completions = min(ceil(whole_groups / gpus), generation_batch)
    prompts = ceil(completions / group_size)
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


# --- docs/explorer.html ------------------------------------------------------------------------
def constants_json() -> str:
    """The JSON that stands in docs/explorer.html, a model or an algorithm per line."""
    text = json.dumps(CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda entry: " ".join(entry[0].split()), text)


def write_explorer() -> None:
    """Put the constants into docs/explorer.html."""
    text = EXPLORER.read_text()
    opening = '<script type="application/json" id="constants">\n'
    start, _, rest = text.partition(opening)
    end = rest[rest.index("</script>") :]
    EXPLORER.write_text(start + opening + constants_json() + "\n" + end)
