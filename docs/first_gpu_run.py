"""Runs the commands of docs/first_gpu_run.md, on a GPU if there is one; prints a report in JSON.

python -m docs.first_gpu_run    # from the root of a checkout
"""

import hashlib
import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import tyro
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, llama_sizes, peak
from runtime.model import use_bfloat16

# The page with the commands; of the last one the model, the algorithm, and the work.
PAGE = Path("docs/first_gpu_run.md")
SIZES, ALGORITHM = CONSTANTS["models"]["Qwen2.5-0.5B"], CONSTANTS["algorithms"]["grpo_no_kl"]
WORK = DEFAULTS | dict(micro_batch=16, prompt=11, completion=256, rollout=256)


def run(folder: Path, metric: str, least: str, most: str, *command: str) -> dict:
    """Of a command its exit code, its numbers, and the SHA-256 of its metrics.jsonl."""
    words, start = [*command, "--output-dir", str(folder)], time.perf_counter()
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    found = dict(command=" ".join(command), exit=ran.returncode)
    found |= dict(seconds=round(time.perf_counter() - start), said=ran.stderr[-2000:])
    if ran.returncode == 0:
        found["said"] = re.findall("Warning: (.*)", ran.stderr)
        (log,) = folder.glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        found[metric] = [(row["step"], row[metric]) for row in rows if metric in row]
        found["as_predicted"] = float(least) <= found[metric][-1][1] <= float(most)
        found["tokens_per_second"] = median(row["time/tokens_per_second"] for row in rows[1:])
        found["peak_memory_gb"] = rows[-1]["time/peak_memory_gb"]
        found["sha256"] = hashlib.sha256(log.read_bytes()).hexdigest()
    print(json.dumps(found), file=sys.stderr)
    return found


def main(model: str = "", output_dir: Path = Path("runs")) -> None:
    """Run all, and print the report. `model`: one of chats, in place of random weights."""
    folder = output_dir / time.strftime("first_gpu_run__%Y%m%d-%H%M%S")
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty", "--abbrev=40"])
    cuda = torch.cuda.is_available()
    report = dict(commit=commit.decode().strip(), python=sys.version, cuda=torch.version.cuda)
    report |= {name: version(name) for name in ("torch", "transformers", "peft", "datasets")}
    report["card"] = str(torch.cuda.get_device_properties(0)) if cuda else "none"
    words = "--chat --dataset docs/real/sums"
    if not model:
        model, words = str(folder / "model"), ""
        LlamaForCausalLM(LlamaConfig(**llama_sizes(SIZES))).bfloat16().save_pretrained(model)
        AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(model)
        compute_bytes = 2 if use_bfloat16(torch.device("cuda" if cuda else "cpu")) else 4
        report["predicted_gb"] = peak(SIZES, ALGORITHM, compute_bytes, **WORK) / 1e9
    commands = PAGE.read_text().split("```")[1].strip()
    lines = f"{commands} --model {model} {words}".splitlines()
    report["runs"] = [run(folder / str(i), *line.split()) for i, line in enumerate(lines)]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
