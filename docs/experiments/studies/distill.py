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

BY_TOKEN, BY_SUM = "distillation", "distillation, `--discount 1`"
COMMANDS = {BY_TOKEN: "distill.py --eval-every 8", BY_SUM: "distill.py --discount 1 --eval-every 8"}
TEACHER, BY_SFT = "the teacher", "SFT on the teacher's completions"
PER_ROLLOUT = {BY_TOKEN: 32, BY_SUM: 32, "GRPO": 32 * 8}  # completions
LENGTH = "completions/length_mean"


# --- measuring ---------------------------------------------------------------------------------
def accuracy(samples: list[dict]) -> float:
    """Of completions of held-out prompts."""
    rows = read_jsonl(Path(distill.Args.dataset, "test.jsonl"))
    answers = {row["prompt"]: row["answer"] for row in rows}
    texts = [sample["completion"] for sample in samples]
    return mean(last_number([], texts, [answers[sample["prompt"]] for sample in samples]))


def accuracies(run: Run) -> list[tuple[int, float]]:
    """After each number of rollouts at which the run was evaluated."""
    return [(int(step), accuracy(run.samples(step))) for step in run.values("eval/kl").index]


def completed(policy: sampling.Policy, split: str, seed: int) -> tuple[list[dict], int]:
    """The prompts of a split with a completion of each, and the number of sampled tokens."""
    prompts = sampling.load_prompts(grpo.Args(), split, policy.tokenizer)
    prompt_ids = [prompt.ids for prompt in prompts]
    sequences, texts = sampling.sample(policy, prompt_ids, 24, Generator().manual_seed(seed))
    rows = [{"prompt": p.text, "completion": y} for p, y in zip(prompts, texts, strict=True)]
    return rows, sum(len(completion) for _, completion in sequences)


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """The teacher; SFT on its completion of each training prompt; seconds of one core."""
    teacher = sampling.load_policy(distill.Args.teacher)
    held_out, _ = completed(teacher, "test", seed)
    found = {TEACHER: {"accuracy": accuracy(held_out)}}
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(seed=seed, output_dir=folder, eval_every=1000)
        start = time.process_time()
        rows, num_tokens = completed(teacher, "train", seed)
        write_jsonl(Path(folder, "train.jsonl"), rows)
        write_jsonl(Path(folder, "test.jsonl"), held_out)
        flags |= dict(model=distill.Args.model)
        run = train(sft, dataset=folder, epochs=1.0, eval_samples=len(held_out), **flags)
        seconds = time.process_time() - start
        found[BY_SFT] = {"seconds": seconds, "tokens": num_tokens}
        found[BY_SFT]["accuracy"] = accuracy(run.samples())
        for name, script, optimiser_steps in ((BY_TOKEN, distill, 1), ("GRPO", grpo, 4)):
            with noted_steps(time.process_time) as ends:
                train(script, total_rollouts=6, eval_split="test[:8]", **flags)
            of_five = ends[-1] - ends[optimiser_steps - 1]  # the first starts cold
            found[f"{name}, a rollout"] = {"seconds": of_five / 5}
    return found


# --- the table and the figure ------------------------------------------------------------------
def curves_of(name: str, results: dict) -> tuple[list, list]:
    """Accuracies and mean lengths of the seeds, over rollouts."""
    if name == "GRPO":
        curves = saved_results("grpo")["curves"]["(default)"]
        return curves["eval/accuracy"], curves[LENGTH]
    return results["numbers"][name]["accuracies"], results["curves"][name][LENGTH]


def thousand_tokens(lengths: list, rollout: int, name: str) -> float:
    return sum(length for _, length in lengths[:rollout]) * PER_ROLLOUT[name] / 1000


def tables(results: dict) -> dict[str, dict]:
    numbers = results["numbers"]
    teacher = numbers[TEACHER]["accuracy"]
    starts = [curve[0][1] for curve in numbers[BY_TOKEN]["accuracies"]]

    def row(name: str, tokens: list, seconds: list, reached: list) -> list[str]:
        gains = []
        for value, start, best in zip(reached, starts, teacher, strict=True):
            gains.append((value - start) / (best - start))
        return [name, spread(tokens, 0), spread(seconds, 0), spread(reached, 3), spread(gains, 2)]

    rows = []
    for name, moments in ((BY_TOKEN, (80, 160)), (BY_SUM, (80, 160)), ("GRPO", (20, 60))):
        costs = numbers[f"{'GRPO' if name == 'GRPO' else BY_TOKEN}, a rollout"]["seconds"]
        curves, lengths = curves_of(name, results)
        for moment in moments:
            tokens = [thousand_tokens(of_seed, moment, name) for of_seed in lengths]
            reached = [dict(map(tuple, curve))[moment] for curve in curves]
            seconds = [moment * cost for cost in costs]
            rows.append(row(f"{name}, {moment} rollouts", tokens, seconds, reached))
    of_sft = numbers[BY_SFT]
    tokens = [number / 1000 for number in of_sft["tokens"]]
    rows.append(row(BY_SFT, tokens, of_sft["seconds"], of_sft["accuracy"]))
    rows.append([TEACHER, "", "", spread(teacher, 3), "1"])
    columns = ["", "sampled tokens, thousands", "seconds of a core", "accuracy"]
    return {"distill": {"columns": [*columns, "of the teacher's gain"], "rows": rows}}


def draw(results: dict) -> dict[str, Any]:
    """Accuracy over sampled tokens, of which all seeds take nearly the same number: the mean."""
    title = "Fewer tokens than its teacher took"
    axis = panel(title, "sampled tokens, thousands", "held-out accuracy", ylim=(0, 1))
    for name in (BY_TOKEN, "GRPO"):
        curves, lengths = curves_of(name, results)
        tokens = {
            rollout: mean(thousand_tokens(of_seed, rollout, name) for of_seed in lengths)
            for rollout, _ in curves[0]
        }
        points = [[(tokens[rollout], value) for rollout, value in curve] for curve in curves]
        draw_curves(axis, points, name, ALGORITHM_STYLES[name])
    axis.legend(loc="lower right")
    return {"distill": axis}


EXPERIMENTS = (
    Experiment(
        "distill",
        COMMANDS,
        metrics={label: [Metric("accuracies", accuracies)] for label in COMMANDS},
        curves={label: [LENGTH] for label in COMMANDS},
        measure_seed=measure_seed,
        more_tables=tables,
        draw=draw,
    ),
)
