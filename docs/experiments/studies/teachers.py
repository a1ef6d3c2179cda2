"""docs/distill_variants.md: two teachers, each right on one half of the sums, and one student."""

import random
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import distill
import sft
from docs.experiments.lib import sampling
from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.runs import load_script, read_jsonl, train, write_jsonl
from docs.experiments.lib.variants import write_variant
from docs.experiments.studies.distill import accuracy, completed
from docs.experiments.studies.hints import with_hint

START, ROLLOUTS = distill.Args.model, distill.Args.total_rollouts
EVEN, ODD = HALVES = (0, 1)


def half_of(row: dict) -> int:
    """Whether a sum's first digit is even or odd."""
    return int(row["prompt"][0]) % 2


def demonstration(row: dict, half: int) -> dict:
    """What the teacher of a half learns from: the working of its own sums, a guess for others."""
    guess = random.Random(row["prompt"]).randrange(10)
    return with_hint(row) if half_of(row) == half else row | {"completion": f"#{guess}"}


def by_half(model: str, seed: int) -> dict[str, float]:
    """A model's accuracy on the held-out sums of each half."""
    rows, _ = completed(sampling.load_policy(model), "test", seed)
    even, odd = ([row for row in rows if half_of(row) == half] for half in HALVES)
    return {"even": accuracy(even), "odd": accuracy(odd)}


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """By label the accuracy on both halves."""
    with tempfile.TemporaryDirectory() as folder:
        several = load_script(write_variant("teachers", Path(folder)).name, Path(folder))
        files = {s: Path(distill.Args.dataset, f"{s}.jsonl") for s in ("train", "test")}
        splits = {split: read_jsonl(file) for split, file in files.items()}

        def written(rows_by_split: dict[str, list]) -> str:
            data = tempfile.mkdtemp(dir=folder)
            for split, rows in rows_by_split.items():
                write_jsonl(Path(data, f"{split}.jsonl"), rows)
            return data

        def trained(script: Any, dataset: str, model: str = START, **flags: Any) -> str:
            flags |= dict(seed=seed, output_dir=folder, eval_every=1000)
            return str(train(script, dataset=dataset, model=model, **flags).folder)

        teachers, on_half, with_teacher, mixture = [], [], {}, {}
        for half in HALVES:
            shown = {s: [demonstration(row, half) for row in splits[s]] for s in splits}
            teachers.append(trained(sft, written(shown), epochs=2.0))
            own = {s: [row for row in splits[s] if half_of(row) == half] for s in splits}
            on_half.append(written(own))
        for split, rows in splits.items():
            with_teacher[split] = [row | {"teacher": teachers[half_of(row)]} for row in rows]
            found = [completed(sampling.load_policy(t), split, seed)[0] for t in teachers]
            mixture[split] = [pair[half_of(pair[0])] for pair in zip(*found, strict=True)]
        on_all = [written(with_teacher)] * 2  # whichever the teacher

        def one_after_the_other(data: list[str], **flags: Any) -> str:
            flags |= dict(total_rollouts=ROLLOUTS // 2)
            first = trained(distill, data[EVEN], teacher=teachers[EVEN], **flags)
            return trained(distill, data[ODD], model=first, teacher=teachers[ODD], **flags)

        both, alone, reverse = teachers, teachers[EVEN], dict(divergence="reverse")
        models = {
            "the teacher of even sums": teachers[EVEN],
            "the teacher of odd sums": teachers[ODD],
            "both, by the column `teacher`": trained(several, on_all[0], teacher=both),
            "both, `--divergence reverse`": trained(several, on_all[0], teacher=both, **reverse),
            "the even teacher alone, on all sums": trained(distill, on_all[0], teacher=alone),
            "the even teacher alone, on even sums": trained(distill, on_half[EVEN], teacher=alone),
            "one after the other, on all sums": one_after_the_other(on_all),
            "the same, `--divergence reverse`": one_after_the_other(on_all, **reverse),
            "one after the other, each on its half": one_after_the_other(on_half),
            "SFT on both teachers' completions": trained(sft, written(mixture), epochs=1.0),
        }
        return {label: by_half(model, seed) for label, model in models.items()}


def tables(results: dict) -> dict[str, dict]:
    """Means and their standard errors."""
    rows = []
    for label, of_half in results["numbers"].items():
        errors = [stdev(values) / len(values) ** 0.5 for values in of_half.values()]
        cells = zip(map(mean, of_half.values()), errors, strict=True)
        rows.append([label, *(f"{value:.3f} ± {error:.3f}" for value, error in cells)])
    return {"teachers": {"columns": ["", "first digit even", "odd"], "rows": rows}}


EXPERIMENTS = (Experiment("teachers", measure_seed=measure_seed, more_tables=tables),)
