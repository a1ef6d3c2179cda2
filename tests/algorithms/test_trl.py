"""Gradients beside those of TRL's trainers (needs the `bench` extra)."""

import copy

import pytest
import torch
from datasets import Dataset
from reviews import POLICY, plain_model
from runs import read
from transformers import AutoTokenizer

import dpo
import grpo
import grpo_variants
import reinforce
from common.logprobs import completion_logprobs

trl = pytest.importorskip("trl", reason="pip install -e '.[bench]'")


def first_rows(task, columns):
    rows = read(f"tiny/reviews/{task}/train.jsonl")[:4]
    return [{column: row[column] for column in columns} for row in rows]


def settings(tmp_path):
    return dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )


@pytest.mark.parametrize(
    ("loss", "beta"), [("sigmoid", 0.3), ("sigmoid_norm", 5.0), ("apo_zero", 0.3)]
)
def test_dpo(loss, beta, tmp_path):
    rows = first_rows("preferences", ["prompt", "chosen", "rejected"])
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    reference, policy = plain_model(), plain_model()
    torch.manual_seed(2)
    for weight in policy.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    trainer = trl.DPOTrainer(
        model=copy.deepcopy(policy),
        ref_model=plain_model(),
        args=trl.DPOConfig(beta=beta, loss_type=loss, **settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, batch)
    expected.backward()

    args = dpo.Args(train_split="train[:4]", loss=loss)
    pairs = dpo.load_preference_pairs(args, "train[:4]", tokenizer, [tokenizer.eos_token_id])
    sequences = [sequence for pair in pairs for sequence in pair.sequences()]
    lengths = torch.tensor([[len(pair.chosen_ids), len(pair.rejected_ids)] for pair in pairs])
    inds = torch.arange(len(pairs))
    with torch.no_grad():
        ref_logprobs = dpo.pair_logprobs(reference, sequences, inds)
    logprobs = dpo.pair_logprobs(policy, sequences, inds)
    losses, _ = dpo.pair_losses(args, logprobs, ref_logprobs, lengths)
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(policy.parameters(), trainer.model.parameters(), strict=True):
        assert theirs.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


# --- grpo.py and grpo_variants.py ---------------------------------------------------------------
RECIPES = {
    "clip": (dict(loss_type="grpo"), {}, "sequence"),
    # TRL bounds the ratio by epsilon_high itself, and not from below; ours is 1 + clip_high.
    "cispo": (
        dict(loss_type="cispo", epsilon_high=1.05),
        dict(loss_type="cispo", clip_low=1.0, clip_high=0.05),
        "token",
    ),
    "KL": (
        dict(loss_type="grpo", use_bias_correction_kl=False, beta=0.3),
        dict(beta=0.3),
        "sequence",
    ),
    "unbiased": (
        dict(loss_type="grpo", use_bias_correction_kl=True, beta=0.3),
        dict(unbiased_kl=True, beta=0.3),
        "sequence",
    ),
    "batch": (dict(loss_type="grpo", scale_rewards="batch"), {}, "sequence"),
    "sapo": (dict(loss_type="sapo"), dict(loss_type="sapo"), "sequence"),
    "luspo": (
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        dict(level="sequence"),
        "constant",
    ),
}


def letters(rewards):
    """A reward that differs within and between groups, and is noted."""

    def num_letters(completions, **columns):
        rewards.extend(float(len({*text})) for text in completions)
        return rewards

    return num_letters


def sequences_of(inputs):
    """Prompts and completions without TRL's padding."""
    prompts = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
    completions = zip(inputs["completion_ids"], inputs["completion_mask"].bool(), strict=True)
    rows = [[ids[mask].tolist() for ids, mask in side] for side in (prompts, completions)]
    return [*zip(*rows, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_grpo(recipe, tmp_path):
    """The second of two optimiser steps on one rollout, after a first one with a high rate."""
    theirs, ours, norm = RECIPES[recipe]
    config = trl.GRPOConfig(
        **settings(tmp_path)
        | dict(per_device_train_batch_size=8, max_steps=2, learning_rate=3e-3)
        | dict(num_generations=4, num_iterations=2, max_completion_length=8, max_grad_norm=1e9)
        | dict(weight_decay=0.0, lr_scheduler_type="constant", save_strategy="no")
        | theirs
    )
    rewards = []
    rows = Dataset.from_list(first_rows("prompts", ["prompt"]))
    trainer = trl.GRPOTrainer(plain_model(), letters(rewards), args=config, train_dataset=rows)
    compute, seen = trainer._compute_loss, []

    def watch(model, inputs):
        loss = compute(model, inputs)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        seen.append((inputs, weights, torch.autograd.grad(loss, parameters, retain_graph=True)))
        return loss

    trainer._compute_loss = watch
    trainer.train()
    (first, _, _), (inputs, weights, expected) = seen
    assert torch.equal(first["completion_ids"], inputs["completion_ids"])

    policy = plain_model()
    policy.load_state_dict(weights, strict=False)
    mask, advantages = inputs["completion_mask"].bool(), inputs["advantages"]
    scale = theirs.get("scale_rewards", "group")
    ours_sorted = grpo_variants.scaled_advantages(torch.tensor(rewards), 4, scale).sort().values
    torch.testing.assert_close(ours_sorted, advantages.sort().values)  # TRL shuffles them
    logprobs = completion_logprobs(policy, sequences_of(inputs), torch.arange(8))
    width = logprobs.shape[1]
    mask, old = mask[:, :width], inputs["old_per_token_logps"][:, :width]
    ref = inputs["ref_per_token_logps"][:, :width] if "beta" in theirs else None
    coefs = dict(clip_low=0.2, clip_high=0.2, beta=0.0) | ours
    losses, _ = grpo_variants.variant_loss(logprobs, old, ref, advantages, mask, **coefs)
    if recipe in ("clip", "KL"):
        of_variants = losses
        losses, _ = grpo.grpo_loss(logprobs, old, ref, advantages, **coefs)
        assert torch.equal(losses, of_variants)
    weights = grpo.token_weights(mask, mask.sum(dim=1), norm, 1)  # LUSPO divides by no constant
    loss = (weights * losses).sum()
    assert not torch.allclose(logprobs[mask], old[mask], atol=1e-2)
    for found, gradient in zip(
        torch.autograd.grad(loss, policy.parameters()), expected, strict=True
    ):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found, gradient, atol=2e-6, rtol=1e-4)


def test_rloo(tmp_path):
    """The first step; TRL's loss has another value, since its ratio is 1."""
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8)
    config = trl.RLOOConfig(**settings(tmp_path) | sizes | dict(beta=0.0))
    rewards = []
    rows = Dataset.from_list(first_rows("prompts", ["prompt"]))
    trainer = trl.RLOOTrainer(plain_model(), letters(rewards), args=config, train_dataset=rows)
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(trainer.model, inputs).backward()

    policy = plain_model()
    advantages = reinforce.baseline_advantages(torch.tensor(rewards), 4, "leave_one_out")
    torch.testing.assert_close(advantages.sort().values, inputs["advantages"].sort().values)
    logprobs = completion_logprobs(policy, sequences_of(inputs), torch.arange(8))
    reinforce.policy_gradient_loss(logprobs, inputs["advantages"], 8).backward()
    for ours, theirs in zip(policy.parameters(), trainer.model.parameters(), strict=True):
        assert theirs.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-6, rtol=1e-4)
