"""docs/stories.md: a real pretrained model, SFT and GRPO on children's stories.

The model is stories260K, a Llama of 260,032 parameters that was pretrained on TinyStories; the data
is a file with a story per line, in a column `text`. Neither is in this repository: docs/stories.md
says where both can be had. They are expected in `FOLDER`.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Generator

import grpo
from docs.experiments.lib import sampling
from docs.experiments.lib.drawing import (
    ALGORITHM_STYLES,
    HEALTHY,
    SICK,
    THIRD,
    draw_band,
    draw_evaluations,
    panel,
)
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import (
    JOBS,
    SEEDS,
    Run,
    for_each_seed,
    read_jsonl,
    run_of,
    runs_of,
    value,
    write_jsonl,
)
from docs.experiments.lib.tables import rounded, spread
from docs.rewards import stories as rules

FOLDER = Path("runs/stories")
MODEL = FOLDER / "model"  # in the format of transformers
STORIES = FOLDER / "stories.jsonl"
DATA = FOLDER / "data"  # made from the stories
NUM_STORIES = 600  # of which the last are held out
NUM_HELD_OUT = 100
NUM_COPIES = 4  # of each held-out opening: an evaluation samples one completion per row
NUM_EXAMPLES = 1  # openings whose completions the page shows
LONG = 400  # tokens within which most stories of the data end

SFT = (
    f"sft.py --dataset {DATA} --model {MODEL} --max-length 512 --epochs 1 --batch-size 16 "
    "--micro-batch-size 8 --learning-rate 5e-4 --eval-every 10 --eval-rows 100 --max-new-tokens 64"
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
HACKED, HELD = [*COMMANDS][2:]


# --- the data ----------------------------------------------------------------------------------
def split_story(text: str) -> tuple[str, str] | None:
    """The first sentence, and the rest with the space before it; None if there is no rest."""
    first = re.match(r'.+?[.!?]["”]?(?=\s\S)', text, re.DOTALL)
    if first is None:
        return None
    return first[0], text[len(first[0]) :]


def write_data(stories: Path, folder: Path) -> None:
    """train.jsonl and test.jsonl with prompts and completions, of the stories' first sentences."""
    rows = []
    for story in read_jsonl(stories)[:NUM_STORIES]:
        parts = split_story(story["text"].strip())
        if parts is not None:
            rows.append({"prompt": parts[0], "completion": parts[1]})
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows[:-NUM_HELD_OUT])
    write_jsonl(folder / "test.jsonl", rows[-NUM_HELD_OUT:] * NUM_COPIES)


# --- measuring ---------------------------------------------------------------------------------
def load_prompts(tokenizer: Any) -> list[grpo.Prompt]:
    """The held-out openings."""
    args = grpo.Args(dataset=str(DATA), max_prompt_length=96)
    return sampling.load_prompts(args, "test", tokenizer)


def ended_fraction(policy: sampling.Policy, seed: int) -> float:
    """The fraction of stories that end with a stop token; one for each held-out opening."""
    prompt_ids = [prompt.ids for prompt in load_prompts(policy.tokenizer)[:NUM_HELD_OUT]]
    sequences, _ = sampling.sample(policy, prompt_ids, LONG, Generator().manual_seed(seed))
    return mean(float(completion[-1] in policy.stop_ids) for _, completion in sequences)


def evaluate(policy: sampling.Policy, start: sampling.Policy, seed: int) -> dict[str, Any]:
    """What the stories of a policy are like: a completion of each held-out row, the same as in the
    run's last evaluation, judged by the rules and by the policy that the run started from."""
    prompts = load_prompts(policy.tokenizer)
    prompt_ids = [prompt.ids for prompt in prompts]
    sequences, texts = sampling.sample(policy, prompt_ids, 64, Generator().manual_seed(seed))
    num_tokens = sum(len(completion) for _, completion in sequences)
    return {
        "friend": mean(rules.friend([], texts)),
        "happy words": mean(rules.happy_words([], texts)),
        "distinct pairs": mean(rules.distinct_pairs([], texts)),
        "log-prob": sampling.total_logprob(start, sequences) / num_tokens,
        "KL": sampling.mean_log_ratio(policy, start, sequences),
        "samples": [*zip([prompt.text for prompt in prompts], texts, strict=True)][:NUM_EXAMPLES],
    }


def measure_seed(seed: int) -> dict[str, dict]:
    """`evaluate` by label, and the fraction of stories that end, before and after SFT."""
    before = sampling.load_policy(MODEL)
    measured = {}
    for label, command in COMMANDS.items():
        policy = sampling.load_policy(run_of(command, seed).folder)
        if label == "SFT":
            start = policy
        measured[label] = evaluate(policy, start, seed)
    measured["ended"] = {
        "before": ended_fraction(before, seed),
        "after": ended_fraction(start, seed),
    }
    return measured


def measure() -> dict:
    write_data(STORIES, DATA)
    by_command = runs_of(COMMANDS.values())
    runs = {label: by_command[command] for label, command in COMMANDS.items()}
    return report(runs, [*for_each_seed(measure_seed).values()])


