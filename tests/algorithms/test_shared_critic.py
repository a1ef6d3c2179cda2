"""ppo_rlhf.py --critic-init policy: a value head on the policy's own backbone."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_rlhf
from common.logprobs import plain_logprobs
from ppo_rlhf import Args, load_critic

CPU = torch.device("cpu")
SMALL = dict(
    critic_init="policy",
    total_rollouts=2,
    prompts_per_rollout=8,
    max_new_tokens=12,
    num_minibatches=1,
    update_epochs=1,
    eval_rows=2,
    eval_every=9,
    micro_batch_size=3,
    max_grad_norm=1e9,
    vf_coef=0.7,
)


def run(tmp_path, **flags):
    return ppo_rlhf.main(Args(output_dir=str(tmp_path), **{**SMALL, **flags}))


def head_of(seed):
    args = Args(critic_init="policy", seed=seed)
    return load_critic(args, AutoTokenizer.from_pretrained(args.model), 104, CPU)


def test_the_critic_is_one_linear_head_drawn_by_the_seed():
    head, same, other = (head_of(seed) for seed in (3, 3, 4))
    assert isinstance(head, torch.nn.Linear) and head.weight.shape == (1, 128)
    assert torch.equal(head.weight, same.weight) and not torch.equal(head.weight, other.weight)
    assert head.weight.std().item() == pytest.approx(129**-0.5, rel=0.3)


def test_one_step_has_the_gradient_of_one_joint_loss(tmp_path, monkeypatch):
    """- mean_t A_t log pi_t + vf_coef mean_t 1/2 (V_t - R_t)^2, in plain loops over one model.

    In the first step all ratios are 1 and V_t is V_old: nothing is clipped.
    """
    seen, gradients = {}, []
    gae, clip_grad_norm = ppo_rlhf.gae, ppo_rlhf.clip_grad_norm
    generate = ppo_rlhf.generate
    batches = []

    def spy_on_generate(model, prompts, **options):
        completions = generate(model, prompts, **options)
        batches.append(list(zip(prompts, completions, strict=True)))
        return completions

    def spy_on_gae(*args, **kwargs):
        seen["advantages"], seen["returns"] = gae(*args, **kwargs)
        return seen["advantages"], seen["returns"]

    def spy_on_clip(model, *args):
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return clip_grad_norm(model, *args)

    monkeypatch.setattr(ppo_rlhf, "generate", spy_on_generate)
    monkeypatch.setattr(ppo_rlhf, "gae", spy_on_gae)
    monkeypatch.setattr(ppo_rlhf, "clip_grad_norm", spy_on_clip)
    run(tmp_path, total_rollouts=1, whiten_advantages=False, beta=0.0)

    model = AutoModelForCausalLM.from_pretrained(Args().model, dtype=torch.float32).eval()
    head = head_of(seed=1)
    sequences = batches[1]  # the first ones are of the evaluation
    num_tokens = sum(len(completion) for _, completion in sequences)
    for row, (prompt, completion) in enumerate(sequences):
        ids = torch.tensor([prompt + completion])
        logprobs, _ = plain_logprobs(model, prompt, completion)
        hidden = model.base_model(ids).last_hidden_state[0]
        loss = 0.0
        for t in range(len(completion)):
            value = hidden[len(prompt) + t - 1] @ head.weight[0]
            loss = loss - seen["advantages"][row, t] * logprobs[t]
            loss = loss + SMALL["vf_coef"] * 0.5 * (value - seen["returns"][row, t]).square()
        (loss / num_tokens).backward()
    of_policy, of_head = gradients
    for name, parameter in model.named_parameters():
        if name in of_policy:
            torch.testing.assert_close(of_policy[name], parameter.grad, atol=2e-6, rtol=1e-3)
    torch.testing.assert_close(of_head["weight"], head.weight.grad, atol=2e-6, rtol=1e-3)


def test_the_value_loss_trains_the_policys_backbone(tmp_path):
    """With vf_coef 0 the weights are others: it is not a head on frozen features."""
    with_loss = load_file(run(tmp_path / "a") / "model.safetensors")
    without = load_file(run(tmp_path / "b", vf_coef=0.0) / "model.safetensors")
    assert not any(torch.equal(with_loss[key], without[key]) for key in with_loss)


def test_the_saved_model_is_the_policy_alone_and_the_run_resumes_to_the_same_bits(tmp_path):
    whole = run(tmp_path / "whole", save_every=1)
    _, last = sorted(whole.glob("checkpoint_*.pt"))
    weights, _ = torch.load(last, weights_only=True)["critic"]
    assert [*weights] == ["weight"]
    _, info = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]

    expected, lines = load_file(whole / "model.safetensors"), (whole / "metrics.jsonl").read_text()
    last.unlink()  # a run that stopped after its first rollout, some time after its checkpoint
    resumed = ppo_rlhf.main(ppo_rlhf.parse_args(["--resume", str(whole)]))
    found = load_file(resumed / "model.safetensors")
    assert resumed == whole
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    for row, other in zip(
        map(json.loads, lines.splitlines()),
        map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()),
        strict=True,
    ):
        assert all(row[key] == other[key] for key in row if not key.startswith("time/"))
