"""Score completions under a model: the log-probability, and the entropy, of each sampled token."""

import weakref

import torch
from torch.utils.checkpoint import checkpoint

# The most logits that exist at one time: 2^25 float32 numbers are 128 MiB.
MAX_LOGITS = 2**25

_head_is_known: weakref.WeakSet = weakref.WeakSet()


def project(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Map final hidden states (N, d) to logits (N, V), as the model's own forward does."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def _check_head(model: torch.nn.Module, token: torch.Tensor) -> None:
    """Compare `project` with the model's own logits, once a model, on one real token (1, 1).

    Raises:
        ValueError: the architecture does something to its logits that `project` does not know.
    """
    if model in _head_is_known:
        return
    training = model.training
    model.eval()  # the two passes must not differ by dropout
    hidden = model.base_model(input_ids=token, use_cache=False).last_hidden_state[0]
    found = project(model, hidden).float()
    expected = model(input_ids=token, use_cache=False).logits[0].float()
    model.train(training)
    # Under autocast, weights cast here would be kept without a graph for the pass that follows.
    torch.clear_autocast_cache()
    if found.shape != expected.shape or (found - expected).norm() > 1e-3 * expected.norm():
        raise ValueError(
            f"completion_logprobs does not know the output head of {type(model).__name__}: its "
            "logits are not the output embedding of the last hidden state"
        )
    _head_is_known.add(model)


def _score_chunk(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    return_entropy: bool,
) -> tuple[torch.Tensor, ...]:
    """Log-probability, and entropy, (N,) of targets (N,) at hidden states (N, d), in nats."""
    logits = project(model, hidden).float()  # (N, V)
    if temperature != 1.0:
        logits = logits / temperature
    log_normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - log_normaliser
    if not return_entropy:
        return (logprobs,)
    # H = -sum p log p = log Z - sum p * logit
    return logprobs, log_normaliser - (logits.softmax(dim=-1) * logits).sum(dim=-1)


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

    The transformer runs over whole rows; the projection to the vocabulary, whose output is the
    largest tensor of all in a model with 150,000 tokens, runs at the completion's positions
    only, in chunks of at most `MAX_LOGITS` numbers which the backward pass computes again
    instead of keeping (activation checkpointing). The logits of a whole batch never exist.

    Args:
        model: a causal language model of transformers.
        input_ids: (B, L) token ids, padded on either side.
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
    # A token of padding would prove nothing: its embedding may be zero.
    _check_head(model, input_ids[attention_mask.bool()][:1, None])
    attention_mask = attention_mask.long()
    hidden = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        # Counted over real tokens, so that neither the side nor the amount of padding matters.
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state  # (B, L, d)

    scored = completion_mask[:, 1:].bool()  # the hidden state at t - 1 predicts token t
    hidden, targets = hidden[:, :-1][scored], input_ids[:, 1:][scored]  # (N, d), (N,)
    chunk = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    pieces = [
        checkpoint(
            _score_chunk,
            model,
            *piece,
            temperature,
            return_entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for piece in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    outputs = []
    for values in zip(*pieces, strict=True):
        out = torch.zeros(scored.shape, dtype=torch.float32, device=input_ids.device)
        out = out.masked_scatter(scored, torch.cat(values))
        outputs.append(torch.nn.functional.pad(out, (1, 0)))  # (B, L)
    return tuple(outputs) if return_entropy else outputs[0]
