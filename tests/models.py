"""Tiny randomly initialised models of several architectures, for the tests."""

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 50

_ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # large, so that the output depends on the whole context
    # No special tokens: the tests pass their own.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, _ROTARY),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _ROTARY),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**_ROTARY, "head_dim": 8}),
    "granite": (GraniteForCausalLM, GraniteConfig, _ROTARY),
    "cohere": (CohereForCausalLM, CohereConfig, _ROTARY),
}


def tiny_config(architecture: str, **overrides):
    _, config_class, settings = _ARCHITECTURES[architecture]
    return config_class(**{**settings, **overrides})


def tiny_model(architecture: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model in float32 and eval mode; `overrides` go to its config."""
    torch.manual_seed(seed)
    return _ARCHITECTURES[architecture][0](tiny_config(architecture, **overrides)).eval()


# For the tokenizer of tiny/reviews: a review follows `the :`, and after its end comes a full stop,
# which is never sampled.
CHAT = (
    "<bos>{% for m in messages %}{% if m['role'] == 'assistant' %} the :{% endif %}"
    " {{ m['content'] }} <eos> .{% endfor %}{% if add_generation_prompt %} the :{% endif %}"
)
