"""Runs of the scripts: made where there are none, found by their flags, and read."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import mean

from paths import ROOT
from subprocesses import run_or_exit
from tables import spread

from tiny.reviews.gold import grammatical

os.chdir(ROOT)
RUNS = Path("runs/figures")
SEEDS = (1, 2, 3, 4, 5)
GOLD = "tiny/reviews/gold.py:sentiment"
# GRPO on the reviews, with the learned reward, and evaluated by the gold reward.
GRPO_REVIEWS = (
    "grpo.py --model tiny/reviews/policy --dataset tiny/reviews/prompts --max-new-tokens 40 "
    f"--reward-model tiny/reviews/reward_model --eval-reward-fn {GOLD} "
    "--prompts-per-rollout 16 --total-rollouts 30"
)
# What a run may differ in and still be the one that is asked for.
IGNORED_FLAGS = ("exp_name", "output_dir", "resume", "track", "save_every", "eval_every")


@dataclass
class Run:
    """What a run has logged."""

    folder: Path

    def __post_init__(self) -> None:
        self.rows = read_jsonl(self.folder / "metrics.jsonl")  # a row for each logged step
        self.evaluations = []  # the rows of evaluations
        for row in self.rows:
            if any(name.startswith("eval/") for name in row):
                self.evaluations.append(row)

    def curve(self, x: str, y: str) -> list[tuple]:
        """Points (x, y), where both metrics were logged."""
        return [(row[x], row[y]) for row in self.rows if x in row and y in row]

    @property
    def samples(self) -> list[dict]:
        """Those of the last evaluation."""
        samples = read_jsonl(self.folder / "samples.jsonl")
        return [sample for sample in samples if sample["step"] == samples[-1]["step"]]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- finding and making runs -------------------------------------------------------------------
@cache
def flags_of_command(command: str, seed: int) -> dict:
    """Every flag of a run with its value, as the run writes them to args.json."""
    script, *flags = command.split()
    module = import_module(Path(script).stem)
    args = module.parse_args([*flags, "--seed", str(seed)])
    return asdict(module.check_args(args))


def identity(flags: dict) -> str:
    """Two runs with one identity have done the same."""
    relevant_flags = {name: flags[name] for name in flags if name not in IGNORED_FLAGS}
    return json.dumps(relevant_flags, sort_keys=True)


@cache
def finished_runs() -> dict[str, list[tuple[dict, Path]]]:
    """Flags and folders of all finished runs, by their identity."""
    finished = {}
    for model in sorted(RUNS.glob("*/model")):
        folder = model.parent
        flags = json.loads((folder / "args.json").read_text())
        finished.setdefault(identity(flags), []).append((flags, folder))
    return finished


def find_run(command: str, seed: int) -> Run | None:
    """The finished run of a command, if there is one; best one that evaluates as often."""
    wanted_flags = flags_of_command(command, seed)
    candidates = finished_runs().get(identity(wanted_flags), [])
    for flags, folder in candidates:
        if flags["eval_every"] == wanted_flags["eval_every"]:
            return Run(folder)
    if candidates and "--eval-every" not in command:
        _, folder = candidates[0]
        return Run(folder)
    return None


def train(command: str, seed: int, output_dir: Path = RUNS) -> None:
    """Run a command with a seed, on one thread."""
    arguments = [*command.split(), "--seed", str(seed), "--output-dir", str(output_dir)]
    run_or_exit(arguments, OMP_NUM_THREADS="1")
    print(f"    {command} --seed {seed}", flush=True)


# --- what is read off a run --------------------------------------------------------------------
def first_evaluation(metric: str) -> Callable[[Run], float]:
    return lambda run: run.evaluations[0][metric]


def last_evaluation(metric: str) -> Callable[[Run], float]:
    return lambda run: run.evaluations[-1][metric]


def last_five(metric: str) -> Callable[[Run], float]:
    """The metric's mean over the last five rollouts."""
    return lambda run: mean(row[metric] for row in run.rows[-5:])


def at_step(step: int, metric: str) -> Callable[[Run], float]:
    return lambda run: next(row[metric] for row in run.rows if row["step"] == step)


def grammar(run: Run) -> float:
    """The fraction of the sampled sentences that are grammatical."""
    return mean(grammatical([], [sample["completion"] for sample in run.samples]))


