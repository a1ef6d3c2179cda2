"""What to run when there is a GPU: each script for a few steps, then decoding and training speed.

The first part says which scripts pass. The second compares with what the hardware reaches in the
same run.

    python docs/experiments/gpu.py                     # Qwen2.5-0.5B's and -1.5B's shapes
    python docs/experiments/gpu.py --shapes toy        # the same program, small, also on a CPU

The models have the shapes of Qwen2.5 with random weights, so nothing is downloaded.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.generation import generate
from common.logprobs import completion_logprobs
from dpo import Args, preference_loss
from grpo import grpo_loss, token_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, heads=(14, 2)),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, heads=(12, 2)),
    "toy": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, heads=(4, 2)),
}


STEPS = {
    "sft.py": "--epochs 0.05",
    "rm_bradley_terry.py": "--epochs 0.05",
    "ppo_rlhf.py": "--total-rollouts 3",
    "grpo.py": "--total-rollouts 3",
    "dpo.py": "--epochs 0.05",
    "kto.py": "--epochs 0.05",
    "reinforce.py": "--total-rollouts 3",
}


def scripts() -> None:
    """Run each script as a user would, with its default model and data, and say which passed."""
    for script, flags in STEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, script, *flags.split(), "--output-dir", folder]
            root = Path(__file__).resolve().parents[2]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        fallback = "without a CUDA graph" in done.stderr
        print(
            f"{script}: {'FAILED' if done.returncode else 'passed'}{', no CUDA graph' * fallback}"
        )
        if done.returncode:
            print(done.stderr[-3000:])


def make_model(shape: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of a shape with random weights, in eval mode as the scripts have it."""
    sizes = dict(SHAPES[shape])
    heads, kv_heads = sizes.pop("heads")
    config = Qwen2Config(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=151_936 if shape != "toy" else 1_000,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype).eval()


def seconds(function, repeats: int = 3) -> float:
    """Median wall-clock seconds of a call, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def hardware(small: bool) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and bfloat16 operations a second of a product."""
    n = 2**20 if small else 2**30
    a, b = torch.empty(2, n, dtype=torch.uint8, device=DEVICE)
    bandwidth = 2 * n / seconds(lambda: b.copy_(a), 10)
    n = 256 if small else 8192
    x = torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE)
    return bandwidth, 2 * n**3 / seconds(lambda: x @ x, 10)


def decoding(shape: str, batch: int, new_tokens: int, bandwidth: float) -> None:
    """Tokens a second of `generate`, of transformers' generate, and of reading memory alone."""
    model = make_model(shape, torch.bfloat16)
    config, prompt = model.config, 128
    ids = torch.randint(10, config.vocab_size, (batch, prompt), device=DEVICE)
    mask, prompts, rng = torch.ones_like(ids), ids.tolist(), torch.Generator()
    ours = seconds(lambda: generate(model, prompts, new_tokens, 1.0, [], rng), 2)
    theirs = seconds(
        lambda: model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        ),
        1,
    )
    weights = 2 * model.num_parameters()
    head_size = config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size  # a token
    floor = new_tokens * (weights + batch * cache * (prompt + new_tokens / 2)) / bandwidth
    rates = [batch * new_tokens / x for x in (ours, theirs, floor)]
    print(
        f"{shape}, batch {batch}, {new_tokens} new tokens: {rates[0]:,.0f} tokens/s, "
        f"model.generate {rates[1]:,.0f} ({theirs / ours:.1f} times slower), "
        f"floor {rates[2]:,.0f} ({ours / floor:.2f} times faster)"
    )

    # Ragged: with random weights, 1 in 128 of the tokens drawn is a stop id.
    often = torch.randperm(config.vocab_size)[: config.vocab_size // 128].tolist()
    made = sum(map(len, generate(model, prompts, new_tokens, 1.0, often, rng)))
    took = seconds(lambda: generate(model, prompts, new_tokens, 1.0, often, rng), 2)
    part, cost = made / (batch * new_tokens), took / ours
    print(f"  ragged: {part:.0%} of the tokens made, in {cost:.0%} of the time")


def training(shape: str, rows: int, length: int, matrix_rate: float) -> None:
    """Model FLOPs utilisation of one optimiser step of GRPO and of DPO, and its peak memory."""
    policy = make_model(shape, torch.float32)
    reference = None  # DPO's log-probs of it are computed before training
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=DEVICE == "cuda")
    ids, start = torch.randint(10, policy.config.vocab_size, (rows, length)).tolist(), length // 4
    pairs = [(row[:start], row[start:]) for row in ids]
    mask = torch.ones(rows, length - start, dtype=torch.bool, device=DEVICE)
    weights = token_weights(mask, "sequence", length)
    advantages = torch.randn(rows, device=DEVICE)

    def logprobs(model):
        return completion_logprobs(model, pairs, range(rows))

    def grpo_step():
        with torch.no_grad():
            ref = logprobs(reference)
        new = logprobs(policy)
        loss, _ = grpo_loss(new, new.detach(), ref, advantages, weights, 0.2, 0.2, 0.04)
        finish(loss)

    def dpo_step():
        sides = logprobs(policy).sum(dim=1).view(2, -1).T  # (B, 2), chosen and rejected
        lengths = torch.full_like(sides, length - start)
        losses, _ = preference_loss(Args(beta=0.1), sides, torch.zeros_like(sides), lengths)
        finish(losses.mean())

    def finish(loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    n, config = policy.num_parameters(), policy.config
    # 2 n a token forward and 4 n backward, and the products of causal attention.
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    for name, step, passes in (("DPO", dpo_step, 3), ("GRPO", grpo_step, 4)):
        if name == "GRPO":
            reference = make_model(shape, torch.float32).requires_grad_(False)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        took = seconds(step)
        flops = passes * rows * length * (2 * n + attention)
        table = 4 * n * (4 + (name == "GRPO")) / 1e9
        peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else float("nan")
        print(
            f"{shape}, {name} update of {rows} x {length} tokens: {took:.3f} s, "
            f"MFU {flops / took / matrix_rate:.0%}; peak {peak:.1f} GB, table {table:.1f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.5B", "1.5B"], choices=SHAPES)
    args = parser.parse_args()
    small = args.shapes == ["toy"]
    scripts()
    bandwidth, matrix_rate = hardware(small)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{name}: {bandwidth / 1e9:,.0f} GB/s, {matrix_rate / 1e12:,.1f} TFLOP/s in bfloat16")
    for shape in args.shapes:
        for batch in (64, 256) if not small else (8,):
            decoding(shape, batch, 512 if not small else 32, bandwidth)
        training(shape, 8, 1024 if not small else 64, matrix_rate)


if __name__ == "__main__":
    main()
