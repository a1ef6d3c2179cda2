"""Tiny randomly initialised models of several architectures, for the tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, PreTrainedModel

VOCAB = 50

_TINY = {  # GPT-2 has names of its own for these, and takes both
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


def tiny_config(architecture: str, **overrides):
    settings = _TINY | ({"head_dim": 8} if architecture == "gemma2" else {})
    return AutoConfig.for_model(architecture, **settings | overrides)


def tiny_model(architecture: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A model in float32 and eval mode; `overrides` go to its config."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides)).eval()


def tiny_classifier(architecture: str, **overrides) -> PreTrainedModel:
    """Its head gives one number, as that of a reward model or a critic."""
    torch.manual_seed(0)
    config = tiny_config(architecture, num_labels=1, **overrides)
    return AutoModelForSequenceClassification.from_config(config).eval()


# --- one small model of each family ---------------------------------------------------------------

# What configurations call the sizes; each takes those that it knows.
_SIZES = {
    32: "hidden_size n_embd d_model dim embed_dim word_embed_proj_dim lru_width "
    "moe_intermediate_size shared_expert_intermediate_size",
    64: "intermediate_size max_position_embeddings n_positions n_ctx max_seq_len ffn_hidden_size "
    "ffn_dim decoder_ffn_dim encoder_ffn_dim dff",
    2: "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads "
    "num_experts num_local_experts n_routed_experts linear_num_value_heads rotary_dim "
    "time_step_rank conv_kernel",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_n_heads mamba_d_head mamba_d_state mamba_num_heads "
    "mamba_head_dim ssm_state_size state_size chunk_size num_heads",
    16: "q_lora_rank kv_lora_rank",
    1: "n_group topk_group first_k_dense_replace n_groups mamba_n_groups",
    None: "bos_token_id eos_token_id pad_token_id",
    False: "tie_word_embeddings",
    VOCAB: "vocab_size",
}
_DEEPSEEK = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_WINDOW = {"sliding_window": 3}
_CONV = {"layer_types": ["conv", "full_attention"]}
_MLLAMA = dict(num_hidden_layers=3, cross_attention_layers=[1], bos_token_id=1, eos_token_id=2)
_MLLAMA["pad_token_id"] = 0
# Attention with keys and values only.
_ATTENTION = {
    name: {}
    for name in "Apertus BioGpt Bloom CodeGen Cohere Exaone4 Falcon Gemma Glm4 GPT2 GPTJ GPTNeoX "
    "Granite GraniteMoe Llama MiniMaxM2 Mistral Mixtral Mpt NanoChat Nemotron Olmo2 Olmoe OPT Phi "
    "Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2 Whisper XGLM".split()
} | {
    "Cohere2": _WINDOW,
    "Gemma2": _WINDOW,
    "Gemma3": _WINDOW,
    "Gemma3n": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=None,
        intermediate_size=64,
    ),
    "GptOss": _WINDOW,
    "DeepseekV2": _DEEPSEEK,
    "DeepseekV3": _DEEPSEEK,
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "Mllama": _MLLAMA,
}
# Linear attention, state spaces, convolutions, alone or between layers of attention.
_RECURRENT = {
    "BailingHybrid": _DEEPSEEK | _HYBRID,
    "Bamba": {"attn_layer_indices": [1]},
    "FalconH1": {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": _HYBRID,
    "Jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_dt_rank=4),
    "Lfm2": _CONV,
    "Lfm2Moe": _CONV | {"num_dense_layers": 1},
    "Mamba2": {},
    "NemotronH": {},
    "OlmoHybrid": _HYBRID,
    "Qwen3Next": _HYBRID,
    "Qwen3_5": _HYBRID,
    "Qwen3_5Moe": _HYBRID,
    "Zaya": {"num_experts_per_tok": 1},
}
# Whose rows cannot be padded on the left and dropped: `generate` refuses them.
_APART = {
    "Bart": {},
    "DeepseekV4": {},
    "FalconMamba": {},
    "Mamba": {},
    "MiniMax": {},
}
FREE = [*_ATTENTION, *_RECURRENT]
# Whose cache `generate` makes static on a GPU: no sliding windows, no states.
_WINDOWS = "Exaone4 Mistral Cohere2 Gemma2 Gemma3 Gemma3n GptOss"
STATIC = [n for n in _ATTENTION if n not in _WINDOWS.split()]
APART = [*_APART]
# One of each kind of positions, cache and head; the other families are `slow`.
ARCHETYPES = (
    "Llama Qwen2 GPT2 OPT Bloom Falcon Mistral Gemma2 Cohere Mixtral DeepseekV3 Mllama Qwen3Next "
    "GraniteMoeHybrid Mamba2 Mamba Bart"
).split()
# Models that cannot be sampled from: they keep their state to themselves, or have no cache, or mix
# up the rows of a batch.
REFUSED = ["OpenAIGPTLMHeadModel", "Rwkv"]  # but their log-probs are right
_SETTINGS = _ATTENTION | _RECURRENT | _APART
_SETTINGS["BertLMHeadModel"] = {"is_decoder": True}


def _small_config(config_class, settings):
    default, names = config_class(), config_class.attribute_map
    sizes = {name: size for size, words in _SIZES.items() for name in words.split()}
    sizes = {
        name: size
        for name, size in sizes.items()
        if (hasattr(default, name) or size is None)
        and not isinstance(getattr(config_class, name, None), property)
        and names.get(name) not in sizes
    }
    if hasattr(default, "layer_types") and "layer_types" in settings:
        sizes["num_hidden_layers"] = len(settings["layer_types"])
    return config_class(**(sizes | settings))


def some_slow(names: list, fast: list = ARCHETYPES, mark: Any = pytest.mark.slow) -> list:
    """Parameters of a test, of which those that are not fast have the mark."""
    return [pytest.param(name, marks=[mark] * (name not in fast)) for name in names]


def some_wide(names: list, fast: list) -> list:
    """The same for parameters that `python -m pytest -m wide` adds."""
    return some_slow(names, fast, pytest.mark.wide)


def family_model(name: str) -> PreTrainedModel:
    """A small random model; its output depends on the whole context."""
    full = name if name.endswith("Model") else name + "ForCausalLM"
    model_class = getattr(transformers, {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(full, full))
    config = _small_config(model_class.config_class, _SETTINGS.get(name, {}))
    torch.manual_seed(0)
    model = model_class(config).eval()
    assert model.num_parameters() < 3e6
    generator = torch.Generator().manual_seed(1)
    for parameter_name, weight in model.named_parameters():
        if weight.dim() > 1 and weight.std() < 0.15 and "A_log" not in parameter_name:
            weight.data.normal_(0, 0.2, generator=generator)
    return model


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> str:
    """With a tokenizer, or that of another folder; returns the name of the folder."""
    model.save_pretrained(folder)
    if isinstance(tokenizer, str):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    tokenizer.save_pretrained(folder)
    return str(folder)


# For the tokenizer of tiny/reviews: a review follows `the :`, and after its end comes a full stop,
# which is never sampled.
CHAT = (
    "<bos>{% for m in messages %}{% if m['role'] == 'assistant' %} the :{% endif %}"
    " {{ m['content'] }} <eos> .{% endfor %}{% if add_generation_prompt %} the :{% endif %}"
)
