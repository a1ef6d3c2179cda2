"""A prompt that several rows of a micro-batch share, as a group or a pair does, is read once, and
nothing is padded outside attention.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.tokens import pad_rows
from runtime.model import backbone, failure_of

Sequences = list[tuple[list[int], list[int]]]  # (prompt, completion), token ids


class SharedPrompts:
    """The tokens that a model reads of a batch, as one row: each distinct prompt, each completion.
    Of (ab, cde), (ab, fg) and (x, yz), where nothing follows the last token of a completion:

        place        0  1  2  3  4  5  6
        token        a  b  c  d  f  x  y
        position     0  1  2  3  2  0  1
        in_branches  0  1  2  3  6  8  9
        branches     0 1 2 3,  0 1 4,  5 6

    A branch lists the places of one sequence. Only attention reads along branches, each whole and
    causally. Of a token that is in several branches its result is the same in each, and is taken
    from the first: at `in_branches` in all branches, padded to the longest (here 4), one after the
    other.
    """

    def __init__(self, batch: Sequences, device: torch.device):
        ids, branches, before, in_branches, places_of = [], [], [], [], {}
        longest = max(len(prompt + completion[:-1]) for prompt, completion in batch)

        def append(tokens: list[int], in_branch: int) -> Tensor:
            ids.extend(tokens)
            in_branches.append(torch.arange(in_branch, in_branch + len(tokens)))
            return torch.arange(len(ids) - len(tokens), len(ids))

        for row, (prompt, completion) in enumerate(batch):
            key = tuple(prompt)
            if key not in places_of:
                places_of[key] = append(prompt, row * longest)
            places = append(completion[:-1], row * longest + len(prompt))
            branches.append(torch.cat([places_of[key], places]))
            # The place before that of each completion token; there may be none.
            before.append(branches[-1][len(prompt) - 1 :][: len(completion)])
        self.ids = torch.tensor(ids).to(device, non_blocking=True)  # (N,)
        self.in_branches = torch.cat(in_branches).to(device, non_blocking=True)  # (N,)
        self.positions = self.in_branches % longest  # (N,)
        self.branches = pad_sequence(branches, batch_first=True).to(device, non_blocking=True)
        self.before = torch.cat(before).to(device, non_blocking=True)  # (n,)
        self.masks = {}  # by sliding window: a mask for all layers that have this window


def shared_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared: SharedPrompts | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention (1, N, heads, d) of tokens with queries, keys and values (1, heads, N, d) along
    their branches; plain scaled dot-product attention where there are none, as when sampling.
    """
    if shared is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("softcap", "s_aux", "position_bias"):  # s_aux: attention sinks
        if options.get(name) is not None:
            raise ValueError(f"its attention has a {name}")
    by_token = [states[0].transpose(0, 1) for states in (query, key, value)]  # (N, heads, d)
    q, k, v = (take(states, shared.branches).transpose(1, 2) for states in by_token)
    if sliding_window not in shared.masks:
        shared.masks[sliding_window] = window_mask(v, sliding_window)
    mask = shared.masks[sliding_window]
    attended, _ = sdpa_attention_forward(module, q, k, v, mask, is_causal=True, **options)
    return take(attended.flatten(0, 1), shared.in_branches)[None], None


def window_mask(states: Tensor, window: int | None) -> Tensor | None:
    """What is added to the scores (1, 1, L, L) of tokens (b, heads, L, d) that see only the last
    `window` tokens, themselves included; None if that is all before them.
    """
    length = states.shape[2]
    if not window or window >= length:
        return None
    # Numbers, not booleans, in memory with rows of a multiple of 8 numbers, as attention's kernels
    # want it: from any other mask each layer would make one for itself, and keep it.
    mask = states.new_zeros(1, 1, length, length + -length % 8)[..., :length]
    is_seen = torch.ones_like(mask, dtype=torch.bool).tril().triu(1 - window)
    return mask.masked_fill_(~is_seen, -torch.inf)


def take(states: Tensor, places: Tensor) -> Tensor:
    """states[places], (..., heads, d) of (N, heads, d). Not by indexing: on a CPU its gradient sums
    over equal indices in another order each time, and takes three times as long.
    """
    return embedding(places, states.flatten(1)).unflatten(-1, states.shape[1:])


AttentionInterface.register("shared_prompts", shared_attention)
AttentionMaskInterface.register("shared_prompts", sdpa_mask)


def shared_states(model: Any, shared: SharedPrompts) -> Tensor:
    """The last hidden states (n, d) before each of the n tokens of the completions."""
    output = backbone(model)(
        input_ids=shared.ids[None],
        position_ids=shared.positions[None],
        # transformers takes a 4D mask as it is, and would build one of (N, N) without it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
        use_cache=False,
        shared=shared,
    )
    return embedding(shared.before, output.last_hidden_state[0])  # see `take`


def padded_states(model: Any, batch: Sequences) -> Tensor:
    """The same of rows that are read one by one, padded on the right. This needs no attention mask:
    attention only looks back.
    """
    ids, _ = pad_rows([prompt + completion[:-1] for prompt, completion in batch], model.device)
    hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state  # (b, L, d)
    rows = zip(hidden, batch, strict=True)
    return torch.cat([states[len(x) - 1 :][: len(y)] for states, (x, y) in rows])


def shares_prompts(model: Any) -> bool:
    """Whether hidden states are the same with `SharedPrompts`, tried once; a warning says why not.
    If they are, `shared_attention` is the model's attention for good: activation checkpointing
    computes layers again in the backward pass.
    """
    if hasattr(model, "can_share_prompts"):
        return model.can_share_prompts
    original, config = model.config._attn_implementation, model.config.get_text_config()
    # Without layer types any layer may have the window of the config.
    layer_types = {*(getattr(config, "layer_types", None) or ["sliding_attention"])}
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layer_types else None
    vocab = model.get_input_embeddings().num_embeddings
    a, b, c, d, e = (vocab * i // 8 for i in range(1, 6))  # token ids; the first are often special
    batch = [([a, b], [c, d, e, a]), ([a, b], [d, d, c, a, e]), ([a, b], [e]), ([d], [a, b])]

    def together() -> Tensor:
        if unknown := layer_types - {"full_attention", "sliding_attention"}:
            raise ValueError(f"it has layers of the type {unknown}")
        model.set_attn_implementation("shared_prompts")
        shared = SharedPrompts(batch, model.device)
        states = shared_states(model, shared)
        # No layer has asked for the window, and these rows may be too short to show that it counts.
        if window and window not in shared.masks:
            raise ValueError("its sliding window is not known")
        return states

    def alone() -> Tensor:
        return torch.cat([padded_states(model, [sequence]) for sequence in batch])

    failure = failure_of(model, together, alone, lambda: padded_states(model, batch))
    if failure:
        model.set_attn_implementation(original)
        name = type(model).__name__
        warnings.warn(f"slower: {name} reads shared prompts again: {failure}", stacklevel=2)
    model.can_share_prompts = failure is None
    return model.can_share_prompts