def report(runs: dict[str, list[Run]], measured: list[dict]) -> dict:
    """What docs/results/stories.json holds."""
    numbers = {}
    for label in COMMANDS:
        numbers[label] = {}
        for quantity in QUANTITIES:
            numbers[label][quantity] = [of_seed[label][quantity] for of_seed in measured]
    numbers["held-out loss"] = {
        "before": [run.evaluations[0]["eval/loss"] for run in runs["SFT"]],
        "after": [run.evaluations[-1]["eval/loss"] for run in runs["SFT"]],
    }
    numbers[f"ends within {LONG} tokens"] = {
        moment: [of_seed["ended"][moment] for of_seed in measured] for moment in ("before", "after")
    }
    curves = {}
    for label, metric in CURVES:
        of_label = [run.curve("step", metric) for run in runs[label]]
        curves.setdefault(label, {})[f"{metric} over step"] = of_label
    samples = []  # of the first held-out openings, seed 1: neither chosen nor shortened
    for i in range(NUM_EXAMPLES):
        for label in COMMANDS:
            opening, completion = measured[0][label]["samples"][i]
            samples.append([opening, label, completion])
    return {
        "seeds": SEEDS,
        "numbers": rounded(numbers),
        "curves": rounded(curves),
        "samples": samples,
    }


# --- tables and figure -------------------------------------------------------------------------
QUANTITIES = {  # heading and digits
    "friend": ("a friend", 2),
    "happy words": ("happy words", 2),
    "distinct pairs": ("distinct pairs", 2),
    "log-prob": ("log-prob per token under the SFT model", 2),
    "KL": ("KL to it", 1),
}
CURVES = (
    ("friend", "rewards/friend"),
    (HACKED, "rewards/happy_words"),
    (HELD, "rewards/happy_words"),
    (HACKED, "eval/reward"),
    (HELD, "eval/reward"),
)


def tables(results: dict) -> dict:
    numbers = results["numbers"]
    rows = []
    for label in COMMANDS:
        cells = [spread(numbers[label][name], QUANTITIES[name][1]) for name in QUANTITIES]
        rows.append([label, *cells])
    headings = [heading for heading, _ in QUANTITIES.values()]
    samples = []
    for opening, label, completion in results["samples"]:
        samples.append([in_a_cell(opening), label, in_a_cell(completion)])
    return {
        "stories": {"columns": ["", *headings], "rows": rows},
        "stories samples": {"columns": ["opening", "", "completion"], "rows": samples},
    }


def in_a_cell(text: str) -> str:
    """A text on one line, as code, so that Markdown leaves it alone."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


def draw(results: dict) -> dict:
    """The rewards and the second judge over the rollouts."""
    curves = results["curves"]
    friend = panel("Rule 1 is learned", "rollout", "fraction with a friend", THIRD)
    happy = panel("Rule 2 is hacked", "rollout", "happy words per story", THIRD)
    distinct = panel("Text repeats itself", "rollout", "distinct pairs, held out", THIRD)
    friend_curves = curves["friend"]["rewards/friend over step"]
    draw_band(friend, friend_curves, "friend", ALGORITHM_STYLES["GRPO"])
    for label, beta, style in ((HACKED, "beta 0", SICK), (HELD, "beta 0.2", HEALTHY)):
        draw_band(happy, curves[label]["rewards/happy_words over step"], beta, style)
        draw_evaluations(distinct, curves[label]["eval/reward over step"], beta, style)
    friend.set(ylim=(0, 1.03))
    distinct.set(ylim=(0, 1.03))
    happy.legend()
    return {"stories_friend": friend, "stories_happy": happy, "stories_distinct": distinct}


# --- learning rates, for docs/choosing.md ------------------------------------------------------
GRPO_AT = f"{GRPO}:happy_words".replace("--eval-rows 400 --eval-every 10", "--eval-rows 40")
RATES = {rate: GRPO_AT.replace("3e-4", rate) for rate in ("5e-4", "5e-5", "5e-6")}
RATE_SEEDS = (1, 2)
RATE_COLUMNS = {
    "happy words": "rewards/happy_words",
    "KL (k3), nats per completion": "objective/kl",
}


def measure_rates() -> dict:
    """Means over the last five of 40 rollouts, by rate and metric, one for each seed."""
    write_data(STORIES, DATA)
    numbers = {}
    for rate, command in RATES.items():
        numbers[rate] = {}
        with ThreadPoolExecutor(JOBS) as pool:
            runs = [*pool.map(partial(run_of, command), RATE_SEEDS)]
        for metric in RATE_COLUMNS.values():
            numbers[rate][metric] = [value(run.rows, metric) for run in runs]
    return {"seeds": RATE_SEEDS, "numbers": rounded(numbers)}


def rate_tables(results: dict) -> dict:
    rows = []
    for rate, numbers in results["numbers"].items():
        rows.append([rate, *(spread(numbers[metric], 2) for metric in RATE_COLUMNS.values())])
    return {"stories_rates": {"columns": ["learning rate", *RATE_COLUMNS], "rows": rows}}


EXPERIMENTS = (
    Experiment("stories", tables, measure, draw, COMMANDS),
    Experiment("stories_rates", rate_tables, measure_rates, commands=RATES),
)
