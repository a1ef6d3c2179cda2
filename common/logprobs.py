"""Log-probabilities and entropies of sampled tokens. A rollout is B pairs (prompt, completion) of
token ids; what is computed from it is (B, T): column t belongs to token t of the completion.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from common.generation import RANK, WORLD_SIZE, all_reduce_sum, autocast, content, encode
from common.generation import pad_rows, use_bfloat16

Pairs = list[tuple[list[int], list[int]]]

MAX_LOGITS = 2**26  # that exist at one time: 256 MiB in float32
NOT_CAUSAL = ("xlnet", "cpmant")  # kinds of model in which later tokens change earlier ones


def micro_batches(pairs: Pairs, rows: Tensor, size: int) -> Iterator[Tensor]:
    """Row numbers (b,) in groups of similar length, as many on each rank: the last may be empty."""
    lengths = torch.tensor([len(pairs[i][0]) + len(pairs[i][1]) for i in rows])
    rows = rows[lengths.argsort(descending=True, stable=True)]
    for group in rows.split(size * WORLD_SIZE):
        yield group[RANK::WORLD_SIZE]


def head_logits(hidden: Tensor, room: Tensor, weight: Tensor, bias: Any, *shape: Any) -> Tensor:
    """u = scale (W h + b), or cap tanh(u / cap): logits (n, V) of n hidden states, in `room`."""
    scale, cap = shape
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

    With 150,000 tokens in the vocabulary the logits are the largest tensor of all. Here they exist
    for a chunk of positions at a time, give way to their own gradient, and are computed again in
    the backward pass instead of kept, but for the chunk with which one ends and the other begins.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Any, y: Any, temperature: float, entropy: bool, *head: Any
    ) -> tuple[Tensor, Tensor]:
        """(N, 1) each for hidden states (N, d), tokens y (N, 1) and a head as `head_of` gives."""
        weight, bias, *ctx.shape = head
        low = weight.bfloat16() if use_bfloat16(weight.device) else weight  # once, not per chunk
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        size = max(1, min(len(y), MAX_LOGITS // len(weight)))
        ctx.few = max(
            1, MAX_LOGITS // 32 // len(weight)
        )  # rows that the processor's cache can hold
        ctx.chunks = [slice(start, start + size) for start in range(0, len(y), size)]
        room = torch.empty(size, len(weight), device=hidden.device)
        logprobs, totals, entropies = torch.zeros(3, len(y), 1, device=hidden.device)
        for rows in reversed(ctx.chunks):
            chunk = head_logits(hidden[rows], room, low, bias, *ctx.shape)
            some = (x.split(ctx.few) for x in (chunk, totals[rows], entropies[rows]))
            for z, total, h in zip(*some, strict=True):
                torch.logsumexp(z.div_(temperature), dim=1, keepdim=True, out=total)
                log_p = z.sub_(total)
                if entropy:  # 0 * -inf is 0 here
                    h.copy_(-(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=1, keepdim=True))
            logprobs[rows] = chunk.gather(1, y[rows])
        ctx.room, ctx.size = room, size
        ctx.save_for_backward(hidden, y, totals, entropies, weight, bias)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Any, grad_entropies: Any) -> tuple:
        """Gradients of hidden states, W and b; the last two are sums in float32."""
        hidden, y, totals, entropies, weight, bias = ctx.saved_tensors
        low = weight.bfloat16() if use_bfloat16(weight.device) else weight
        scale, cap = ctx.shape
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
            some = (x.split(ctx.few) for x in (chunk, *(column[rows] for column in columns)))
            for log_p, target, total, h, g, *g_h in zip(*some, strict=True):
                slope = scale / ctx.temperature
                if cap:
                    slope *= 1 - ((log_p + total) * ctx.temperature / cap).square()
                grad = log_p.exp()
                grad *= -g - g_h[0] * (log_p.clamp(min=-1e4) + h) if g_h else -g
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


def head_of(model: torch.nn.Module, token: Tensor) -> tuple:
    """(W, b, scale, cap) of a model's output head; b and cap may be None. Compared once, after one
    token (1, 1): a ValueError if the architecture does to its logits what is not known here.
    """
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    caps = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"  # Gemma, xLSTM
    cap = next((getattr(config, name) for name in caps if getattr(config, name, None)), None)
    known = isinstance(module, torch.nn.Linear) and getattr(model, "head_is_known", False)
    if not known and isinstance(module, torch.nn.Linear) and config.model_type not in NOT_CAUSAL:
        # Not model(...): sharded, it would begin a forward pass within the one that is running.
        with torch.no_grad(), torch.autocast(token.device.type, enabled=False):
            own = model.forward(input_ids=token, use_cache=False, output_hidden_states=True)
            expected, hidden = own.logits[0].float(), own.hidden_states[-1][0]
            if hidden.shape[1:] == module.weight.shape[1:]:
                head = (module.weight, module.bias, scale, cap)
                found = head_logits(hidden, torch.empty_like(expected), *head)
                bound = 1e-5 if hidden.dtype == torch.float32 else 1e-2
                known = bool((found - expected).norm() <= bound * found.norm())
        model.head_is_known = known
    if not known:
        raise ValueError(f"the output head of {type(model).__name__} is not known to logprobs.py")
    return module.weight, module.bias, scale, cap


def _logprobs(model: Any, pairs: Pairs, rows: Sequence, temperature: float, entropy: bool) -> Any:
    width = max(len(completion) for _, completion in pairs)
    # Without rows, a blank one: the ranks of a sharded model run all passes together.
    some = [pairs[i] for i in rows] or [([0], [])]
    # On the right, padding needs no mask: attention only looks back.
    ids, real = pad_rows([prompt + completion for prompt, completion in some], model.device)
    starts = torch.tensor([len(prompt) for prompt, _ in some], device=ids.device)
    scored = real & (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None])
    # Llama 4 and Mllama are their own base model.
    inner = model.get_decoder().model if model.base_model is model else model.base_model
    with autocast(ids.device):
        hidden = inner(input_ids=ids, use_cache=False).last_hidden_state
        head = head_of(model, ids[:1, :1])
    hidden = hidden[:, :-1][scored[:, 1:]]  # (N, d); the one at t - 1 predicts token t
    values = HeadLogprobs.apply(hidden, ids[scored][:, None], temperature, entropy, *head)
    lengths = scored.sum(dim=1, keepdim=True)[: len(rows)]
    mask = torch.arange(width, device=ids.device) < lengths  # (b, T)
    empty = torch.zeros(mask.shape, device=ids.device)
    logprobs, entropies = (empty.masked_scatter(mask, value) for value in values)
    return (logprobs, entropies) if entropy else logprobs


def completion_logprobs(
    model: Any, pairs: Pairs, rows: Sequence, temperature: float = 1.0, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability, in nats, of each completion token given all tokens before it: (b, T).

    `out[b, t] = log pi(y_t | x, y_<t)` with (x, y) = pairs[rows[b]], pi = softmax(logits /
    temperature), in float32, and 0 after a completion's end; T is the longest of all pairs, b may
    be 0. With `entropy` also that of pi(. | x, y_<t), in nats. The model is a causal one of
    transformers, sharded or not. The projection to the vocabulary runs at the completions'
    positions only.
    """
    if isinstance(model, FSDPModule) and not hasattr(model, "logprobs"):
        model.logprobs = types.MethodType(_logprobs, model)
        register_fsdp_forward_method(model, "logprobs")  # for those FSDP gathers weights
    compute = getattr(model, "logprobs", types.MethodType(_logprobs, model))
    return compute(pairs, rows, temperature, entropy)


