"""Sample completions from a policy: `sample_tokens` draws a token, the rest makes it fast.

Tokens are drawn from the whole vocabulary, whatever the checkpoint's generation config says.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from common.logprobs import Sequences, head_logits, output_head
from common.tokens import pad_rows
from runtime.checks import check_sampled
from runtime.model import autocast, backbone, unsharded
from runtime.processes import RANK, WORLD_SIZE, all_gather, all_reduce_sum

GRAPH_DEVICES = ("cuda",)  # where steps can be captured; elsewhere a cache that grows is faster


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B,) from softmax(logits (B, V) / temperature), by inversion: the first token whose
    cumulative probability exceeds its number in uniform (B,), float64 in [0, 1). And their
    log-probs (B,) under that distribution.
    """
    if temperature == 0:
        return logits.argmax(dim=-1), torch.zeros(len(logits), device=logits.device)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    # float64: over 150,000 tokens a float32 sum would swallow the rare ones.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)  # (B, 1); uniform * sum may round to the sum
    return tokens.squeeze(1), probabilities.gather(1, tokens).log().squeeze(1)


@torch.no_grad()
def generate(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: list[int],
    rng: torch.Generator,
    batch_size: int | None = None,
) -> tuple[Sequences, Tensor]:
    """Sample a completion for each of B prompts (token ids), `batch_size` at a time. Returns the
    sequences, pairs (prompt, completion) of token ids, and the log-probs (B, T) with which the
    completions' tokens were drawn, 0 after the end.

    Sampling stops at the first token in `stop_ids` (a list that may be empty), which is kept, or
    after `max_new_tokens`. Temperature 0 is greedy. Under torchrun each rank samples a part, and
    all ranks return all completions. Random numbers for all are drawn at once, by a CPU generator
    in the same state on each rank: up to rounding, a completion depends on its prompt and place
    alone.
    """
    check_sampled(model)
    prompts = [list(prompt) for prompt in prompts]  # those of rows are arrays
    uniform = torch.rand(len(prompts), max_new_tokens, dtype=torch.float64, generator=rng)
    uniform = uniform.to(model.device)
    first, last = (len(prompts) * rank // WORLD_SIZE for rank in (RANK, RANK + 1))  # this rank's
    completions, logprobs = [], torch.zeros(uniform.shape, device=model.device)
    with unsharded(model), autocast(model.device):
        output_head(model)  # tries it once: here, on all ranks, also on those without prompts
        size = batch_size or max(1, len(prompts))
        for start in range(first, last, size):
            batch = slice(start, min(start + size, last))
            decoded, logprobs[batch] = decode(
                model, prompts[batch], uniform[batch], temperature, stop_ids
            )
            completions += decoded
    completions = all_gather(completions)
    sequences = list(zip(prompts, completions, strict=True))
    longest = max(map(len, completions), default=0)
    return sequences, all_reduce_sum(logprobs)[:, :longest]


def decode(model: Any, prompts: list, uniform: Tensor, temperature: float, stop_ids: list) -> tuple:
    """`generate` on one rank. Its random numbers and log-probs are (B, max_new_tokens)."""
    decoder = make_decoder(model, prompts, uniform.shape[1])
    logits = decoder.prompt_logits()  # (B, V)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    sampled = torch.full(uniform.shape, -1, device=model.device)  # -1 after a completion's end
    logprobs = torch.zeros(uniform.shape, device=model.device)
    rows = torch.arange(len(prompts), device=model.device)  # of the sequences still in the batch
    ended = torch.zeros_like(rows, dtype=torch.bool)
    # Tokens between two looks at `ended`, for each of which a GPU waits.
    interval = 1 if model.device.type == "cpu" else 8
    for t in range(uniform.shape[1]):
        tokens, token_logprobs = sample_tokens(logits, temperature, uniform[rows, t])
        sampled[rows, t] = tokens.masked_fill(ended, -1)
        logprobs[rows, t] = token_logprobs
        ended |= torch.isin(tokens, stop)
        if (t + 1) % interval == 0:
            running = (~ended).nonzero().squeeze(1)
            if len(running) == 0:
                break
            if decoder.should_drop(len(ended) - len(running)):
                decoder.select(running)
                rows, tokens, ended = rows[running], tokens[running], ended[running]
        if t + 1 < uniform.shape[1]:
            logits = decoder.next_logits(tokens)
    completions = [[token for token in row if token >= 0] for row in sampled.tolist()]
    return completions, logprobs.masked_fill(sampled < 0, 0.0)


def make_decoder(model: Any, prompts: list, max_new_tokens: int) -> "Decoder":
    """A `Decoder`, on a GPU a `GraphDecoder`."""
    layers = DynamicCache(config=model.config).layers
    # A sliding window is not captured: Python decides how it moves.
    can_capture = all(type(layer) is DynamicLayer for layer in layers)
    if can_capture and model.device.type in GRAPH_DEVICES:
        return GraphDecoder(model, prompts, max_new_tokens)
    return Decoder(model, prompts)


class Decoder:
    """A model and its cache: reads the distinct ones of B prompts, left-padded, then one more token
    of each sequence per call.
    """

    def __init__(self, model: Any, prompts: list):
        self.backbone, self.head = backbone(model), output_head(model)
        self.cache = None
        rows = {}  # of each distinct prompt, its row in `ids`
        prompt_of = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
        self.prompt_of = torch.tensor(prompt_of, device=model.device)  # (B,)
        ids, mask = pad_rows([*rows], model.device, side="left")  # (number of prompts, P)
        self.tokens, self.mask = ids, mask.long()
        # Counted over real tokens, so that a padded prompt has the positions that it has alone.
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)

    def prompt_logits(self) -> Tensor:
        """Logits (B, V) of the first token of each completion."""
        logits = self.step()
        self.tokens, self.positions = self.tokens[:, -1:], self.positions[:, -1:]
        self.select(self.prompt_of)
        return logits[self.prompt_of]

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of each sequence."""
        self.tokens = tokens[:, None]
        self.mask = pad(self.mask, (0, 1), value=1)
        return self.step()

    def step(self) -> Tensor:
        """The model's forward pass over `self.tokens`; logits (B, V) at the last one."""
        output = self.backbone(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            cache=self.cache,
            use_cache=True,
        )
        self.positions += 1  # in place, so that a graph does it too
        self.cache = output.cache
        # The head of logprobs.py: what is sampled from is what is trained.
        return head_logits(output.last_hidden_state[:, -1], self.head)

    def should_drop(self, num_ended: int) -> bool:
        """Whether the sequences that have ended should leave the batch now."""
        return num_ended > 0

    def select(self, rows: Tensor) -> None:
        """Continue these sequences, by their rows in the batch; one may occur several times."""
        self.cache.reorder_cache(rows)
        self.tokens = self.tokens[rows]
        self.positions = self.positions[rows]
        self.mask = self.mask[rows]


