"""Memory of a run by algorithm, from one table of constants. A GB is 10^9 bytes.

`CONSTANTS` stands in docs/explorer.html as JSON, which has the same formula; tests compare the two.
`python -m docs.experiments --redraw` writes them there.
"""

import json
import re
from math import ceil
from pathlib import Path

from common.logprobs import MAX_LOGITS

GB = 1e9
EXPLORER = Path("docs/explorer.html")


# --- the constants -----------------------------------------------------------------------------
def shape(hidden: int, layers: int, query: int, kv: int, ffn: int, vocab: int, tied: bool) -> dict:
    """`query` and `kv` are widths, heads times the size of a head; `tied` embeddings are the head's
    weights too."""
    return dict(hidden=hidden, layers=layers, query=query, kv=kv, ffn=ffn, vocab=vocab, tied=tied)


def llama_sizes(model: dict) -> dict:
    """Arguments of LlamaConfig and Qwen2Config."""
    head_dim = 64 if model["query"] < 1_000 else 128
    return dict(
        vocab_size=model["vocab"],
        hidden_size=model["hidden"],
        intermediate_size=model["ffn"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["query"] // head_dim,
        num_key_value_heads=model["kv"] // head_dim,
        head_dim=head_dim,
        tie_word_embeddings=model["tied"],
    )


def needs(
    name: str,
    trained: list[str],
    frozen: list[str] | None = None,
    samples: str = "",
    evaluated: int = 0,
    rows: int = 1,
) -> dict:
    """The models of an algorithm; what a rollout samples: nothing, one completion for each prompt,
    or a group; without rollouts, how many completions an evaluation samples; and the rows of one
    element of a micro-batch: a pair has two."""
    fixed = dict(samples=samples, evaluated=evaluated, rows=rows)
    return dict(name=name, trained=trained, frozen=frozen or []) | fixed


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
        "sft": needs("SFT", ["policy"], evaluated=8),
        "rm": needs("Reward model", ["reward"], rows=2),
        "reinforce": needs("REINFORCE, RLOO", ["policy"], samples="group"),
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
        "dpo": needs("DPO, IPO", ["policy"], ["reference"], evaluated=500, rows=2),
        "simpo": needs("SimPO, ORPO", ["policy"], evaluated=500, rows=2),
        "kto": needs("KTO", ["policy"], ["reference"], evaluated=500),
    },
    # Bytes of a number that a matrix product reads and writes: bfloat16 on GPUs that have it.
    "precisions": {"mixed": 2, "float32": 4},
    # Bytes that autograd keeps for a token of a layer, per unit of each width.
    "activations": {
        "float32": dict(hidden=24, query=8, kv=8, ffn=16),
        "autocast": dict(hidden=26, query=4, kv=4, ffn=8),  # bfloat16 on one GPU
        "bfloat16": dict(hidden=16, query=4, kv=4, ffn=8),  # under FSDP
    },
    "lora_activations": {  # the norms are frozen; on one GPU each adapter casts its own input
        "float32": dict(hidden=16, query=8, kv=8, ffn=16),
        "autocast": dict(hidden=18, query=6, kv=4, ffn=8),
        "bfloat16": dict(hidden=12, query=4, kv=4, ffn=8),
    },
    # Bytes of a frozen weight of a layer in 4 bits: its code, and for each 64 a scale in float32.
    "in_4_bits": 0.5625,
    # Bytes of a layer's input, per unit of the hidden size: what checkpointing keeps of a layer.
    "layer_input": dict(float32=4, autocast=4, bfloat16=2),
    "prefill": dict(hidden=6, ffn=3),  # numbers that are in use at one time for a token of a prompt
    "logits_chunk": MAX_LOGITS,
    # Copies of a chunk at one time: with the entropy, without it, and in the backward pass.
    "chunks": dict(entropy=5, plain=3, backward=3),
    "logit": 4,  # bytes; and of the head's gradient, per weight, before it is added to the others
    "sampled_logit": 16,  # bytes: the logit, its softmax, and the cumulative sum in float64
    "cards": [12, 16, 24, 32, 40, 48, 80],  # GB
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
    gpus=1,
    lora_rank=0,
    bits=16,
    micro_batch=1,
    prompt=512,
    completion=512,
    rollout=128,
    group=8,
    generation_batch=256,
)


# --- the formula -------------------------------------------------------------------------------
def parameters(model: dict, lora_rank: int = 0) -> dict[str, int]:
    """Of a layer, its seven matrices, and their adapters; of the embeddings with the output head,
    the policy, and a classifier. The biases of Qwen2.5's queries, keys and values, a ten-thousandth
    of all, are left out."""
    h, q, kv, f = (model[width] for width in ("hidden", "query", "kv", "ffn"))
    embedding = model["vocab"] * h
    matrices = h * (2 * q + 2 * kv + 3 * f)
    adapters = lora_rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + f))
    layer = matrices + 2 * h
    ends = embedding * (1 if model["tied"] else 2) + h
    layers = model["layers"] * layer
    return dict(
        layer=layer,
        matrices=matrices,
        adapters=adapters,
        ends=ends,
        policy=layers + ends,
        backbone=layers + embedding + h,
    )


