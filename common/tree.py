"""A micro-batch as the prefix tree of its rows (prefix sharing): what several rows begin with, such
as the prompt of a group, is computed once, and nothing is padded outside attention.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.model import backbone, failure_of, trial_tokens
from common.tokens import pad_rows


class PrefixTree:
    """A node is a token together with all tokens before it. The rows abc, abd, ab and xy

        row   path        node      0  1  2  3  4  5
        abc   0 1 2       token     a  b  c  d  x  y
        abd   0 1 3       position  0  1  2  2  0  1
        ab    0 1
        xy    4 5

    have 6 nodes, which a model reads as one row. Only attention reads each row whole and causally,
    as a branch; a row that adds no node, such as ab after abc, needs none of its own.
    """

    def __init__(self, rows: list[list[int]], device: torch.device):
        nodes, paths, branches = {}, [], []
        longest = max(map(len, rows))
        places = []  # of each node in the branches, padded and joined
        for row in rows:
            node, path, num_before = -1, [], len(nodes)
            for t, token in enumerate(row):
                node = nodes.setdefault((node, token), len(nodes))
                path.append(node)
                if node == len(places):
                    places.append(len(branches) * longest + t)
            paths.append(path)
            if len(nodes) > num_before:
                branches.append(path)
        ids, places = torch.tensor([token for _, token in nodes]), torch.tensor(places)
        self.ids = ids.to(device, non_blocking=True)  # (N,)
        self.places = places.to(device, non_blocking=True)  # (N,)
        self.positions = (places % longest).to(device, non_blocking=True)  # (N,)
        self.paths, _ = pad_rows(paths, device)  # (b, L): the nodes of each row
        self.branches, _ = pad_rows(branches, device)  # (R, L')
        self.windows = set()  # those that layers have asked for


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: PrefixTree | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention (1, N, heads, d) of nodes with queries, keys and values (1, heads, N, d); plain
    scaled dot-product attention where there is no tree, as when sampling.
    """
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("softcap", "s_aux", "position_bias"):  # s_aux: attention sinks
        if options.get(name) is not None:
            raise ValueError(f"its attention has a {name}")
    by_node = [states[0].transpose(0, 1) for states in (query, key, value)]  # (N, heads, d)
    q, k, v = (
        take(states, tree.branches).transpose(1, 2) for states in by_node
    )  # (R, heads, L, d)
    tree.windows.add(sliding_window)
    mask, length = None, q.shape[2]  # causal
    if sliding_window and sliding_window < length:  # the last tokens alone
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device)
        mask = mask.tril().triu(1 - sliding_window)
    attended, _ = sdpa_attention_forward(module, q, k, v, mask, is_causal=True, **options)
    return take(attended.flatten(0, 1), tree.places)[None], None


def take(states: Tensor, nodes: Tensor) -> Tensor:
    """states[nodes], (..., heads, d) of (N, heads, d). Not by indexing: on a CPU its gradient sums
    over equal indices in another order each time, and takes three times as long.
    """
    return embedding(nodes, states.flatten(1)).unflatten(-1, states.shape[1:])


AttentionInterface.register("prefix_tree", tree_attention)
AttentionMaskInterface.register("prefix_tree", sdpa_mask)


def tree_states(model: Any, tree: PrefixTree) -> Tensor:
    """The last hidden states (b, L, d) of a tree's rows; after a row's end they mean nothing."""
    output = backbone(model)(
        input_ids=tree.ids[None],
        position_ids=tree.positions[None],
        # transformers takes a 4D mask as it is, and would build one of (N, N) without it.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
        use_cache=False,
        tree=tree,
    )
    return embedding(tree.paths, output.last_hidden_state[0])  # see `take`


def padded_states(model: Any, rows: list[list[int]]) -> Tensor:
    """The same of rows that are computed one by one, padded on the right. This needs no attention
    mask: attention only looks back.
    """
    ids, _ = pad_rows(rows, model.device)
    return backbone(model)(input_ids=ids, use_cache=False).last_hidden_state


def reads_trees(model: Any) -> bool:
    """Whether the model's hidden states are the same with a `PrefixTree`, tried once on short rows;
    a warning says why not. If they are, `tree_attention` is its attention for good: activation
    checkpointing computes layers again in the backward pass.
    """
    if hasattr(model, "can_read_trees"):
        return model.can_read_trees
    before, config = model.config._attn_implementation, model.config.get_text_config()
    layer_types = {*(getattr(config, "layer_types", None) or ["sliding_attention"])}
    window = getattr(config, "sliding_window", None) if "sliding_attention" in layer_types else None
    a, b, c, d, e = trial_tokens(model)
    rows = [[a, b, c, d, e], [a, b, c, e], [a, b, d, d, c, a], [a, b, c], [d, a]]
    is_token = pad_rows(rows, model.device)[1]

    def alone() -> Tensor:
        return torch.cat([padded_states(model, [row])[0] for row in rows])

    def in_tree() -> Tensor:
        if unknown := layer_types - {"full_attention", "sliding_attention"}:
            raise ValueError(f"it has layers of the type {unknown}")
        model.set_attn_implementation("prefix_tree")
        tree = PrefixTree(rows, model.device)
        states = tree_states(model, tree)[is_token]
        if window and window not in tree.windows:  # too long for these rows to show it
            raise ValueError("its sliding window is not known")
        return states

    failure = failure_of(model, in_tree, alone, lambda: padded_states(model, rows)[is_token])
    if failure:
        model.set_attn_implementation(before)
        name = type(model).__name__
        warnings.warn(f"slower: {name} takes padded rows, no prefix tree: {failure}", stacklevel=2)
    model.can_read_trees = failure is None
    return model.can_read_trees
