"""Log-probs log pi(y_t | x, y_<t), in nats, without all logits at once.

A sequence is a pair (prompt, completion) of token ids. Per-token results for B sequences are
tensors (B, T): column t belongs to token t of the completion, and is 0 after its end.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.prompts import Sequences, SharedPrompts, padded_states, shared_states, shares_prompts
from runtime.checks import check_sampling_kl
from runtime.model import autocast, backbone, failure_of, forward_method, use_bfloat16
from runtime.processes import RANK, WORLD_SIZE, all_reduce_sum

MAX_LOGITS = 2**26  # in a chunk: 256 MiB in float32


@forward_method
def completion_logprobs(
    model: Any,
    sequences: Sequences,
    inds: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    is_learned: list[list[int]] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`out[i, t] = log pi(y_t | x, y_<t)` (b, T), float32, of (x, y) = sequences[inds[i]], with
    logits divided by the temperature. T is the length of the longest completion of all; `inds` may
    be empty. With `entropy` also the entropy of pi(. | x, y_<t), by default without a gradient.
    Given `is_learned`, tokens where `is_learned[i][t]` is 0 are not computed: their log-prob is 0.
    """
    batch = [sequences[i] for i in inds]
    states, row, t = completion_states(model, batch)  # (n, d), (n,)
    tokens = torch.tensor([token for _, completion in batch for token in completion]).long()
    if is_learned is not None:
        learned = torch.tensor([flag for i in inds for flag in is_learned[i]]).nonzero().squeeze(1)
        tokens = tokens[learned]
        learned = learned.to(model.device, non_blocking=True)
        states, row, t = states[learned], row[learned], t[learned]
    tokens = tokens.to(model.device, non_blocking=True)

    def of_logits(logits: Tensor, chunk: slice) -> list[Tensor]:
        scaled = logits if temperature == 1 else logits / temperature
        log_pi = scaled.log_softmax(dim=1)  # (c, V)
        values = [log_pi.gather(1, tokens[chunk, None]).squeeze(1)]
        if entropy:
            log_pi = log_pi if entropy_gradient else log_pi.detach()
            values.append(-(log_pi.exp() * log_pi.clamp(min=-1e4)).sum(dim=1))  # 0, not 0 * -inf
        return values

    values = map_logits(model, states, of_logits)
    width = max(len(completion) for _, completion in sequences)
    zeros = torch.zeros(len(batch), width, device=model.device)
    logprobs = zeros.index_put((row, t), values[0])
    if not entropy:
        return logprobs
    return logprobs, zeros.index_put((row, t), values[1])


