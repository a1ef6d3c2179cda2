"""Score completions under a model: the log-probability, and the entropy, of each sampled token.

Everywhere a rollout is B pairs (prompt, completion) of token ids, and what is computed from it is
(B, T), T the longest completion: column t belongs to token t of the completion.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from common.generation import RANK, WORLD_SIZE, all_reduce_sum, autocast, pad_rows, use_bfloat16

Pairs = list[tuple[list[int], list[int]]]

# The most logits that exist at one time: 2^26 float32 numbers are 256 MiB.
MAX_LOGITS = 2**26


def micro_batches(pairs: Pairs, rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Split row numbers (b,) into groups of similar length, so that little is padded.

    Under torchrun each rank gets as many groups; of the last one a rank may get no row.
    """
    lengths = torch.tensor([len(pairs[i][0]) + len(pairs[i][1]) for i in rows])
    rows = rows[lengths.argsort(descending=True, stable=True)]
    for group in rows.split(size * WORLD_SIZE):
        yield group[RANK::WORLD_SIZE]


def parts(chunk: torch.Tensor, *columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """A few rows at a time of (n, V) and (n, 1): small beside the chunk, and in the cache."""
    size = max(1, MAX_LOGITS // 32 // chunk.shape[1])
    return zip(chunk.split(size), *(column.split(size) for column in columns), strict=True)


def cast(weight: torch.Tensor) -> torch.Tensor:
    """W in the type it is multiplied in; once per pass, since it takes as long as a chunk does."""
    return weight.bfloat16() if use_bfloat16(weight.device) else weight


def head_logits(
    hidden: torch.Tensor, room: torch.Tensor, weight: torch.Tensor, bias: Any, scale: Any, cap: Any
) -> torch.Tensor:
    """u = scale (W h + b), or cap tanh(u / cap): logits (n, V) of n hidden states, in `room`."""
    logits = room[: len(hidden)]
    if hidden.dtype == weight.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=logits)
    else:
        logits.copy_(hidden.to(weight.dtype) @ weight.T)
    if bias is not None:
        logits += bias
    if scale != 1:
        logits *= scale
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class HeadLogprobs(torch.autograd.Function):
    """log p(y) and entropy H, in nats, of p = softmax(logits / temperature). For a token j

        d log p(y) / d logit_j = (1[j = y] - p_j) / temperature,
        d H / d logit_j        = - p_j (log p_j + H) / temperature.

    With 150,000 tokens in the vocabulary the logits are the largest tensor of all, and autograd
    would keep several of their size. Here they exist for a chunk of positions at a time, give way
    to their own gradient, and are computed again in the backward pass instead of kept. The forward
    pass ends with the first chunk, with which the backward pass begins: that one is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, y: Any, temperature: float, entropy: bool, *head: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 1) each for hidden states (N, d), tokens y (N, 1) and a head as `head_of` gives."""
        weight, bias, *ctx.shape = head
        low, ctx.temperature = cast(weight), temperature
        ctx.set_materialize_grads(False)
        ctx.size = size = max(1, min(len(y), MAX_LOGITS // len(weight)))
        ctx.chunks = [slice(start, start + size) for start in range(0, len(y), size)]
        room = torch.empty(size, len(weight), device=hidden.device)
        logprobs, totals, entropies = torch.zeros(3, len(y), 1, device=hidden.device)
        for rows in reversed(ctx.chunks):
            chunk = head_logits(hidden[rows], room, low, bias, *ctx.shape)
            for z, total, h in parts(chunk, totals[rows], entropies[rows]):
                log_p = torch.log_softmax(z.div_(temperature), dim=1)
                total.copy_(z[:, :1] - log_p[:, :1])
                if entropy:
                    h.copy_(-(log_p.exp() * log_p).sum(dim=1, keepdim=True))
                z.copy_(log_p)
            logprobs[rows] = chunk.gather(1, y[rows])
        ctx.room = room if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, y, totals, entropies, weight, bias)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Any, grad_entropies: Any) -> tuple:
        """Gradients of hidden states, W and b; the last two are sums in float32."""
        hidden, y, totals, entropies, weight, bias = ctx.saved_tensors
        (scale, cap), low = ctx.shape, cast(weight)
        kept, ctx.room = ctx.room, None  # written over below, so that it serves once
        room = torch.empty(ctx.size, len(low), device=low.device) if kept is None else kept
        columns = [y, totals, entropies, totals * 0 if grad_logprobs is None else grad_logprobs]
        columns += [] if grad_entropies is None else [grad_entropies]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in ctx.chunks:
            chunk = room[: len(y[rows])]
            if kept is None or rows.start > 0:
                head_logits(hidden[rows], room, low, bias, scale, cap)
                chunk.div_(ctx.temperature).sub_(totals[rows])
            for log_p, target, total, h, g, *g_h in parts(chunk, *(x[rows] for x in columns)):
                slope = scale / ctx.temperature
                if cap:
                    slope *= 1 - ((log_p + total) * ctx.temperature / cap).square()
                grad = log_p.exp()
                grad *= -g - g_h[0] * (log_p + h) if g_h else -g
                torch.mul(grad.scatter_add_(1, target, g), slope, out=log_p)
            grad, states = chunk.to(low.dtype), hidden[rows].to(low.dtype)
            grad_hidden[rows] = (grad @ low).to(hidden.dtype)
            if low.dtype == torch.float32:
                grad_weight.addmm_(grad.T, states)  # no second tensor of the weights' size
            else:
                grad_weight += grad.T @ states
            if bias is not None:
                grad_bias += chunk.sum(dim=0)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None, None


def head_of(model: torch.nn.Module, token: torch.Tensor) -> tuple:
    """(W, b, scale, cap) of a model's output head; b and cap may be None.

    Compared, once per model, with the model's own logits after one token (1, 1).

    Raises:
        ValueError: the architecture does something to its logits that is not known here.
    """
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    known = isinstance(module, torch.nn.Linear)  # an adapter on it is not
    head = (module.weight, module.bias, scale, cap) if known else ()
    if known and not getattr(model, "head_is_known", False):
        with torch.no_grad():
            # Not model(...): sharded, it would begin a forward pass within the one that is running.
            own = model.forward(input_ids=token, use_cache=False, output_hidden_states=True)
            expected, hidden = own.logits[0].float(), own.hidden_states[-1][0]
            low = cast(module.weight)
            found = head_logits(hidden, torch.empty_like(expected), low, *head[1:])
            known = bool((found - expected).norm() <= 1e-2 * expected.norm())
        model.head_is_known = known
    if not known:
        raise ValueError(f"the output head of {type(model).__name__} is not known to logprobs.py")
    return head


def _completion_logprobs(
    model: torch.nn.Module, pairs: Pairs, rows: Sequence, temperature: float, entropy: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    width = max(len(completion) for _, completion in pairs)
    # Without rows, a blank one: the ranks of a sharded model run all passes together.
    some = [pairs[i] for i in rows] or [([0], [])]
    # On the right, padding needs no mask: attention only looks back.
    ids, real = pad_rows([prompt + completion for prompt, completion in some], model.device)
    starts = torch.tensor([len(prompt) for prompt, _ in some], device=ids.device)
    scored = real & (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None])
    with autocast(ids.device):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        head = head_of(model, ids[:1, :1])  # second: autocast would keep weights cast without graph
    hidden = hidden[:, :-1][scored[:, 1:]]  # (N, d); the one at t - 1 predicts token t
    values = HeadLogprobs.apply(hidden, ids[scored][:, None], temperature, entropy, *head)
    lengths = scored.sum(dim=1, keepdim=True)[: len(rows)]
    mask = torch.arange(width, device=ids.device) < lengths  # (b, T)
    empty = torch.zeros(mask.shape, device=ids.device)
    logprobs, entropies = (empty.masked_scatter(mask, value) for value in values)
    return (logprobs, entropies) if entropy else logprobs


def completion_logprobs(
    model: torch.nn.Module,
    pairs: Pairs,
    rows: Sequence[int] | torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability, in nats, of each completion token given all tokens before it.

    `out[b, t] = log pi(y_t | x, y_<t)` with (x, y) = pairs[rows[b]], pi = softmax(logits /
    temperature). The transformer runs over whole rows; the projection to the vocabulary runs at the
    completion's positions only, in chunks of at most `MAX_LOGITS` numbers.

    Args:
        model: a causal language model of transformers, sharded with FSDP or not.
        pairs: prompts, none of them empty, and completions; T is the longest of all pairs.
        rows: (b,) which of the pairs are read; b may be 0.
        temperature: divides the logits; use the one that sampled the completions.
        entropy: also return the entropy of pi(. | x, y_<t), in nats.

    Returns:
        (b, T) float32 with gradient, 0 after a completion's end; or a pair of such.
    """
    if not isinstance(model, FSDPModule):
        return _completion_logprobs(model, pairs, rows, temperature, entropy)
    if not hasattr(model, "completion_logprobs"):  # FSDP gathers weights for registered methods
        model.completion_logprobs = types.MethodType(_completion_logprobs, model)
        register_fsdp_forward_method(model, "completion_logprobs")
    return model.completion_logprobs(pairs, rows, temperature, entropy)


@torch.no_grad()
def rollout_logprobs(
    model: torch.nn.Module, pairs: Pairs, batches: Iterable[torch.Tensor], temperature: float
) -> torch.Tensor:
    """`completion_logprobs` (B, T) of all pairs, without gradient.

    `batches` are this rank's micro-batches; those of all ranks hold each row once.
    """
    width = max(len(completion) for _, completion in pairs)
    logprobs = torch.zeros(len(pairs), width, device=model.device)
    for rows in batches:
        logprobs[rows] = completion_logprobs(model, pairs, rows, temperature)
    return all_reduce_sum(logprobs)
