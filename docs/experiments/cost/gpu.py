"""What to run on a GPU: each script for a few steps, with its default model and data.

It says which scripts pass, and whether they decode with a CUDA graph. How fast a model of yours
decodes and trains stands in its run's metrics: time/rollout_seconds, time/update_seconds.
"""

import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from time import perf_counter

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


def attention_seconds(cudnn: bool) -> float:
    """Of causal attention in bfloat16 at 64 lengths, each met for the first time: the scripts turn
    cuDNN's kernel off, which would compile for each.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    start = perf_counter()
    for length in range(200 + cudnn, 328, 2):  # none that the other kernel has met
        q = torch.randn(8, 14, length, 64, device="cuda", dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.cuda.synchronize()
    return perf_counter() - start


def main() -> None:
    print(torch.cuda.get_device_name() if CUDA else "CPU")
    if CUDA:
        for cudnn in (False, True, False, True):
            print(f"attention, cuDNN {cudnn}: {attention_seconds(cudnn):.2f} s", flush=True)
    for script in sorted(Path().glob("*.py")):
        print(f"{script}: {outcome_of(script.stem)}", flush=True)
