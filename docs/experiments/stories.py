"""A real pretrained model: SFT and GRPO on children's stories, for docs/stories.md.

    python docs/experiments/stories.py --model FOLDER --data FOLDER    # 20 minutes, two cores

The model is stories260K, a Llama of 260,032 parameters that was pretrained on TinyStories; the data
is a folder whose train.jsonl has a story per line, in a column `text`. Neither is in this
repository: the page says where both can be had. Writes docs/results/stories.json, the page's tables
and its figure. Runs that lie in --out already are read, not repeated.
"""

import contextlib
import io
import json
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import tyro
from paths import RESULTS
from runs import SEEDS, Run
from subprocesses import run_or_exit
from tables import insert_tables, spread
from torch import Generator
from transformers import AutoModelForCausalLM

import grpo
from common.generation import generate
from common.logprobs import micro_batches, rollout_logprobs
from docs.rewards import stories as rules

NUM_STORIES = 600  # of which the last are held out
NUM_HELD_OUT = 100
NUM_COPIES = 4  # of each held-out opening: an evaluation samples one completion per row
NUM_EXAMPLES = 2  # openings whose completions the page shows
LONG = 400  # tokens within which most stories of the data end

SFT = (
    "sft.py --dataset {data} --model {model} --max-length 512 --epochs 1 --batch-size 16 "
    "--micro-batch-size 8 --learning-rate 5e-4 --eval-every 10 --eval-rows 100 --max-new-tokens 64"
)
GRPO = (
    "grpo.py --dataset {data} --model {sft} --max-prompt-length 96 --max-new-tokens 64 "
    "--prompts-per-rollout 16 --total-rollouts 40 --learning-rate 3e-4 --eval-rows 400 "
    "--eval-every 10"
)
RULES = "docs/rewards/stories.py"
COMMANDS = {
    "SFT": SFT,
    "friend": f"{GRPO} --reward-fn {RULES}:friend",
    "happy words, beta 0": f"{GRPO} --reward-fn {RULES}:happy_words --beta 0 "
    f"--eval-reward-fn {RULES}:distinct_pairs",
    "happy words, beta 0.2": f"{GRPO} --reward-fn {RULES}:happy_words --beta 0.2 "
    f"--eval-reward-fn {RULES}:distinct_pairs",
}
HACKED, HELD = [*COMMANDS][2:]


@dataclass
class Args:
    model: str
    """Folder of stories260K, in the format of transformers."""
    data: str
    """Folder with train.jsonl, a story per line in the column `text`."""
    out: str = "runs/stories"
    """Where the data's split and the runs are."""
    jobs: int = 2
    """Runs side by side, of one thread each."""


# --- the data ----------------------------------------------------------------------------------
def split_story(text: str) -> tuple[str, str] | None:
    """The first sentence, and the rest with the space before it; None if there is no rest."""
    first = re.match(r'.+?[.!?]["”]?(?=\s\S)', text, re.DOTALL)
    if first is None:
        return None
    return first[0], text[len(first[0]) :]


