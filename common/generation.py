"""Sample completions from a policy; then what this needs: a cache, several processes, tokens.

Tokens are drawn from softmax(logits / temperature) over the whole vocabulary: no top-k, no penalty,
nothing from the checkpoint's generation config. `logprobs.py` has that distribution's log-probs.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

RANK = int(os.environ.get("RANK", 0))  # number of this process, set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


# --- sampling ----------------------------------------------------------------------------------
@torch.no_grad()
def generate(
    model: Any, prompts: list, *, max_new_tokens: int, temperature: float, stop_ids: list, rng: Any
) -> list[list[int]]:
    """Sample a completion (token ids) for each prompt (token ids).

    Sampling stops at the first token in `stop_ids` (a list that may be empty), which is kept, or
    after `max_new_tokens`. Temperature 0 is greedy. The model is a causal one of transformers; a
    ValueError if its logits differ with its cache. Under torchrun each rank samples a part, and all
    ranks return all completions. Random numbers for all are drawn at once, by a CPU generator in
    the same state on each rank: up to rounding, a completion depends on its prompt and place alone.
    """
    if model.training or temperature < 0 or not all(prompts):
        raise ValueError("generate: training mode, a temperature below 0, or an empty prompt")
    uniform = torch.rand(len(prompts), max_new_tokens, dtype=torch.float64, generator=rng)
    mine = range(len(prompts) * RANK // WORLD_SIZE, len(prompts) * (RANK + 1) // WORLD_SIZE)
    batches, completions = defaultdict(list), {}
    with unsharded(model), autocast(model.device):
        if mine and not hasattr(model, "can_pad_left"):
            model.can_pad_left = can_pad_left(model)
        for i in mine:  # all in one batch, or a batch for each length
            batches[0 if model.can_pad_left else len(prompts[i])].append(i)
        for batch in batches.values():
            batch_prompts = [prompts[i] for i in batch]
            numbers = uniform[batch].to(model.device)
            decoded = decode(model, batch_prompts, numbers, temperature, stop_ids)
            completions.update(zip(batch, decoded, strict=True))
    return all_gather([completions[i] for i in mine])


def decode(
    model: Any, prompts: list, uniform: Tensor, temperature: float, stop_ids: list
) -> list[list[int]]:
    """`generate` on one rank, with its random numbers (B, max_new_tokens)."""
    max_new_tokens = uniform.shape[1]
    decoder = CachedDecoder(model, prompts, max_new_tokens, left_padded=model.can_pad_left)
    logits = decoder.prompt_logits()  # (B, V)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    sampled = torch.full(uniform.shape, -1, device=model.device)  # -1 after a completion's end
    rows = torch.arange(len(prompts), device=model.device)  # of `sampled`, of the batch's sequences
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for t in range(max_new_tokens):
        tokens = sample_tokens(logits, temperature, uniform[rows, t])
        sampled[rows, t] = tokens.masked_fill(ended, -1)
        ended |= torch.isin(tokens, stop)
        running = (~ended).nonzero().squeeze(1)
        if len(running) == 0 or t + 1 == max_new_tokens:
            break
        # Sequences that have ended leave the batch. Each batch size needs a CUDA graph of its own,
        # so with a static cache they leave when half of the batch has ended.
        limit = len(rows) // 2 if decoder.static else len(rows) - 1
        if decoder.left_padded and len(running) <= limit:
            rows, tokens, ended = rows[running], tokens[running], ended[running]
            decoder.select(running)
        logits = decoder.next_logits(tokens)
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Tokens (B,) from softmax(logits (B, V) / temperature), by inversion: the first token whose
    cumulative probability exceeds its number in uniform (B,), float64 in [0, 1).
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    # float64: over 150,000 tokens a float32 sum would swallow the rare ones.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)  # (B, V)
    tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return tokens.squeeze(1).clamp(max=logits.shape[-1] - 1)


# --- the key/value cache -----------------------------------------------------------------------
class CachedDecoder:
    """A model and its cache: reads B prompts, then one more token of each sequence per call.

    With `left_padded` (most models) prompts of different lengths share a batch, equal neighbours
    are read once, and sequences can be dropped. Without it all prompts have one length and none is
    dropped. A `static` cache (CUDA) has fixed tensors, so that a CUDA graph can launch all kernels
    of a step at once: one by one, launching takes longer than running them.
    """

    def __init__(self, model: Any, prompts: list, max_new_tokens: int, left_padded: bool):
        self.model, self.max_new_tokens = model, max_new_tokens
        self.left_padded, self.static = left_padded, False
        self.cache = {}  # the model's argument for its cache, by name
        ids, mask = pad_rows(prompts, model.device, left=True)  # (B, P)
        self.prompt_of = torch.arange(len(ids), device=ids.device)  # (B,): sequence -> prompt's row
        if left_padded:
            layer_types = {type(layer) for layer in DynamicCache(config=model.config).layers}
            if any(layer.__module__ != DynamicLayer.__module__ for layer in layer_types):
                # `can_pad_left` then tries it without padding.
                raise ValueError("a cache of the model's own may count padding in its blocks")
            # A sliding window is not captured: Python decides how it moves.
            self.static = layer_types == {DynamicLayer} and use_static_cache(ids.device)
            # A group's copies of a prompt are read once; the mask tells padding from real tokens.
            ids_and_mask = torch.cat([ids, mask.long()], dim=1)
            ids_and_mask, self.prompt_of = ids_and_mask.unique_consecutive(
                dim=0, return_inverse=True
            )
            ids, mask = ids_and_mask.chunk(2, dim=1)
        if self.static:
            cache_length = ids.shape[1] + max_new_tokens
            self.cache["past_key_values"] = SameTypeStaticCache(model.config, cache_length)
        self.tokens, self.mask = ids, mask.long()
        # Counted over real tokens, so that a padded prompt has the positions that it has alone.
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)

    def prompt_logits(self) -> Tensor:
        """Logits (B, V) of the first token of each completion."""
        logits = self.step()
        self.tokens, self.positions = self.tokens[:, -1:], self.positions[:, -1:]
        if self.static:  # ones for columns to come, which the causal mask hides: a fixed shape
            self.mask = torch.nn.functional.pad(self.mask, (0, self.max_new_tokens), value=1)
        self.select(self.prompt_of)
        return logits[self.prompt_of]

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; the same one may occur several times."""
        if self.left_padded:
            for cache in self.cache.values():
                cache.reorder_cache(rows)
        self.tokens = self.tokens[rows]
        self.positions = self.positions[rows]
        self.mask = self.mask[rows]
        self.num_calls = 0  # on these tensors; a graph captured on other ones is void
        self.replay = None

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) after one more token (B,) of each sequence."""
        self.tokens.copy_(tokens[:, None])  # in place: a captured graph reads this tensor
        self.positions += 1
        self.num_calls += 1
        if not self.static:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        elif self.num_calls == 2:  # the first call warms libraries up, outside the graph
            try:
                self.replay = capture(self.step)
            except RuntimeError as error:
                warnings.warn(f"generate: slow, without a CUDA graph: {error}", stacklevel=2)
        return self.replay() if self.replay else self.step()

    def step(self) -> Tensor:
        """The model's forward pass over `self.tokens`; logits (B, V) at the last one."""
        inputs = {"input_ids": self.tokens, **self.cache}
        if self.left_padded:  # without padding the model counts positions itself
            inputs |= {"attention_mask": self.mask, "position_ids": self.positions}
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        self.cache = {}
        for name in ("past_key_values", "cache_params"):  # attention caches, state-space caches
            if output.get(name) is not None:
                self.cache[name] = output[name]
        return output.logits[:, -1]


