"""Runs of the scripts: made where there are none, found by their flags, and read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import mean

from tables import ROOT

sys.path.insert(0, str(ROOT))
os.chdir(ROOT)
from tiny.reviews.gold import grammatical  # noqa: E402

RUNS = Path("runs/figures")
SEEDS = (1, 2, 3, 4, 5)
# What a run may differ in and still be the one that is asked for.
FREE = ("exp_name", "output_dir", "resume", "track", "save_every", "eval_every")


@dataclass
class Run:
    folder: Path

    def __post_init__(self) -> None:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]
        self.evaluations = [r for r in self.rows if any(name.startswith("eval/") for name in r)]

    @property
    def samples(self) -> list[dict]:
        """Those of the last evaluation."""
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        return [sample for sample in samples if sample["step"] == samples[-1]["step"]]


@cache
def parse(command: str, seed: int) -> tuple[str, int]:
    """What a run must agree in to be the one that is asked for, and `--eval-every`."""
    script, *flags = command.split()
    module = import_module(Path(script).stem)
    return key(asdict(module.parse_args([*flags, "--seed", str(seed)])))


def key(flags: dict) -> tuple[str, int]:
    fixed = {name: value for name, value in flags.items() if name not in FREE}
    return json.dumps(fixed, sort_keys=True), flags.get("eval_every", 0)


@cache
def finished() -> dict[str, list[tuple[int, Path]]]:
    """All whole runs: how often they evaluate, and their folders."""
    found = {}
    for path in sorted(RUNS.glob("*/model")):
        name, often = key(json.loads((path.parent / "args.json").read_text()))
        found.setdefault(name, []).append((often, path.parent))
    return found


def find(command: str, seed: int) -> Run | None:
    """The run of a command, if there is one."""
    name, often = parse(command, seed)
    known = finished().get(name, [])
    exact = [folder for number, folder in known if number == often]
    others = [folder for _, folder in known if "--eval-every" not in command]
    return next(map(Run, exact + others), None)


def train(command: str, seed: int) -> None:
    words = [sys.executable, *command.split(), "--seed", str(seed), "--output-dir", str(RUNS)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    print(f"    {command} --seed {seed}", flush=True)


# --- what is read off a run --------------------------------------------------------------------
def ends(metric: str) -> tuple[Callable, Callable]:
    """A metric of the first and of the last evaluation."""
    return lambda run: run.evaluations[0][metric], lambda run: run.evaluations[-1][metric]


def last_five(metric: str) -> Callable:
    """Its mean over the last five rollouts."""
    return lambda run: mean(row[metric] for row in run.rows[-5:])


def at(step: int, metric: str) -> Callable:
    return lambda run: next(row[metric] for row in run.rows if row["step"] == step)


def grammar(run: Run) -> float:
    return mean(grammatical([], [sample["completion"] for sample in run.samples]))


def sampled_kl(run: Run) -> float:
    """KL(policy || starting policy), nats per completion: k1 over the last evaluation's samples."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.generation import encode
    from common.logprobs import completion_logprobs

    torch.set_num_threads(1)
    kept = run.folder / "kl.json"
    if not kept.exists():
        start = json.loads((run.folder / "args.json").read_text())["model"]
        tokenizer = AutoTokenizer.from_pretrained(start)
        pairs = []
        for sample in run.samples:
            ids = tokenizer(sample["completion"], add_special_tokens=False).input_ids
            ids += [tokenizer.eos_token_id] * (sample["length"] - len(ids))
            assert len(ids) == sample["length"], sample
            pairs.append((encode(tokenizer, sample["prompt"]), ids))
        sums = []
        for folder in (run.folder / "model", start):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                sums.append(completion_logprobs(model, pairs, range(len(pairs))).sum().item())
        kept.write_text(json.dumps((sums[0] - sums[1]) / len(pairs)))
    return json.loads(kept.read_text())


QUANTITIES = {
    "KL, last five rollouts": last_five("objective/kl"),
    "learned reward": last_five("reward/mean"),
    "explained variance": last_five("value/explained_variance"),
    "first explained variance": lambda run: run.rows[1]["value/explained_variance"],
    "eval KL": ends("eval/kl")[1],
    "KL of samples": sampled_kl,
    "grammatical": grammar,
    "calibration error": ends("eval/calibration_error")[1],
    "right in the third rollout": at(3, "reward/last_number"),
    "brevity": last_five("reward/brevity"),
    "working": last_five("reward/working"),
    "first shown": at(1, "reward/shown"),
    "shown": last_five("reward/shown"),
    "highest KL": lambda run: max(row["eval/kl"] for row in run.evaluations),
}
for _name, _metric in {
    "accuracy": "eval/accuracy",
    "reward": "eval/reward",
    "tokens": "eval/length_mean",
    "pair accuracy": "eval/pair_accuracy",
    "loss": "eval/loss",
}.items():
    QUANTITIES[f"{_name} before"], QUANTITIES[_name] = ends(_metric)
QUANTITIES["reward after 20"] = at(20, "eval/reward")


def spread(values: list[float], digits: int) -> str:
    """Mean, least and most."""
    some = (mean(values), min(values), max(values))
    told = [f"{value:.{digits}f}" for value in some]
    return told[0] if len({*told}) == 1 else "{} ({} to {})".format(*told)


@dataclass
class Found:
    """The runs of an experiment by label, and a record of all that was asked of them."""

    runs: dict[str, list[Run]]
    numbers: dict = field(default_factory=dict)
    curves: dict = field(default_factory=dict)

    def of(self, label: str, quantity: str) -> list[float]:
        """A number for each seed."""
        values = [QUANTITIES[quantity](run) for run in self.runs[label]]
        self.numbers.setdefault(label, {})[quantity] = [round(value, 4) for value in values]
        return values

    def curve(self, label: str, x: str, y: str) -> list[list[tuple]]:
        """Points of each seed, where both metrics were logged."""
        kept = self.curves.setdefault(label, {})
        runs = [[(r[x], r[y]) for r in run.rows if x in r and y in r] for run in self.runs[label]]
        kept[f"{y} over {x}"] = [[[round(v, 4) for v in p] for p in points] for points in runs]
        return runs

    def by_seed(self, columns: dict[str, tuple[str, str, int]]) -> dict:
        """A row for each seed; columns are (label, quantity, digits) by heading."""
        rows = [[str(seed)] for seed in SEEDS]
        for label, quantity, digits in columns.values():
            for row, value in zip(rows, self.of(label, quantity), strict=True):
                row.append(f"{value:.{digits}f}")
        return dict(columns=["seed", *columns], rows=rows)

    def by_label(self, columns: dict[str, tuple[str, int]]) -> dict:
        """A row for each command; columns are (quantity, digits) by heading."""
        rows = []
        for label in self.runs:
            cells = [
                spread(self.of(label, quantity), digits) for quantity, digits in columns.values()
            ]
            rows.append([label, *cells])
        return dict(columns=["flags", *columns], rows=rows)
