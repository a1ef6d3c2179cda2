"""Log-probs, in nats: `plain_logprobs` is the definition, the rest makes it fast and small.

A sequence is a pair (prompt, completion) of token ids. What is computed from B of them is (B, T):
column t belongs to token t of the completion, and is 0 after its end.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from common.generation import RANK, WORLD_SIZE, all_reduce_sum, autocast, content, encode
from common.generation import pad_rows, use_bfloat16

Sequences = list[tuple[list[int], list[int]]]  # (prompt, completion), token ids

MAX_LOGITS = 2**26  # held at one time: 256 MiB in float32
NOT_CAUSAL = ("xlnet", "cpmant")  # model types in which later tokens change earlier ones


def plain_logprobs(model: Any, prompt: list, completion: list, temperature: float = 1.0) -> tuple:
    """The definition, for one sequence: log pi(y_t | x, y_<t), and the entropy of pi(. | x, y_<t).

    Both (T,), with pi = softmax(logits / temperature). The tests compare `completion_logprobs` with
    it; no script calls it, because the logits of all positions exist at once.
    """
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # (T, V)
    log_p = (logits.float() / temperature).log_softmax(dim=-1)
    logprobs = log_p.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return logprobs, -(log_p.exp() * log_p).sum(dim=-1)


def completion_logprobs(
    model: Any,
    sequences: Sequences,
    rows: Sequence,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each completion token given all tokens before it: (b, T), float32.

    `out[i, t] = log pi(y_t | x, y_<t)` with (x, y) = sequences[rows[i]]; T is the longest
    completion of all sequences, `rows` may be empty. With `entropy` also that of pi(. | x, y_<t).
    The model is a causal one of transformers, sharded or not.
    """
    if isinstance(model, FSDPModule) and not hasattr(model, "logprobs"):
        model.logprobs = types.MethodType(_completion_logprobs, model)
        register_fsdp_forward_method(model, "logprobs")  # FSDP gathers weights around it too
    compute = getattr(model, "logprobs", types.MethodType(_completion_logprobs, model))
    logprobs, entropies = compute(sequences, rows, temperature, entropy)
    return (logprobs, entropies) if entropy else logprobs


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """The last hidden states (b, L, d) of token ids (b, L), from which a head computes values.

    Rows are padded on the right. The model is one of transformers, sharded or not.
    """
    if isinstance(model, FSDPModule) and not hasattr(model, "hidden_states"):
        model.hidden_states = types.MethodType(_hidden_states, model)
        register_fsdp_forward_method(model, "hidden_states")
    compute = getattr(model, "hidden_states", types.MethodType(_hidden_states, model))
    return compute(ids)


@torch.no_grad()
def rollout_logprobs(
    model: Any, sequences: Sequences, batches: Iterable[Tensor], temperature: float
) -> Tensor:
    """`completion_logprobs` (B, T) of all sequences, without gradient; each row must be in exactly
    one batch of one rank.
    """
    width = max(len(completion) for _, completion in sequences)
    logprobs = torch.zeros(len(sequences), width, device=model.device)
    for rows in batches:
        logprobs[rows] = completion_logprobs(model, sequences, rows, temperature)
    return all_reduce_sum(logprobs)


def micro_batches(sequences: Sequences, rows: Tensor, size: int) -> Iterator[Tensor]:
    """Row numbers (b,) of this rank's micro-batches, longest sequences first, `size` rows at most.

    All ranks get equally many micro-batches; the last may be empty.
    """
    lengths = torch.tensor([len(sequences[i][0]) + len(sequences[i][1]) for i in rows])
    rows = rows[lengths.argsort(descending=True, stable=True)]
    for group in rows.split(size * WORLD_SIZE):
        yield group[RANK::WORLD_SIZE]


def _hidden_states(model: Any, ids: Tensor) -> Tensor:
    # Llama 4 and Mllama are their own base model. Padding on the right needs no attention mask:
    # attention only looks back.
    backbone = model.get_decoder().model if model.base_model is model else model.base_model
    with autocast(ids.device):
        return backbone(input_ids=ids, use_cache=False).last_hidden_state


