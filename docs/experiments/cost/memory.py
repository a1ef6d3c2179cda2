"""Peak memory of log-probabilities over a large vocabulary, of activations, and of a rollout.

Each number comes from a process of its own. On a CPU it is the most resident memory that Linux has
seen since the measurement began, less what was resident then; on a GPU what torch has allocated.
"""

from functools import partial
from time import perf_counter

import torch

from common.distributed import autocast, checkpoint_activations
from common.generation import generate
from common.logprobs import MAX_LOGITS, completion_logprobs
from docs.experiments.lib.measuring import (
    DEVICE,
    extra_bytes,
    in_own_process,
    median_seconds,
    random_llama,
)

VOCABULARY, HIDDEN, TOKENS = 151_936, 896, 2_048  # Qwen2.5-0.5B's head
LLAMA_21M = dict(
    vocab_size=50_257,
    hidden_size=256,
    num_hidden_layers=8,
    intermediate_size=1_024,
    num_attention_heads=8,
    tie_word_embeddings=True,
)
MB = 1e6


def plain_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The usual lines: logits of all positions, log_softmax, gather."""
    row = torch.tensor([ids], device=DEVICE)
    with autocast(model.device):
        logits = model(input_ids=row[:, :-1], use_cache=False).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(2, row[:, 1:, None])


def our_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return completion_logprobs(model, [(ids[:1], ids[1:])], [0])


def measure_logprobs(are_ours: bool) -> tuple[float, float]:
    """Extra bytes and seconds of log-probs, forward and backward, through the head of a model."""
    # Hardly a layer, and embeddings that are not trained: what is left to measure is the head.
    model = random_llama(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=1,
        num_attention_heads=14,
        max_position_embeddings=TOKENS + 1,
    )
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (TOKENS + 1,)).tolist()
    logprobs = our_logprobs if are_ours else plain_logprobs

    def forward_and_backward(num_tokens: int = TOKENS) -> None:
        logprobs(model, ids[: num_tokens + 1]).sum().backward()
        model.zero_grad()

    forward_and_backward(64)  # what is made once, such as the threads' own memory
    extra = extra_bytes(forward_and_backward)
    return extra, median_seconds(forward_and_backward, repeats=3)


def measure_activations(checkpointing: bool) -> tuple[float, float]:
    """Extra bytes and seconds of a forward and backward pass over 8 rows of 1,024 tokens."""
    model = random_llama(**LLAMA_21M)
    if checkpointing:
        checkpoint_activations(model)
    ids = torch.randint(LLAMA_21M["vocab_size"], (8, 1_024)).tolist()
    sequences = [(row[:128], row[128:]) for row in ids]
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def forward_and_backward(num_rows: int = 8) -> None:
        completion_logprobs(model, sequences[:num_rows], range(num_rows)).sum().backward()

    forward_and_backward(1)
    extra = extra_bytes(forward_and_backward)
    return extra, median_seconds(forward_and_backward, repeats=3)


def measure_rollout(batch_size: int) -> tuple[float, float]:
    """Extra bytes and seconds of 256 completions of 512 tokens, `batch_size` at a time."""
    model = random_llama(**LLAMA_21M | {"num_hidden_layers": 6})
    prompts = [[token] * 64 for token in range(32) for _ in range(8)]
    sample = partial(
        generate,
        model,
        prompts,
        temperature=1.0,
        stop_ids=[],
        rng=torch.Generator().manual_seed(0),
        batch_size=batch_size,
    )
    sample(max_new_tokens=2)
    start_time = perf_counter()
    extra = extra_bytes(lambda: sample(max_new_tokens=512))
    return extra, perf_counter() - start_time


def main() -> None:
    print(f"{TOKENS:,} tokens, vocabulary {VOCABULARY:,}, hidden {HIDDEN}, forward and backward")
    gradients = 4 * HIDDEN * (VOCABULARY + TOKENS)  # of the head's weights and the hidden states
    chunk = 4 * MAX_LOGITS
    for name, are_ours in {"log-softmax": False, "completion_logprobs": True}.items():
        extra, seconds = in_own_process(measure_logprobs, are_ours)
        chunks = (extra - gradients) / chunk
        print(
            f"{name}: {extra / MB:,.0f} MB extra (gradients and {chunks:.2f} chunks), "
            f"{seconds:.1f} s",
            flush=True,
        )
    print("a rollout of 256 completions of 512 tokens")
    for batch_size in (256, 64, 16):
        extra, seconds = in_own_process(measure_rollout, batch_size)
        print(f"{batch_size} at a time: {extra / MB:,.0f} MB extra, {seconds:.0f} s", flush=True)
    print("activations of 8 rows of 1,024 tokens")
    for name, checkpointing in {"without": False, "with checkpointing": True}.items():
        extra, seconds = in_own_process(measure_activations, checkpointing)
        print(f"{name}: {extra / MB:,.0f} MB extra, {seconds:.1f} s", flush=True)
