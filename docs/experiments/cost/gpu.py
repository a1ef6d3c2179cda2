"""What to run on a GPU: each script for a few steps, then decoding and training speed.

The first part says which scripts pass. The second compares with what the hardware reaches in the
same run, with models of the shapes of Qwen2.5-0.5B and -1.5B and random weights, so nothing is
downloaded. Without a GPU the shape is a toy's.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from transformers import Qwen2Config

from common.generation import generate
from common.logprobs import completion_logprobs
from docs.experiments.lib.measuring import CUDA, DEVICE, SCRIPTS, median_seconds, random_model
from dpo import dpo_loss
from grpo import grpo_loss, token_weights


def qwen2(
    hidden_size: int, ffn_size: int, layers: int, heads: int, vocabulary: int = 151_936
) -> Qwen2Config:
    """The configuration of a small Qwen2.5, which has two heads of keys and values."""
    return Qwen2Config(
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
    "0.5B": qwen2(hidden_size=896, ffn_size=4864, layers=24, heads=14),
    "1.5B": qwen2(hidden_size=1536, ffn_size=8960, layers=28, heads=12),
    "toy": qwen2(hidden_size=64, ffn_size=128, layers=2, heads=4, vocabulary=1_000),
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
def measure_hardware(small: bool) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and bfloat16 operations a second of a product."""
    num_bytes = 2**20 if small else 2**30
    source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=DEVICE)
    bandwidth = 2 * num_bytes / median_seconds(lambda: target.copy_(source), repeats=10)
    width = 256 if small else 8192
    matrix = torch.randn(width, width, dtype=torch.bfloat16, device=DEVICE)
    matrix_rate = 2 * width**3 / median_seconds(lambda: matrix @ matrix, repeats=10)
    return bandwidth, matrix_rate


def measure_decoding(shape: str, batch_size: int, new_tokens: int, bandwidth: float) -> None:
    """Tokens a second of `generate`, of transformers' generate, and of reading memory alone."""
    config = SHAPES[shape]
    model = random_model(config, torch.bfloat16, DEVICE)
    prompt_length = 128
    ids = torch.randint(10, config.vocab_size, (batch_size, prompt_length), device=DEVICE)
    prompts, rng = ids.tolist(), torch.Generator()

    def ours(stop_ids: list[int]) -> list[list[int]]:
        return generate(
            model,
            prompts,
            max_new_tokens=new_tokens,
            temperature=1.0,
            stop_ids=stop_ids,
            rng=rng,
        )

    def theirs() -> Tensor:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )

    our_seconds = median_seconds(lambda: ours(stop_ids=[]), repeats=2)
    their_seconds = median_seconds(theirs, repeats=1)
    weight_bytes = 2 * model.num_parameters()
    head_size = config.hidden_size // config.num_attention_heads
    # Keys and values of all layers, two bytes a number, for a token.
    cache_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    mean_length = prompt_length + new_tokens / 2
    step_bytes = weight_bytes + batch_size * cache_bytes * mean_length
    floor_seconds = new_tokens * step_bytes / bandwidth
    num_tokens = batch_size * new_tokens
    print(
        f"{shape}, batch {batch_size}, {new_tokens} new tokens: "
        f"{num_tokens / our_seconds:,.0f} tokens/s, "
        f"model.generate {num_tokens / their_seconds:,.0f} "
        f"({their_seconds / our_seconds:.1f} times slower), "
        f"floor {num_tokens / floor_seconds:,.0f} "
        f"({our_seconds / floor_seconds:.2f} times faster)"
    )

    # Ragged: with random weights, 1 in 128 of the tokens drawn is a stop id.
    stop_ids = torch.randperm(config.vocab_size)[: config.vocab_size // 128].tolist()
    ragged_tokens = sum(len(completion) for completion in ours(stop_ids))
    ragged_seconds = median_seconds(lambda: ours(stop_ids), repeats=2)
    print(
        f"  ragged: {ragged_tokens / num_tokens:.0%} of the tokens made, "
        f"in {ragged_seconds / our_seconds:.0%} of the time"
    )


def measure_training(shape: str, rows: int, length: int, matrix_rate: float) -> None:
    """Model FLOPs utilisation of one optimiser step of GRPO and of DPO, and its peak memory."""
    config = SHAPES[shape]
    policy = random_model(config, torch.float32, DEVICE)
    ref_model = random_model(config, torch.float32, DEVICE).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=CUDA)
    prompt_length = length // 4
    ids = torch.randint(10, config.vocab_size, (rows, length)).tolist()
    sequences = [(row[:prompt_length], row[prompt_length:]) for row in ids]

    def logprobs(model: torch.nn.Module) -> Tensor:
        return completion_logprobs(model, sequences, range(rows))

    def optimizer_step(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def dpo_step() -> None:
        """The first half of the rows are chosen."""
        with torch.no_grad():
            ref_logprobs = logprobs(ref_model)
        logratios = (logprobs(policy) - ref_logprobs).sum(dim=1).view(2, -1).T  # (B, 2)
        optimizer_step(dpo_loss(logratios, beta=0.1).mean())

    mask = torch.ones(rows, length - prompt_length, dtype=torch.bool, device=DEVICE)
    weights = token_weights(mask, "sequence", length)
    advantages = torch.randn(rows, device=DEVICE)

    def grpo_step() -> None:
        with torch.no_grad():
            ref_logprobs = logprobs(ref_model)
        new_logprobs = logprobs(policy)
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
        optimizer_step(loss)

    measure_step(shape, "DPO", dpo_step, policy, rows, length, matrix_rate)
    measure_step(shape, "GRPO", grpo_step, policy, rows, length, matrix_rate)


def measure_step(
    shape: str,
    name: str,
    step: Callable[[], None],
    policy: torch.nn.Module,
    rows: int,
    length: int,
    matrix_rate: float,
) -> None:
    """Print the time of an optimiser step, its share of the hardware's rate, and its memory."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, repeats=3)
    peak = torch.cuda.max_memory_allocated() / 1e9 if CUDA else float("nan")
    config, num_parameters = policy.config, policy.num_parameters()
    # 2 operations a parameter and token forward and 4 backward, and the products of causal
    # attention.
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    forward_flops = rows * length * (2 * num_parameters + attention)
    flops = 4 * forward_flops  # with the reference's forward pass
    # float32: weights, gradients and two moments; the reference's weights.
    table = 5 * 4 * num_parameters / 1e9
    print(
        f"{shape}, {name} update of {rows} x {length} tokens: {seconds:.3f} s, "
        f"MFU {flops / seconds / matrix_rate:.0%}; peak {peak:.1f} GB, table {table:.1f} GB"
    )


def main() -> None:
    run_scripts()
    bandwidth, matrix_rate = measure_hardware(small=not CUDA)
    name = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{name}: {bandwidth / 1e9:,.0f} GB/s, {matrix_rate / 1e12:,.1f} TFLOP/s in bfloat16")
    if not CUDA:
        measure_decoding("toy", batch_size=8, new_tokens=32, bandwidth=bandwidth)
        measure_training("toy", rows=8, length=64, matrix_rate=matrix_rate)
        return
    for shape in ("0.5B", "1.5B"):
        measure_decoding(shape, batch_size=64, new_tokens=512, bandwidth=bandwidth)
        measure_decoding(shape, batch_size=256, new_tokens=512, bandwidth=bandwidth)
        measure_training(shape, rows=8, length=1024, matrix_rate=matrix_rate)
