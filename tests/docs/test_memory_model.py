"""Memory by algorithm: the formula against what each script holds, against transformers, and
against autograd. The tests of docs/explorer.html compare the page with the formula.
"""

import gc

import pytest
import torch
from scripts import SCRIPTS, short_flags
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from common.distributed import checkpoint_activations, transformer_layers
from common.logprobs import add_adapters
from docs.experiments.cost.memory_model import CONSTANTS, DEFAULTS, llama_sizes, memory, parameters

MODELS, ALGORITHMS = CONSTANTS["models"], CONSTANTS["algorithms"]
MIXED, FLOAT32 = CONSTANTS["precisions"]["mixed"], CONSTANTS["precisions"]["float32"]


# --- what a script holds -------------------------------------------------------------------------
WITH_REWARD_MODEL = dict(
    model="tiny/reviews/policy",
    dataset="tiny/reviews/prompts",
    eval_reward_fn="tiny/reviews/gold.py:sentiment",
    reward_model="tiny/reviews/reward_model",
)
A_RULE = dict(reward_model=None, reward_fn=["tiny/reviews/gold.py:sentiment"], critic_init="sft")
RUNS = {  # script and flags
    "sft": ("sft", {}),
    "rm": ("rm_bradley_terry", {}),
    "reinforce": ("reinforce", dict(beta=0.0)),
    "reinforce_kl": ("reinforce", dict(beta=0.1)),
    "ppo": ("ppo_rlhf", {}),
    "ppo_rule": ("ppo_rlhf", A_RULE),
    "ppo_shared": ("ppo_rlhf", dict(critic_init="policy")),
    "grpo": ("grpo", dict(beta=0.1)),
    "grpo_no_kl": ("grpo", dict(beta=0.0)),
    "grpo_rm": ("grpo", WITH_REWARD_MODEL | dict(beta=0.1)),
    "dpo": ("dpo", {}),
    "simpo": ("dpo", dict(loss="simpo", beta=2.5)),
    "kto": ("kto", {}),
}
TWO_STEPS = dict(train_split="train[:4]", eval_split="test[:2]", epochs=1.0, batch_size=2)
TWO_STEPS |= dict(total_rollouts=2, prompts_per_rollout=2, max_new_tokens=4, num_minibatches=1)


def live_storages():
    """Bytes of all tensors, by address."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [each.untyped_storage() for each in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


ALL_WEIGHTS = [(algorithm, 0) for algorithm in ALGORITHMS]
ADAPTERS = [(algorithm, 8) for algorithm in ("rm", "ppo", "ppo_shared", "grpo_rm", "dpo")]


@pytest.mark.parametrize(("algorithm", "lora_rank"), ALL_WEIGHTS + ADAPTERS)
def test_a_script_holds_what_the_formula_says(algorithm, lora_rank, tmp_path):
    """Weights, gradients and moments of all its models, after an optimiser step."""
    script, flags = SCRIPTS[RUNS[algorithm][0]], RUNS[algorithm][1]
    gc.collect()  # an earlier run's models, or their addresses would be taken again
    before, held = live_storages(), []

    def note(*_):
        now = live_storages()
        held.append(sum(size for address, size in now.items() if address not in before))

    hook = register_optimizer_step_post_hook(note)
    flags = short_flags(RUNS[algorithm][0], **TWO_STEPS) | flags
    script.main(script.Args(**flags, lora_rank=lora_rank, output_dir=str(tmp_path)))
    hook.remove()
    config = AutoConfig.from_pretrained(flags.get("model", script.Args.model))
    model = dict(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query=config.num_attention_heads * config.head_dim,
        kv=config.num_key_value_heads * config.head_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
    )
    work = DEFAULTS | {"lora_rank": lora_rank}
    parts = memory(model, ALGORITHMS[algorithm], FLOAT32, **work)["update"]
    core = sum(parts.values()) - parts["copies"] - parts["activations"]
    print(algorithm, lora_rank, max(held)/1e6, core/1e6, max(held)/core)
    assert max(held) == pytest.approx(core, rel=0.005)
