"""docs/distill.md: distillation, GRPO itself, and SFT on the teacher's completions."""

import tempfile
import time
from pathlib import Path
from statistics import mean

from torch import Generator

import distill
import grpo
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import saved_results
from docs.experiments.lib.measuring import noted_steps
from docs.experiments.lib.runs import Numbers, experiment_of_runs, train, variants, write_jsonl
from docs.experiments.lib.tables import spread
from tiny.arithmetic.reward import last_number

COMMANDS = variants("distill.py", "")
SFT = "SFT on the teacher's completions"
# Of which experiment and script, and after which rollouts.
ROWS = {
    "distillation": ("distill", "eval/reward", (80, 160)),
    "GRPO": ("grpo", "eval/accuracy", (20, 60)),
}
PER_ROLLOUT = {"distill": distill.Args.prompts_per_rollout, "grpo": 32 * 8}  # completions


# --- measuring ---------------------------------------------------------------------------------
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
    """The teacher; SFT on its completion of each training prompt; what a rollout costs. Seconds are
    those of one core.
    """
    teacher = sampling.load_policy(distill.Args.teacher)
    found = {"teacher": {"accuracy": accuracy(teacher, seed)}}
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(seed=seed, output_dir=folder, eval_split="test[:8]", eval_every=1000)
        start = time.process_time()
        prompts, sequences, texts = complete(teacher, "train", seed)
        rows = [{"prompt": p.text, "completion": y} for p, y in zip(prompts, texts, strict=True)]
        for split in ("train", "test"):
            write_jsonl(Path(folder) / f"{split}.jsonl", rows)
        run = train(sft, model=distill.Args.model, dataset=folder, epochs=1.0, **flags)
        seconds = time.process_time() - start
        tokens = sum(len(completion) for _, completion in sequences)
        reached = accuracy(sampling.load_policy(run.folder), seed)
        found["sft"] = {"accuracy": reached, "tokens": tokens, "seconds": seconds}
        for script, rollouts, steps in ((distill, 6, 1), (grpo, 2, 4)):  # optimiser steps of each
            with noted_steps(time.process_time) as ends:
                train(script, total_rollouts=rollouts, **flags)
            cost = (ends[-1] - ends[steps - 1]) / (rollouts - 1)  # without the first
            found[script.__name__] = {"seconds per rollout": cost}
    return found


# --- the table ---------------------------------------------------------------------------------
def tables(numbers: Numbers) -> dict:
    (label,) = COMMANDS
    curves = {"grpo": saved_results("grpo")["curves"]["(default)"], "distill": {}}
    for metric in ("eval/reward", "completions/length_mean"):
        curves["distill"][metric] = numbers.metric_curves(label, metric)
    starts = [curve[0][1] for curve in curves["distill"]["eval/reward"]]
    teacher = numbers.values("teacher", "accuracy")

    def row(name: str, tokens: list, seconds: list, reached: list) -> list[str]:
        gains = []
        for value, start, best in zip(reached, starts, teacher, strict=True):
            gains.append((value - start) / (best - start))
        thousands = spread([number / 1000 for number in tokens], 0)
        return [name, thousands, spread(seconds, 0), spread(reached, 3), spread(gains, 2)]

    rows = []
    for name, (script, metric, moments) in ROWS.items():
        costs = numbers.values(script, "seconds per rollout")
        for moment in moments:
            tokens = []
            for curve in curves[script]["completions/length_mean"]:
                tokens.append(sum(length for _, length in curve[:moment]) * PER_ROLLOUT[script])
            reached = [dict(map(tuple, curve))[moment] for curve in curves[script][metric]]
            seconds = [moment * cost for cost in costs]
            rows.append(row(f"{name}, {moment} rollouts", tokens, seconds, reached))
    of_sft = [numbers.values("sft", metric) for metric in ("tokens", "seconds", "accuracy")]
    rows.append(row(SFT, *of_sft))
    rows.append(["the teacher", "", "", spread(teacher, 3), "1"])
    columns = ["", "sampled tokens, thousands", "seconds of a core", "accuracy"]
    return {"distill": {"columns": [*columns, "of the teacher's gain"], "rows": rows}}


EXPERIMENTS = (experiment_of_runs("distill", COMMANDS, tables, measure_seed=measure_seed),)