@torch.no_grad()
def rollout_logprobs(model: Any, pairs: Pairs, batches: Iterable, temperature: float) -> Tensor:
    """`completion_logprobs` (B, T) of all pairs; `batches` of all ranks hold each row once."""
    width = max(len(completion) for _, completion in pairs)
    logprobs = torch.zeros(len(pairs), width, device=model.device)
    for rows in batches:
        logprobs[rows] = completion_logprobs(model, pairs, rows, temperature)
    return all_reduce_sum(logprobs)


def encode_pair(tokenizer: Any, prompt: Any, completion: Any, stop_ids: list) -> tuple | str:
    """Token ids of a prompt and of its completion, which ends with its first stop id; or why not.

    The two are tokenised as one text, as the model would meet them, and cut at the prompt's length.
    """
    texts = (part if isinstance(part, str) else content(part[-1]) for part in (prompt, completion))
    if not all(text.strip() for text in texts):
        return "with an empty prompt or completion"
    if isinstance(completion, list) and len(completion) > 1:
        return "with a completion of several messages"
    prompt_ids = encode(tokenizer, prompt, add_generation_prompt=True)
    ids = encode(tokenizer, prompt + completion)
    if ids[: len(prompt_ids)] != prompt_ids:
        return "that change the prompt's tokens (begin the completion with the white space)"
    eos = stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    completion_ids = [*ids[len(prompt_ids) :], eos]
    end = min(completion_ids.index(stop) for stop in stop_ids if stop in completion_ids)
    return prompt_ids, completion_ids[: end + 1]
