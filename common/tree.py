"""A micro-batch as the prefix tree of its rows (prefix sharing): what several rows begin with, such
as the prompt of a group, is computed once, and nothing is padded outside attention.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.model import backbone, use_bfloat16
from common.tokens import pad_rows


class PrefixTree:
    """A node is a token together with all tokens before it. The rows abc, abd, ab and xy

        row   path      adds            node      0  1  2  3  4  5
        abc   0 1 2     0 1 2           token     a  b  c  d  x  y
        abd   0 1 3     3               position  0  1  2  2  0  1
        ab    0 1       nothing
        xy    4 5       4 5

    have 6 nodes, which a model reads as one row. A path is a row's nodes; a row adds those that no
    row before it has. A node attends to its path up to itself. Attention is computed in two blocks:
    rows that add at least half of their path (abc, xy) are plain causal attention, without a mask;
    the nodes that other rows add (3) are queries to all of their row's path (0 1 3), under a mask.
    """

    def __init__(self, rows: list[list[int]], device: torch.device):
        nodes, paths = {}, []
        whole, branches = [], []  # (queries, path, what the row adds)
        for row in rows:
            node, path, num_before = -1, [], len(nodes)
            for token in row:
                node = nodes.setdefault((node, token), len(nodes))
                path.append(node)
            paths.append(path)
            added = [node for node in path if node >= num_before]
            # Causal attention computes half of what a mask computes, and has the faster kernels. So
            # it may compute again what a row shares, such as a BOS or a system prompt.
            if 2 * len(added) >= len(path):
                whole.append((path, path, added))
            elif added:
                branches.append((added, path, added))
        positions = torch.zeros(len(nodes), dtype=torch.long)
        for path in paths:
            positions[path] = torch.arange(len(path))

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        self.ids = move(torch.tensor([token for _, token in nodes]))  # (N,)
        self.positions = move(positions)  # (N,)
        self.paths = move(pad_rows(paths, "cpu")[0])  # (b, L): the nodes of each row
        self.blocks, order = [], []  # of attention: queries (R, T) and keys (R, K), nodes
        for block in filter(None, (whole, branches)):
            queries, keys, added = zip(*block, strict=True)
            self.blocks.append((move(pad_rows(queries, "cpu")[0]), move(pad_rows(keys, "cpu")[0])))
            results = [[-1] * (len(q) - len(a)) + a for q, a in zip(queries, added, strict=True)]
            results, is_result = pad_rows(results, "cpu")
            order.append(results.masked_fill(~is_result, -1).flatten())
        order = torch.cat(order)  # the nodes as the blocks have them, -1 at padding and repetitions
        places = torch.empty(len(nodes), dtype=torch.long)
        places[order[order >= 0]] = (order >= 0).nonzero().squeeze(1)
        # (N,): where the blocks have each node; None if they have them in order.
        self.places = None if torch.equal(places, torch.arange(len(order))) else move(places)
        self.masks, self.windows = {}, set()  # filled by `mask`: what layers have asked for

    def mask(self, block: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """(R, 1, T, K): 0 where a query of a block sees a key, else -inf; None if it is causal.
        Layers with a sliding window see the last `window` tokens.
        """
        self.windows.add(window)
        queries, keys = self.blocks[block]
        length = keys.shape[1]
        window = min(window or length, length)
        if block == 0 and window == length:  # whole rows: the first row always is one
            return None
        if (block, window) not in self.masks:  # made once, kept by all layers
            # A path's column is its node's position. So a row's padded keys come after its queries,
            # and a padded query, node 0 at position 0, sees column 0: no row is all -inf, or NaN.
            columns = torch.arange(length, device=keys.device)
            distance = self.positions[queries][:, None, :, None] - columns
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[block, window] = mask.masked_fill_(hidden, -torch.inf)
        return self.masks[block, window]


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: PrefixTree | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention (1, N, heads, d) of nodes with queries, keys and values (1, heads, N, d); plain
    scaled dot-product attention where there is no tree, as when sampling.
    """
    if tree is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    for name in ("softcap", "s_aux", "position_bias"):  # s_aux: attention sinks
        if options.get(name) is not None:
            raise ValueError(f"its attention has a {name}")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    results = []
    for block, (queries, keys) in enumerate(tree.blocks):
        q, k, v = take(query, queries), take(key, keys), take(value, keys)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (R, heads, T or K, d)
        mask = tree.mask(block, sliding_window, v.dtype)
        # CUDA-only: no fast kernel has both a mask and grouped queries.
        if mask is not None and q.is_cuda:
            k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
        result = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # (R, heads, T, d)
        results.append(result.transpose(1, 2).flatten(0, 1))
    attended = torch.cat(results) if len(results) > 1 else results[0]
    attended = attended if tree.places is None else take(attended, tree.places)
    return attended[None], None


def take(states: Tensor, nodes: Tensor) -> Tensor:
    """states[nodes], (..., heads, d) of (N, heads, d). On a CPU the backward pass of `embedding`
    takes a third of the time that indexing takes: it runs in parallel.
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
    # Not by indexing: on a CPU its gradient adds up at shared nodes in an order of its own each time.
    return embedding(tree.paths, output.last_hidden_state[0])


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
    if not hasattr(model, "can_read_trees"):
        before = model.config._attn_implementation
        try:
            failure = try_tree(model)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # models without this interface fail in their own way
            failure = repr(error)
        if failure:
            model.set_attn_implementation(before)
            name = type(model).__name__
            warnings.warn(
                f"slower: {name} takes padded rows, no prefix tree: {failure}", stacklevel=2
            )
        model.can_read_trees = failure is None
    return model.can_read_trees


@torch.no_grad()
def try_tree(model: Any) -> str | None:
    """What is wrong with a model that reads a tree, if anything."""
    config = model.config.get_text_config()
    layer_types = {*(getattr(config, "layer_types", None) or ["sliding_attention"])}
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        return f"it has layers of the type {unknown}"
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 5], [1, 2, 4, 4, 3, 1], [1, 2, 3], [4, 1]]
    expected = padded_states(model, rows)
    model.set_attn_implementation("prefix_tree")
    tree = PrefixTree(rows, model.device)
    of_tree = tree_states(model, tree)
    is_token = pad_rows(rows, model.device)[1]
    difference = (of_tree - expected)[is_token].norm() / expected[is_token].norm()
    is_exact = model.dtype.itemsize >= 4 and not use_bfloat16(model.device)
    if not difference <= (1e-5 if is_exact else 5e-2):
        return f"it changes hidden states by {difference:.1%}"
    window = getattr(config, "sliding_window", None)  # too long for these rows to show it
    if window and "sliding_attention" in layer_types and window not in tree.windows:
        return "its sliding window is not known"
    return None
