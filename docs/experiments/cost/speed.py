"""Seconds an optimiser step takes, and the memory, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python -m docs.experiments speed grpo dpo rm sft --data FOLDER

The model is a Llama of 20M parameters with random weights. FOLDER holds gsm8k/train.jsonl
(`question`, `answer`) and gsm8k_solutions/train.jsonl (`prompt`, a right solution as `chosen`, a
wrong one as `rejected`), both from github.com/openai/grade-school-math. With --model it is a real
model; with --data docs/real on docs/real/sums and docs/real/pairs.

Both sides train the same checkpoint on the same rows with the same batch, micro-batch, lengths,
optimiser and number of optimiser steps, in processes that take turns, on a CPU in float32. The
clock is the same too: a hook after each step of torch's AdamW. Start-up, the first steps and
evaluations lie outside. Memory is the highest of the whole process, libraries and evaluations
included. Output: rows of a table in Markdown.
"""

import shutil
import statistics
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from docs.experiments.lib.measuring import (
    in_own_process,
    noted_steps,
    peak,
    quietly,
    random_llama,
)
from docs.experiments.lib.runs import read_jsonl, write_jsonl
from docs.experiments.lib.tables import spread

ADAPTERS = dict(lora_rank=16)
# ChatML, which tells TRL what is an assistant's.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Work(NamedTuple):
    """What both sides do. TRL's settings are read off the script's flags."""

    title: str
    script: str
    rows_per_step: int  # prompts, pairs or rows; each is trained on once
    trl_trainer: str  # the start of the names of its trainer and its config
    flags: dict[str, Any]


def works_in(folder: str) -> dict[str, Work]:
    """Works on the models and the data that `make_inputs` has made in the folder."""
    grpo = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/prompts",
        max_prompt_length=256,
        max_new_tokens=64,
        prompts_per_rollout=4,
        group_size=8,
        num_minibatches=1,
        micro_batch_size=8,
        reward_fn=["docs/experiments/cost/speed.py:count_letters"],
    )
    pairs = dict(
        model=f"{folder}/policy",
        dataset=f"{folder}/preferences",
        max_length=512,
        batch_size=16,
        micro_batch_size=4,
    )
    rows = pairs | dict(dataset=f"{folder}/sft")
    chats = rows | dict(dataset=f"{folder}/chats", max_length=4096, batch_size=8)
    rm, lora = "rm_bradley_terry", "the same with adapters of rank 16"
    return {
        "sft": Work("SFT, 16 rows in micro-batches of 4", "sft", 16, "SFT", rows),
        "chats": Work("SFT, 8 chats of six turns in micro-batches of 4", "sft", 8, "SFT", chats),
        "rm": Work("reward model, 16 pairs in micro-batches of 4", rm, 16, "Reward", pairs),
        "dpo": Work("DPO, 16 pairs in micro-batches of 4", "dpo", 16, "DPO", pairs),
        "grpo": Work("GRPO, 4 prompts x 8 samples, 64 new tokens", "grpo", 4, "GRPO", grpo),
        "sft_lora": Work(f"SFT, {lora}", "sft", 16, "SFT", rows | ADAPTERS),
        "dpo_lora": Work(f"DPO, {lora}", "dpo", 16, "DPO", pairs | ADAPTERS),
    }


def count_letters(prompts: list, completions: list[str], **columns: list) -> list[float]:
    """A reward that differs between the samples of a model with random weights."""
    return [float(sum(map(str.isalpha, completion))) for completion in completions]


# --- our side ----------------------------------------------------------------------------------
def train_ours(work: Work, num_rows: int, folder: str) -> None:
    """Train with a script of this repository on the first rows, once."""
    script = import_module(work.script)
    flags = work.flags | dict(
        output_dir=folder,
        train_split=f"train[:{num_rows}]",
        eval_rows=8,
        eval_every=10**9,
        save_every=10**9,
    )
    if "prompts_per_rollout" in flags:
        flags["total_rollouts"] = num_rows // flags["prompts_per_rollout"]
    else:
        flags["epochs"] = 1.0
    script.main(script.Args(**flags))


