"""Rows that the scripts, and TRL, turn into token ids in a second of one core; bytes per token.

    pip install -e ".[bench]"
    python -m docs.experiments reading --model FOLDER --data FOLDER

The model gives the tokenizer and its chat template. The data are those of `speed`, repeated with a
number behind each prompt. TRL prepares the same rows, without the cache of `datasets`. Each runs
twice, by turns; the CPU time of all its processes counts, so other work on the machine matters
little. Output: rows of a table in Markdown.
"""

import resource
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path

from datasets import Dataset, disable_caching, disable_progress_bars
from transformers import AutoTokenizer

from common.rows import EncodedRows
from common.tokens import find_stop_ids
from docs.experiments.lib.measuring import quietly, random_llama
from docs.experiments.lib.runs import read_jsonl, write_jsonl

LOADERS = {
    "sft": "load_demonstrations",
    "kto": "load_labelled",
    "dpo": "load_preference_pairs",
    "rm_bradley_terry": "load_comparisons",
    "grpo": "load_prompts",
}
TRL = {"sft": "SFT", "dpo": "DPO"}


def make_rows(data: str, num_rows: int) -> dict[str, list[dict]]:
    """Questions with answers, and half as many pairs, as the datasets have them."""
    questions = read_jsonl(Path(data, "gsm8k/train.jsonl"))
    pairs = read_jsonl(Path(data, "gsm8k_solutions/train.jsonl"))
    rows = {"rows": [], "pairs": []}
    for i in range(num_rows):
        row = questions[i % len(questions)]
        prompt, answer = f"{row['question']} ({i})", row["answer"]
        rows["rows"].append(dict(prompt=prompt, completion=answer, answer=answer, label=True))
    for i in range(num_rows // 2):
        row = pairs[i % len(pairs)]
        rows["pairs"].append(row | dict(prompt=f"{row['prompt']} ({i})"))
    return rows


def bytes_per_token(rows: EncodedRows) -> float:
    """What stays in memory; the prompt of a pair is kept once."""
    arrays = [ids for _, row in rows.encoded for ids in row]
    return sum(map(sys.getsizeof, arrays)) / sum(map(len, arrays))


def cpu_seconds() -> float:
    """CPU time so far of this process and of those that it has started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_ours(name: str, folder: str, tokenizer, stop_ids: list[int]) -> EncodedRows:
    """By a script of this repository, through its tokenizer's chat template."""
    script = import_module(name)
    flags = dict(max_prompt_length=4096) if name == "grpo" else dict(max_length=4096)
    args = script.Args(dataset=folder, chat=True, **flags)
    more = [] if name == "grpo" else [stop_ids]
    return getattr(script, LOADERS[name])(args, "train", tokenizer, *more)


def read_trl(name: str, rows: list[dict], tokenizer, model: str) -> Dataset:
    """By a trainer of TRL, which gets chats and prepares them before it trains a model."""
    import trl

    chats = []
    for row in rows:
        chat = {"prompt": [{"role": "user", "content": row["prompt"]}]}
        for side in ("completion", "chosen", "rejected"):
            if side in row:
                chat[side] = [{"role": "assistant", "content": row[side]}]
        chats.append(chat)
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(trl, f"{TRL[name]}Config")
        settings = dict(output_dir=folder, use_cpu=True, bf16=False, report_to=[], max_length=4096)
        trainer = getattr(trl, f"{TRL[name]}Trainer")(
            model,
            args=config(**settings),
            train_dataset=Dataset.from_list(chats),
            processing_class=tokenizer,
        )
    return trainer.train_dataset


def main(model: str, data: str, num_rows: int = 20_000) -> None:
    """Measure each script, and TRL's trainers of SFT and DPO.

    Args:
        model: folder whose tokenizer is used
        data: folder with gsm8k/ and gsm8k_solutions/
        num_rows: questions; half as many pairs
    """
    warnings.simplefilter("ignore")
    disable_caching()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    stop_ids = find_stop_ids(model, tokenizer)
    print("| script | rows per second and core | bytes per token | TRL, rows per second and core |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        sizes = dict(hidden_size=8, num_attention_heads=1, vocab_size=len(tokenizer))
        random_llama(**sizes).save_pretrained(f"{folder}/model")
        rows = make_rows(data, num_rows)
        for kind in rows:
            Path(folder, kind).mkdir()
            write_jsonl(Path(folder, kind, "train.jsonl"), rows[kind])
        for name in LOADERS:
            kind = "pairs" if name in ("dpo", "rm_bradley_terry") else "rows"
            speeds, trl_speeds = [], []
            for _ in range(2):
                start = cpu_seconds()
                found = quietly(read_ours, name, f"{folder}/{kind}", tokenizer, stop_ids)
                speeds.append(len(found) / (cpu_seconds() - start))
                if name in TRL:
                    start = cpu_seconds()
                    quietly(read_trl, name, rows[kind], tokenizer, f"{folder}/model")
                    trl_speeds.append(len(rows[kind]) / (cpu_seconds() - start))
            theirs = f"{max(trl_speeds):,.0f}" if trl_speeds else ""
            cells = f"{max(speeds):,.0f} | {bytes_per_token(found):.1f} | {theirs}"
            print(f"| `{name}.py` | {cells} |", flush=True)
