"""docs/distill_variants.md: the student as its own teacher, which reads the worked sum first."""

import json
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import mean

from torch import Generator

import distill
import grpo
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import Metric
from docs.experiments.lib.runs import Run, read_jsonl, train, write_jsonl
from docs.experiments.studies.distill import accuracy, points
from docs.experiments.studies.real import SFT, film_prompts
from tiny.arithmetic.reward import last_number

DEMONSTRATION = 12  # its tokens, with the end
HINTED = "the start, which reads the hint"


def with_hint(row: dict) -> dict:
    """A row with the running sums of its prompt as `completion`, and before the prompt in `hinted`:
    6,6,0,8,5#5,6+0+4+8+7="""
    digits = map(int, row["prompt"].rstrip("=").split("+"))
    sums = [str(total % 10) for total in accumulate(digits)]
    completion = f"{','.join(sums)}#{sums[-1]}"
    return row | {"completion": completion, "hinted": f"{completion},{row['prompt']}"}


def hinted_row(row: dict) -> dict:
    return {"prompt": row["hinted"], "completion": row["completion"]}


def write_data(start: Path, hints: Path) -> None:
    """`start`: demonstrations for plain prompts and for hinted ones. `hints`: other prompts."""
    for split in ("train", "test"):
        prompts = read_jsonl(Path(distill.Args.dataset, f"{split}.jsonl"))
        write_jsonl(hints / f"{split}.jsonl", [with_hint(row) for row in prompts])
    plain = read_jsonl(Path("tiny/arithmetic/sft/train.jsonl"))[:3200]
    hinted = [hinted_row(with_hint(row)) for row in plain]
    write_jsonl(start / "train.jsonl", plain + hinted)
    held_out = read_jsonl(hints / "test.jsonl")
    write_jsonl(start / "test.jsonl", [hinted_row(row) for row in held_out])


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """By label the accuracy, and thousands of tokens that were sampled or shown until then."""
    with tempfile.TemporaryDirectory() as start, tempfile.TemporaryDirectory() as hints:
        write_data(Path(start), Path(hints))
        flags = dict(seed=seed, output_dir=start, eval_every=20)
        on_rows = dict(epochs=1.0, eval_samples=500)
        first = train(sft, model=distill.Args.model, dataset=start, **on_rows, **flags)
        flags |= dict(model=str(first.folder), dataset=hints)
        hinted = flags | dict(teacher_prompt_column="hinted")
        of_distill = {"": points(train(distill, **hinted))}
        of_distill[", `reverse`"] = points(train(distill, divergence="reverse", **hinted))
        by_sft = train(sft, **on_rows, **flags)
        by_grpo = train(grpo, **flags)

        tokens = by_grpo.values("completions/length_mean").cumsum() * 256 / 1000
        found = {HINTED: {"tokens": 0.0, "accuracy": accuracy(first.samples())}}
        found["the start"] = {"tokens": 0.0, "accuracy": of_distill[""][0][2]}
        for divergence, of_run in of_distill.items():
            for rollouts, sampled, reached in of_run:
                label = f"self-distillation{divergence}, {rollouts} rollouts"
                if rollouts in (20, 160):
                    found[label] = {"tokens": sampled, "accuracy": reached}
        for steps in (20, 120):
            rows = 32 * steps
            reached = accuracy(by_sft.samples(steps))
            cost = rows * DEMONSTRATION / 1000
            found[f"SFT on {rows:,} demonstrations"] = {"tokens": cost, "accuracy": reached}
        for rollouts in (20, 60):
            reached = by_grpo.values("eval/accuracy")[rollouts]
            found[f"GRPO, {rollouts} rollouts"] = {"tokens": tokens[rollouts], "accuracy": reached}
        return found


# --- SmolLM2 ---------------------------------------------------------------------------------
ON_SUMS = "--chat --dataset docs/real/sums --micro-batch-size 8 --eval-every 100"
SFT_ON_SUMS = f"sft.py {ON_SUMS} --epochs 1 --learning-rate 2e-5 --eval-rows 100"
START = f"{SFT_ON_SUMS} --model {{{SFT} 2e-5}} --prompt-column hinted --train-split train[64:128] "
START += "--batch-size 16 --eval-samples 100"
COMMANDS = {
    HINTED: START,
    "self-distillation": f"distill.py {ON_SUMS} --model {{{START}}} --teacher-prompt-column hinted "
    "--max-prompt-length 80 --train-split train[128:] --eval-split test[:100] "
    "--total-rollouts 16 --learning-rate 2e-5",
    "SFT on the demonstrations": f"{SFT_ON_SUMS} --model {{{START}}} "
    "--train-split train[128:640] --batch-size 32 --eval-samples 100",
}
ONE_SEED = {
    "GRPO": f"grpo.py {ON_SUMS} --model {{{START}}} --train-split train[128:] --eval-rows 100 "
    "--total-rollouts 16 --prompts-per-rollout 4 --group-size 8 --num-minibatches 1 "
    "--max-new-tokens 24 --beta 0 --learning-rate 1e-5",
}


def accuracy_after(run: Run, step: int | None = None) -> float:
    """Of the completions of an evaluation: the last one, or that after so many steps."""
    answers = {
        row["prompt"]: row["answer"] for row in read_jsonl(Path("docs/real/sums/test.jsonl"))
    }
    right = []
    for sample in run.samples(step):
        question = sample["prompt"][-1]["content"].partition(" Answer:")[0]
        right += last_number([], [sample["completion"]], [answers[question]])
    return mean(right)


def forgotten(run: Run) -> float:
    """How much less probable the run has made what its --model writes about films: nats per
    completion."""
    model = json.loads((run.folder / "args.json").read_text())["model"]
    start, trained = sampling.load_policy(model), sampling.load_policy(run.folder)
    prompts = film_prompts(start.tokenizer)
    sequences, _ = sampling.sample(start, prompts, 40, Generator().manual_seed(1))
    return sampling.mean_log_ratio(start, trained, sequences)


BEFORE = Metric("before", lambda run: accuracy_after(run, 0))
AFTER, FORGOTTEN = Metric("after", accuracy_after), Metric("forgotten", forgotten)
KEPT = [BEFORE, AFTER, FORGOTTEN]
EXPERIMENTS = (
    Experiment("hints", measure_seed=measure_seed),
    Experiment("hints_real", COMMANDS, metrics=dict.fromkeys(COMMANDS, KEPT), seeds=(1, 2, 3)),
    Experiment("hints_grpo", ONE_SEED, metrics={"GRPO": KEPT}, seeds=(1,)),
)
