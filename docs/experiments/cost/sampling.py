"""Tokens per second that `generate` and vLLM sample from one model on a CPU, in float32.

The server stands in runs/vllm, where docs/samplers/install.sh has put it. A second is one of the
clock, and one of the processor: that does not change much where other programs run.
"""

import os
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from subprocess import DEVNULL
from urllib.request import urlopen

import psutil
import torch
import tyro
from transformers import AutoModelForCausalLM

from common.generation import generate
from docs.samplers import vllm

SERVER = "runs/vllm/bin/python -m vllm.entrypoints.openai.api_server --model runs/served "
SERVER += "--dtype float32 --logprobs-mode processed_logprobs --max-model-len 512 "
SERVER += "--enforce-eager --no-enable-chunked-prefill"
ENVIRONMENT = dict(VLLM_TARGET_DEVICE="cpu", VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="2")


def start_server(threads: int) -> psutil.Process:
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    server = psutil.Popen(SERVER.split(), env=environment, stdout=DEVNULL, stderr=DEVNULL)
    while True:
        time.sleep(1)
        with suppress(OSError):
            urlopen(f"{vllm.SERVER}/health")
            return server


def seconds(process: psutil.Process) -> tuple[float, float]:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return time.perf_counter(), sum(one.user + one.system for one in times)


def main(model: tyro.conf.Positional[Path], threads: tuple[int, ...] = (1, 2)) -> None:
    """A row for each number of threads, completions (eight of each prompt), and new tokens."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    vllm.write(policy, vllm.whole_weights(policy))
    for n in threads:
        torch.set_num_threads(n)
        server = start_server(n)
        for b, t in ((8, 8), *product((32, 128), (64, 256))):  # the first to warm up
            prompts, row = [[100 + i // 8, *range(100, 139)] for i in range(b)], [n, b, t]
            for sample, process in ((generate, psutil.Process()), (vllm.generate, server)):
                options = dict(max_new_tokens=t, temperature=1.0, stop_ids=[])
                start, rng = seconds(process), torch.Generator().manual_seed(1)
                sample(policy, prompts, rng=rng, **options)
                row += [b * t / (e - s) for s, e in zip(start, seconds(process), strict=True)]
            print("|", *(f"{cell:.0f} |" for cell in row), "load", os.getloadavg()[0], flush=True)
        server.terminate()
        server.wait()
