"""Sample completions from a policy, and what comes before that: tokens of texts, sharded models.

The distribution sampled from is softmax(logits / temperature) over the whole vocabulary: no top-k,
no penalty, nothing from the checkpoint's generation config. `common/logprobs.py` computes its
log-probs, so a policy gradient is on-policy. Under torchrun each rank samples a part of the rows.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicLayer

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def all_gather(part: list) -> list:
    """The lists of all ranks, concatenated in the order of the ranks."""
    parts = [part] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(parts, part)
    return [item for part in parts for item in part]


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def pad_rows(rows: list[list[int]], device: Any, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) of rows of different lengths, and a bool mask of the real ones.

    The mask comes from the lengths: padding may have any id, and a real EOS is never padding.
    """
    side = "left" if left else "right"
    ids = pad_sequence([torch.LongTensor(row) for row in rows], batch_first=True, padding_side=side)
    mask = torch.arange(ids.shape[1]) < torch.tensor([*map(len, rows)])[:, None]
    return ids.to(device), (mask.flip(1) if left else mask).to(device)


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that end a completion: the tokenizer's EOS, all of the generation config's (if the
    folder or hub name `source` has one), and what the chat template writes after an assistant's
    turn: a base model's EOS is often another one than its template's.
    """
    stop_ids = [tokenizer.eos_token_id]
    with suppress(OSError):  # many checkpoints have none
        more = GenerationConfig.from_pretrained(source).eos_token_id
        stop_ids += more if isinstance(more, list) else [more]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@"}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).partition("@@")[2]
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
    """A sharded model with whole weights, gathered once, and without FSDP's hooks: ranks finish
    after different numbers of tokens, so none may wait for another between two tokens.
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


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Tokens (B,) from softmax(logits (B, V) / temperature) by uniform (B,), float64 in [0, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    # float64: over 150,000 tokens a float32 sum would swallow the rare ones.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return tokens.squeeze(1).clamp(max=logits.shape[-1] - 1)


class OneTypeCache(StaticCache):
    """Under autocast rotated keys are float32 and values bfloat16; a StaticCache holds one type."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """CUDA-only: record the kernels of `step`, running none; returns what replays them at once."""
    graph = torch.cuda.CUDAGraph()
    # Records those of this thread; NCCL has threads of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return lambda: graph.replay() or output  # replay() returns None


class Reader:
    """A model and its cache: reads B prompts, then one more token of each row per call.

    Most models' rows are `free`: padded on the left, read once where neighbours are equal, dropped
    when they have ended. Others read prompts of one length and keep all rows. On a GPU launching a
    step's kernels takes longer than running them: a CUDA graph launches all, on tensors that stay.
    """

    def __init__(self, model: torch.nn.Module, prompts: list, max_new_tokens: int, free: bool):
        ids, mask = pad_rows(prompts, model.device, left=True)  # (B, P)
        self.model, self.free, self.static, self.cache = model, free, False, {}
        rows = torch.arange(len(ids), device=model.device)
        if free:
            both = torch.cat([ids, mask.long()], dim=1)
            both, rows = both.unique_consecutive(dim=0, return_inverse=True)
            ids, mask = both.chunk(2, dim=1)
            kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
            # Windows that slide are not captured: how they move is decided in Python.
            self.static = kinds == {DynamicLayer} and use_static_cache(model.device)
            if any(kind.__module__ != DynamicLayer.__module__ for kind in kinds):
                raise ValueError("a cache of the model's own may count padding in its blocks")
        if self.static:
            cache = OneTypeCache(config=model.config, max_cache_len=ids.shape[1] + max_new_tokens)
            self.cache = dict(past_key_values=cache)
        # Counted over real tokens, so that a padded prompt sees the positions it has when alone.
        self.tokens, self.mask = ids, mask.long()
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        self.logits = self.step()[rows]  # (B, V)
        self.tokens, self.positions = ids[:, -1:], self.positions[:, -1:]
        if self.static:  # covers the columns to come, so that it never changes
            self.mask = torch.nn.functional.pad(self.mask, (0, max_new_tokens), value=1)
        self.keep(rows)

    def keep(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was."""
        for cache in self.cache.values() if self.free else ():
            cache.reorder_cache(rows)
        inputs = (self.tokens, self.positions, self.mask)
        self.tokens, self.positions, self.mask = (x[rows] for x in inputs)
        self.calls, self.run = 0, None

    def step(self) -> Tensor:
        inputs = dict(self.cache, input_ids=self.tokens)
        if self.free:  # else the model counts for itself
            inputs |= dict(attention_mask=self.mask, position_ids=self.positions)
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        names = ("past_key_values", "cache_params")  # as models call it
        self.cache = {name: output[name] for name in names if output.get(name) is not None}
        return output.logits[:, -1]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of each row."""
        self.tokens.copy_(tokens[:, None])
        self.positions += 1
        self.calls += 1
        if not self.static:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        elif self.calls == 2:  # in the first, libraries set themselves up
            try:
                self.run = capture(self.step)
            except RuntimeError as error:
                warnings.warn(f"generate: slow, without a CUDA graph: {error}", stacklevel=2)
        return (self.run or self.step)()


def rows_are_free(model: torch.nn.Module) -> bool:
    """Whether a `Reader` may pad and drop the model's rows; tried out on three short prompts."""
    prompts, tokens = [[5] * 7, [1, 2, 3], [4, 4, 4]], torch.arange(1, 6, device=model.device)
    expected = model(input_ids=tokens[None], use_cache=False).logits[0, -1].softmax(dim=0)
    bound = 0.1 if use_bfloat16(model.device) or model.dtype != torch.float32 else 1e-4
    for free in (True, False):
        with suppress(Exception):  # a cache of another form fails in its own way
            reader = Reader(model, prompts[not free :], 2, free)
            reader.keep(tokens[:2] - 1 + free)
            reader(tokens[3].expand(2))
            found = reader(tokens[4].expand(2))[0].softmax(dim=0)
            if (found - expected).norm() <= bound * expected.norm():
                return free
    raise ValueError(f"generate: {type(model).__name__} gives other logits with a cache")


def decode(model: Any, prompts: list, uniform: Tensor, temperature: float, stop_ids: list) -> list:
    """`generate` on one rank, with its random numbers (B, max_new_tokens). Rows that have ended
    leave the batch: at once, or where each number of rows needs a graph, when they are half of it.
    """
    reader = Reader(model, prompts, uniform.shape[1], model.free_rows)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    sampled = torch.full(uniform.shape, -1, device=model.device)  # -1 after a row's end
    rows = torch.arange(len(prompts), device=model.device)  # which of `sampled` each row writes
    finished = torch.zeros_like(rows, dtype=torch.bool)  # in the order of `rows`
    logits, reader.logits = reader.logits, None  # not kept beyond its step
    for t in range(uniform.shape[1]):
        tokens = sample_tokens(logits, temperature, uniform[rows, t])
        sampled[rows, t] = tokens.masked_fill(finished, -1)
        finished |= torch.isin(tokens, stop)
        unfinished = (~finished).nonzero().squeeze(1)
        if len(unfinished) == 0 or t + 1 == uniform.shape[1]:
            break
        if reader.free and len(unfinished) <= (len(rows) // 2 if reader.static else len(rows) - 1):
            rows, tokens, finished = (x[unfinished] for x in (rows, tokens, finished))
            reader.keep(unfinished)
        logits = reader(tokens)
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


@torch.no_grad()
def generate(
    model: Any, prompts: list, max_new_tokens: int, temperature: float, stop_ids: list, rng: Any
) -> list[list[int]]:
    """Sample a completion (token ids) for each prompt (token ids), with a key/value cache.

    A completion ends with the first of `stop_ids` (may be empty) that is drawn, and includes it, or
    after `max_new_tokens`. Random numbers are drawn for all tokens that all rows may have, from a
    generator on the CPU in the same state on each rank: so a completion depends neither on the
    other rows nor on the number of ranks. Temperature 0 is greedy. The model is a causal one of
    transformers, sharded or not; one whose cache changes its logits is a ValueError.
    """
    if model.training or temperature < 0 or not all(prompts):
        raise ValueError("generate: training mode, a temperature below 0, or an empty prompt")
    uniform = torch.rand(len(prompts), max_new_tokens, dtype=torch.float64, generator=rng)
    mine = range(len(prompts) * RANK // WORLD_SIZE, len(prompts) * (RANK + 1) // WORLD_SIZE)
    completions = {}
    with unsharded(model):
        if mine and not hasattr(model, "free_rows"):
            model.free_rows = rows_are_free(model)
        with autocast(model.device):
            for length in {len(prompts[row]) * (not model.free_rows) for row in mine}:
                rows = [row for row in mine if model.free_rows or len(prompts[row]) == length]
                some, numbers = [prompts[row] for row in rows], uniform[rows].to(model.device)
                made = decode(model, some, numbers, temperature, stop_ids)
                completions |= zip(rows, made, strict=True)
    return all_gather([completions[row] for row in mine])


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model to the device; under torchrun FSDP shards it, layer by layer."""
    # torch gives the input embedding of this id no gradient, and where pad == eos it is the EOS.
    model.get_input_embeddings().padding_idx = None
    names = model._no_split_modules or ()
    units = [part for part in reversed([*model.modules()]) if type(part).__name__ in names]
    units += [model.base_model, model.score] if hasattr(model, "score") else [model]
    for unit in units if WORLD_SIZE > 1 else []:
        low = use_bfloat16(device) and not isinstance(unit, torch.nn.Linear)  # no head of scores
        dtypes = MixedPrecisionPolicy(torch.bfloat16 if low else None, reduce_dtype=torch.float32)
        fully_shard(unit, mp_policy=dtypes, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)  # losses are divided by counts over all ranks
        unit.set_force_sum_reduction_for_comms(True)  # the only one that gloo knows
    return model.to(device)


def content(message: Any) -> str:
    """The text of a chat message; parts are joined, since most templates expect a string."""
    if not isinstance(message, dict) or not message.get("role"):
        raise ValueError(f"every chat message needs a role and a content, found {message!r:.200}")
    parts = message.get("content") or ""
    parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
    if any(part["type"] != "text" for part in parts):
        raise ValueError(f"only parts of type `text` can be read, found {parts!r:.200}")
    return "".join(part["text"] for part in parts)


def encode(tokenizer: Any, text: str | list[dict], **options: Any) -> list[int]:
    """Token ids of a string as it is, or of chat messages through the chat template."""
    if isinstance(text, str):
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # appended by the tokenizer: as a prompt it would have ended already
    else:
        turns = [turn | {"content": content(turn)} for turn in text]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        last = ([turn for turn in turns if turn["role"] not in ("assistant", "tool")] or turns)[-1]
        if last["content"].strip() not in rendered:
            told = f"the chat template of {tokenizer.name_or_path} leaves out what the role"
            raise ValueError(f"{told} {last['role']!r} says")
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
    if ids[:2] == 2 * [tokenizer.bos_token_id]:
        raise ValueError("two BOS, one added by the tokenizer")
    return ids