def weighted_widths(model: dict, per_unit: dict[str, int]) -> int:
    """The sum over widths of the model, each times what there is per unit of it."""
    return sum(amount * model[width] for width, amount in per_unit.items())


def memory(
    model: dict,
    algorithm: dict,
    compute_bytes: int,  # one of the precisions
    gpus: int,
    micro_batch: int,  # rows or pairs that a GPU computes at a time
    prompt: int,  # tokens
    completion: int,  # tokens
    rollout: int,  # completions of all GPUs together, rounded up to whole groups
    group: int,  # completions of a prompt
    generation_batch: int = 256,  # completions that a GPU samples at a time
    checkpointing: bool = False,
    train_layers: int | None = None,  # the last layers of a reward model; None: all weights
    lora_rank: int = 0,  # of adapters, which alone are trained; 0: all weights
    bits: int = 16,  # of the matrices of layers below adapters: 16, or 4 by bitsandbytes
) -> dict[str, dict[str, float]]:
    """Bytes on one GPU by part, while the script updates, and while it samples (if it does)."""
    counts = parameters(model, lora_rank)
    embedding = model["vocab"] * model["hidden"]
    has_policy = "policy" in algorithm["trained"]  # which has an output head over the vocabulary
    trained_names, frozen_names = algorithm["trained"], algorithm["frozen"]
    if lora_rank > 0:  # a model without its adapters is the reference, or the reward model
        doubles = {"reference"} | ({"reward"} if "critic" in trained_names else set())
        frozen_names = [name for name in frozen_names if name not in doubles]
    freezes_layers = train_layers is not None and trained_names == ["reward"] and lora_rank == 0
    trained_layers = train_layers if freezes_layers else model["layers"]

    in_4_bits = bits == 4 and lora_rank > 0 and gpus == 1
    # 1. Weights, gradients and AdamW's two moments, sharded over the GPUs: in float32, but for the
    # frozen matrices of layers and of an untied head, which are in the precision of products.
    update = dict.fromkeys(PARTS, 0.0)
    for name in trained_names + frozen_names:
        is_policy = name in ("policy", "reference")
        weights = counts["policy" if is_policy else "backbone"]
        matrices = model["layers"] * counts["matrices"]
        if is_policy and not model["tied"]:
            matrices += embedding
        if name in frozen_names:
            trained = 0
        elif lora_rank > 0:
            trained = model["layers"] * counts["adapters"]
            weights += trained
        elif freezes_layers:
            trained = trained_layers * counts["layer"]
            matrices -= trained_layers * counts["matrices"]
        else:
            trained, matrices = weights, 0
        update[name] = (4 * weights - (4 - compute_bytes) * matrices) / gpus
        if in_4_bits:
            saved = compute_bytes - CONSTANTS["in_4_bits"]
            update[name] -= saved * model["layers"] * counts["matrices"]
        update["gradients"] += 4 * trained / gpus
        update["adamw"] += 8 * trained / gpus
    sampling = dict(update)

    # 2. Copies of weights: on one GPU autocast keeps a copy in low precision of the trained weights
    # that it multiplies by, and a head that is tied to frozen embeddings is cast too; several
    # gather two layers at a time, and what stands at the ends.
    multiplied = counts["backbone"] - (0 if has_policy else embedding)
    if freezes_layers:
        multiplied = trained_layers * counts["layer"]
    if lora_rank > 0:
        tied_head = embedding if has_policy and model["tied"] else 0
        multiplied = model["layers"] * counts["adapters"] + tied_head
    autocast_copies = 2 * multiplied if compute_bytes == 2 else 0
    if in_4_bits:  # the largest matrix, for its product
        autocast_copies += compute_bytes * model["hidden"] * model["ffn"]
    if gpus == 1:
        update["copies"] = autocast_copies
    else:
        gathered_ends = counts["ends"] if has_policy else embedding
        two_layers = 2 * (counts["layer"] + counts["adapters"])
        update["copies"] = compute_bytes * (gathered_ends + two_layers)

    # 3. Activations of a micro-batch, and the logits of a chunk with the gradient of the head. Rows
    # that share a prompt read it once. Attention reads the prompt again for each row, and gathers
    # the results of all tokens.
    # Nothing is kept below the first trained layer. Checkpointing keeps the inputs of the layers.
    # Of each adapter's two matrices the second keeps its input too; the ends are then frozen.
    # The forward pass ends with a chunk's logits and what is computed from them, the entropy too in
    # scripts that sample. The backward pass has a chunk first (in bfloat16 also casts of its
    # gradient and of the head's), and then, one after another, the layers' activations; last the
    # embeddings' gradient, for which that of a tied head has waited.
    if compute_bytes == 4:
        kind = "float32"
    else:
        kind = "autocast" if gpus == 1 else "bfloat16"
    rows = micro_batch * algorithm["rows"]
    activations = CONSTANTS["lora_activations" if lora_rank > 0 else "activations"][kind]
    bytes_per_token = weighted_widths(model, activations) + 7 * lora_rank * compute_bytes
    prompts = ceil(rows / (group if algorithm["samples"] == "group" else algorithm["rows"]))
    repeating = rows - prompts  # rows whose prompt another one has
    tokens = prompts * prompt + rows * completion
    layer_bytes = tokens * bytes_per_token
    if repeating > 0:
        again = 2 * (model["query"] + model["kv"])  # queries, results, keys, values
        layer_bytes += compute_bytes * (repeating * prompt * again + tokens * model["query"])
    trains_ends = lora_rank == 0 and not freezes_layers
    end_gradient = CONSTANTS["logit"] * embedding if trains_ends else 0
    last_bytes = end_gradient * (2 if has_policy and model["tied"] else 1)
    chunk_bytes = head_gradient = 0
    if has_policy:
        positions = min(rows * completion, CONSTANTS["logits_chunk"] // model["vocab"])
        chunk_bytes = CONSTANTS["logit"] * model["vocab"] * positions
        head_gradient = end_gradient
    kept_bytes, recomputed_bytes = trained_layers * layer_bytes, 0
    if checkpointing:
        kept_bytes = tokens * trained_layers * CONSTANTS["layer_input"][kind] * model["hidden"]
        recomputed_bytes = layer_bytes if trained_layers > 0 else 0
    cast_bytes = (chunk_bytes + head_gradient) / 2 if compute_bytes == 2 else 0
    chunks = CONSTANTS["chunks"]
    forward_bytes = chunks["entropy" if algorithm["samples"] else "plain"] * chunk_bytes
    of_head = chunks["backward"] * chunk_bytes + cast_bytes
    backward_bytes = max(recomputed_bytes, of_head) + head_gradient
    first_bytes = kept_bytes + max(forward_bytes, backward_bytes)
    update["activations"] = float(max(first_bytes, last_bytes))
    if not algorithm["samples"] and not algorithm["evaluated"]:
        return {"update": update}

    # 4. Sampling: all weights on each GPU, and the larger of what reading the prompts takes and
    # what a batch of completions takes, of a rollout or else of an evaluation. Each prompt is read
    # once, before the rows of its group are made.
    group_size = group if algorithm["samples"] == "group" else 1
    whole_groups = ceil(rollout / group_size) * group_size
    of_all = whole_groups if algorithm["samples"] else algorithm["evaluated"]
    completions = min(ceil(of_all / gpus), generation_batch)
    prompts = ceil(completions / group_size)
    cache_bytes = 2 * model["layers"] * model["kv"] * (prompt + completion) * compute_bytes
    logits = completions * CONSTANTS["sampled_logit"] * model["vocab"]
    reading = prompts * prompt * weighted_widths(model, CONSTANTS["prefill"]) * compute_bytes
    whole_policy = compute_bytes * (counts["policy"] + model["layers"] * counts["adapters"])
    sampling["gradients"] = 0.0
    sampling["copies"] = autocast_copies if gpus == 1 else whole_policy
    if prompts * cache_bytes + reading > completions * cache_bytes + logits:
        sampling["cache"], sampling["reading"] = float(prompts * cache_bytes), float(reading)
    else:
        sampling["cache"], sampling["logits"] = float(completions * cache_bytes), float(logits)
    return {"update": update, "sampling": sampling}


def peak(model: dict, algorithm: dict, compute_bytes: int, **work: int) -> float:
    """Bytes at the moment that needs most; `work` are the other arguments of `memory`."""
    moments = memory(model, algorithm, compute_bytes, **work)
    return max(sum(parts.values()) for parts in moments.values())


# --- docs/explorer.html ------------------------------------------------------------------------
def constants_json() -> str:
    """The JSON that stands in docs/explorer.html, a model or an algorithm per line."""
    text = json.dumps(CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}, indent=1)
    return re.sub(r"\{[^{}]*\}|\[[^][{}]*\]", lambda entry: " ".join(entry[0].split()), text)


def write_explorer() -> None:
    """Put the constants into docs/explorer.html."""
    text = EXPLORER.read_text()
    opening = '<script type="application/json" id="constants">\n'
    start, _, rest = text.partition(opening)
    end = rest[rest.index("</script>") :]
    EXPLORER.write_text(start + opening + constants_json() + "\n" + end)
