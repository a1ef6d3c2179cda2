"""docs/stories.md: a real pretrained model, SFT and GRPO on children's stories.

The page says where the model and the stories can be had. They are expected in `FOLDER`.
"""

import re
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Generator

import grpo
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment, Table, runs_by_label
from docs.experiments.lib.metrics import measured
from docs.experiments.lib.runs import Run, read_jsonl, run_of, write_jsonl
from docs.rewards import stories as rules

FOLDER = Path("runs/stories")
MODEL = FOLDER / "model"  # in the format of transformers
STORIES = FOLDER / "stories.jsonl"
DATA = FOLDER / "data"  # made from the stories
NUM_STORIES = 600  # of which the last are held out
NUM_HELD_OUT = 100
NUM_COPIES = 4  # of each held-out opening: an evaluation samples one completion per row

SFT = (
    f"sft.py --dataset {DATA} --model {MODEL} --max-length 512 --epochs 1 --batch-size 16 "
    "--micro-batch-size 8 --learning-rate 5e-4 --eval-every 10 --eval-rows 100 "
    "--eval-samples 100 --max-new-tokens 400"
)
GRPO = (
    f"grpo.py --dataset {DATA} --model {{{SFT}}} --max-prompt-length 96 --max-new-tokens 64 "
    "--prompts-per-rollout 16 --total-rollouts 40 --learning-rate 3e-4 --eval-rows 400 "
    "--eval-every 10 --reward-fn docs/rewards/stories.py"
)
JUDGE = "--eval-reward-fn docs/rewards/stories.py:distinct_pairs"
COMMANDS = {
    "SFT": SFT,
    "friend": f"{GRPO}:friend",
    "happy words, beta 0": f"{GRPO}:happy_words --beta 0 {JUDGE}",
    "happy words, beta 0.2": f"{GRPO}:happy_words --beta 0.2 {JUDGE}",
}


# --- the data ----------------------------------------------------------------------------------
def split_story(text: str) -> tuple[str, str] | None:
    """The first sentence, and the rest with the space before it; None if there is no rest."""
    first = re.match(r'.+?[.!?]["”]?(?=\s\S)', text, re.DOTALL)
    if first is None:
        return None
    return first[0], text[len(first[0]) :]


def write_data() -> None:
    """train.jsonl and test.jsonl with prompts and completions, of the stories' first sentences."""
    rows = []
    for story in read_jsonl(STORIES)[:NUM_STORIES]:
        parts = split_story(story["text"].strip())
        if parts is not None:
            rows.append({"prompt": parts[0], "completion": parts[1]})
    DATA.mkdir(parents=True, exist_ok=True)
    write_jsonl(DATA / "train.jsonl", rows[:-NUM_HELD_OUT])
    write_jsonl(DATA / "test.jsonl", rows[-NUM_HELD_OUT:] * NUM_COPIES)


# --- measuring ---------------------------------------------------------------------------------
def find_runs(commands: dict[str, str]) -> dict[str, list[Run]]:
    write_data()
    return runs_by_label(commands)


def measure_seed(seed: int) -> dict[str, dict[str, Any]]:
    """What the stories of each run are like: a completion of each held-out row, the same as in the
    last evaluation of grpo.py, judged by the rules, and the KL to the policy after SFT."""
    start = sampling.load_policy(run_of(SFT, seed).folder)
    args = grpo.Args(dataset=str(DATA), max_prompt_length=96)
    prompt_ids = [prompt.ids for prompt in sampling.load_prompts(args, "test", start.tokenizer)]
    found = {}
    for label, command in COMMANDS.items():
        policy = sampling.load_policy(run_of(command, seed).folder)
        sequences, texts = sampling.sample(policy, prompt_ids, 64, Generator().manual_seed(seed))
        found[label] = {
            "a friend": mean(rules.friend([], texts)),
            "happy words": mean(rules.happy_words([], texts)),
            "distinct pairs": mean(rules.distinct_pairs([], texts)),
            "KL": sampling.mean_log_ratio(policy, start, sequences),
            "first completion": texts[0],
        }
    return found


# --- tables ------------------------------------------------------------------------------------
COLUMNS = {
    "a friend": (measured("a friend"), 2),
    "happy words": (measured("happy words"), 2),
    "distinct pairs": (measured("distinct pairs"), 2),
    "KL to the SFT model": (measured("KL"), 1),
}


def tables(results: dict) -> dict:
    """Of the first held-out opening, seed 1: neither chosen nor shortened."""
    numbers = results["numbers"]
    samples = [[label, in_a_cell(numbers[label]["first completion"][0])] for label in COMMANDS]
    return {"stories samples": {"columns": ["", "completion"], "rows": samples}}


def in_a_cell(text: str) -> str:
    """A text on one line, as code, so that Markdown leaves it alone."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


EXPERIMENTS = (
    Experiment(
        "stories",
        COMMANDS,
        {"stories": Table(COLUMNS, heading=("",))},
        measure_seed=measure_seed,
        find_runs=find_runs,
        more_tables=tables,
    ),
)
