"""docs/grpo.md: whether GRPO finds the working that no sample of its start shows."""

import tempfile
from pathlib import Path
from statistics import mean

import grpo
import sft
from docs.experiments.lib.experiment import Experiment, Table
from docs.experiments.lib.metrics import first, last, measured
from docs.experiments.lib.runs import read_jsonl, train, write_jsonl
from docs.rewards import formats


def share_with_working(samples: list[dict]) -> float:
    return mean(formats.shown([], [sample["completion"] for sample in samples]))


def write_data_without_working(folder: Path) -> None:
    """The demonstrations of tiny/arithmetic that give the answer at once."""
    for split in ("train", "test"):
        rows = read_jsonl(Path(f"tiny/arithmetic/sft/{split}.jsonl"))
        at_once = [row for row in rows if row["completion"].startswith("#")]
        write_jsonl(folder / f"{split}.jsonl", at_once)


def measure_seed(seed: int) -> dict[str, dict[str, float]]:
    """Before and after GRPO, the share of samples with working and the accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        write_data_without_working(Path(folder))
        flags = dict(output_dir=folder, seed=seed)
        # Twice the epochs, of half the data.
        at_once = train(sft, dataset=folder, epochs=8.0, **flags)
        trained = train(grpo, model=str(at_once.folder), **flags)
        return {
            "before": {
                "share": share_with_working(trained.samples(step=0)),
                "accuracy": first("eval/accuracy").of_run(trained),
            },
            "after": {
                "share": share_with_working(trained.samples()),
                "accuracy": last("eval/accuracy").of_run(trained),
            },
        }


COLUMNS = {
    "share of samples with working": (measured("share"), 2),
    "accuracy": (measured("accuracy"), 2),
}
TABLE = Table(COLUMNS, heading=("60 rollouts of GRPO",))
EXPERIMENTS = (
    Experiment("shown_working", tables={"shown_working": TABLE}, measure_seed=measure_seed),
)
