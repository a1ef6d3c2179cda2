"""Log-probs log pi(y_t | x, y_<t), in nats, without all logits at once.

A sequence is a pair (prompt, completion) of token ids. What is computed from B of them is (B, T):
column t belongs to token t of the completion, and is 0 after its end.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from common.model import autocast, backbone, forward_method, use_bfloat16
from common.ranks import RANK, WORLD_SIZE, all_reduce_sum
from common.tree import PrefixTree, padded_states, reads_trees, tree_states

Sequences = list[tuple[list[int], list[int]]]  # (prompt, completion), token ids
MAX_LOGITS = 2**26  # in a chunk: 256 MiB in float32
MAX_SAMPLING_KL = 0.003  # nats per token; rounding to bfloat16 alone gives about 0.0004


@forward_method
def completion_logprobs(
    model: Any, sequences: Sequences, inds: Tensor, temperature: float = 1.0, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`out[i, t] = log pi(y_t | x, y_<t)` (b, T), float32, of (x, y) = sequences[inds[i]], with
    logits divided by the temperature. T is the length of the longest completion of all; `inds` may
    be empty. With `entropy` also that of pi(. | x, y_<t).
    """
    batch = [sequences[i] for i in inds]
    hidden, row, t = completion_states(model, batch)  # (n, d), of all tokens of all completions
    tokens = torch.tensor([token for _, completion in batch for token in completion])
    tokens = tokens.long().to(model.device, non_blocking=True)
    head = output_head(model)
    values = ChunkedLogprobs.apply(hidden, tokens[:, None], temperature, entropy, *head)
    width = max(len(completion) for _, completion in sequences)
    empty = torch.zeros(len(batch), width, device=model.device)
    logprobs, entropies = (empty.index_put((row, t), value.squeeze(1)) for value in values)
    return (logprobs, entropies) if entropy else logprobs


