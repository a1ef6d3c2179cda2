"""docs/distill.md: distillation, GRPO itself, and SFT on the teacher's completions."""

import tempfile
import time
from itertools import accumulate
from pathlib import Path
from statistics import mean

from torch import Generator

import distill
import grpo
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.drawing import (
    ALGORITHM_STYLES,
    RED,
    TEXT,
    WIDE,
    Style,
    draw_evaluations,
    panel,
)
from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.runs import Numbers, experiment_of_runs, train, variants, write_jsonl
from docs.experiments.lib.tables import spread
from tiny.arithmetic.reward import last_number

COMMANDS = variants("distill.py", "", "--discount 1")
DEFAULT, DISCOUNT_1 = COMMANDS
SFT = "SFT on the teacher's completions"
SHORT = dict(eval_split="test[:8]", eval_every=1000)


def complete(policy: sampling.Policy, split: str, seed: int) -> tuple[list, list, list[str]]:
    """The prompts of a split, and a completion of each: token ids, and texts."""
    prompts = sampling.load_prompts(grpo.Args(), split, policy.tokenizer)
    prompt_ids = [prompt.ids for prompt in prompts]
    sequences, texts = sampling.sample(policy, prompt_ids, 24, Generator().manual_seed(seed))
    return prompts, sequences, texts


def accuracy(policy: sampling.Policy, seed: int) -> float:
    """On the held-out prompts, as the scripts evaluate."""
    prompts, _, texts = complete(policy, "test", seed)
    return mean(last_number([], texts, [prompt.columns["answer"] for prompt in prompts]))


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """The teacher; SFT on its completion of each training prompt; what a rollout costs, in seconds
    of a core.
    """
    teacher = sampling.load_policy(distill.Args.teacher)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        prompts, sequences, texts = complete(teacher, "train", seed)
        rows = [{"prompt": p.text, "completion": y} for p, y in zip(prompts, texts, strict=True)]
        for split in ("train", "test"):
            write_jsonl(Path(folder) / f"{split}.jsonl", rows)
        flags = SHORT | dict(seed=seed, output_dir=folder)
        run = train(sft, model=distill.Args.model, dataset=folder, epochs=1.0, **flags)
        found = {SFT: {"seconds": time.process_time() - start}}
        found[SFT]["tokens"] = sum(len(completion) for _, completion in sequences) / 1000
        found[SFT]["eval/reward"] = accuracy(sampling.load_policy(run.folder), seed)
        found["teacher"] = {"eval/reward": accuracy(teacher, seed)}
        for name, script in (("distill", distill), ("grpo", grpo)):
            seconds = []
            for rollouts in (4, 12):  # the difference leaves out what a run does once
                start = time.process_time()
                train(script, total_rollouts=rollouts, **flags)
                seconds.append(time.process_time() - start)
            found[name] = {"seconds per rollout": (seconds[1] - seconds[0]) / 8}
    return found


# --- tables and figures ------------------------------------------------------------------------
def curves(numbers: Numbers) -> dict[str, list[list[tuple]]]:
    """By label, for each seed the points (rollout, sampled tokens, accuracy) of its evaluations."""
    saved = saved_results("grpo")["curves"]["(default)"]
    group = grpo.Args.prompts_per_rollout * grpo.Args.group_size
    logged = {"GRPO": (saved["eval/accuracy"], saved["completions/length_mean"], group)}
    for label in COMMANDS:
        accuracies = numbers.metric_curves(label, "eval/reward")
        lengths = numbers.metric_curves(label, "completions/length_mean")
        logged[label] = accuracies, lengths, distill.Args.prompts_per_rollout
    found = {}
    for label, (accuracies, lengths, per_rollout) in logged.items():
        found[label] = []
        for of_seed, lengths_of_seed in zip(accuracies, lengths, strict=True):
            tokens = [0, *accumulate(length * per_rollout for _, length in lengths_of_seed)]
            found[label].append([(step, tokens[step], value) for step, value in of_seed])
    return found


def tables(numbers: Numbers) -> dict:
    teacher = numbers.values("teacher", "eval/reward")
    all_curves = curves(numbers)
    starts = [points[0][2] for points in all_curves[DEFAULT]]

    def cells(tokens: list, seconds: list, reached: list) -> list[str]:
        gains = []
        for value, start, best in zip(reached, starts, teacher, strict=True):
            gains.append((value - start) / (best - start))
        return [spread(tokens, 1), spread(seconds, 0), spread(reached, 3), spread(gains, 2)]

    rows = []
    for label, script in ((DEFAULT, "distill"), (DISCOUNT_1, "distill"), ("GRPO", "grpo")):
        costs = numbers.values(script, "seconds per rollout")
        for points in zip(*all_curves[label], strict=True):  # of one evaluation, for each seed
            rollouts, (_, tokens, reached) = points[0][0], zip(*points, strict=True)
            if rollouts > 0:
                thousands = [number / 1000 for number in tokens]
                seconds = [rollouts * cost for cost in costs]
                rows.append([label, str(rollouts), *cells(thousands, seconds, reached)])
    sft_values = [numbers.values(SFT, name) for name in ("tokens", "seconds", "eval/reward")]
    rows.append([SFT, "", *cells(*sft_values)])
    rows.append(["the teacher", "", "", "", spread(teacher, 3), "1"])
    columns = ["", "rollouts", "sampled tokens, thousands", "seconds of a core", "accuracy"]
    return {"distill": {"columns": [*columns, "of the teacher's gain"], "rows": rows}}


def draw(numbers: Numbers) -> dict:
    axis = panel(
        "TITLE",
        "sampled tokens, thousands",
        "held-out accuracy",
        WIDE,
        ylim=(0, 1.03),
    )
    styles = {DEFAULT: Style(TEXT, "o"), DISCOUNT_1: Style(RED, "x")}
    styles["GRPO"] = ALGORITHM_STYLES["GRPO"]
    names = {DEFAULT: "distillation", DISCOUNT_1: "distillation, discount 1", "GRPO": "GRPO"}
    for label, points in curves(numbers).items():
        thousands = [[(tokens / 1000, value) for _, tokens, value in of_seed] for of_seed in points]
        draw_evaluations(axis, thousands, names[label], styles[label])
    best = mean(numbers.values("teacher", "eval/reward"))
    axis.axhline(best, color=TEXT, ls="--", lw=1.2, label="the teacher")
    axis.legend(loc="lower right")
    return {"distill": axis}


EXPERIMENTS = (experiment_of_runs("distill", COMMANDS, tables, draw, measure_seed),)
