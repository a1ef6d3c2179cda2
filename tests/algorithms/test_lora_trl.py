"""Gradients of adapters beside TRL's trainers with peft (needs the `bench` extra)."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import sft
from common.logprobs import adapters_off, add_adapters, completion_logprobs

trl = pytest.importorskip("trl", reason="pip install -e '.[bench]'")
peft = pytest.importorskip("peft")
POLICY = "tiny/reviews/policy"


def first_rows(task, columns):
    with open(f"tiny/reviews/{task}/train.jsonl") as file:
        rows = [json.loads(line) for line in file][:4]
    return [{column: row[column] for column in columns} for row in rows]


def load_policy():
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


def with_same_adapters(theirs):
    """Our policy with random adapters, which TRL's receives too."""
    policy = load_policy()
    add_adapters(policy, 4, seed=1)
    torch.manual_seed(2)
    ours = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert {name.removeprefix("base_model.model.") for name in trained} == ours.keys()
    for p in ours.values():
        torch.nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(ours[name.removeprefix("base_model.model.")])
    return policy


def check(policy, our_loss, trainer):
    """Both losses' gradients, on the batch that TRL's trainer makes."""
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    our_loss.backward()
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    ours = dict(policy.named_parameters())
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            found = ours[name.removeprefix("base_model.model.")].grad
            assert p.grad.abs().max() > 0
            torch.testing.assert_close(found, p.grad, atol=1e-6, rtol=1e-4)


def settings(tmp_path):
    return dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )


LORA = dict(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def test_dpo(tmp_path):
    rows = first_rows("preferences", ["prompt", "chosen", "rejected"])
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    trainer = trl.DPOTrainer(
        model=load_policy(),
        args=trl.DPOConfig(beta=0.3, **settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )
    policy = with_same_adapters(trainer.model)
    args = dpo.Args(train_split="train[:4]")
    pairs = dpo.load_preference_pairs(args, "train[:4]", tokenizer, [tokenizer.eos_token_id])
    sequences, lengths = dpo.to_sequences(pairs, policy.device)
    inds = torch.arange(len(pairs))
    with torch.no_grad(), adapters_off(policy):
        ref_logprobs = dpo.pair_logprobs(policy, sequences, inds)
    logprobs = dpo.pair_logprobs(policy, sequences, inds)
    losses, _ = dpo.pair_losses(args, logprobs, ref_logprobs, lengths)
    check(policy, losses.mean(), trainer)


def test_sft(tmp_path):
    rows = first_rows("sft", ["prompt", "completion"])
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    trainer = trl.SFTTrainer(
        model=load_policy(),
        args=trl.SFTConfig(completion_only_loss=True, **settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )
    policy = with_same_adapters(trainer.model)
    args = sft.Args(dataset="tiny/reviews/sft")
    data = sft.load_demonstrations(args, "train[:4]", tokenizer, [tokenizer.eos_token_id])
    sequences = sft.loss_sequences(args, data)
    logprobs = completion_logprobs(policy, sequences, torch.arange(len(data)))
    num_tokens = sum(len(completion) for _, completion in sequences)
    check(policy, sft.negative_log_likelihood(logprobs, num_tokens), trainer)
