"""What to run on a GPU: each script for a few steps, then decoding and training speed.

The first part says which scripts pass. The second compares with what the hardware reaches in the
same run, with Llamas of the shapes of Qwen2.5-0.5B and -1.5B and random weights. Without a GPU the
shape is that of a Llama of 21M parameters.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from time import perf_counter

import torch

from common.generation import generate
from common.logprobs import completion_logprobs
from docs.experiments.cost.memory import LLAMA_21M
from docs.experiments.cost.memory_model import CONSTANTS, llama_sizes
from docs.experiments.lib.measuring import (
    CUDA,
    DEVICE,
    SCRIPTS,
    median_seconds,
    peak,
    random_llama,
    reset_peak,
)
from grpo import k3_kl


SHAPES = {name: llama_sizes(CONSTANTS["models"][name]) for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B")}
SHAPES["21M"] = LLAMA_21M
DTYPE = torch.bfloat16 if CUDA else torch.float32


# --- the scripts -------------------------------------------------------------------------------
def run_scripts() -> None:
    """Run each script as a user would, with its default model and data, and say which passed."""
    for name in SCRIPTS:
        few_steps = ["--epochs", "0.05"]
        if hasattr(import_module(name).Args, "total_rollouts"):
            few_steps = ["--total-rollouts", "3"]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, f"{name}.py", *few_steps, "--output-dir", folder]
            process = subprocess.run(command, capture_output=True, text=True)
        outcome = "passed" if process.returncode == 0 else "FAILED"
        if "without a CUDA graph" in process.stderr:
            outcome += ", no CUDA graph"
        print(f"{name}.py: {outcome}", flush=True)
        if process.returncode != 0:
            print(process.stderr[-3000:])


# --- speed -------------------------------------------------------------------------------------
def measure_hardware() -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and bfloat16 operations a second of a product."""
    num_bytes = 2**30 if CUDA else 2**20
    source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=DEVICE)
    bandwidth = 2 * num_bytes / median_seconds(lambda: target.copy_(source), repeats=10)
    width = 8192 if CUDA else 256
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=DEVICE)
    matrix_rate = 2 * width**3 / median_seconds(lambda: matrix @ matrix, repeats=10)
    return bandwidth, matrix_rate


def measure_decoding(name: str, batch_size: int, new_tokens: int, bandwidth: float) -> None:
    """Tokens a second of `generate`, of transformers' generate, and of reading memory alone. So
    many tokens stop a completion that its mean length is just under half of `new_tokens`."""
    sizes = SHAPES[name]
    model = random_llama(DTYPE, **sizes)
    prompt_length, vocabulary = 128, sizes["vocab_size"]
    stop_ids = [*range(2 * vocabulary // new_tokens)]
    pad = vocabulary - 1
    ids = torch.randint(len(stop_ids), pad, (batch_size, prompt_length), device=DEVICE)
    prompts, rng = ids.tolist(), torch.Generator()

    def ours() -> list[int]:
        completions = generate(
            model,
            prompts,
            max_new_tokens=new_tokens,
            temperature=1.0,
            stop_ids=stop_ids,
            rng=rng,
        )
        return [*map(len, completions)]

    def theirs() -> list[int]:
        sequences = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=pad,
        )
        return (sequences[:, prompt_length:] != pad).sum(dim=1).tolist()

    def tokens_per_second(sample: Callable[[], list[int]]) -> tuple[float, list[int]]:
        sample()
        start_time = perf_counter()
        lengths = sample()
        return sum(lengths) / (perf_counter() - start_time), lengths

    our_rate, lengths = tokens_per_second(ours)
    their_rate, _ = tokens_per_second(theirs)
    # All weights in every step, and for every token the keys and values of all before it.
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    kv_heads = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    cache_size = 2 * sizes["num_hidden_layers"] * kv_heads * head_dim
    tokens_read = sum(length * (prompt_length + length / 2) for length in lengths)
    numbers_read = max(lengths) * model.num_parameters() + cache_size * tokens_read
    bound = sum(lengths) / (numbers_read * DTYPE.itemsize / bandwidth)
    print(
        f"{name}, {batch_size} completions of at most {new_tokens} tokens: "
        f"{our_rate:,.0f} tokens/s, model.generate {their_rate:,.0f}, "
        f"ratio {our_rate / their_rate:.2f}, upper bound {bound:,.0f}",
        flush=True,
    )


def measure_training(name: str, rows: int, length: int, matrix_rate: float) -> None:
    """Time of an optimiser step of a policy with a reference, its share of the hardware's rate, and
    its peak memory."""
    sizes = SHAPES[name]
    policy, ref_model = random_llama(**sizes), random_llama(**sizes)
    num_parameters = policy.num_parameters()
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=CUDA)
    ids = torch.randint(10, sizes["vocab_size"], (rows, length)).tolist()
    sequences = [(row[: length // 4], row[length // 4 :]) for row in ids]

    def step() -> None:
        with torch.no_grad():
            ref_logprobs = completion_logprobs(ref_model, sequences, range(rows))
        logprobs = completion_logprobs(policy, sequences, range(rows))
        k3_kl(logprobs, ref_logprobs).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    reset_peak()
    seconds = median_seconds(step, repeats=3)
    # 2 operations a parameter and token forward and 4 backward, and the products of causal
    # attention.
    attention = 2 * sizes["num_hidden_layers"] * sizes["hidden_size"] * length
    forward_flops = rows * length * (2 * num_parameters + attention)
    flops = 4 * forward_flops  # with the reference's forward pass
    print(
        f"{name}, update of {rows} x {length} tokens: {seconds:.3f} s, "
        f"MFU {flops / seconds / matrix_rate:.0%}; peak {peak() / 1e9:.1f} GB, "
        f"of which 20 bytes a parameter {20 * num_parameters / 1e9:.1f} GB"
    )


def main() -> None:
    run_scripts()
    bandwidth, matrix_rate = measure_hardware()
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{device}: {bandwidth / 1e9:,.0f} GB/s, {matrix_rate / 1e12:,.1f} TFLOP/s in bfloat16")
    if not CUDA:
        for batch_size in (1, 16, 64, 256):
            measure_decoding("21M", batch_size, new_tokens=128, bandwidth=bandwidth)
        measure_training("21M", rows=2, length=512, matrix_rate=matrix_rate)
        return
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        for batch_size in (64, 256):
            measure_decoding(name, batch_size, new_tokens=512, bandwidth=bandwidth)
        measure_training(name, rows=8, length=1024, matrix_rate=matrix_rate)