def write_data(source: Path, folder: Path) -> None:
    """train.jsonl and test.jsonl with prompts and completions, of the stories' first sentences."""
    rows = []
    for line in (source / "train.jsonl").read_text().splitlines()[:NUM_STORIES]:
        parts = split_story(json.loads(line)["text"].strip())
        if parts is not None:
            rows.append(json.dumps({"prompt": parts[0], "completion": parts[1]}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(rows[:-NUM_HELD_OUT]))
    (folder / "test.jsonl").write_text("".join(rows[-NUM_HELD_OUT:] * NUM_COPIES))


# --- the runs ----------------------------------------------------------------------------------
def run_of(label: str, seed: int, out: Path) -> Run | None:
    """The finished run of a label and a seed, if there is one."""
    folders = sorted((out / label.replace(" ", "_")).glob(f"*__{seed}__*/model"))
    return Run(folders[-1].parent) if folders else None


def train(label: str, seed: int, args: Args) -> None:
    """Make the run of a label and a seed, unless it is there."""
    out = Path(args.out).resolve()
    if run_of(label, seed, out) is not None:
        return
    names = {"model": args.model, "data": out / "data"}
    if label != "SFT":
        names["sft"] = run_of("SFT", seed, out).folder / "model"
    arguments = COMMANDS[label].format(**names).split()
    folder = out / label.replace(" ", "_")
    run_or_exit([*arguments, "--seed", str(seed), "--output-dir", str(folder)], OMP_NUM_THREADS="1")
    print(f"    {label}, seed {seed}", flush=True)


# --- what is read off them ---------------------------------------------------------------------
def load_prompts(data: str, tokenizer: Any) -> list[grpo.Prompt]:
    """The held-out openings."""
    with contextlib.redirect_stdout(io.StringIO()):
        return grpo.load_prompts(grpo.Args(dataset=data, max_prompt_length=96), "test", tokenizer)


def ended_fraction(model: str, data: str, seed: int) -> float:
    """The fraction of stories that end with a stop token; one for each held-out opening."""
    torch.set_num_threads(1)
    tokenizer, stop_ids = grpo.load_tokenizer(model)
    prompts = load_prompts(data, tokenizer)[:NUM_HELD_OUT]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    completion_ids = generate(
        policy,
        [prompt.ids for prompt in prompts],
        max_new_tokens=LONG,
        temperature=1.0,
        stop_ids=stop_ids,
        rng=Generator().manual_seed(seed),
    )
    return mean(float(ids[-1] in stop_ids) for ids in completion_ids)


def measure(model: str, start: str, data: str, seed: int) -> dict[str, Any]:
    """What the stories of a model are like: a completion of each held-out row, the same as in the
    run's last evaluation, judged by the rules and by the model that the run started from."""
    torch.set_num_threads(1)
    tokenizer, stop_ids = grpo.load_tokenizer(model)
    prompts = load_prompts(data, tokenizer)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    start_policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    rng = Generator().manual_seed(seed)
    sequences = []
    for first in range(0, len(prompts), 128):  # the batches of an evaluation
        prompt_ids = [prompt.ids for prompt in prompts[first : first + 128]]
        completion_ids = generate(
            policy, prompt_ids, max_new_tokens=64, temperature=1.0, stop_ids=stop_ids, rng=rng
        )
        sequences += zip(prompt_ids, completion_ids, strict=True)
    texts = tokenizer.batch_decode([ids for _, ids in sequences], skip_special_tokens=True)
    num_tokens = sum(len(ids) for _, ids in sequences)
    logprobs = {}
    for name, scorer in (("policy", policy), ("start", start_policy)):
        batches = micro_batches(sequences, torch.arange(len(sequences)), 64)
        logprobs[name] = rollout_logprobs(scorer, sequences, batches, 1.0).double().sum().item()
    return {
        "friend": mean(rules.friend([], texts)),
        "happy words": mean(rules.happy_words([], texts)),
        "distinct pairs": mean(rules.distinct_pairs([], texts)),
        "log-prob": logprobs["start"] / num_tokens,
        "KL": (logprobs["policy"] - logprobs["start"]) / len(sequences),
        "texts": texts[:NUM_EXAMPLES],
        "prompts": [prompt.text for prompt in prompts[:NUM_EXAMPLES]],
    }


def measure_all(args: Args) -> tuple[dict[str, list[dict]], dict[str, list[float]]]:
    """What `measure` finds for each label, a dictionary for each seed; and the fraction of stories
    that end, before and after SFT, a number for each seed."""
    out = Path(args.out).resolve()
    data = str(out / "data")
    sft_models = [str(run_of("SFT", seed, out).folder / "model") for seed in SEEDS]
    measured, ended = {}, {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for name, models in (("before", [args.model] * len(SEEDS)), ("after", sft_models)):
            ended[name] = [*pool.map(ended_fraction, models, [data] * len(SEEDS), SEEDS)]
        for label in COMMANDS:
            models = [str(run_of(label, seed, out).folder / "model") for seed in SEEDS]
            measured[label] = [*pool.map(measure, models, sft_models, [data] * len(SEEDS), SEEDS)]
    return measured, ended


# --- results -----------------------------------------------------------------------------------
def report(
    runs: dict[str, list[Run]], measured: dict[str, list[dict]], ended: dict[str, list[float]]
) -> dict:
    """What docs/results/stories.json holds."""
    columns = {
        "friend": ("a friend", 2),
        "happy words": ("happy words", 2),
        "distinct pairs": ("distinct pairs", 2),
        "log-prob": ("log-prob per token under the SFT model", 2),
        "KL": ("KL to it", 1),
    }
    rows, numbers = [], {}
    for label, of_label in measured.items():
        row, numbers[label] = [label], {}
        for quantity in columns:
            values = [round(of_seed[quantity], 4) for of_seed in of_label]
            numbers[label][quantity] = values
            row.append(spread(values, columns[quantity][1]))
        rows.append(row)
    headings = [heading for heading, _ in columns.values()]
    losses = {}
    for name, i in (("before", 0), ("after", -1)):
        losses[name] = [round(run.evaluations[i]["eval/loss"], 4) for run in runs["SFT"]]
    sft_rows = []
    for quantity, by_name, digits in (
        ("held-out loss", losses, 3),
        (f"ends within {LONG} tokens", ended, 2),
    ):
        numbers[quantity] = by_name
        for name, values in by_name.items():
            sft_rows.append([f"{quantity}, {name}", *(f"{value:.{digits}f}" for value in values)])
    curves = {}
    for label, metric in (
        ("friend", "reward/friend"),
        (HACKED, "reward/happy_words"),
        (HELD, "reward/happy_words"),
        (HACKED, "eval/reward"),
        (HELD, "eval/reward"),
    ):
        of_label = [run.curve("step", metric) for run in runs[label]]
        curves.setdefault(label, {})[f"{metric} over step"] = [
            [(step, round(value, 4)) for step, value in curve] for curve in of_label
        ]
    return {
        "tables": {
            "stories sft": {
                "columns": ["", *(f"seed {seed}" for seed in SEEDS)],
                "rows": sft_rows,
            },
            "stories": {"columns": ["", *headings], "rows": rows},
            "stories samples": samples_table(measured),
        },
        "commands": COMMANDS,
        "seeds": SEEDS,
        "numbers": numbers,
        "curves": curves,
    }


def samples_table(measured: dict[str, list[dict]]) -> dict:
    """Completions of the first held-out openings, seed 1: neither chosen nor shortened."""
    rows = []
    openings = next(iter(measured.values()))[0]["prompts"]
    for i, opening in enumerate(openings):
        for label, of_label in measured.items():
            rows.append([in_a_cell(opening), label, in_a_cell(of_label[0]["texts"][i])])
    return {"columns": ["opening", "", "completion"], "rows": rows}


def in_a_cell(text: str) -> str:
    """A text on one line, as code, so that Markdown leaves it alone."""
    return "`" + " ".join(text.replace("`", "'").replace("|", "/").split()) + "`"


def draw(results: dict) -> None:
    """docs/figures/stories.svg: the rewards and the second judge over the rollouts."""
    from drawing import ALGORITHM_STYLES, HEALTHY, SICK, draw_band, draw_evaluations, panels, save

    curves = results["curves"]
    figure, axes = panels(3)
    friend_curves = curves["friend"]["reward/friend over step"]
    draw_band(axes[0], friend_curves, "friend", *ALGORITHM_STYLES["GRPO"])
    axes[0].set(title="rule 1: with a friend", xlabel="rollout", ylim=(0, 1.02))
    for label, style in ((HACKED, SICK), (HELD, HEALTHY)):
        draw_band(axes[1], curves[label]["reward/happy_words over step"], label, *style)
        draw_evaluations(axes[2], curves[label]["eval/reward over step"], label, *style)
    axes[1].set(title="rule 2: happy words", xlabel="rollout")
    axes[1].legend()
    axes[2].set(title="distinct pairs, held out", xlabel="rollout", ylim=(0, 1.02))
    save(
        figure,
        "stories.svg",
        "GRPO on stories with two rules",
        "Over 40 rollouts: the fraction of stories with a friend rises; the number of happy words "
        "rises far with beta 0 and a little with a KL; the fraction of distinct pairs of words "
        "falls with beta 0 and stays high with a KL.",
    )


def main(args: Args) -> None:
    out = Path(args.out).resolve()
    write_data(Path(args.data), out / "data")
    for labels in (["SFT"], [label for label in COMMANDS if label != "SFT"]):
        with ThreadPoolExecutor(args.jobs) as pool:
            trainings = []
            for label in labels:
                for seed in SEEDS:
                    trainings.append(pool.submit(train, label, seed, args))
            for training in trainings:
                training.result()  # raises what the training raised
    runs = {label: [run_of(label, seed, out) for seed in SEEDS] for label in COMMANDS}
    results = report(runs, *measure_all(args))
    (RESULTS / "stories.json").write_text(json.dumps(results, indent=1) + "\n")
    insert_tables()
    draw(results)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
