"""What to run on a GPU: each script for a few steps, with its default model and data.

It says which scripts pass, and whether they decode with a CUDA graph. How fast a model of yours
decodes and trains stands in its run's metrics: time/rollout_seconds, time/update_seconds.
"""

import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from docs.experiments.lib.measuring import CUDA


def outcome_of(name: str) -> str:
    """Run a script as a user would."""
    few_steps = ["--epochs", "0.05"]
    if hasattr(import_module(name).Args, "total_rollouts"):
        few_steps = ["--total-rollouts", "3"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{name}.py", *few_steps, "--output-dir", folder]
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        return f"FAILED\n{process.stderr[-3000:]}"
    return "passed, no CUDA graph" if "without a CUDA graph" in process.stderr else "passed"


def main() -> None:
    print(torch.cuda.get_device_name() if CUDA else "CPU")
    for script in sorted(Path().glob("*.py")):
        print(f"{script}: {outcome_of(script.stem)}", flush=True)
