"""Tokens per second that `generate` and vLLM sample from one model on a CPU, in float32.

The server is that of docs/samplers/install.sh runs/vllm, and has the model of `python -m
docs.samplers.vllm MODEL`. A row has tokens per second of the clock, then per second of the
processor, for `generate` and for vLLM, and the load.
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
ENVIRONMENT |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind")


def start_server(threads: int) -> psutil.Process:
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    server = psutil.Popen(SERVER.split(), env=environment, stdout=DEVNULL, stderr=DEVNULL)
    while server.poll() is None:
        time.sleep(1)
        with suppress(OSError):
            urlopen(f"{vllm.SERVER}/health")
            return server
    raise RuntimeError("the server has ended")


def seconds(process: psutil.Process) -> tuple[float, float]:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return time.perf_counter(), sum(one.user + one.system for one in times)


def main(model: tyro.conf.Positional[Path], threads: tuple[int, ...] = (1, 2)) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for n in threads:
        torch.set_num_threads(n)
        server = start_server(n)
        for b, t in ((8, 8), *product((32, 128), (64, 256))):  # the first to warm up
            prompts, row = [[100 + i // 8, *range(100, 139)] for i in range(b)], [n, b, t]
            options = dict(max_new_tokens=t, temperature=1.0, stop_ids=[])
            for sample, process in ((generate, psutil.Process()), (vllm.generate, server)):
                start, rng = seconds(process), torch.Generator().manual_seed(1)
                sample(policy, prompts, rng=rng, **options)
                row += [b * t / (e - s) for s, e in zip(start, seconds(process), strict=True)]
            print("|", *(f"{cell:.0f} |" for cell in row), "load", os.getloadavg()[0], flush=True)
        server.terminate()
        server.wait()