def can_pad_left(model: torch.nn.Module) -> bool:
    """Whether a `CachedDecoder` may pad and drop the model's sequences; tried on short prompts."""
    # Reading 1, 2, 3 and then 4 and 5 with a cache must give the logits of all five without one.
    ids = torch.tensor([[1, 2, 3, 4, 5]], device=model.device)
    expected = model(input_ids=ids, use_cache=False).logits[0, -1].softmax(dim=0)
    exact = model.dtype == torch.float32 and not use_bfloat16(model.device)
    tolerance = 1e-4 if exact else 0.1
    for left_padded in (True, False):
        prompts = [[1, 2, 3], [4, 4, 4]]
        if left_padded:  # a longer prompt comes first, and is dropped when all have been read
            prompts = [[5] * 7, *prompts]
        with suppress(Exception):  # a cache of another form fails in its own way
            decoder = CachedDecoder(model, prompts, 2, left_padded)
            decoder.prompt_logits()
            last_two = torch.arange(len(prompts), device=model.device)[-2:]
            decoder.select(last_two)
            decoder.next_logits(ids[0, 3].expand(2))
            logits = decoder.next_logits(ids[0, 4].expand(2))
            error = (logits[0].softmax(dim=0) - expected).norm()
            if error <= tolerance * expected.norm():
                return left_padded
    raise ValueError(
        f"generate: {type(model).__name__} fails with a key/value cache, or gives other logits"
    )


class SameTypeStaticCache(StaticCache):
    """Under autocast rotated keys are float32 and values bfloat16; a StaticCache holds one type."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """CUDA-only: record the kernels of `step` without running them; returns what replays them."""
    graph = torch.cuda.CUDAGraph()
    # CUDA calls of other threads, such as NCCL's, must not invalidate the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def use_static_cache(device: torch.device) -> bool:
    """CUDA-only: where steps can be captured. Elsewhere a cache that grows is the faster one."""
    return device.type == "cuda"


# --- precision, and several processes ----------------------------------------------------------
def use_bfloat16(device: torch.device) -> bool:
    """CUDA-only: where matrix products are computed in bfloat16; weights stay float32.

    Not on cards that only emulate it (T4, V100, RTX 20): emulated, it is slower than float32.
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products where `use_bfloat16`; log-softmax, losses and scores are float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16(device))


