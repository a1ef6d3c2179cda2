"""Peak memory and time of log-probabilities over a large vocabulary, forward and backward.

Each number comes from a process of its own, and is the most resident memory that Linux has seen
since the measurement began, less what was resident then.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.logprobs import completion_logprobs
from docs.experiments.lib.measuring import in_own_process, peak, reset_peak

VOCABULARY, HIDDEN, TOKENS = 151_936, 896, 2_048  # Qwen2.5-0.5B's head


def plain_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The usual lines: logits of all positions, log_softmax, gather."""
    row = torch.tensor([ids])
    logits = model(input_ids=row[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits, dim=-1).gather(2, row[:, 1:, None])


def our_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return completion_logprobs(model, [(ids[:1], ids[1:])], [0])


def measure_logprobs(logprobs: Callable) -> tuple[float, float]:
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
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.get_input_embeddings().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (TOKENS + 1,)).tolist()

    def forward_and_backward(num_tokens: int = TOKENS) -> None:
        logprobs(model, ids[: num_tokens + 1]).sum().backward()
        model.zero_grad()

    forward_and_backward(64)  # what is made once, such as the threads' own memory
    before = reset_peak()
    start_time = perf_counter()
    forward_and_backward()
    extra = peak() - before
    return extra, perf_counter() - start_time


def main() -> None:
    print(f"{TOKENS:,} tokens, vocabulary {VOCABULARY:,}, hidden {HIDDEN}, forward and backward")
    functions = {"log-softmax": plain_logprobs, "completion_logprobs": our_logprobs}
    for name, logprobs in functions.items():
        extra, seconds = in_own_process(measure_logprobs, logprobs)
        print(f"{name}: {extra / 1e6:,.0f} MB extra, {seconds:.1f} s", flush=True)