@forward_method
def sum_over_logits(
    model: Any, sequences: Sequences, inds: Tensor, function: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """The sum of function(logits, chunk) over chunks of the completion tokens of sequences[inds],
    one after the other. Logits (c, V), float32, exist for a chunk at a time: the backward pass
    computes them again.
    """
    hidden, _, _ = completion_states(model, [sequences[i] for i in inds])  # (n, d)
    head = output_head(model)
    if head.weight.requires_grad:  # then gradients of chunks are added up in float32
        head = head._replace(weight=head.weight.float())

    def of_chunk(states: Tensor, chunk: slice) -> Tensor:
        return function(differentiable_logits(states, head), chunk)

    size, total = max(1, MAX_LOGITS // len(head.weight)), 0.0
    for start in range(0, max(1, len(hidden)), size):  # an empty one gives gradients of 0
        chunk = slice(start, start + size)
        total = total + checkpoint(
            of_chunk, hidden[chunk], chunk, use_reentrant=False, preserve_rng_state=False
        )
    return total


@torch.no_grad()
@forward_method
def frozen_logits(model: Any, sequences: Sequences, inds: Tensor) -> Callable[[slice], Tensor]:
    """A function from a chunk of the completion tokens of sequences[inds] to its logits (c, V)."""
    hidden, _, _ = completion_states(model, [sequences[i] for i in inds])  # (n, d)
    head = output_head(model)
    weight = head.weight.bfloat16() if use_bfloat16(hidden.device) else head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    if isinstance(model, FSDPModule):  # its own are freed when this returns
        weight, bias = weight.clone(), None if bias is None else bias.clone()
    head = head._replace(weight=weight, bias=bias)

    def logits_of_chunk(chunk: slice) -> Tensor:
        buffer = torch.empty(len(hidden[chunk]), len(weight), device=hidden.device)
        return head_logits(hidden[chunk], buffer, head)

    return logits_of_chunk


@forward_method
def completion_states(model: Any, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states (n, d) before each of the n completion tokens of a batch, from which a head
    computes log-probs or values, and the tokens' rows and columns (n,) in a tensor (b, T).
    """
    # A rank without rows reads a dummy: sharded, all ranks must run every forward pass.
    rows = [prompt + completion[:-1] for prompt, completion in batch] or [[0]]
    hidden = hidden_states(model, rows)  # (b, L, d)
    places = [
        (row, t, len(prompt) + t - 1)
        for row, (prompt, completion) in enumerate(batch)
        for t in range(len(completion))
    ]
    places = torch.tensor(places, dtype=torch.long).view(-1, 3)
    row, t, before = places.T.to(model.device, non_blocking=True)
    return hidden[row, before], row, t


@forward_method
def last_states(model: Any, rows: list[list[int]]) -> Tensor:
    """The hidden states (b, d) of the last tokens of b rows, from which a head computes scores."""
    hidden = hidden_states(model, rows or [[0]])  # (b, L, d); a dummy as above
    ends = torch.tensor([(i, len(row) - 1) for i, row in enumerate(rows)], dtype=torch.long)
    row, end = ends.view(-1, 2).T.to(model.device, non_blocking=True)
    return hidden[row, end]


@forward_method
def hidden_states(model: Any, rows: list[list[int]]) -> Tensor:
    """The last hidden states (b, L, d) of rows of token ids, from which a head computes values;
    after a row's end they mean nothing. What several rows begin with is computed once: tree.py.
    """
    with autocast(model.device):
        if not reads_trees(model):
            return padded_states(model, rows)
        return tree_states(model, PrefixTree(rows, model.device))


@torch.no_grad()
def rollout_logprobs(
    model: Any, sequences: Sequences, batches: Iterable[Tensor], temperature: float
) -> Tensor:
    """`completion_logprobs` (B, T) of all sequences; each must be in one batch of one rank."""
    width = max(len(completion) for _, completion in sequences)
    logprobs = torch.zeros(len(sequences), width, device=model.device)
    for inds in batches:
        idx = inds.to(model.device, non_blocking=True)  # indexing by a CPU tensor blocks
        logprobs[idx] = completion_logprobs(model, sequences, inds, temperature)
    return all_reduce_sum(logprobs)


def sampling_metrics(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the policy that sampled is from pi_old, which should be the same: over the tokens of
    the mask (B, T) the mean of k3, an estimate of KL(pi_sampler || pi_old), and the largest ratio
    pi_old / pi_sampler. A warning if these are two policies.
    """
    log_ratio = mask * (logprobs - sampler_logprobs).double()
    kl = ((log_ratio.expm1() - log_ratio).sum() / mask.sum().clamp(min=1)).item()
    if not kl <= MAX_SAMPLING_KL:  # or NaN
        difference = "the sampler's log-probs are not the policy's, see docs/pitfalls.md"
        warnings.warn(f"policy/sampling_kl {kl:.4f}: {difference}", stacklevel=2)
    largest = log_ratio.masked_fill(~mask, -torch.inf).max().exp().item()
    return {"policy/sampling_kl": kl, "policy/sampling_ratio_max": largest}


def micro_batches(sequences: Sequences, inds: Tensor, size: int) -> Iterator[Tensor]:
    """This rank's micro-batches of sequences[inds]: inds (b,), b <= size. Groups of rows with one
    prompt are dealt to the ranks in turn, those with the most tokens first; they stay neighbours,
    since tree.py reads the prompt once. All ranks get equally many micro-batches, as FSDP runs
    every forward pass on all ranks; the last may be empty.
    """
    groups = defaultdict(list)
    for i in inds.tolist():
        groups[tuple(sequences[i][0])].append(i)

    def num_tokens(group: list[int]) -> int:
        return len(sequences[group[0]][0]) + sum(len(sequences[i][1]) for i in group)

    groups = sorted(groups.values(), key=num_tokens, reverse=True)
    # Like cards: group 0 to rank 0, 1 to rank 1, ...; then the ranks' hands one after the other.
    in_turn = [group for rank in range(WORLD_SIZE) for group in groups[rank::WORLD_SIZE]]
    rows = torch.tensor([i for group in in_turn for i in group], dtype=torch.long)
    of_ranks = rows.tensor_split(WORLD_SIZE)  # equally many rows, so a group may be cut
    for start in range(0, max(1, len(of_ranks[0])), size):
        yield of_ranks[RANK][start : start + size]


# --- from hidden states to log-probs, without all logits at once -------------------------------
class OutputHead(NamedTuple):
    """logits = scale (W h + b), or cap tanh(scale (W h + b) / cap)."""

    weight: Tensor  # W (V, d)
    bias: Tensor | None  # b (V,)
    scale: float
    cap: float | None


def head_logits(hidden: Tensor, buffer: Tensor, head: OutputHead) -> Tensor:
    """Logits (n, V), float32, of n hidden states (n, d), in the first rows of the buffer."""
    logits = buffer[: len(hidden)]
    if hidden.is_cuda and head.weight.dtype == torch.bfloat16:  # CUDA-only: the sums stay float32
        torch.mm(hidden.bfloat16(), head.weight.T, out_dtype=torch.float32, out=logits)
    else:
        torch.mm(hidden.to(head.weight.dtype).float(), head.weight.T.float(), out=logits)
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1:
        logits *= head.scale
    if head.cap:
        logits.div_(head.cap).tanh_().mul_(head.cap)
    return logits


def differentiable_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """`head_logits`, with a gradient. The float32 product of rounded states and weights is slower
    than that of `torch.mm` with `out_dtype`, which has no derivative.
    """
    weight = head.weight
    if use_bfloat16(hidden.device):
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = hidden.float() @ weight.float().T
    if head.bias is not None:  # may be bfloat16, where it is sharded
        logits = logits + head.bias
    logits = logits * head.scale
    return head.cap * (logits / head.cap).tanh() if head.cap else logits


class ChunkedLogprobs(torch.autograd.Function):
    """log p(y) and entropy H, in nats, of p = softmax(logits / temperature). For a token j

        d log p(y) / d logit_j = (1[j = y] - p_j) / temperature,
        d H / d logit_j        = - p_j (log p_j + H) / temperature.

    With 150,000 tokens in the vocabulary the logits are the largest tensor of all: they exist for a
    chunk of positions at a time. The backward pass computes them again.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, y: Tensor, temperature: float, entropy: bool, *head) -> tuple:
        """(N, 1) each for hidden states (N, d), tokens y (N, 1) and an `OutputHead`."""
        weight, bias, scale, cap = head
        cast_weight = weight.bfloat16() if use_bfloat16(hidden.device) else weight
        head = OutputHead(cast_weight, bias, scale, cap)
        size = max(1, MAX_LOGITS // len(weight))
        ctx.chunks = [slice(start, start + size) for start in range(0, len(y), size)]
        ctx.buffer_shape = min(size, len(y)), len(weight)
        buffer = torch.empty(ctx.buffer_shape, device=hidden.device)
        logprobs, log_sums, entropies = torch.zeros(3, len(y), 1, device=hidden.device)
        for chunk in ctx.chunks:
            log_p = head_logits(hidden[chunk], buffer, head).div_(temperature)
            log_sums[chunk] = log_p.logsumexp(dim=1, keepdim=True)
            log_p -= log_sums[chunk]
            logprobs[chunk] = log_p.gather(1, y[chunk])
            if entropy:  # the clamp makes 0 * -inf 0
                p_log_p = log_p.exp().mul_(log_p.clamp_(min=-1e4))
                entropies[chunk] = -p_log_p.sum(dim=1, keepdim=True)
        ctx.save_for_backward(hidden, y, log_sums, entropies, weight, bias)
        ctx.temperature, ctx.scale, ctx.cap = temperature, scale, cap
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple:
        """Gradients of hidden states, W and b; the last two are summed in float32."""
        hidden, y, log_sums, entropies, weight, bias = ctx.saved_tensors
        cast_weight = weight.bfloat16() if use_bfloat16(hidden.device) else weight
        head = OutputHead(cast_weight, bias, ctx.scale, ctx.cap)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        buffer = torch.empty(ctx.buffer_shape, device=hidden.device)
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        if ctx.needs_input_grad[4]:  # not under adapters
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        for chunk in ctx.chunks:
            # With gradients g of log p(y) and g_H of H: g (1[j = y] - p_j) - g_H p_j (log p_j + H),
            # as p_j (-g - g_H (log p_j + H)) + g 1[j = y]; `slope` is the rest of the chain rule.
            logits = head_logits(hidden[chunk], buffer, head)
            slope = ctx.scale / ctx.temperature
            if ctx.cap:
                slope = slope * (1 - (logits / ctx.cap).square())
            log_p = logits.div_(ctx.temperature).sub_(log_sums[chunk])
            g, factor = grad_logprobs[chunk], -grad_logprobs[chunk]
            if grad_entropies is not None:
                log_p_plus_h = log_p.clamp(min=-1e4).add_(entropies[chunk])
                factor = log_p_plus_h.mul_(-grad_entropies[chunk]).add_(factor)
            grad = log_p.exp_().mul_(factor).scatter_add_(1, y[chunk], g).mul_(slope)
            grad_cast, states = grad.to(head.weight.dtype), hidden[chunk].to(head.weight.dtype)
            grad_hidden[chunk] = (grad_cast @ head.weight).to(hidden.dtype)
            if grad_weight is not None and head.weight.dtype == torch.float32:
                grad_weight.addmm_(grad_cast.T, states)  # no second tensor of the weight's size
            elif grad_weight is not None:
                grad_weight += grad_cast.T @ states
            if bias is not None:
                grad_bias += grad.sum(dim=0)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None, None


def output_head(model: Any) -> OutputHead:
    """The output head, tried once; a ValueError if `OutputHead` cannot express it."""
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    unknown = ValueError(f"the output head of {type(model).__name__} is not known to logprobs.py")
    if not isinstance(module, torch.nn.Linear):
        raise unknown
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = None
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        cap = cap or getattr(config, name, None)  # Gemma, xLSTM
    head = OutputHead(module.weight, module.bias, scale, cap)
    if not hasattr(model, "head_is_known"):
        model.head_is_known = gives_the_models_logits(head, model)
    if not model.head_is_known:
        raise unknown
    return head


@torch.no_grad()
def gives_the_models_logits(head: OutputHead, model: Any) -> bool:
    """Whether a head's logits of two tokens are those of the model's own forward pass."""
    mixed = any(p.dtype != torch.float32 for p in model.parameters())  # frozen, in bfloat16
    # Not model(...): sharded, it would begin a forward pass within the one that is running.
    inputs = {"input_ids": torch.tensor([[1, 2]], device=model.device), "use_cache": False}
    with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
        expected = model.forward(**inputs).logits[0].float()
        hidden = backbone(model).forward(**inputs).last_hidden_state[0]
        if hidden.shape[1:] != head.weight.shape[1:]:
            return False
        difference = head_logits(hidden, torch.empty_like(expected), head) - expected
    return bool(difference.norm() <= (1e-2 if mixed else 1e-5) * expected.norm())
