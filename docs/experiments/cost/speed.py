"""Seconds an optimiser step takes, and the memory, in these scripts and in TRL, on the same work.

    pip install -e ".[bench]"
    python -m docs.experiments speed grpo dpo rm sft --data FOLDER --model MODEL

FOLDER holds gsm8k/train.jsonl (`question`, `answer`) and gsm8k_solutions/train.jsonl (`prompt`, a
right solution as `chosen`, a wrong one as `rejected`), both from
github.com/openai/grade-school-math.

Both sides train the same checkpoint on the same rows with the same batch, micro-batch, lengths,
optimiser and number of optimiser steps, in processes of their own, on a CPU in float32. The clock
is the same too: a hook after each step of torch's AdamW. Start-up, the first steps and evaluations
lie outside. Memory is the highest of the whole process, libraries and evaluations included. Output:
rows of a table in Markdown.
"""

import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro
from transformers import AutoTokenizer

from docs.experiments.lib.measuring import in_own_process, noted_steps, peak
from docs.experiments.lib.runs import read_jsonl, write_jsonl

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
    rm = "rm_bradley_terry"
    return {
        "sft": Work("SFT, 16 rows in micro-batches of 4", "sft", 16, "SFT", rows),
        "chats": Work("SFT, 8 chats of six turns in micro-batches of 4", "sft", 8, "SFT", chats),
        "rm": Work("reward model, 16 pairs in micro-batches of 4", rm, 16, "Reward", pairs),
        "dpo": Work("DPO, 16 pairs in micro-batches of 4", "dpo", 16, "DPO", pairs),
        "grpo": Work("GRPO, 4 prompts x 8 samples, 64 new tokens", "grpo", 4, "GRPO", grpo),
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
NAMES_IN_TRL = {  # of our flags that have another one there
    "clip_coef": "epsilon",
    "epochs": "num_train_epochs",
    "generation_batch_size": "",  # there all completions of a rollout
    "group_size": "num_generations",
    "max_new_tokens": "max_completion_length",
    "warmup_ratio": "warmup_steps",  # below 1 a fraction of the steps
}


def train_trl(work: Work, num_rows: int, folder: str) -> None:
    """Train with TRL on the first rows, once."""
    settings = dict(output_dir=folder, max_steps=num_rows // work.rows_per_step)
    args = import_module(work.script).Args(**work.flags)
    trl_trainer(work.trl_trainer, args, f"train[:{num_rows}]", count_letters, **settings).train()


def trl_trainer(kind: str, args: Any, split: str, reward: Callable, **settings: Any) -> Any:
    """A trainer of TRL with the values of our script's flags, where both have them, and its own
    defaults elsewhere; settings come before both."""
    try:
        import trl
    except ModuleNotFoundError as error:
        raise ImportError('TRL comes with an extra: pip install -e ".[bench]"') from error
    from datasets import load_dataset

    flags = vars(args)
    config = getattr(trl, f"{kind}Config")
    shared = {NAMES_IN_TRL.get(flag, flag): value for flag, value in flags.items()}
    shared = {name: shared[name] for name in shared if name in config.__dataclass_fields__}
    shared |= dict(use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no")
    shared |= dict(report_to="none", model_init_kwargs={"dtype": "float32"})
    shared.setdefault("max_grad_norm", 0.0)  # reinforce.py does not clip gradients
    data = load_dataset(args.dataset, split=split).shuffle(seed=args.seed)
    inputs = dict(model=args.model, train_dataset=data)
    if "messages" in data.column_names:
        shared["assistant_only_loss"] = True
        inputs["processing_class"] = AutoTokenizer.from_pretrained(args.model)
        inputs["processing_class"].chat_template = CHAT_TEMPLATE
    sequences_per_step = flags.get("batch_size")
    if sequences_per_step is None:
        sequences_per_rollout = args.prompts_per_rollout * flags.get("group_size", 1)
        sequences_per_step = sequences_per_rollout // flags.get("num_minibatches", 1)
        shared["max_steps"] = args.total_rollouts * flags.get("num_minibatches", 1)
    if "group_size" in flags:
        inputs["reward_funcs"] = reward
        shared |= dict(generation_batch_size=sequences_per_rollout)
    if kind == "GRPO":
        is_unbiased = flags.get("kl_placement") == "unbiased"
        shared |= dict(loss_type="grpo", use_bias_correction_kl=is_unbiased)
    if kind == "Distillation":
        inputs["teacher_model"] = args.teacher
        shared["teacher_model_init_kwargs"] = {"dtype": "float32"}
    size = min(args.micro_batch_size, sequences_per_step)
    shared["per_device_train_batch_size"] = size
    shared["gradient_accumulation_steps"] = sequences_per_step // size
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(**inputs, args=config(**shared | settings))


# --- models and data ---------------------------------------------------------------------------
def make_inputs(folder: str, data: Path) -> None:
    """Write GSM8K to the folder, as the scripts read it."""
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
    works: tyro.conf.Positional[tuple[Literal["sft", "chats", "rm", "dpo", "grpo"], ...]],
    data: Path,
    model: Path,
    skipped: int = 4,
    steps: int = 4,
) -> None:
    """Compare the speed and memory of works.

    Args:
        works: which
        data: folder with the texts
        model: its folder
        skipped: optimiser steps before the clock starts, at least 1
        steps: optimiser steps measured
    """
    columns = ["workload"]
    for quantity in ("ms per step", "peak MB"):
        columns += [*(f"{side}, {quantity}" for side in SIDES), "ratio"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(folder, data)
        Path(folder, "policy").symlink_to(model.resolve())
        all_works = works_in(folder)
        for name in works:
            work = all_works[name]
            runs = [in_own_process(measure, side, work, skipped, steps) for side in SIDES]
            cells = [work.title]
            for ours, theirs in zip(*runs, strict=True):
                cells += [f"{ours:,.0f}", f"{theirs:,.0f}", f"{theirs / ours:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