# --- TRL's side, in float32 and without checkpointing ------------------------------------------
def train_trl(work: Work, num_rows: int, folder: str) -> None:
    """Train with TRL on the first rows, once."""
    try:
        import trl
    except ModuleNotFoundError as error:
        raise ImportError('TRL comes with an extra: pip install -e ".[bench]"') from error
    from datasets import load_dataset

    args = import_module(work.script).Args(**work.flags)
    settings = dict(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=1,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.micro_batch_size,
    )
    data = load_dataset(args.dataset, split=f"train[:{num_rows}]")
    settings["max_steps"] = num_rows // work.rows_per_step
    sequences_per_step = work.rows_per_step * getattr(args, "group_size", 1)
    settings["gradient_accumulation_steps"] = sequences_per_step // args.micro_batch_size
    inputs = dict(
        model=load_model(work, args.model),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    if args.lora_rank > 0:
        inputs["peft_config"] = LoraConfig(
            r=args.lora_rank,
            lora_alpha=2 * args.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    if work.script == "grpo":
        inputs["reward_funcs"] = count_letters
        settings |= dict(
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            temperature=1.0,
            beta=args.beta,
            epsilon=args.clip_coef,
            loss_type="grpo",
        )
    else:
        settings["max_length"] = args.max_length
    if "messages" in data.column_names:
        settings["assistant_only_loss"] = True
        inputs["processing_class"].chat_template = CHAT_TEMPLATE
    if work.script == "dpo":
        settings["beta"] = args.beta
        if args.lora_rank == 0:  # with adapters the reference is the policy without them
            inputs["ref_model"] = load_model(work, args.model)
    config = getattr(trl, f"{work.trl_trainer}Config")(**settings)
    getattr(trl, f"{work.trl_trainer}Trainer")(**inputs, args=config).train()


def load_model(work: Work, source: str) -> torch.nn.Module:
    if work.script == "rm_bradley_terry":
        kind = AutoModelForSequenceClassification
        return kind.from_pretrained(source, dtype="float32", num_labels=1)
    return AutoModelForCausalLM.from_pretrained(source, dtype="float32")


# --- models and data ---------------------------------------------------------------------------
def make_inputs(folder: str, source: str, data: Path) -> None:
    """Write a model with the tokenizer of `source`, and data, to the folder."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    model = random_llama(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(f"{folder}/policy")
    tokenizer.save_pretrained(f"{folder}/policy")
    prompts, completions, preferences, chats = [], [], [], []
    for row in read_jsonl(data / "gsm8k/train.jsonl"):
        prompts.append({"prompt": row["question"], "answer": row["answer"]})
        completions.append({"prompt": row["question"], "completion": f" {row['answer']}"})
        if not chats or len(chats[-1]["messages"]) == 12:
            chats.append({"messages": []})
        for role, text in (("user", row["question"]), ("assistant", row["answer"])):
            chats[-1]["messages"].append({"role": role, "content": text})
    for row in read_jsonl(data / "gsm8k_solutions/train.jsonl"):
        both = {"chosen": f" {row['chosen']}", "rejected": f" {row['rejected']}"}
        preferences.append({"prompt": row["prompt"]} | both)
    tables = {"prompts": prompts, "sft": completions, "preferences": preferences, "chats": chats}
    for name, rows in tables.items():
        Path(folder, name).mkdir()
        write_jsonl(Path(folder, name, "train.jsonl"), rows[:-8])
        write_jsonl(Path(folder, name, "test.jsonl"), rows[-8:])


def link_inputs(folder: str, model: Path, data: Path) -> None:
    """The same names for a model and data that are there."""
    names = {"policy": model, "prompts": data / "sums", "sft": data / "sums"}
    for name, path in (names | {"preferences": data / "pairs"}).items():
        Path(folder, name).symlink_to(path.resolve())


# --- the table ---------------------------------------------------------------------------------
SIDES = {"ours": train_ours, "TRL": train_trl}


def measure(side: str, work: Work, skipped: int, steps: int) -> tuple[float, float]:
    """Milliseconds of an optimiser step, and the peak of this process in MB."""
    num_rows = (skipped + steps) * work.rows_per_step
    with tempfile.TemporaryDirectory() as folder, noted_steps(time.perf_counter) as times:
        SIDES[side](work, num_rows, folder)
    seconds = (times[-1] - times[skipped - 1]) / (len(times) - skipped)
    return 1e3 * seconds, peak() / 1e6


def main(
    works: tyro.conf.Positional[
        tuple[Literal["sft", "sft_lora", "chats", "rm", "dpo", "dpo_lora", "grpo"], ...]
    ],
    data: Path,
    tokenizer: str = "openai-community/gpt2",
    model: Path | None = None,
    repeats: int = 5,
    skipped: int = 4,
    steps: int = 4,
) -> None:
    """Compare the speed and memory of works, which take turns.

    Args:
        works: which
        data: folder with the texts
        tokenizer: folder or hub name
        model: folder of a real one
        repeats: turns of each work and side
        skipped: optimiser steps before the clock starts, at least 1
        steps: optimiser steps measured
    """
    columns = ["workload"]
    for quantity in ("ms per step", "peak MB"):
        columns += [*(f"{side}, {quantity}" for side in SIDES), "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if (data / "gsm8k").exists():
            quietly(make_inputs, folder, str(model or tokenizer), data)
            if model:
                shutil.rmtree(f"{folder}/policy")
                Path(folder, "policy").symlink_to(model.resolve())
        else:
            link_inputs(folder, model, data)
        all_works = works_in(folder)
        runs = {(work, side): [] for work in works for side in SIDES}
        for _ in range(repeats):
            for work, side in runs:
                turn = (side, all_works[work], skipped, steps)
                runs[work, side].append(in_own_process(measure, *turn))
    for work in works:
        cells = [all_works[work].title]
        for quantity in (0, 1):
            values = [[run[quantity] for run in runs[work, side]] for side in SIDES]
            cells += [spread(of_side, 0, statistics.median) for of_side in values]
            ours, theirs = map(statistics.median, values)
            cells.append(f"{theirs / ours:.1f}")
        print(f"| {' | '.join(cells)} |")
