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
    curve,
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
CURVES = {
    "rewards/friend": ("friend",),
    "rewards/happy_words": (HACKED, HELD),
    "eval/reward": (HACKED, HELD),  # distinct pairs
}


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
def load_prompt_ids(policy: sampling.Policy) -> list[list[int]]:
    """The held-out openings."""
    args = grpo.Args(dataset=str(DATA), max_prompt_length=96)
    return [prompt.ids for prompt in sampling.load_prompts(args, "test", policy.tokenizer)]


def ended_fraction(policy: sampling.Policy, seed: int) -> float:
    """Of one story for each held-out opening, how many end within 400 tokens, as most stories of
    the data do."""
    prompt_ids = load_prompt_ids(policy)[:NUM_HELD_OUT]
    sequences, _ = sampling.sample(policy, prompt_ids, 400, Generator().manual_seed(seed))
    return mean(float(completion[-1] in policy.stop_ids) for _, completion in sequences)


def evaluate(policy: sampling.Policy, start: sampling.Policy, seed: int) -> dict[str, Any]:
    """What the stories of a policy are like: a completion of each held-out row, the same as in the
    run's last evaluation, judged by the rules and by the policy that the run started from."""
    prompt_ids = load_prompt_ids(policy)
    sequences, texts = sampling.sample(policy, prompt_ids, 64, Generator().manual_seed(seed))
    num_tokens = sum(len(completion) for _, completion in sequences)
    return {
        "a friend": mean(rules.friend([], texts)),
        "happy words": mean(rules.happy_words([], texts)),
        "distinct pairs": mean(rules.distinct_pairs([], texts)),
        "log-prob per token under the SFT model": sampling.total_logprob(start, sequences)
        / num_tokens,
        "KL to it": sampling.mean_log_ratio(policy, start, sequences),
        "first completion": texts[0],
    }


def measure_seed(seed: int) -> dict[str, Any]:
    """`evaluate` by label, and the fraction of stories that end, before and after SFT."""
    start = sampling.load_policy(run_of(SFT, seed).folder)
    measured = {
        "ended before SFT": ended_fraction(sampling.load_policy(MODEL), seed),
        "ended after SFT": ended_fraction(start, seed),
    }
    for label, command in COMMANDS.items():
        policy = sampling.load_policy(run_of(command, seed).folder)
        measured[label] = evaluate(policy, start, seed)
    return measured


def measure() -> dict:
    write_data(STORIES, DATA)
    runs = runs_of(COMMANDS.values())
    curves = {}
    for metric, labels in CURVES.items():
        curves[metric] = {}
        for label in labels:
            curves[metric][label] = [curve(run.rows, metric) for run in runs[COMMANDS[label]]]
    return {"numbers": rounded(for_each_seed(measure_seed)), "curves": rounded(curves)}


# --- tables and figures --------------------------------------------------------------------------
def tables(results: dict) -> dict:
    digits = {
        "a friend": 2,
        "happy words": 2,
        "distinct pairs": 2,
        "log-prob per token under the SFT model": 2,
        "KL to it": 1,
    }
    rows, samples = [], []
    for label in COMMANDS:
        of_label = [of_seed[label] for of_seed in results["numbers"].values()]
        cells = [spread([one[name] for one in of_label], digits[name]) for name in digits]
        rows.append([label, *cells])
        # Of the first held-out opening, seed 1: neither chosen nor shortened.
        samples.append([label, in_a_cell(of_label[0]["first completion"])])
    return {
        "stories": {"columns": ["", *digits], "rows": rows},
        "stories samples": {"columns": ["", "completion"], "rows": samples},
    }


def in_a_cell(text: str) -> str:
    """A text on one line, as code, so that Markdown leaves it alone."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


def draw(results: dict) -> dict:
    """The rewards and the second judge over the rollouts."""
    curves = results["curves"]
    friend = panel("Rule 1 is learned", "rollout", "fraction with a friend", THIRD, ylim=(0, 1.03))
    happy = panel("Rule 2 is hacked", "rollout", "happy words per story", THIRD)
    distinct = panel(
        "Text repeats itself", "rollout", "distinct pairs, held out", THIRD, ylim=(0, 1.03)
    )
    draw_band(friend, curves["rewards/friend"]["friend"], "friend", ALGORITHM_STYLES["GRPO"])
    for label, beta, style in ((HACKED, "beta 0", SICK), (HELD, "beta 0.2", HEALTHY)):
        draw_band(happy, curves["rewards/happy_words"][label], beta, style)
        draw_evaluations(distinct, curves["eval/reward"][label], beta, style)
    happy.legend()
    return {"stories_friend": friend, "stories_happy": happy, "stories_distinct": distinct}


# --- learning rates, for docs/choosing.md ------------------------------------------------------
GRPO_AT = f"{GRPO}:happy_words".replace("--eval-rows 400 --eval-every 10", "--eval-rows 40")
RATES = {rate: GRPO_AT.replace("3e-4", rate) for rate in ("5e-4", "5e-5", "5e-6")}
RATE_COLUMNS = {
    "happy words": "rewards/happy_words",
    "KL (k3), nats per completion": "objective/kl",
}


def measure_rates() -> dict:
    """Means over the last five of 40 rollouts, by rate and metric, for seeds 1 and 2."""
    write_data(STORIES, DATA)
    numbers = {}
    for rate, command in RATES.items():
        runs = [run_of(command, seed) for seed in (1, 2)]
        numbers[rate] = {}
        for metric in RATE_COLUMNS.values():
            numbers[rate][metric] = [value(run.rows, metric) for run in runs]
    return {"numbers": rounded(numbers)}


def rate_tables(results: dict) -> dict:
    rows = []
    for rate, numbers in results["numbers"].items():
        rows.append([rate, *(spread(numbers[metric], 2) for metric in RATE_COLUMNS.values())])
    return {"stories_rates": {"columns": ["learning rate", *RATE_COLUMNS], "rows": rows}}


EXPERIMENTS = (
    Experiment("stories", tables, measure, draw, COMMANDS),
    Experiment("stories_rates", rate_tables, measure_rates, commands=RATES),
)