def _completion_logprobs(
    model: Any, sequences: Sequences, rows: Sequence, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    width = max(len(completion) for _, completion in sequences)
    # A rank without rows runs a dummy: sharded, all ranks must run every forward pass.
    batch = [sequences[i] for i in rows] or [([0], [])]
    ids, mask = pad_rows([prompt + completion for prompt, completion in batch], model.device)
    starts = torch.tensor([len(prompt) for prompt, _ in batch], device=ids.device)
    is_completion = mask & (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None])
    hidden = _hidden_states(model, ids)  # (b, L, d)
    head = output_head(model, ids[:1, :1])
    hidden = hidden[:, :-1][is_completion[:, 1:]]  # (N, d): that at t - 1 predicts token t
    tokens = ids[is_completion][:, None]  # (N, 1)
    values = ChunkedLogprobs.apply(hidden, tokens, temperature, entropy, *head)
    # Back to (b, T), with zeros after each completion's end.
    lengths = is_completion.sum(dim=1, keepdim=True)[: len(rows)]
    out_mask = torch.arange(width, device=ids.device) < lengths  # (b, T)
    empty = torch.zeros(out_mask.shape, device=ids.device)
    return tuple(empty.masked_scatter(out_mask, value) for value in values)


# --- from hidden states to log-probs, without all logits at once -------------------------------
class OutputHead(NamedTuple):
    """logits = scale (W h + b), or cap tanh(scale (W h + b) / cap)."""

    weight: Tensor  # W (V, d)
    bias: Tensor | None  # b (V,)
    scale: float
    cap: float | None


def head_logits(hidden: Tensor, logits_buffer: Tensor, head: OutputHead) -> Tensor:
    """Logits (n, V) of n hidden states (n, d), in the first rows of the buffer."""
    logits = logits_buffer[: len(hidden)]
    if hidden.dtype == head.weight.dtype == torch.float32:
        torch.mm(hidden, head.weight.T, out=logits)
    else:
        logits.copy_(hidden.to(head.weight.dtype) @ head.weight.T)
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1:
        logits *= head.scale
    if head.cap:
        logits.div_(head.cap).tanh_().mul_(head.cap)
    return logits


