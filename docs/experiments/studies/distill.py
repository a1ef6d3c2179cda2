"""docs/distill.md: distillation, GRPO itself, and SFT on the teacher's completions."""

import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Generator

import distill
import grpo
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.drawing import ALGORITHM_STYLES, draw_curves, panel
from docs.experiments.lib.experiment import Experiment, saved_results
from docs.experiments.lib.measuring import noted_steps
from docs.experiments.lib.metrics import Metric
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl
from docs.experiments.lib.tables import spread
from tiny.arithmetic.reward import last_number

COMMANDS = {
    "distillation": "distill.py --eval-every 8",
    "distillation, `--discount 1`": "distill.py --discount 1 --eval-every 8",
}
# Completions of a rollout, for tokens: the runs log mean lengths.
PER_ROLLOUT = {"distillation": 32, "GRPO": 32 * 8}
TEACHER, BY_SFT = "the teacher", "SFT on the teacher's completions"


# --- measuring ---------------------------------------------------------------------------------
def accuracies(run: Run) -> list[tuple[int, float]]:
    """Of each evaluation's samples."""
    rows = read_jsonl(Path(distill.Args.dataset, "test.jsonl"))
    answers = {row["prompt"]: row["answer"] for row in rows}
    found = []
    for step in run.values("eval/kl").index:
        samples = run.samples(int(step))
        texts = [sample["completion"] for sample in samples]
        right = last_number([], texts, [answers[sample["prompt"]] for sample in samples])
        found.append((int(step), mean(right)))
    return found


def complete(policy: sampling.Policy, split: str, seed: int) -> tuple[list, list, list[str]]:
    """The prompts of a split, and a completion of each: token ids, and texts."""
    prompts = sampling.load_prompts(grpo.Args(), split, policy.tokenizer)
    prompt_ids = [prompt.ids for prompt in prompts]
    sequences, texts = sampling.sample(policy, prompt_ids, 24, Generator().manual_seed(seed))
    return prompts, sequences, texts


def accuracy(source: str | Path, seed: int) -> float:
    """Of a saved policy, as the scripts evaluate."""
    prompts, _, texts = complete(sampling.load_policy(source), "test", seed)
    return mean(last_number([], texts, [prompt.columns["answer"] for prompt in prompts]))


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """The teacher; SFT on its completion of each training prompt; seconds of one core."""
    found = {TEACHER: {"accuracy": accuracy(distill.Args.teacher, seed)}}
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(seed=seed, output_dir=folder, eval_split="test[:8]", eval_every=1000)
        start = time.process_time()
        teacher = sampling.load_policy(distill.Args.teacher)
        prompts, sequences, texts = complete(teacher, "train", seed)
        rows = [{"prompt": p.text, "completion": y} for p, y in zip(prompts, texts, strict=True)]
        for split in ("train", "test"):
            write_jsonl(Path(folder, f"{split}.jsonl"), rows)
        run = train(sft, model=distill.Args.model, dataset=folder, epochs=1.0, **flags)
        found[BY_SFT] = {
            "seconds": time.process_time() - start,
            "tokens": sum(len(completion) for _, completion in sequences),
            "accuracy": accuracy(run.folder, seed),
        }
        for name, script, optimiser_steps in (("distillation", distill, 1), ("GRPO", grpo, 4)):
            with noted_steps(time.process_time) as ends:
                train(script, total_rollouts=6, **flags)
            of_five = ends[-1] - ends[optimiser_steps - 1]  # the first starts cold
            found[f"{name}, a rollout"] = {"seconds": of_five / 5}
    return found


# --- the table and the figure ------------------------------------------------------------------
def curves_of(results: dict) -> dict[str, tuple[list, list]]:
    """By name the accuracies and the mean lengths of the seeds, over rollouts."""
    of_grpo = saved_results("grpo")["curves"]["(default)"]
    curves = {"GRPO": (of_grpo["eval/accuracy"], of_grpo["completions/length_mean"])}
    for label in COMMANDS:
        of_label = results["curves"][label]
        curves[label] = (
            results["numbers"][label]["accuracies"],
            of_label["completions/length_mean"],
        )
    return curves


def tokens_until(lengths: list, rollout: int, name: str) -> float:
    return sum(length for _, length in lengths[:rollout]) * PER_ROLLOUT[name.partition(",")[0]]


def tables(results: dict) -> dict[str, dict]:
    numbers, curves = results["numbers"], curves_of(results)
    teacher = numbers[TEACHER]["accuracy"]
    starts = [curve[0][1] for curve in curves["distillation"][0]]

    def row(name: str, tokens: list, seconds: list, reached: list) -> list[str]:
        gains = [
            (value - start) / (best - start)
            for value, start, best in zip(reached, starts, teacher, strict=True)
        ]
        thousands = spread([number / 1000 for number in tokens], 0)
        return [name, thousands, spread(seconds, 0), spread(reached, 3), spread(gains, 2)]

    rows = []
    for name, rollout in (
        *((label, n) for label in COMMANDS for n in (80, 160)),
        ("GRPO", 20),
        ("GRPO", 60),
    ):
        by_seed, lengths = curves[name]
        costs = numbers[f"{name.partition(',')[0]}, a rollout"]["seconds"]
        tokens = [tokens_until(of_seed, rollout, name) for of_seed in lengths]
        reached = [dict(map(tuple, curve))[rollout] for curve in by_seed]
        rows.append(
            row(f"{name}, {rollout} rollouts", tokens, [rollout * c for c in costs], reached)
        )
    of_sft = numbers[BY_SFT]
    rows.append(row(BY_SFT, of_sft["tokens"], of_sft["seconds"], of_sft["accuracy"]))
    rows.append([TEACHER, "", "", spread(teacher, 3), "1"])
    columns = ["", "sampled tokens, thousands", "seconds of a core", "accuracy"]
    return {"distill": {"columns": [*columns, "of the teacher's gain"], "rows": rows}}


def draw(results: dict) -> dict[str, Any]:
    """Accuracy over sampled tokens, which are nearly the same for all seeds: their mean."""
    title = "Fewer tokens than its teacher took"
    axis = panel(title, "sampled tokens, thousands", "held-out accuracy", ylim=(0, 1))
    for name in ("distillation", "GRPO"):
        by_seed, lengths = curves_of(results)[name]
        points = [
            [
                (mean(tokens_until(of_seed, rollout, name) for of_seed in lengths) / 1000, value)
                for rollout, value in curve
            ]
            for curve in by_seed
        ]
        draw_curves(axis, points, name, ALGORITHM_STYLES[name])
    axis.legend(loc="lower right")
    return {"distill": axis}


EXPERIMENTS = (
    Experiment(
        "distill",
        COMMANDS,
        metrics={label: [Metric("accuracies", accuracies)] for label in COMMANDS},
        curves={label: ["completions/length_mean", "eval/kl"] for label in COMMANDS},
        measure_seed=measure_seed,
        more_tables=tables,
        draw=draw,
    ),
)