def sampled_kl(run: Run) -> float:
    """KL(policy || starting policy), nats per completion: k1 over the last evaluation's samples."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.generation import encode
    from common.logprobs import completion_logprobs

    torch.set_num_threads(1)
    result = run.folder / "kl.json"
    if not result.exists():
        start = json.loads((run.folder / "args.json").read_text())["model"]
        tokenizer = AutoTokenizer.from_pretrained(start)
        sequences = []
        for sample in run.samples:
            ids = tokenizer(sample["completion"], add_special_tokens=False).input_ids
            ids += [tokenizer.eos_token_id] * (sample["length"] - len(ids))
            assert len(ids) == sample["length"], sample
            sequences.append((encode(tokenizer, sample["prompt"]), ids))

        def total_logprob(folder: Path | str) -> float:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                logprobs = completion_logprobs(model, sequences, range(len(sequences)))
            return logprobs.sum().item()

        log_ratio = total_logprob(run.folder / "model") - total_logprob(start)
        result.write_text(json.dumps(log_ratio / len(sequences)))
    return json.loads(result.read_text())


QUANTITIES = {
    "accuracy before": first_evaluation("eval/accuracy"),
    "accuracy": last_evaluation("eval/accuracy"),
    "reward before": first_evaluation("eval/reward"),
    "reward after 20": at_step(20, "eval/reward"),
    "reward": last_evaluation("eval/reward"),
    "learned reward": last_five("reward/mean"),
    "tokens before": first_evaluation("eval/length_mean"),
    "tokens": last_evaluation("eval/length_mean"),
    "pair accuracy before": first_evaluation("eval/pair_accuracy"),
    "pair accuracy": last_evaluation("eval/pair_accuracy"),
    "calibration error": last_evaluation("eval/calibration_error"),
    "loss before": first_evaluation("eval/loss"),
    "loss": last_evaluation("eval/loss"),
    "KL, last five rollouts": last_five("objective/kl"),
    "KL of samples": sampled_kl,
    "eval KL": last_evaluation("eval/kl"),
    "highest KL": lambda run: max(row["eval/kl"] for row in run.evaluations),
    "first explained variance": lambda run: run.rows[1]["value/explained_variance"],
    "explained variance": last_five("value/explained_variance"),
    "grammatical": grammar,
    "right in the third rollout": at_step(3, "reward/last_number"),
    "brevity": last_five("reward/brevity"),
    "working": last_five("reward/working"),
    "first shown": at_step(1, "reward/shown"),
    "shown": last_five("reward/shown"),
}


@dataclass
class Experiment:
    """What tables and figures ask of an experiment's runs, by the label of their command.

    With runs, numbers, curves and samples are read from them and recorded. Without, they are those
    recorded in docs/results/NAME.json, so tables and figures can be made again without the runs.
    """

    labels: list[str]
    runs: dict[str, list[Run]] | None = None  # a run for each seed
    numbers: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    curves: dict[str, dict[str, list[list]]] = field(default_factory=dict)
    samples: dict[str, dict] = field(default_factory=dict)

    def values(self, label: str, quantity: str) -> list[float]:
        """A number for each seed."""
        if self.runs:
            values = [QUANTITIES[quantity](run) for run in self.runs[label]]
            numbers = self.numbers.setdefault(label, {})
            numbers[quantity] = [round(value, 6) for value in values]
        return self.numbers[label][quantity]

    def spread(self, label: str, quantity: str, digits: int) -> str:
        """Mean (lowest to highest) of the seeds."""
        return spread(self.values(label, quantity), digits)

    def metric_curves(self, label: str, y: str, x: str = "step") -> list[list]:
        """Points (x, y) for each seed, where both metrics were logged."""
        if self.runs:
            self.record(label, f"{y} over {x}", [run.curve(x, y) for run in self.runs[label]])
        return self.curves[label][f"{y} over {x}"]

    def evaluation_curves(self, label: str, y: str, x: str) -> list[list]:
        """The same at evaluations only."""
        if self.runs:
            curves = []
            for run in self.runs[label]:
                rows = [row for row in run.evaluations if x in row and y in row]
                curves.append([(row[x], row[y]) for row in rows])
            self.record(label, f"{y} over {x}", curves)
        return self.curves[label][f"{y} over {x}"]

    def record(self, label: str, name: str, curves: list[list]) -> None:
        """Keep curves, their numbers rounded to four digits."""
        rounded = [[[round(x, 4), round(y, 4)] for x, y in curve] for curve in curves]
        self.curves.setdefault(label, {})[name] = rounded

    def typical_sample(self, label: str) -> dict:
        """Of the first seed's last evaluation, the sample whose reward is nearest to the mean."""
        if self.runs:
            samples = self.runs[label][0].samples
            mean_reward = mean(sample["reward"] for sample in samples)
            typical = min(samples, key=lambda sample: abs(sample["reward"] - mean_reward))
            kept = {name: typical[name] for name in ("completion", "reward")}
            self.samples[label] = kept
        return self.samples[label]

    def table_by_seed(self, columns: dict[str, tuple[str, str, int]]) -> dict:
        """A row for each seed; columns are (label, quantity, digits) by heading."""
        rows = [[str(seed)] for seed in SEEDS]
        for label, quantity, digits in columns.values():
            for row, value in zip(rows, self.values(label, quantity), strict=True):
                row.append(f"{value:.{digits}f}")
        return {"columns": ["seed", *columns], "rows": rows}

    def table_by_flags(self, columns: dict[str, tuple[str, int]]) -> dict:
        """A row for each command; columns are (quantity, digits) by heading."""
        rows = []
        for label in self.labels:
            row = [label]
            for quantity, digits in columns.values():
                row.append(self.spread(label, quantity, digits))
            rows.append(row)
        return {"columns": ["flags", *columns], "rows": rows}