class ChunkedLogprobs(torch.autograd.Function):
    """log p(y) and entropy H, in nats, of p = softmax(logits / temperature). For a token j

        d log p(y) / d logit_j = (1[j = y] - p_j) / temperature,
        d H / d logit_j        = - p_j (log p_j + H) / temperature.

    With 150,000 tokens in the vocabulary the logits are the largest tensor of all. Here they exist
    for a chunk of positions at a time, and again in the backward pass, where their gradient takes
    their place. The forward pass takes the chunks from last to first: the log-probs of the first
    are then still in the buffer when the backward pass begins with it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, y: Tensor, temperature: float, entropy: bool, *head: Any
    ) -> tuple[Tensor, Tensor]:
        """(N, 1) each for hidden states (N, d), tokens y (N, 1) and an `OutputHead`."""
        head = OutputHead(*head)
        vocabulary = len(head.weight)
        chunk_size = max(1, min(len(y), MAX_LOGITS // vocabulary))
        rows_per_block = max(1, MAX_LOGITS // 32 // vocabulary)  # what a processor's cache holds
        logits_buffer = torch.empty(chunk_size, vocabulary, device=hidden.device)
        chunks = [slice(start, start + chunk_size) for start in range(0, len(y), chunk_size)]
        logprobs, log_sums, entropies = torch.zeros(3, len(y), 1, device=hidden.device)
        compute_head = head
        if use_bfloat16(hidden.device):  # cast once, not per chunk
            compute_head = head._replace(weight=head.weight.bfloat16())
        for chunk in reversed(chunks):  # in place: logits, divided by temperature, log-probs
            logits = head_logits(hidden[chunk], logits_buffer, compute_head)
            for start in range(0, len(logits), rows_per_block):
                block = slice(start, start + rows_per_block)
                scaled = logits[block].div_(temperature)
                torch.logsumexp(scaled, dim=1, keepdim=True, out=log_sums[chunk][block])
                log_p = scaled.sub_(log_sums[chunk][block])
                if entropy:  # the clamp makes 0 * -inf 0
                    p_log_p = log_p.exp() * log_p.clamp(min=-1e4)
                    entropies[chunk][block] = -p_log_p.sum(dim=1, keepdim=True)
            log_probs = logits  # the same memory
            logprobs[chunk] = log_probs.gather(1, y[chunk])
        ctx.save_for_backward(hidden, y, log_sums, entropies, head.weight, head.bias)
        ctx.logits_buffer, ctx.buffer_shape = logits_buffer, logits_buffer.shape
        ctx.chunks, ctx.rows_per_block = chunks, rows_per_block
        ctx.temperature, ctx.scale, ctx.cap = temperature, head.scale, head.cap
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple:
        """Gradients of hidden states, W and b; the last two are summed in float32."""
        hidden, y, log_sums, entropies, weight, bias = ctx.saved_tensors
        head = OutputHead(weight, bias, ctx.scale, ctx.cap)
        if use_bfloat16(hidden.device):
            head = head._replace(weight=weight.bfloat16())
        logits_buffer, ctx.logits_buffer = ctx.logits_buffer, None  # overwritten, so it serves once
        first_is_kept = logits_buffer is not None
        if not first_is_kept:
            logits_buffer = torch.empty(ctx.buffer_shape, device=weight.device)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_sums)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for chunk in ctx.chunks:
            log_probs = logits_buffer[: len(y[chunk])]
            if chunk.start > 0 or not first_is_kept:
                head_logits(hidden[chunk], logits_buffer, head)
                log_probs.div_(ctx.temperature).sub_(log_sums[chunk])
            # With gradients g of log p(y) and g_H of H, that of logit_j / temperature is
            # g (1[j = y] - p_j) - g_H p_j (log p_j + H); `slope` is the rest of the chain rule.
            for start in range(0, len(log_probs), ctx.rows_per_block):
                block = slice(start, start + ctx.rows_per_block)
                log_p, g = log_probs[block], grad_logprobs[chunk][block]
                slope = head.scale / ctx.temperature
                if head.cap:
                    logits = (log_p + log_sums[chunk][block]) * ctx.temperature
                    slope = slope * (1 - (logits / head.cap).square())
                factor = -g
                if grad_entropies is not None:
                    log_p_plus_h = log_p.clamp(min=-1e4) + entropies[chunk][block]
                    factor = factor - grad_entropies[chunk][block] * log_p_plus_h
                grad = log_p.exp().mul_(factor).scatter_add_(1, y[chunk][block], g)
                torch.mul(grad, slope, out=log_p)  # in the place of the log-probs
            grad_out = log_probs  # the same memory: by now the gradient of W h + b
            grad_cast = grad_out.to(head.weight.dtype)
            states = hidden[chunk].to(head.weight.dtype)
            grad_hidden[chunk] = (grad_cast @ head.weight).to(hidden.dtype)
            if head.weight.dtype == torch.float32:
                grad_weight.addmm_(grad_cast.T, states)  # no second tensor of the weight's size
            else:
                grad_weight += grad_cast.T @ states
            if bias is not None:
                grad_bias += grad_out.sum(dim=0)
        return grad_hidden, None, None, None, grad_weight, grad_bias, None, None


def output_head(model: Any, token: Tensor) -> OutputHead:
    """The model's output head, tried once on one token (1, 1).

    A ValueError if the model computes its logits in a way that `OutputHead` cannot express.
    """
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    unknown = ValueError(f"the output head of {type(model).__name__} is not known to logprobs.py")
    if not isinstance(module, torch.nn.Linear) or config.model_type in NOT_CAUSAL:
        raise unknown
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = None
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        cap = cap or getattr(config, name, None)  # Gemma, xLSTM
    head = OutputHead(module.weight, module.bias, scale, cap)
    if not hasattr(model, "head_is_known"):
        # Not model(...): sharded, it would begin a forward pass within the one that is running.
        with torch.no_grad(), torch.autocast(token.device.type, enabled=False):
            output = model.forward(input_ids=token, use_cache=False, output_hidden_states=True)
            expected, hidden = output.logits[0].float(), output.hidden_states[-1][0]
            model.head_is_known = False
            if hidden.shape[1:] == head.weight.shape[1:]:
                logits = head_logits(hidden, torch.empty_like(expected), head)
                tolerance = 1e-5 if hidden.dtype == torch.float32 else 1e-2
                error = (logits - expected).norm()
                model.head_is_known = bool(error <= tolerance * logits.norm())
    if not model.head_is_known:
        raise unknown
    return head


# --- prompts and completions as token ids ------------------------------------------------------
class UnusableRow(ValueError):
    """A row of the data that is dropped and counted; the message continues "dropped 3 ..."."""


def encode_pair(
    tokenizer: Any, prompt: Any, completion: Any, stop_ids: list
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its completion, which ends with its first stop id.

    The two are tokenised as one text and cut after the prompt, whose tokens must be the same as
    without the completion: that is how the model meets them when it samples.
    """
    for part in (prompt, completion):
        text = part if isinstance(part, str) else content(part[-1])
        if not text.strip():
            raise UnusableRow("with an empty prompt or completion")
    if isinstance(completion, list) and len(completion) > 1:
        raise UnusableRow("with a completion of several messages")
    prompt_ids = encode(tokenizer, prompt, add_generation_prompt=True)
    ids = encode(tokenizer, prompt + completion)
    if ids[: len(prompt_ids)] != prompt_ids:
        raise UnusableRow("whose completion merges with the prompt's last token (a space may help)")
    eos = stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    completion_ids = [*ids[len(prompt_ids) :], eos]
    end = min(completion_ids.index(stop_id) for stop_id in stop_ids if stop_id in completion_ids)
    return prompt_ids, completion_ids[: end + 1]