def map_logits(model: Any, states: Tensor, function: Callable) -> tuple[Tensor, ...]:
    """Results (n,) of function(logits (c, V), chunk) from hidden states (n, d), where a chunk is a
    slice of the n tokens. Over a large vocabulary the logits are the largest tensor of all: only
    those of one chunk exist at a time, and the backward pass computes them again.
    """
    head = output_head(model)
    if head.weight.requires_grad:
        # Gradients of chunks are added up in float32; sharded weights may be gathered in bfloat16.
        head = head._replace(weight=head.weight.float())

    def of_chunk(states: Tensor, chunk: slice) -> list[Tensor]:
        return function(head_logits(states, head), chunk)

    size = max(1, MAX_LOGITS // len(head.weight))
    chunks = [slice(i, i + size) for i in range(0, max(1, len(states)), size)]
    recomputed = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    results = [recomputed(states[chunk], chunk) for chunk in chunks]
    return tuple(torch.cat(values) for values in zip(*results, strict=True))


@forward_method
def completion_states(model: Any, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden states (n, d) before each of the n completion tokens of a batch, from which a head
    computes log-probs or values, and the tokens' rows and columns (n,) in a tensor (b, T).
    """
    if not all(prompt for prompt, _ in batch):
        raise ValueError("a prompt needs a token: the first one of a text has no log-prob")
    lengths = torch.tensor([len(completion) for _, completion in batch], dtype=torch.long)
    row = torch.arange(len(batch)).repeat_interleave(lengths)
    starts = lengths.cumsum(dim=0) - lengths
    t = torch.arange(len(row)) - starts[row]
    # With no rows a token is read for nothing: sharded, all ranks must run every forward pass.
    batch = batch or [([0], [])]
    can_share = shares_prompts(model)
    with autocast(model.device):
        if can_share:
            states = shared_states(model, SharedPrompts(batch, model.device))
        else:
            states = padded_states(model, batch)
    return states, row.to(model.device, non_blocking=True), t.to(model.device, non_blocking=True)


def last_states(model: Any, batch: Sequences) -> Tensor:
    """The hidden states (b, d) of the last tokens of a batch, from which a head computes scores."""
    # The state before a completion token is that of the token in front of it. So with one token
    # appended, whatever its id, the state before this one is that of the last token.
    states, _, _ = completion_states(model, [(prompt, [*ids, 0]) for prompt, ids in batch])
    ends = torch.tensor([len(ids) + 1 for _, ids in batch], dtype=torch.long).cumsum(dim=0) - 1
    return states[ends.to(model.device, non_blocking=True)]


@torch.no_grad()
def rollout_logprobs(
    model: Any, sequences: Sequences, batches: Iterable[Tensor], temperature: float, **options: Any
) -> Tensor:
    """`completion_logprobs` (B, T) of all sequences, on all ranks, without gradient. `batches` are
    this rank's, such as those of `micro_batches`; each sequence must be in one batch of one rank.
    """
    width = max(len(completion) for _, completion in sequences)
    logprobs = torch.zeros(len(sequences), width, device=model.device)
    for inds in batches:
        device_inds = inds.to(model.device, non_blocking=True)  # CPU indices make a GPU wait
        logprobs[device_inds] = completion_logprobs(model, sequences, inds, temperature, **options)
    return all_reduce_sum(logprobs)


def sampling_metrics(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the policy that sampled is from pi_old; they should be the same. Over the tokens of
    the mask (B, T) the mean of k3, an estimate of KL(pi_sampler || pi_old), and the largest ratio
    pi_old / pi_sampler. A warning if these are two policies.
    """
    log_ratio = mask * (logprobs - sampler_logprobs).double()
    kl = ((log_ratio.expm1() - log_ratio).sum() / mask.sum().clamp(min=1)).item()
    check_sampling_kl(kl)
    largest = log_ratio.masked_fill(~mask, -torch.inf).max().exp().item()
    return {"policy/sampling_kl": kl, "policy/sampling_ratio_max": largest}


def micro_batches(sequences: Sequences, inds: Tensor, size: int) -> Iterator[Tensor]:
    """This rank's micro-batches of sequences[inds]: inds (b,), b <= size. Groups of rows with one
    prompt are dealt to the ranks in turn, those with the most tokens first; they stay neighbours,
    since prompts.py reads the prompt once. All ranks get equally many micro-batches, as FSDP runs
    every forward pass on all ranks; the last may be empty.
    """
    groups = defaultdict(list)
    for i in inds.tolist():
        prompt, _ = sequences[i]
        # A prompt of one token, such as a BOS that all rows have, makes no group.
        groups[tuple(prompt) if len(prompt) > 1 else i].append(i)

    def num_tokens(group: list[int]) -> int:
        return len(sequences[group[0]][0]) + sum(len(sequences[i][1]) for i in group)

    groups = sorted(groups.values(), key=num_tokens, reverse=True)
    # Like cards: group 0 to rank 0, 1 to rank 1, ...; then the ranks' hands one after the other.
    in_turn = [group for rank in range(WORLD_SIZE) for group in groups[rank::WORLD_SIZE]]
    rows = torch.tensor([i for group in in_turn for i in group], dtype=torch.long)
    of_ranks = rows.tensor_split(WORLD_SIZE)  # equally many rows, so a group may be cut
    for start in range(0, max(1, len(of_ranks[0])), size):
        yield of_ranks[RANK][start : start + size]


# --- from hidden states to logits --------------------------------------------------------------
class OutputHead(NamedTuple):
    """logits = scale (W h + b), or cap tanh(scale (W h + b) / cap)."""

    weight: Tensor  # W (V, d)
    cast_weight: Tensor  # the same for products, on a GPU in bfloat16
    bias: Tensor | None  # b (V,)
    scale: float
    cap: float | None


def head_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """Logits (n, V), float32, of n hidden states (n, d)."""
    with torch.autocast(hidden.device.type, enabled=False):
        if head.cast_weight.dtype == torch.bfloat16:
            logits = Bfloat16Product.apply(hidden.bfloat16(), head.weight, head.cast_weight)
        else:
            logits = hidden.to(head.weight.dtype) @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    if head.scale != 1:
        logits = logits * head.scale
    return head.cap * (logits / head.cap).tanh() if head.cap else logits


class Bfloat16Product(torch.autograd.Function):
    """CUDA-only: H W^T of bfloat16 factors, summed in float32, for which torch has no derivative.
    The gradient of W is in the type that W had before it was cast.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, cast_weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, cast_weight)
        if hidden.is_cuda:
            return torch.mm(hidden, cast_weight.T, out_dtype=torch.float32)
        return hidden.float() @ cast_weight.float().T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, cast_weight = ctx.saved_tensors
        grad = grad.bfloat16()
        return grad @ cast_weight, grad.T @ hidden if ctx.needs_input_grad[1] else None, None


def output_head(model: Any) -> OutputHead:
    """The output head, tried once; a ValueError if `OutputHead` cannot express it."""
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    cast_weight = module.weight.detach()
    if use_bfloat16(cast_weight.device):
        cast_weight = cast_weight.bfloat16()
    head = OutputHead(module.weight, cast_weight, module.bias, scale, cap)
    if not hasattr(model, "head_is_known"):
        inputs = {"input_ids": torch.tensor([[1, 2]], device=model.device), "use_cache": False}
        uncast = head._replace(cast_weight=head.weight)

        # Not model(...): sharded, it would begin a forward pass within the one that is running.
        def of_model() -> Tensor:
            return model.forward(**inputs).logits[0].float()

        def of_head() -> Tensor:
            return head_logits(backbone(model).forward(**inputs).last_hidden_state[0], uncast)

        if failure := failure_of(model, of_head, of_model, of_model):
            raise ValueError(f"the output head of {type(model).__name__} is not known: {failure}")
        model.head_is_known = True
    return head
