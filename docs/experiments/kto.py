"""docs/kto.md: the default run, the same on both sides of preference pairs, and other weights."""

import random
from pathlib import Path

from docs.experiments.lib.runs import (
    GOLD,
    RUNS,
    Numbers,
    experiment_of_runs,
    read_jsonl,
    variants,
    write_jsonl,
)

LABELLED_PAIRS = RUNS / "labelled_pairs"
COMMANDS = {
    "(default)": "kto.py",
    "pairs": f"kto.py --dataset {LABELLED_PAIRS} --eval-reward-fn {GOLD}",
}
VARIANTS = variants("kto.py", "", "--desirable-weight 1", "--desirable-weight 1 --beta 0.3")


def write_labelled_pairs() -> None:
    """The pairs of tiny/reviews as labelled completions: two rows for each."""
    LABELLED_PAIRS.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = []
        for pair in read_jsonl(Path(f"tiny/reviews/preferences/{split}.jsonl")):
            for side, label in (("chosen", True), ("rejected", False)):
                rows.append({"prompt": pair["prompt"], "completion": pair[side], "label": label})
        random.Random(0).shuffle(rows)  # z0 mismatches neighbours, which must not share a prompt
        write_jsonl(LABELLED_PAIRS / f"{split}.jsonl", rows)


def tables(numbers: Numbers) -> dict:
    made = {}
    for name, label in {"kto": "(default)", "kto pairs": "pairs"}.items():
        columns = {
            "loss before": (label, "first eval/loss", 3),
            "loss": (label, "eval/loss", 3),
            "gold before": (label, "first eval/reward", 2),
            "gold": (label, "eval/reward", 2),
            "grammatical": (label, "grammatical", 2),
            "KL": (label, "eval/kl", 1),
            "highest KL": (label, "highest eval/kl", 1),
            "tokens before": (label, "first eval/length_mean", 1),
            "tokens": (label, "eval/length_mean", 1),
        }
        made[name] = numbers.table_by_seed(columns)
    return made


def variants_tables(numbers: Numbers) -> dict:
    columns = {
        "gold": ("eval/reward", 2),
        "KL": ("KL of samples", 1),
        "grammatical": ("grammatical", 2),
    }
    return {"kto_variants": numbers.table_by_label(columns)}


EXPERIMENTS = (
    experiment_of_runs("kto", COMMANDS, tables, prepare=write_labelled_pairs),
    experiment_of_runs("kto_variants", VARIANTS, variants_tables),
)
