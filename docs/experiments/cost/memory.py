"""Peak memory: of log-probabilities over a large vocabulary, of activations, and of a rollout.

Each number comes from a process of its own. On a CPU it is the most resident memory that Linux has
seen since the measurement began, less what was resident then; on a GPU what torch has allocated.
"""

from time import perf_counter

import torch
from transformers import LlamaConfig

from common.distributed import autocast, checkpoint_activations
from common.generation import generate
from common.logprobs import MAX_LOGITS, completion_logprobs
from docs.experiments.lib.measuring import (
    DEVICE,
    in_own_process,
    median_seconds,
    peak,
    random_model,
    reset_peak,
)

VOCABULARY, HIDDEN, TOKENS = 151_936, 896, 2_048  # Qwen2.5-0.5B's head
MB = 1e6


def measure_logprobs(way: str) -> tuple[float, float]:
    """Extra bytes and seconds of log-probs, forward and backward, through the head of a model."""
    # Hardly a layer, and embeddings that are not trained: what is left to measure is the head.
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=1,
        num_attention_heads=14,
        max_position_embeddings=TOKENS + 1,
    )
    model = random_model(config, device=DEVICE)
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), device=DEVICE)

    def forward(length: int) -> torch.Tensor:
        """The sum of what is computed for all tokens but the first."""
        if way == "plain":  # the usual lines: logits of all positions, log_softmax, gather
            with autocast(model.device):
                logits = model(input_ids=ids[:, : length - 1], use_cache=False).logits.float()
            return torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:length, None]).sum()
        row = ids[0, :length].tolist()
        sequences = [(row[:1], row[1:])]
        if way == "ours":
            return completion_logprobs(model, sequences, [0]).sum()
        logprobs, _ = completion_logprobs(model, sequences, [0], entropy=True)
        return logprobs.sum()

    def forward_and_backward(length: int = TOKENS + 1) -> None:
        forward(length).backward()
        model.zero_grad()

    forward_and_backward(64)  # what is made once, such as the threads' own memory
    before = reset_peak()
    forward_and_backward()
    extra = peak() - before
    return extra, median_seconds(forward_and_backward, repeats=3)


def measure_activations(way: str) -> tuple[float, float, float]:
    """Extra bytes and seconds of a forward and backward pass over 8 rows of 1,024 tokens, and the
    gradient's norm."""
    config = LlamaConfig(
        vocab_size=50_257,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=1_024,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = random_model(config, device=DEVICE)
    if way == "checkpointing":
        checkpoint_activations(model)
    ids = torch.randint(config.vocab_size, (8, 1_024)).tolist()
    sequences = [(row[:128], row[128:]) for row in ids]
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def forward_and_backward(num_rows: int = 8) -> None:
        completion_logprobs(model, sequences[:num_rows], range(num_rows)).sum().backward()

    forward_and_backward(1)
    before = reset_peak()
    forward_and_backward()
    extra = peak() - before
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
    return extra, median_seconds(forward_and_backward, repeats=3), norm


def measure_rollout(batch_size: int) -> tuple[float, float]:
    """Extra bytes and seconds of 256 completions of 512 tokens, `batch_size` at a time."""
    config = LlamaConfig(
        vocab_size=50_257,
        hidden_size=256,
        num_hidden_layers=6,
        intermediate_size=1_024,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = random_model(config, device=DEVICE)
    prompts = [[token] * 64 for token in range(32) for _ in range(8)]

    def sample(num_tokens: int) -> None:
        rng = torch.Generator().manual_seed(0)
        generate(
            model,
            prompts,
            max_new_tokens=num_tokens,
            temperature=1.0,
            stop_ids=[],
            rng=rng,
            batch_size=batch_size,
        )

    sample(2)
    before, start_time = reset_peak(), perf_counter()
    sample(512)
    return peak() - before, perf_counter() - start_time


def main() -> None:
    gradients = 4 * HIDDEN * (VOCABULARY + TOKENS)  # of the head's weights and the hidden states
    chunk = 4 * (MAX_LOGITS // VOCABULARY) * VOCABULARY
    print(f"{TOKENS} tokens, vocabulary {VOCABULARY}, hidden {HIDDEN}, forward and backward")
    print(f"gradients {gradients / MB:,.0f} MB, chunk {chunk / MB:,.0f} MB")
    for way in ("plain", "ours", "ours with entropy"):
        extra, seconds = in_own_process(measure_logprobs, way)
        chunks = (extra - gradients) / chunk
        print(
            f"{way}: {extra / MB:,.0f} MB extra (gradients and {chunks:.2f} chunks), "
            f"{seconds:.2f} s",
            flush=True,
        )
    print("a rollout of 256 completions of 512 tokens")
    for batch_size in (256, 64, 16):
        extra, seconds = in_own_process(measure_rollout, batch_size)
        print(f"{batch_size} at a time: {extra / MB:,.0f} MB extra, {seconds:.0f} s", flush=True)
    print("activations of 8 rows of 1,024 tokens")
    for way in ("plain", "checkpointing"):
        extra, seconds, norm = in_own_process(measure_activations, way)
        print(f"{way}: {extra / MB:,.0f} MB extra, {seconds:.2f} s, gradient norm {norm}")
