"""Sample completions from a policy.

The distribution sampled from is softmax(logits / temperature) over the whole vocabulary and
nothing else: no top-k, no nucleus, no penalty, nothing from the checkpoint's generation config.
That is the distribution whose log-probabilities `common/logprobs.py` computes, so a policy
gradient is on-policy by construction.

Under torchrun each rank samples a part of the rows, and all ranks get all completions.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicLayer

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def all_gather(part: list) -> list:
    """The lists of all ranks, concatenated in the order of the ranks."""
    parts = [part] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(parts, part)
    return list(itertools.chain(*parts))


def all_reduce_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def pad_rows(
    rows: list[list[int]], device: torch.device, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack token ids of different lengths: ids (B, L) int64, and a bool mask of the real ones.

    The mask comes from the lengths, so padding may have any id, and a real EOS is never taken for
    padding.
    """
    lengths = torch.tensor([*map(len, rows)], dtype=torch.long)
    mask = torch.arange(max(map(len, rows), default=0)) < lengths[:, None]
    mask = mask.flip(1) if left else mask
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([*itertools.chain(*rows)], dtype=torch.long)
    return ids.to(device), mask.to(device)


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a completion, sorted; none is an empty list.

    They are the tokenizer's EOS, all of the generation config's (if the folder or hub name `source`
    has one), and what the chat template writes after an assistant's turn: a base model's EOS is
    often another one than its template's.
    """
    stop_ids = [tokenizer.eos_token_id]
    try:
        more = GenerationConfig.from_pretrained(source).eos_token_id
        stop_ids += more if isinstance(more, list) else [more]
    except OSError:  # many checkpoints have none
        pass
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@"}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("@@")[2]
        ids = tokenizer(after, add_special_tokens=False).input_ids
        added = tokenizer.added_tokens_decoder
        stop_ids += [token for token in ids if token in added and added[token].special][:1]
    return sorted({token for token in stop_ids if token is not None})


def use_bfloat16(device: torch.device) -> bool:
    """CUDA-only: where matrix products are computed in bfloat16; weights stay float32."""
    return device.type == "cuda"


def use_static_cache(device: torch.device) -> bool:
    """CUDA-only: where steps can be captured. Elsewhere a cache that grows is the faster one."""
    return device.type == "cuda"


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products where `use_bfloat16`; log-softmax, losses and scores are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """An FSDP model with whole weights, gathered once, and without FSDP's hooks.

    Ranks finish their completions after different numbers of tokens, so none may wait for another
    between two tokens. A model that is not sharded stays as it is.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [(unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    for unit in units:
        unit.unshard()
        unit._forward_pre_hooks, unit._forward_hooks = {}, {}
    yield
    for unit, (before, after) in zip(units, hooks, strict=True):
        unit._forward_pre_hooks, unit._forward_hooks = before, after
        unit.reshard()


def sample_tokens(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature) by inverting its cumulative sum.

    Args:
        logits: (B, V) unnormalised log-probabilities.
        temperature: 0 takes the most probable token (greedy).
        uniform: (B,) float64 random numbers in [0, 1), one per draw; not read when greedy.

    Returns:
        (B,) token ids.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    # float64: over 150,000 tokens a float32 sum would swallow the rare ones.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return tokens.clamp(max=logits.shape[-1] - 1)


class OneTypeCache(StaticCache):
    """Under autocast rotated keys are float32 and values bfloat16; a StaticCache holds one type."""

    def batch_select_indices(self, rows: torch.Tensor) -> None:
        """Let row i be what row `rows[i]` was; a StaticCache cannot, a DynamicCache can."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """CUDA-only: record the kernels of `step`, running none; returns what replays them at once."""
    graph = torch.cuda.CUDAGraph()
    # Records those of this thread; NCCL has threads of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


class StaticStep:
    """A decoding step on fixed memory, which a GPU can replay as a whole: a CUDA graph.

    Launched one by one from Python, the hundreds of kernels of a step take longer to launch than to
    run. A graph launches them at once, but always on the same tensors; so a step's tokens are
    copied into tensors that stay, and `StaticCache` has room for the longest completion from the
    start. A step that cannot be captured runs uncaptured.
    """

    def __init__(self, model: torch.nn.Module, cache: StaticCache, attention_mask: torch.Tensor):
        """Rows and width of the mask are those of the cache; columns to come are 1 in it."""
        self.calls = 0
        self.tokens = torch.zeros_like(attention_mask[:, :1])
        self.positions = torch.zeros_like(self.tokens)
        # The causal mask covers the columns to come, so this one never changes.
        inputs = dict(input_ids=self.tokens, position_ids=self.positions, past_key_values=cache)
        inputs |= dict(attention_mask=attention_mask, use_cache=True)
        self.run = lambda: model(**inputs).logits[:, -1]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) after tokens (B, 1) at positions (B, 1)."""
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.calls += 1
        if self.calls == 2:  # in the first, libraries set themselves up
            try:
                self.run = capture(self.run)
            except RuntimeError as error:
                warnings.warn(f"generate: slow, without a CUDA graph: {error}", stacklevel=2)
        return self.run()


def decode(
    model: torch.nn.Module,
    prompts: list[list[int]],
    uniform: torch.Tensor,
    temperature: float,
    stop_ids: list[int],
) -> list[list[int]]:
    """`generate` on one rank, with its random numbers (B, max_new_tokens) given.

    Equal prompts next to each other are read once. Rows that have ended leave the batch and the
    cache, so that a step costs what the unfinished rows need: at once, or on a GPU, where each
    number of rows needs a graph of its own, when they are half of the rows.
    """
    device = model.device
    ids, mask = pad_rows(prompts, device, left=True)  # (B, P)
    prompt_length, end = ids.shape[1], ids.shape[1] + uniform.shape[1]
    attention_mask = torch.nn.functional.pad(mask.long(), (0, uniform.shape[1]), value=1)
    # Counted over real tokens, so that a padded prompt sees the positions it has when alone.
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=device)
    sampled = torch.full(uniform.shape, -1, device=device)  # -1 after a row's end
    rows = torch.arange(len(ids), device=device)  # which row of `sampled` each model row writes
    finished = torch.zeros_like(rows, dtype=torch.bool)  # in the order of `rows`

    cache = DynamicCache(config=model.config)
    # Windows that slide are not captured: how they move is decided in Python.
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    static = plain and use_static_cache(device)
    if static:
        cache = OneTypeCache(config=model.config, max_cache_len=end)
    cached = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
    both = torch.cat([ids, mask.long()], dim=1)
    both, prompt_of_row = both.unique_consecutive(dim=0, return_inverse=True)
    ids, mask = both.chunk(2, dim=1)
    inputs = dict(position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0), attention_mask=mask)
    logits = model(input_ids=ids, **inputs, **cached).logits[prompt_of_row, -1]  # (B, V)
    cache.batch_select_indices(prompt_of_row)
    step = StaticStep(model, cache, attention_mask) if static else None

    for column in range(prompt_length, end):
        t = column - prompt_length
        tokens = sample_tokens(logits, temperature, uniform[rows, t])
        sampled[rows, t] = tokens.masked_fill(finished, -1)
        finished |= torch.isin(tokens, stop)

        unfinished = (~finished).nonzero().squeeze(1)
        if len(unfinished) == 0 or column + 1 == end:
            break
        if len(unfinished) <= (len(rows) // 2 if static else len(rows) - 1):
            rows, tokens, finished = (x[unfinished] for x in (rows, tokens, finished))
            cache.batch_select_indices(unfinished)
            if static:
                step = StaticStep(model, cache, attention_mask[rows])
        tokens, positions = tokens[:, None], position_ids[rows, column : column + 1]
        if static:
            logits = step(tokens, positions)
        else:
            inputs = dict(input_ids=tokens, attention_mask=attention_mask[rows, : column + 1])
            logits = model(**inputs, position_ids=positions, **cached).logits[:, -1]
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    stop_ids: list[int],
    generator: torch.Generator,
) -> list[list[int]]:
    """Sample a completion for each prompt, with a key/value cache.

    A completion ends with the first of `stop_ids` that is drawn, which belongs to it, or after
    `max_new_tokens`. Random numbers are drawn for all tokens that all rows may have, so that a
    completion depends neither on the other rows and their lengths nor on the number of ranks.

    Args:
        model: a causal language model of transformers, in eval mode; sharded with FSDP or not.
        prompts: B lists of token ids.
        temperature: divides the logits; 0 is greedy decoding.
        stop_ids: may be empty.
        generator: on the CPU, in the same state on each rank.

    Returns:
        B lists of token ids, the stop id included.

    Raises:
        ValueError: a model in training mode, a temperature below 0, or an empty prompt.
    """
    if model.training:
        raise ValueError("generate: the model is in training mode, so dropout would be sampled")
    if temperature < 0 or not all(prompts):
        raise ValueError("generate: a temperature below 0, or an empty prompt")
    batch = len(prompts)
    uniform = torch.rand(batch, max_new_tokens, dtype=torch.float64, generator=generator)
    mine = slice(batch * RANK // WORLD_SIZE, batch * (RANK + 1) // WORLD_SIZE)
    completions = []
    with autocast(model.device), unsharded(model):
        if prompts[mine]:
            numbers = uniform[mine].to(model.device)
            completions = decode(model, prompts[mine], numbers, temperature, stop_ids)
    return all_gather(completions)