# --- CUDA-only: skip it on a first reading -----------------------------------------------------
class GraphDecoder(Decoder):
    """A CUDA graph launches all kernels of a step: one by one, launching takes longer than running.
    It reads the memory that it was captured with: sizes are fixed, tokens change in place.
    """

    def __init__(self, model: Any, prompts: list, max_new_tokens: int):
        super().__init__(model, prompts)
        # Ones for tokens to come too: until they are there, the causal mask hides them.
        self.mask = pad(self.mask, (0, max_new_tokens), value=1)
        self.cache = SameTypeStaticCache(model.config, self.mask.shape[1])

    def next_logits(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens[:, None])
        self.num_calls += 1
        if self.num_calls == 2:  # the first call loads libraries, which a graph cannot record
            try:
                self.replay = capture(self.step)
            except RuntimeError as error:
                warnings.warn(f"generate: slow, without a CUDA graph: {error}", stacklevel=2)
        return self.replay() if self.replay else self.step()

    def should_drop(self, num_ended: int) -> bool:
        return 2 * num_ended >= len(self.tokens)  # each batch size needs a graph of its own

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.num_calls, self.replay = 0, None  # a graph captured on other tensors is void


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record the kernels of `step` without running them; returns what replays them."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()  # back to it if the capture fails
    # CUDA calls of other threads, such as NCCL's, must not invalidate the capture.
    with torch.cuda.stream(stream), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


class SameTypeStaticCache(StaticCache):
    """Keys of the values' type: under autocast rotated keys are float32, of twice the size."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(keys.to(values.dtype), values, *args, **kwargs)
