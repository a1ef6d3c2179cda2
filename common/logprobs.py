"""Score completions under a model: the log-probability, and the entropy, of each sampled token.

With 150,000 tokens in the vocabulary the logits are the largest tensor of all, and autograd would
keep several of their size. Here they exist for a chunk of positions at a time, give way to their
own gradient, and are computed again in the backward pass instead of kept.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

# The most logits that exist at one time: 2^26 float32 numbers are 256 MiB.
MAX_LOGITS = 2**26

_head_is_known: weakref.WeakSet = weakref.WeakSet()


class Head(NamedTuple):
    """How a model's last hidden state h becomes logits: cap tanh(scale (W h + b) / cap)."""

    weight: torch.Tensor  # W (V, d)
    bias: torch.Tensor | None  # b (V,)
    scale: float
    cap: float | None  # None: scale (W h + b)

    def to(self, dtype: torch.dtype) -> "Head":
        """The same head with weights of this type."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self._replace(weight=self.weight.to(dtype), bias=bias)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states (N, d), written to `out` (N, V) float32."""
        hidden = hidden.to(self.weight.dtype)
        if hidden.dtype == out.dtype:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            out.copy_(hidden @ self.weight.T)
        if self.bias is not None:
            out += self.bias
        if self.scale != 1:
            out *= self.scale
        if self.cap:
            out.div_(self.cap).tanh_().mul_(self.cap)
        return out


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """What matrix products with these weights are computed in: autocast's type where it is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@torch.no_grad()
def find_head(model: torch.nn.Module, token: torch.Tensor) -> Head:
    """The head of a model; compared, once a model, with its own logits on one real token (1, 1).

    Raises:
        ValueError: the architecture does something to its logits that `Head` does not know.
    """
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    known = isinstance(module, torch.nn.Linear)  # an adapter on it is not
    head = Head(module.weight, module.bias, scale, cap) if known else None
    if known and model not in _head_is_known:
        training = model.training
        model.eval()  # the two passes must not differ by dropout
        hidden = model.base_model(input_ids=token, use_cache=False).last_hidden_state[0]
        # Not model(...): sharded, it would begin a forward pass within the one that is running.
        expected = model.forward(input_ids=token, use_cache=False).logits[0].float()
        model.train(training)
        # Under autocast, weights cast here would be kept without a graph for the pass that follows.
        torch.clear_autocast_cache()
        known = expected.shape[1] == len(module.weight)
        if known:
            found = head.to(compute_dtype(module.weight)).logits(hidden, torch.empty_like(expected))
            known = (found - expected).norm() <= 1e-3 * expected.norm()
    if not known:
        raise ValueError(
            f"completion_logprobs does not know the output head of {type(model).__name__}: its "
            "logits are not the output embedding of the last hidden state"
        )
    _head_is_known.add(model)
    return head


def chunks(length: int, vocab_size: int) -> list[slice]:
    """Slices of `length` positions whose logits have at most `MAX_LOGITS` numbers."""
    size = max(1, MAX_LOGITS // vocab_size)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def parts(chunk: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """A few rows at a time of a chunk (n, V), and of others (n,) as columns.

    What is derived from them element by element is then small beside the chunk.
    """
    size = max(1, MAX_LOGITS // 32 // chunk.shape[1])
    columns = (other[:, None].split(size) for other in others)
    return zip(chunk.split(size), *columns, strict=True)


class HeadLogprobs(torch.autograd.Function):
    """log p(target) and entropy H, in nats, of p = softmax(z), z = logits / temperature.

    For a token j of the vocabulary, with the indicator 1[.]:

        log p_j = z_j - log sum_k exp z_k,    d log p(target) / dz_j = 1[j = target] - p_j,
        H = - sum_j p_j log p_j,              d H / dz_j             = - p_j (log p_j + H).

    There is room for the log p of one chunk, (n, V), and its gradient takes the same room. The
    forward pass ends with the first chunk, with which the backward pass begins: it is still there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        return_entropy: bool,
        *head: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) float32 each for hidden states (N, d); entropies are 0 if not asked for."""
        ctx.temperature, ctx.scale, ctx.cap = temperature, *head[2:]
        ctx.dtype = compute_dtype(head[0])
        ctx.set_materialize_grads(False)
        logprobs, entropy, log_total = torch.zeros(3, len(targets), device=hidden.device)
        slices = chunks(len(targets), len(head[0]))
        room = hidden.new_empty(slices[0].stop if slices else 0, len(head[0]), dtype=torch.float32)
        low = Head(*head).to(ctx.dtype)
        for rows in reversed(slices):
            chunk = low.logits(hidden[rows], out=room[: rows.stop - rows.start])
            for z, total, h in parts(chunk, log_total[rows], entropy[rows]):
                if temperature != 1:
                    z /= temperature
                log_p = torch.log_softmax(z, dim=1)
                total.copy_(z[:, :1] - log_p[:, :1])
                if return_entropy:
                    h.copy_(-(log_p.exp() * log_p).sum(dim=1, keepdim=True))
                z.copy_(log_p)
            logprobs[rows] = chunk.gather(1, targets[rows, None]).squeeze(1)
        ctx.room = room if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, targets, *head[:2], log_total, entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple:
        """Gradients of hidden states, weight and bias; the last two are sums in float32."""
        hidden, targets, weight, bias, log_total, entropy = ctx.saved_tensors
        head = Head(weight, bias, ctx.scale, ctx.cap).to(ctx.dtype)
        slices = chunks(len(targets), len(weight))
        kept, ctx.room = ctx.room, None  # written over below, so that it serves once
        room = kept
        if kept is None:
            room = hidden.new_empty(slices[0].stop, len(weight), dtype=torch.float32)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_total)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in slices:
            chunk = room[: rows.stop - rows.start]
            if kept is None or rows.start > 0:
                head.logits(hidden[rows], out=chunk)
                chunk.div_(ctx.temperature).sub_(log_total[rows, None])
            columns = (targets, log_total, entropy, grad_logprobs)
            if grad_entropy is not None:
                columns += (grad_entropy,)
            for log_p, target, total, h, g, *g_h in parts(chunk, *(x[rows] for x in columns)):
                slope = ctx.scale / ctx.temperature  # of z with respect to W h + b
                if ctx.cap:
                    capped = (log_p + total) * ctx.temperature
                    slope *= 1 - (capped / ctx.cap) ** 2
                grad = log_p.exp()
                if g_h:
                    grad *= -g - g_h[0] * (log_p + h)
                else:
                    grad *= -g
                grad.scatter_add_(1, target, g)
                torch.mul(grad, slope, out=log_p)
            grad = chunk.to(ctx.dtype)
            states = hidden[rows].to(ctx.dtype)
            grad_hidden[rows] = grad @ head.weight
            if ctx.dtype == torch.float32:
                grad_weight.addmm_(grad.T, states)  # no second tensor of the weights' size
            else:
                grad_weight += grad.T @ states
            if bias is not None:
                grad_bias += chunk.sum(dim=0)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None, None


def as_forward(function: Callable) -> Callable:
    """Let `function(model, ...)` count as a forward pass of the model.

    FSDP gathers the weights of a sharded model when its `forward` is called, or a method that was
    registered as another one; these functions call its parts instead, and read its head's weights.
    """

    @functools.wraps(function)
    def call(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        if not isinstance(model, FSDPModule):
            return function(model, *args, **options)
        name = function.__name__
        if not hasattr(model, name):
            setattr(model, name, types.MethodType(function, model))
            register_fsdp_forward_method(model, name)
        return getattr(model, name)(*args, **options)

    return call


@as_forward
def completion_logprobs(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_mask: torch.Tensor,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each completion token given all tokens before it.

    `out[b, t] = log pi(input_ids[b, t] | input_ids[b, :t])`, pi = softmax(logits / temperature).

    The transformer runs over whole rows; the projection to the vocabulary runs at the completion's
    positions only, in chunks of at most `MAX_LOGITS` numbers.

    Args:
        model: a causal language model of transformers.
        input_ids: (B, L) token ids, padded on either side. B may be 0: the model then reads a blank
            row, because the processes of a sharded one run all of its passes together.
        attention_mask: (B, L) 1 at real tokens, 0 at padding.
        completion_mask: (B, L) true at the tokens to score. Column 0 has no context and is
            never scored, nor should a row's first real token be.
        temperature: divides the logits; use the one that sampled the completions.
        return_entropy: also return the entropy of pi(. | input_ids[b, :t]).

    Returns:
        (B, L) float32 log-probabilities in nats, 0 where `completion_mask` is not set; with
        `return_entropy` a pair of it and the entropies, in nats, laid out alike. Both carry
        gradients.

    Raises:
        ValueError: the model's output head is none of the known kinds.
    """
    scored = completion_mask.bool().clone()  # (B, L)
    scored[:, :1] = False
    batch, targets = len(input_ids), input_ids[scored]  # (N,)
    if batch == 0:
        blank = (1, max(1, input_ids.shape[1]))
        input_ids, attention_mask = input_ids.new_zeros(blank), attention_mask.new_ones(blank)
    # A token of padding would prove nothing: its embedding may be zero.
    head = find_head(model, input_ids[attention_mask.bool()][:1, None])
    attention_mask = attention_mask.long()
    hidden = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        # Counted over real tokens, so that neither the side nor the amount of padding matters.
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state  # (B, L, d)

    hidden = hidden[:batch, :-1][scored[:, 1:]]  # (N, d); the one at t - 1 predicts token t
    outputs = []
    for values in HeadLogprobs.apply(hidden, targets, temperature, return_entropy, *head):
        out = torch.zeros(scored.shape, dtype=torch.float32, device=input_ids.device)
        outputs.append(out.masked_scatter(scored, values))
    return tuple(outputs) if return_entropy else outputs[0]
