"""What to run on a GPU: each script for a few steps, then decoding and training speed.

The first part says which scripts pass. The second compares with what the hardware reaches in the
same run, with Llamas of the shapes of Qwen2.5-0.5B and -1.5B and random weights. Without a GPU the
shape is a toy's.
"""

import subprocess
import sys
import tempfile
from importlib import import_module

import torch

from common.generation import generate
from common.logprobs import completion_logprobs
from docs.experiments.lib.measuring import (
    CUDA,
    DEVICE,
    SCRIPTS,
    median_seconds,
    peak,
    random_llama,
    reset_peak,
)
from grpo import grpo_loss, token_weights


def shape(hidden_size: int, ffn_size: int, layers: int, heads: int, vocabulary: int) -> dict:
    """Of a small Qwen2.5, which has two heads of keys and values."""
    return dict(
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


SHAPES = {
    "0.5B": shape(hidden_size=896, ffn_size=4864, layers=24, heads=14, vocabulary=151_936),
    "1.5B": shape(hidden_size=1536, ffn_size=8960, layers=28, heads=12, vocabulary=151_936),
    "toy": shape(hidden_size=64, ffn_size=128, layers=2, heads=4, vocabulary=1_000),
}


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
    """Tokens a second of `generate`, of transformers' generate, and of reading memory alone."""
    sizes = SHAPES[name]
    model = random_llama(torch.bfloat16, **sizes)
    prompt_length = 128
    ids = torch.randint(10, sizes["vocab_size"], (batch_size, prompt_length), device=DEVICE)
    prompts, rng = ids.tolist(), torch.Generator()

    def ours() -> None:
        generate(model, prompts, max_new_tokens=new_tokens, temperature=1.0, stop_ids=[], rng=rng)

    def theirs() -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )

    our_seconds = median_seconds(ours, repeats=2)
    their_seconds = median_seconds(theirs, repeats=1)
    # Keys and values of all layers, two bytes a number, for a token.
    head_size = sizes["hidden_size"] // sizes["num_attention_heads"]
    cache_bytes = 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head_size
    mean_length = prompt_length + new_tokens / 2
    step_bytes = 2 * model.num_parameters() + batch_size * cache_bytes * mean_length
    floor_seconds = new_tokens * step_bytes / bandwidth
    num_tokens = batch_size * new_tokens
    print(
        f"{name}, batch {batch_size}, {new_tokens} new tokens: "
        f"{num_tokens / our_seconds:,.0f} tokens/s, "
        f"model.generate {num_tokens / their_seconds:,.0f}, "
        f"upper bound {num_tokens / floor_seconds:,.0f}"
    )


def measure_training(name: str, rows: int, length: int, matrix_rate: float) -> None:
    """Time of an optimiser step of GRPO, its share of the hardware's rate, and its peak memory."""
    sizes = SHAPES[name]
    policy = random_llama(**sizes)
    ref_model = random_llama(**sizes).requires_grad_(False)
    num_parameters = policy.num_parameters()
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=CUDA)
    prompt_length = length // 4
    ids = torch.randint(10, sizes["vocab_size"], (rows, length)).tolist()
    sequences = [(row[:prompt_length], row[prompt_length:]) for row in ids]
    mask = torch.ones(rows, length - prompt_length, dtype=torch.bool, device=DEVICE)
    weights = token_weights(mask, "sequence", length)
    advantages = torch.randn(rows, device=DEVICE)

    def step() -> None:
        with torch.no_grad():
            ref_logprobs = completion_logprobs(ref_model, sequences, range(rows))
        new_logprobs = completion_logprobs(policy, sequences, range(rows))
        loss, _ = grpo_loss(
            new_logprobs,
            old_logprobs=new_logprobs.detach(),
            ref_logprobs=ref_logprobs,
            advantages=advantages,
            weights=weights,
            clip_low=0.2,
            clip_high=0.2,
            beta=0.04,
        )
        loss.backward()
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
        f"{name}, GRPO update of {rows} x {length} tokens: {seconds:.3f} s, "
        f"MFU {flops / seconds / matrix_rate:.0%}; peak {peak() / 1e9:.1f} GB, "
        f"of which 20 bytes a parameter {20 * num_parameters / 1e9:.1f} GB"
    )


def main() -> None:
    run_scripts()
    bandwidth, matrix_rate = measure_hardware()
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{device}: {bandwidth / 1e9:,.0f} GB/s, {matrix_rate / 1e12:,.1f} TFLOP/s in bfloat16")
    if not CUDA:
        measure_decoding("toy", batch_size=8, new_tokens=32, bandwidth=bandwidth)
        measure_training("toy", rows=8, length=64, matrix_rate=matrix_rate)
        return
    for name in ("0.5B", "1.5B"):
        measure_decoding(name, batch_size=64, new_tokens=512, bandwidth=bandwidth)
        measure_decoding(name, batch_size=256, new_tokens=512, bandwidth=bandwidth)
        measure_training(name, rows=8, length=1024, matrix_rate=matrix_rate)