def transformer_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers, from the first to the last; a ValueError if none is known."""
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"the layers of {type(model).__name__} are not known")
    return layers


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest once more.

    Less memory for about a third more time (Chen et al., arXiv 1604.06174). The switch that models
    of transformers have for it works in training mode alone, where dropout is on.
    """

    def recomputed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    for layer in transformer_layers(model):
        layer.forward = partial(recomputed, layer.forward)


def all_gather(part: list) -> list:
    """The lists of all ranks, concatenated in the order of the ranks."""
    lists = [part] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(lists, part)
    return [item for one_list in lists for item in one_list]


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(values)
    return values


def shard(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model, or a lone head, to the device; under torchrun FSDP shards it, layer by layer.

    Gradients are summed over ranks, not averaged: losses are divided by counts over all ranks.
    """
    if isinstance(model, PreTrainedModel):
        # torch gives the embedding at padding_idx no gradient; where pad == eos that is the EOS.
        model.get_input_embeddings().padding_idx = None
    if WORLD_SIZE == 1:
        return model.to(device)
    layers = getattr(model, "_no_split_modules", None) or ()
    # FSDP wants inner modules before those that contain them.
    units = [part for part in reversed([*model.modules()]) if type(part).__name__ in layers]
    units += [model.base_model, model.score] if hasattr(model, "score") else [model]
    for unit in units:
        # A head of scores, a Linear, stays in float32: near scores are equal in bfloat16.
        bfloat16 = use_bfloat16(device) and not isinstance(unit, torch.nn.Linear)
        precision = MixedPrecisionPolicy(torch.bfloat16 if bfloat16 else None, torch.float32)
        fully_shard(unit, mp_policy=precision, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # the only one that gloo knows
    return model.to(device)


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """A sharded model with whole weights, gathered once, and without FSDP's hooks.

    Ranks finish after different numbers of tokens, so none may wait for another between two tokens.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [(unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    for unit in units:
        unit.unshard()
        unit._forward_pre_hooks, unit._forward_hooks = {}, {}
    try:
        yield
    finally:
        for unit, (pre_hooks, forward_hooks) in zip(units, hooks, strict=True):
            unit._forward_pre_hooks, unit._forward_hooks = pre_hooks, forward_hooks
            unit.reshard()


# --- tokens of texts ---------------------------------------------------------------------------
def pad_rows(rows: list[list[int]], device: Any, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) of rows of different lengths, and a bool mask of the real ones.

    The mask comes from lengths: padding may have any id, and a real EOS is never padding.
    """
    side = "left" if left else "right"
    ids = pad_sequence([torch.LongTensor(row) for row in rows], batch_first=True, padding_side=side)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), (mask.flip(1) if left else mask).to(device)


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that end a completion: the tokenizer's EOS, those of the generation config of
    `source` (folder or hub name), and what the chat template writes after an assistant's turn: a
    base model's EOS is often another one.
    """
    stop_ids = [tokenizer.eos_token_id]
    with suppress(OSError):  # many checkpoints have no generation config
        config_ids = GenerationConfig.from_pretrained(source).eos_token_id
        stop_ids += config_ids if isinstance(config_ids, list) else [config_ids]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@@"}]
        end = tokenizer.apply_chat_template(turns, tokenize=False).partition("@@")[2]
        ids = tokenizer(end, add_special_tokens=False).input_ids
        added = tokenizer.added_tokens_decoder
        stop_ids += [i for i in ids if i in added and added[i].special][:1]
    return sorted({stop_id for stop_id in stop_ids if stop_id is not None})


def encode(tokenizer: Any, text: str | list[dict], **template_options: Any) -> list[int]:
    """Token ids of chat messages through the chat template, or of a string: with the tokenizer's
    BOS, and without an EOS that it appends.
    """
    if isinstance(text, str):
        ids = tokenizer(text).input_ids
        if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # a prompt that ends with EOS would be over
    else:
        turns = [turn | {"content": content(turn)} for turn in text]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, **template_options)
        asked = [turn for turn in turns if turn["role"] not in ("assistant", "tool")]
        last = (asked or turns)[-1]
        if last["content"].strip() not in rendered:
            name = tokenizer.name_or_path
            raise ValueError(f"the chat template of {name} leaves out what {last['role']!r} says")
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
    if ids[:2] == 2 * [tokenizer.bos_token_id]:
        raise ValueError("two BOS at the start of the token ids")
    return ids


def content(message: Any) -> str:
    """The text of a chat message; parts are joined, since most templates expect a string."""
    if not isinstance(message, dict) or not message.get("role"):
        raise ValueError(f"every chat message needs a role and a content, found {message!r:.200}")
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return parts
    if any(part["type"] != "text" for part in parts):
        raise ValueError(f"only parts of type `text` can be read, found {parts!r:.200}")
    return "".join(part["text"] for part in parts)
