"""A run is a function of its flags on several threads too, the default: sums have a fixed order."""

import hashlib

import pytest
import torch
from models import some_wide
from runs import run_and_resume
from scripts import SPECS, short_flags

# Rows that share prompts, and a micro-batch of them.
FEW = dict(total_rollouts=1, epochs=0.5, batch_size=8, micro_batch_size=16, group_size=8)
FEW |= dict(prompts_per_rollout=2, num_minibatches=1, update_epochs=1, eval_split="test[:2]")
FEW |= dict(eval_rows=2, max_new_tokens=16)
FLAGS = {
    **{name: {} for name in SPECS},
    "grpo lora": dict(lora_rank=4),
    "grpo activations": dict(activation_checkpointing=True),
    "ppo_rlhf lora": dict(lora_rank=4),
    "dpo activations": dict(activation_checkpointing=True),
}


@pytest.fixture
def threads():
    """More than cores: their order changes."""
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", some_wide([*FLAGS], fast=["sft", "ppo_rlhf", "grpo"]))
def test_equal_flags_give_equal_weights(case, tmp_path, threads):
    name = case.split()[0]
    script, digests = SPECS[name].module, set()
    flags = SPECS[name].short_flags | short_flags(name, **FEW) | FLAGS[case]
    for _ in range(3):
        run_dir = script.main(script.Args(output_dir=str(tmp_path), **flags))
        digests.add(hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("name", some_wide(["grpo", "sft", "ppo_rlhf"], fast=["grpo"]))
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path, threads):
    run_and_resume(SPECS[name].module, tmp_path, **SPECS[name].short_flags)
