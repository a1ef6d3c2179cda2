"""Sample completions from a policy.

The distribution sampled from is softmax(logits / temperature) over the whole vocabulary and
nothing else: no top-k, no nucleus, no penalty, nothing from the checkpoint's generation config.
That is the distribution whose log-probabilities `common/logprobs.py` computes, so a policy
gradient is on-policy by construction.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicLayer


def find_stop_ids(source: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a completion, sorted; none is an empty list.

    They are the tokenizer's EOS, all of the generation config's, and what the chat template writes
    after an assistant's turn: a base model's EOS is often another one than its template's.

    Args:
        source: folder or hub name that the generation config is loaded from, if it has one.
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


def pad_rows(
    rows: list[list[int]], pad_id: int, side: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack token ids of different lengths: ids (B, L) int64, and a bool mask of the real ones.

    The mask comes from the lengths, so that a real EOS is never taken for padding where the
    tokenizer has one id for both.
    """
    ids = torch.full((len(rows), max(map(len, rows), default=0)), pad_id)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[i, columns] = torch.tensor(row)
        mask[i, columns] = True
    return ids.to(device), mask.to(device)


def sample_tokens(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature) by inverting its cumulative sum.

    One uniform number a row decides the draw.

    Args:
        logits: (B, V) unnormalised log-probabilities.
        temperature: 0 takes the most probable token (greedy).
        uniform: (B,) float64 numbers in [0, 1); not read when greedy.

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


def use_bfloat16(device: torch.device) -> bool:
    """CUDA-only: where matrix products are computed in bfloat16; weights stay float32."""
    return device.type == "cuda"


def use_static_cache(device: torch.device) -> bool:
    """CUDA-only: where steps can be captured. Elsewhere a cache that grows is the faster one."""
    return device.type == "cuda"


def select_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Let row i of the cache be what row `rows[i]` was."""
    if isinstance(cache, DynamicCache):
        return cache.batch_select_indices(rows)
    for layer in cache.layers:  # a StaticCache has no method for it
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class OneTypeCache(StaticCache):
    """Under autocast rotated keys are float32 and values bfloat16; a StaticCache holds one type."""

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
        inputs = dict(
            input_ids=self.tokens,
            attention_mask=attention_mask,
            position_ids=self.positions,
            past_key_values=cache,
            use_cache=True,
        )
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


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: list[int],
    pad_token_id: int,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Complete a left-padded batch of prompts, token by token, with a key/value cache.

    A row ends at the first of `stop_token_ids` it draws, which belongs to the completion, or
    after `max_new_tokens`. Equal prompts next to each other are read once. Rows that have ended
    leave the batch and the cache, so that a step costs what the unfinished rows need: at once, or
    on a GPU, where each number of rows needs a graph of its own, when they are half of the rows.

    Args:
        model: a causal language model of transformers, in eval mode.
        prompt_ids: (B, P) token ids, padded on the left; B may be 0.
        prompt_mask: (B, P) 1 at prompt tokens, 0 at padding.
        max_new_tokens: the most tokens a completion may have.
        temperature: divides the logits; 0 is greedy decoding.
        stop_token_ids: ids that end a row; may be empty.
        pad_token_id: written after a row's end. Never read: the masks say what is real, so it
            may be equal to a stop id.
        uniform: (B, max_new_tokens) float64 random numbers in [0, 1), one for each token that may
            be sampled; None draws them here. A row's completion depends on its own numbers only,
            not on the rows beside it, nor on how long those are.

    Returns:
        sequences: (B, P + T) prompts followed by completions, T the longest completion made.
        completion_mask: (B, P + T) bool, true at the tokens that were sampled: the stop token
            included, prompt and padding not.
        finished: (B,) bool, true where the row ended at a stop id; false where it was cut off.

    Raises:
        ValueError: the model is in training mode, the temperature is negative, or a prompt is
            empty or padded on the right.
    """
    if model.training:
        raise ValueError("generate: the model is in training mode, so dropout would be sampled")
    if temperature < 0:
        raise ValueError(f"generate: temperature must be 0 or more, found {temperature}")
    if len(prompt_ids) == 0:
        mask = torch.zeros_like(prompt_mask, dtype=torch.bool)
        return prompt_ids, mask, mask.any(dim=1)
    if not prompt_mask[:, -1].all():
        raise ValueError("generate: prompts must be padded on the left and must not be empty")

    batch, prompt_length = prompt_ids.shape
    device = prompt_ids.device
    if uniform is None:
        uniform = torch.rand(batch, max_new_tokens, dtype=torch.float64, device=device)
    sequences = torch.full(
        (batch, prompt_length + max_new_tokens), pad_token_id, dtype=torch.long, device=device
    )
    sequences[:, :prompt_length] = prompt_ids
    completion_mask = torch.zeros_like(sequences, dtype=torch.bool)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=device)

    rows = torch.arange(batch, device=device)  # which row of `sequences` each model row writes
    end = prompt_length + max_new_tokens
    attention_mask = torch.nn.functional.pad(prompt_mask.long(), (0, max_new_tokens), value=1)
    # Counted over real tokens, so that a padded prompt sees the positions it has when alone.
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    cache = DynamicCache(config=model.config)
    # Windows that slide are not captured: how they move is decided in Python.
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    static = plain and use_static_cache(device)
    if static:
        cache = OneTypeCache(config=model.config, max_cache_len=end)
    prompts = torch.cat([prompt_ids, attention_mask[:, :prompt_length]], dim=1)
    prompts, prompt_of_row = prompts.unique_consecutive(dim=0, return_inverse=True)
    ids, mask = prompts.chunk(2, dim=1)
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[prompt_of_row, -1]  # (B, V)
    select_rows(cache, prompt_of_row)
    step = StaticStep(model, cache, attention_mask) if static else None

    for column in range(prompt_length, end):
        tokens = sample_tokens(logits, temperature, uniform[rows, column - prompt_length])
        ended = finished[rows]  # rows that ended before and are still in the batch
        sequences[rows, column] = tokens.masked_fill(ended, pad_token_id)
        completion_mask[rows, column] = ~ended
        finished[rows] = ended | torch.isin(tokens, stop_ids)

        going = (~finished[rows]).nonzero().squeeze(1)
        if len(going) == 0 or column + 1 == end:
            end = column + 1
            break
        if len(going) <= (len(rows) // 2 if static else len(rows) - 1):
            rows, tokens = rows[going], tokens[going]
            select_rows(cache, going)
            if static:
                step = StaticStep(model, cache, attention_mask[rows])
        positions = position_ids[rows, column : column + 1]
        if static:
            logits = step(tokens[:, None], positions)
        else:
            logits = model(
                input_ids=tokens[:, None],
                attention_mask=attention_mask[rows, : column + 1],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
    return sequences[:, :end], completion_mask[:, :end], finished
