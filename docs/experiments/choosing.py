"""Memory of a run by algorithm, from one table of constants, and how near it is to measured peaks.

    python docs/experiments/figures.py choosing     # five minutes on two cores
    python docs/experiments/choosing.py             # writes docs/explorer.html too

`CONSTANTS` stands in docs/explorer.html as JSON; tests/test_choosing.py compares the two, and
what the page shows with what `memory` computes. A GB is 10^9 bytes.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from math import ceil
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
RESULTS, PAGE = DOCS / "results" / "choosing.json", DOCS / "explorer.html"
GB = 1e9


def shape(hidden: int, layers: int, query: int, kv: int, ffn: int, vocab: int, tied: bool) -> dict:
    """`query` and `kv` are widths, heads times the size of a head; `tied` embeddings are the head's
    weights too."""
    return dict(hidden=hidden, layers=layers, query=query, kv=kv, ffn=ffn, vocab=vocab, tied=tied)


def algorithm(name: str, trained: str, frozen: str = "", samples: str = "", rows: int = 1) -> dict:
    """What it samples: nothing, a completion for each prompt, or a group. `rows` are those of one
    element of a micro-batch: a pair has two."""
    models = dict(trained=trained.split(","), frozen=[x for x in frozen.split(",") if x])
    return dict(name=name, **models, samples=samples, rows=rows)


def precision(name: str, weights: int, gradients: int, adamw: int, frozen: int, compute: int):
    """Bytes of a parameter, and of a number that a matrix product reads and writes."""
    sizes = dict(weights=weights, gradients=gradients, adamw=adamw, frozen=frozen, compute=compute)
    return dict(name=name, **sizes)


CONSTANTS = {
    "models": {
        "Qwen2.5-0.5B": shape(896, 24, 896, 128, 4_864, 151_936, True),
        "Qwen2.5-1.5B": shape(1_536, 28, 1_536, 256, 8_960, 151_936, True),
        "Qwen2.5-3B": shape(2_048, 36, 2_048, 256, 11_008, 151_936, True),
        "Qwen2.5-7B": shape(3_584, 28, 3_584, 512, 18_944, 152_064, False),
        "Llama-3.1-8B": shape(4_096, 32, 4_096, 1_024, 14_336, 128_256, False),
        "Qwen2.5-14B": shape(5_120, 48, 5_120, 1_024, 13_824, 152_064, False),
        "Qwen2.5-32B": shape(5_120, 64, 5_120, 1_024, 27_648, 152_064, False),
        "Llama-3.1-70B": shape(8_192, 80, 8_192, 1_024, 28_672, 128_256, False),
    },
    "algorithms": {
        "sft": algorithm("SFT", "policy"),
        "rm": algorithm("Reward model", "reward", rows=2),
        "reinforce": algorithm("REINFORCE, RLOO", "policy", "", "group"),
        "reinforce_kl": algorithm("REINFORCE, RLOO with a KL", "policy", "reference", "group"),
        "ppo": algorithm("PPO", "policy,critic", "reference,reward", "one"),
        "ppo_rule": algorithm("PPO with a rule", "policy,critic", "reference", "one"),
        "grpo": algorithm("GRPO, GSPO, GDPO", "policy", "reference", "group"),
        "grpo_no_kl": algorithm("GRPO without a KL (DAPO, Dr. GRPO)", "policy", "", "group"),
        "grpo_rm": algorithm("GRPO with a reward model", "policy", "reference,reward", "group"),
        "dpo": algorithm("DPO, IPO", "policy", rows=2),
        "dpo_online": algorithm("DPO, IPO with an online reference", "policy", "reference", rows=2),
        "simpo": algorithm("SimPO, ORPO", "policy", rows=2),
        "kto": algorithm("KTO", "policy"),
    },
    "precisions": {
        "mixed": precision("float32, bfloat16 products (GPUs)", 4, 4, 8, 4, 2),
        "float32": precision("float32 throughout (CPUs)", 4, 4, 8, 4, 4),
        "master": precision("bfloat16, float32 master weights", 2, 2, 12, 2, 2),
        "bfloat16": precision("bfloat16 throughout", 2, 2, 4, 2, 2),
    },
    # Bytes that autograd keeps for a token of a layer, per unit of each width.
    "activations": {
        "float32": dict(hidden=24, query=8, kv=8, ffn=16),
        "autocast": dict(hidden=26, query=4, kv=4, ffn=8),
        "bfloat16": dict(hidden=16, query=4, kv=4, ffn=8),
    },
    "prefill": dict(hidden=6, ffn=3),  # numbers that are in use at one time for a token of a prompt
    "logits_chunk": 2**26,  # MAX_LOGITS of common/logprobs.py
    "logit": 4,  # bytes; and of the head's gradient, per weight, before it is added to the others
    "sampled_logit": 16,  # bytes: the logit, its softmax, and the cumulative sum in float64
    "cards": [24, 40, 80],  # GB
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
}
DEFAULTS = dict(gpus=1, micro_batch=1, prompt=512, completion=512, rollout=128, group=8)


def parameters(model: dict) -> dict[str, int]:
    """Of a layer, of the embeddings with the output head, of the policy, and of a classifier. The
    biases of Qwen2.5's queries, keys and values, a ten-thousandth of all, are left out."""
    h, embedding = model["hidden"], model["vocab"] * model["hidden"]
    layer = h * (2 * model["query"] + 2 * model["kv"] + 3 * model["ffn"] + 2)
    ends = embedding * (1 if model["tied"] else 2) + h
    layers = model["layers"] * layer
    return dict(layer=layer, ends=ends, policy=layers + ends, backbone=layers + embedding + h)


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
) -> dict[str, dict[str, float]]:
    """Bytes on one GPU by part, while the script updates, and while it samples (if it does).

    micro_batch: rows or pairs that a GPU computes at a time; prompt, completion: tokens; rollout:
    completions of all GPUs together; group: completions of a prompt.
    """
    count, p, c = parameters(model), precision, CONSTANTS
    size = dict.fromkeys(("policy", "reference"), count["policy"])
    size |= dict.fromkeys(("critic", "reward"), count["backbone"])
    parts = dict.fromkeys(PARTS, 0.0)
    for name in algorithm["trained"]:
        parts[name] = p["weights"] * size[name] / gpus
        parts["gradients"] += p["gradients"] * size[name] / gpus
        parts["adamw"] += p["adamw"] * size[name] / gpus
    for name in algorithm["frozen"]:
        parts[name] = p["frozen"] * size[name] / gpus

    # On one GPU autocast keeps a low copy of what it multiplies by; several gather the layers.
    low, head = p["compute"] < p["weights"], "policy" in algorithm["trained"]
    embedding = model["vocab"] * model["hidden"]
    cast = p["compute"] * (count["backbone"] - (0 if head else embedding)) if low else 0
    gathered = p["compute"] * ((count["ends"] if head else embedding) + 2 * count["layer"])
    kind = "float32" if p["compute"] == 4 else "autocast" if low and gpus == 1 else "bfloat16"
    rows = micro_batch * algorithm["rows"]
    kept = sum(size * model[width] for width, size in c["activations"][kind].items())
    activations = rows * (prompt + completion) * model["layers"] * kept
    if head:
        positions = min(rows * completion, c["logits_chunk"] // model["vocab"])
        activations += c["logit"] * model["vocab"] * (positions + model["hidden"])
    copies = cast if gpus == 1 else gathered
    found = {"update": parts | {"copies": copies, "activations": activations}}

    if algorithm["samples"]:
        mine = ceil(rollout / gpus)
        row = 2 * model["layers"] * model["kv"] * (prompt + completion) * p["compute"]
        cache = mine * (row + c["sampled_logit"] * model["vocab"])
        # Prompts are read all at one time, each once, before the rows of its group are made.
        prompts = ceil(mine / group) if algorithm["samples"] == "group" else mine
        read = sum(size * model[width] for width, size in c["prefill"].items()) * p["compute"]
        prefill = prompts * (row + prompt * read)
        copies = cast if gpus == 1 else p["compute"] * count["policy"]
        sampling = {"gradients": 0.0, "copies": copies, "cache": float(max(cache, prefill))}
        found["sampling"] = parts | sampling
    return found


def peak(*arguments, **options) -> float:
    return max(sum(parts.values()) for parts in memory(*arguments, **options).values())


# --- the peaks that are measured ---------------------------------------------------------------
ROWS, CHECKED = 16, shape(512, 8, 512, 128, 1_536, 32_768, True)
SCRIPTS = {
    "sft": "sft",
    "rm_bradley_terry": "rm",
    "reinforce": "reinforce",
    "ppo_rlhf": "ppo",
    "grpo": "grpo",
    "dpo": "dpo",
    "kto": "kto",
}


def measure_script(name: str) -> dict:
    """Peak of two optimiser steps with models of 27M parameters, and their micro-batches."""
    import importlib

    import memory as measuring

    sys.path.insert(0, str(DOCS.parent))
    import common.logprobs

    script = importlib.import_module(name)
    import torch

    seen, since = [], 0  # [rows, tokens of each, AdamW has moments, there are gradients]

    def pad_rows(rows: list, *arguments, **options):
        nonlocal since
        ids, mask = pad(rows, *arguments, **options)
        if torch.is_grad_enabled():
            seen.append([*ids.shape, bool(stepped), since > 0])
            since += 1
        return ids, mask

    def step(*arguments, **options):
        nonlocal since
        since = 0
        stepped.append(True)
        return adamw(*arguments, **options)

    stepped, adamw, torch.optim.AdamW.step = [], torch.optim.AdamW.step, step
    pad = common.logprobs.pad_rows
    for module in (common.logprobs, script):
        if hasattr(module, "pad_rows"):
            module.pad_rows = pad_rows
    fields = vars(script.Args())
    flags = dict(batch_size=2 * ROWS, train_split=f"train[:{4 * ROWS}]", epochs=1.0)
    flags |= dict(total_rollouts=1 + (name == "reinforce"), num_minibatches=2, update_epochs=1)
    flags |= dict(prompts_per_rollout=4 * ROWS // fields.get("group_size", 1), eval_rows=4)
    flags |= dict(micro_batch_size=ROWS, eval_split="test[:4]")
    if "total_rollouts" in fields:
        del flags["train_split"]
    flags = {flag: value for flag, value in flags.items() if flag in fields}
    with tempfile.TemporaryDirectory() as folder:
        large = {
            flag: measuring.enlarge(source, Path(folder) / flag)
            for flag in ("model", "reward_model")
            if (source := fields.get(flag))
        }
        script.main(script.Args(output_dir=folder, **flags))  # what is made once
        for record in (seen, stepped):
            record.clear()
        before = measuring.reset_peak()
        script.main(script.Args(output_dir=folder, **flags | large))
        measured = measuring.peak() - before
        config = json.loads((Path(large["model"]) / "config.json").read_text())
    rows, length = max((row[:2] for row in seen), key=lambda row: row[0] * row[1])
    heads = config["head_dim"]
    model = shape(
        config["hidden_size"],
        config["num_hidden_layers"],
        heads * config["num_attention_heads"],
        heads * config["num_key_value_heads"],
        config["intermediate_size"],
        config["vocab_size"],
        config["tie_word_embeddings"],
    )
    kind = CONSTANTS["algorithms"][SCRIPTS[name]]
    work = dict(micro_batch=rows // kind["rows"], prompt=length, completion=0)
    if kind["samples"]:
        rollout = flags["prompts_per_rollout"] * fields.get("group_size", 1)
        work |= dict(rollout=rollout, group=fields.get("group_size", 1))
    found = dict(run=f"`{name}.py`", model=model, algorithm=SCRIPTS[name], work=work)
    return found | dict(seen=seen, peak=measured)


def measure_part(which: str) -> dict:
    """An update of 4 x 512 tokens, or a rollout of 48 x 256, of a model with a real vocabulary."""
    sys.path.insert(0, str(DOCS.parent))
    import memory as measuring
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from common.generation import generate
    from common.logprobs import completion_logprobs

    rows, prompt, completion = (4, 256, 256) if which == "update" else (48, 224, 32)

    def make(layers: int) -> torch.nn.Module:
        config = Qwen2Config(
            vocab_size=CHECKED["vocab"],
            hidden_size=CHECKED["hidden"],
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=CHECKED["ffn"],
            tie_word_embeddings=CHECKED["tied"],
        )
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()

    def run(model: torch.nn.Module, rows: int, prompt: int, completion: int) -> None:
        ids = torch.randint(CHECKED["vocab"], (rows, prompt + completion)).tolist()
        if which == "sampling":
            prompts, rng = [row[:prompt] for row in ids], torch.Generator()
            generate(model, prompts, completion, 1.0, [], rng)
            return
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        pairs = [(row[:prompt], row[prompt:]) for row in ids]
        for _step in range(2):
            for _micro_batch in range(2):  # the second micro-batch meets the gradients of the first
                completion_logprobs(model, pairs, range(rows)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run(make(1), 2, 8, 2)
    before = measuring.reset_peak()
    run(make(CHECKED["layers"]), rows, prompt, completion)
    work = dict(micro_batch=rows, prompt=prompt, completion=completion, rollout=rows, group=1)
    said = f"an update, {rows} x {prompt + completion} tokens"
    if which == "sampling":
        said = f"a rollout, {rows} x {prompt + completion} tokens"
    found = measuring.peak() - before
    return dict(run=said, model=CHECKED, algorithm=which, work=work, peak=found)


def measure() -> list[dict]:
    """Each in a process of its own; freed memory goes back to the system at once."""
    found = []
    for case in [*SCRIPTS, "update", "sampling"]:
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, __file__, case]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=DOCS.parent
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{case}: {found[-1]['peak'] / 1e6:,.0f} MB", flush=True)
    return found


def expected(case: dict) -> tuple[float, float, float]:
    """Bytes of weights, gradients and AdamW; of all that `memory` counts; and of what there was
    when the micro-batches came: in a step's first there are no gradients yet, in the first step
    no moments of AdamW."""
    kind, p = case["algorithm"], CONSTANTS["precisions"]["float32"]
    work = DEFAULTS | case["work"]
    if kind not in CONSTANTS["algorithms"]:  # a part alone: no optimiser while it samples
        parts = memory(case["model"], CONSTANTS["algorithms"]["reinforce"], p, **work)[kind]
        parts["adamw"] *= kind == "update"
        total = sum(parts.values())
        return total - parts["activations"] - parts["cache"], total, total
    came = []
    for rows, length, stepped, gradients in case["seen"]:
        algorithm = CONSTANTS["algorithms"][kind] | {"rows": 1}
        shapes = {"micro_batch": rows, "prompt": length}
        parts = memory(case["model"], algorithm, p, **work | shapes)["update"]
        held = parts["adamw"] * (not stepped) + parts["gradients"] * (not gradients)
        came.append(sum(parts.values()) - held)
    parts = memory(case["model"], CONSTANTS["algorithms"][kind], p, **work)["update"]
    return sum(parts.values()) - parts["activations"], sum(parts.values()), max(came)


# --- the tables --------------------------------------------------------------------------------
COLUMNS = ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen2.5-14B"]
COLUMNS += ["Qwen2.5-32B", "Llama-3.1-70B"]


def tables(measured: list[dict]) -> dict:
    models, algorithms = CONSTANTS["models"], CONSTANTS["algorithms"]
    mixed = CONSTANTS["precisions"]["mixed"]
    sizes = [name.partition("-")[2].removeprefix("3.1-") for name in COLUMNS]
    bytes_rows, numbers = [], {}
    for kind in algorithms.values():
        held = [f"{x} (trained)" for x in kind["trained"]] + kind["frozen"]
        each = mixed["weights"] + mixed["gradients"] + mixed["adamw"]
        total = each * len(kind["trained"]) + mixed["frozen"] * len(kind["frozen"])
        said = ", ".join(held).replace("reward", "reward model")
        bytes_rows.append([kind["name"], said, str(total)])
    made = {
        "choosing_bytes": {
            "columns": ["algorithm", "models in memory while training", "bytes per parameter"],
            "rows": bytes_rows,
        }
    }
    for table, gpus in (("choosing_one", 1), ("choosing_eight", 8)):
        numbers[table] = {
            key: [
                peak(models[name], kind, mixed, **DEFAULTS | {"gpus": gpus}) / GB
                for name in COLUMNS
            ]
            for key, kind in algorithms.items()
        }
        named = {}  # the algorithms that need the same share a row
        for key, row in numbers[table].items():
            cells = tuple(f"{x:,.0f}" if x >= 10 else f"{x:.1f}" for x in row)
            named.setdefault(cells, []).append(algorithms[key]["name"])
        rows = [["; ".join(names), *cells] for cells, names in named.items()]
        made[table] = {"columns": ["algorithm", *sizes], "rows": rows}

    rows = []
    for case in measured:
        cells = [*expected(case), case["peak"]]
        ratio = f"{case['peak'] / cells[2]:.2f}"
        rows.append([case["run"], *[f"{cell / 1e6:,.0f}" for cell in cells], ratio])
    columns = ["run", "weights, gradients, AdamW, MB", "with activations or cache, MB"]
    columns += ["as the micro-batches came, MB", "measured peak, MB", "measured / as they came"]
    made["choosing_measured"] = {"columns": columns, "rows": rows}
    return {"tables": made, "numbers": numbers | {"measured": measured}}


def results() -> dict:
    draw()
    return tables(measure())


def draw() -> None:
    """Bars of a 7B model on one GPU, at the moment that needs most."""
    from drawing import COLOURS, GREY, panels, save

    names = ["sft", "dpo", "grpo_no_kl", "grpo", "grpo_rm", "ppo"]
    figure, (axis,) = panels(1, height=2.6)
    precision = CONSTANTS["precisions"]["mixed"]
    left = dict.fromkeys(names, 0.0)
    found = {}
    for name in names:
        of_each = memory(
            CONSTANTS["models"]["Qwen2.5-7B"], CONSTANTS["algorithms"][name], precision, **DEFAULTS
        )
        found[name] = max(of_each.values(), key=lambda parts: sum(parts.values()))
    colours = [*COLOURS, "#5a6a7a", "#50b8c0", "#c0a0e0"]
    labels = [CONSTANTS["algorithms"][name]["name"] for name in names]
    labels = [label.replace(" (DAPO, Dr. GRPO)", "") for label in labels]
    for (part, said), colour in zip(PARTS.items(), colours, strict=True):
        widths = [found[name][part] / GB for name in names]
        if any(widths):
            axis.barh(labels, widths, left=[*left.values()], color=colour, label=said, height=0.6)
        left = {name: left[name] + width for name, width in zip(names, widths, strict=True)}
    axis.axvline(80, color=GREY, ls="--", lw=1)
    axis.annotate("80 GB", (80, -0.45), xytext=(3, 0), textcoords="offset points", va="bottom")
    axis.invert_yaxis()
    axis.set_xlabel("GB on one GPU, 7B parameters, a micro-batch of 1 with 512 + 512 tokens")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(figure, DOCS / "choosing.svg")


def page_constants() -> str:
    """The JSON that stands in docs/explorer.html."""
    together = CONSTANTS | {"parts": PARTS, "defaults": DEFAULTS}
    return json.dumps(together, indent=1)


def main() -> None:
    if sys.argv[1:]:  # one case, in a process of its own
        case = sys.argv[1]
        run = partial(measure_script if case in SCRIPTS else measure_part, case)
        print(json.dumps(run()))
        return
    from tables import insert_tables

    RESULTS.write_text(json.dumps(results(), indent=1) + "\n")
    text = PAGE.read_text()
    middle = '<script type="application/json" id="constants">\n'
    start, _, rest = text.partition(middle)
    PAGE.write_text(start + middle + page_constants() + "\n" + rest[rest.index("</script>") :])
    insert_tables()


if __name__ == "__main__":
    main()
