"""The mathematics of grpo.py against derivations of its own, and the wiring of a real run. Whole
rollouts, and what is computed of them: test_grpo_variants.py.
"""

import math
from functools import partial

import algorithms
import pytest
import spies
import torch
from plain import plain_logprobs
from reviews import plain_model

import grpo
from grpo import group_advantages, grpo_loss, k3_kl, token_weights

POLICY = "tiny/arithmetic/policy"
# Groups of four completions of four prompts, and one step on them.
run = partial(algorithms.run, "grpo", train_split="train[:64]")
spy_on = partial(spies.spy_on, grpo)
spy_by_name = partial(spies.spy_by_name, grpo)


# --- passes -------------------------------------------------------------------------------------
# --- advantages ---------------------------------------------------------------------------------
def test_group_advantages_by_hand():
    # Group 1: mean 1/2, squared deviations 4 x 1/4, sample variance 1/3. Group 2: mean 2, variance
    # (4 + 0 + 0 + 4) / 3 = 8/3.
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    b = 2 / (math.sqrt(8 / 3) + 1e-4)
    expected = torch.tensor([a, -a, -a, a, -b, 0, 0, b])
    torch.testing.assert_close(group_advantages(rewards, 4), expected)
    unscaled = torch.tensor([0.5, -0.5, -0.5, 0.5, -2, 0, 0, 2])
    torch.testing.assert_close(group_advantages(rewards, 4, scale="none"), unscaled)
    # In float32 the mean of these would be off by 4.
    assert group_advantages(torch.tensor([1e8, 1e8 + 8]), 2, scale="none").tolist() == [-4, 4]


@pytest.mark.parametrize("reciprocal", [False, True])
def test_equal_rewards_give_exactly_zero(monkeypatch, reciprocal):
    if reciprocal:  # CUDA multiplies by 1/n, rounded, where a mean or a number n divides

        def times_reciprocal(x, dim, keepdim):
            return x.sum(dim=dim, keepdim=keepdim) * (1 / x.shape[dim])

        def divide(x, y):
            return x * y.reciprocal() if torch.is_tensor(y) else x * (1 / y)

        monkeypatch.setattr(torch.Tensor, "mean", times_reciprocal)
        monkeypatch.setattr(torch.Tensor, "__truediv__", divide)
    values = torch.tensor([0.0, 0.1, -0.7, 1 / 3, 3e-39, 123456.789, -7.77e18])
    for group_size in range(2, 257):
        advantages = group_advantages(values.repeat_interleave(group_size), group_size)
        assert (advantages == 0).all(), group_size


# --- clipping -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 1.28 * 2, 0.0),  # above, to be raised: clipped, no gradient
        (1.5, -2.0, 1.5 * -2, 1.5 * -2),  # above, to be lowered: free
        (0.5, 2.0, 0.5 * 2, 0.5 * 2),  # below, to be raised: free
        (0.5, -2.0, 0.8 * -2, 0.0),  # below, to be lowered: clipped, no gradient
        (1.1, 2.0, 1.1 * 2, 1.1 * 2),  # inside
        (1.25, 2.0, 1.25 * 2, 1.25 * 2),  # above 1 + clip_low, inside 1 + clip_high
    ],
)
def test_clipping_in_each_sign_and_side(ratio, advantage, value, gradient):
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    arguments = (torch.zeros(1, 1), None, torch.tensor([advantage]))
    loss, _ = grpo_loss(log_ratio, *arguments, clip_low=0.2, clip_high=0.28)
    assert -loss.item() == pytest.approx(value)
    (-loss).backward()
    assert log_ratio.grad.item() == pytest.approx(gradient)  # d(rho A)/d(log rho) = rho A


# --- k3 -----------------------------------------------------------------------------------------
def test_k3_value_sign_and_gradient_by_enumeration():
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), torch.randn(7, dtype=torch.float64).log_softmax(0)
    p, q = logp.detach().exp(), ref.exp()

    per_token = k3_kl(logp, ref)
    assert (per_token > 0).all()  # never negative, whichever token is drawn
    kl = (p * (p / q).log()).sum()  # KL(pi || pi_ref)
    torch.testing.assert_close((p * per_token).sum().detach(), kl)
    assert (k3_kl(ref, ref) == 0).all()

    # Gradient of the expectation over tokens drawn from pi: that of KL(pi_ref || pi), whose
    # derivative with respect to the logits is pi - pi_ref.
    (p * per_token).sum().backward()
    torch.testing.assert_close(logits.grad, p - q)


def test_k3_near_0_in_float32():
    """exp(x) - x - 1 would be off by 6e-8, and as often below 0 as above."""
    log_ratios = torch.linspace(-1e-3, 1e-3, 100_001)
    k3 = k3_kl(torch.zeros(()), log_ratios)
    assert (k3 >= 0).all()
    exact = log_ratios.double().square() / 2 + log_ratios.double() ** 3 / 6
    torch.testing.assert_close(k3.double(), exact, atol=1e-10, rtol=0)


# --- the whole loss -----------------------------------------------------------------------------
def test_loss_metrics_by_hand():
    # Rows to be raised, to be lowered and to be left alone; the last column is padding.
    ratio = torch.tensor([[1.5, 1.25, 0.25, 0.75, 1.0]]).repeat(3, 1)
    advantages, zeros = torch.tensor([0.5, -0.5, 0.0]), torch.zeros(3, 5)
    _, sums = grpo_loss(ratio.log(), zeros, None, advantages, clip_low=0.2, clip_high=0.3)
    assert sums["policy/clip_fraction_high"] == 1  # 1.5 in row 0, above 1.3
    assert sums["policy/clip_fraction_low"] == 2  # 0.25 and 0.75 in row 1, below 0.8
    # KL(pi_old || pi) by k3 on tokens of pi_old: ratio - 1 - log ratio
    expected = 3 * sum(r - 1 - math.log(r) for r in (1.5, 1.25, 0.25, 0.75))
    assert sums["policy/approx_kl"].item() == pytest.approx(expected, rel=1e-5)


def test_token_weights_by_hand():
    mask = torch.tensor([[True, False, False], [True, True, True]])  # four tokens
    expected = {
        "sequence": mask * torch.tensor([[1 / 2], [1 / 6]]),
        "token": mask / 4,
        "constant": mask / 10,
    }
    for norm, weights in expected.items():
        torch.testing.assert_close(token_weights(mask, mask.sum(dim=1), norm, 5), weights)
        for row in (0, 1):  # micro-batches of the same step
            found = token_weights(mask[row : row + 1], mask.sum(dim=1), norm, 5)
            torch.testing.assert_close(found, weights[row : row + 1])
        # None of a rank's own; and a step whose completions are all left out.
        assert token_weights(mask[:0], mask.sum(dim=1), norm, 5).shape == (0, 3)
        assert token_weights(mask[:0], mask[:0].sum(dim=1), norm, 5).shape == (0, 3)


# --- the loop -----------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [dict(num_minibatches=2), dict(update_epochs=2)])
def test_ratio_is_one_before_any_update_and_log_probs_are_those_sampled_from(
    flags, tmp_path, monkeypatch
):
    rollouts, calls = spy_on(monkeypatch, "generate"), spy_by_name(monkeypatch, "grpo_loss")
    run(tmp_path, temperature=0.6, prompts_per_rollout=8, micro_batch_size=8, **flags)
    first_step, passes = (2, 1) if "num_minibatches" in flags else (4, 2)
    assert len(calls) == 4 * passes  # micro-batches of two steps
    for number, call in enumerate(calls):
        same = torch.equal(call["logprobs"], call["old_logprobs"])
        assert same == (number < first_step), "exactly 1 before the first step, and never again"
    assert calls[0]["result"][1]["policy/approx_kl"] == 0
    assert all((call["old_logprobs"] < 0).any() for call in calls)
    # The reference is still the same model.
    assert all(torch.equal(call["ref_logprobs"], call["old_logprobs"]) for call in calls)

    # All old log-probs, by a plain forward pass of the untouched policy.
    policy, expected = plain_model(POLICY), []
    _, (_, (sampled, _)), *_ = rollouts  # evaluation, rollout, evaluation
    with torch.no_grad():
        for prompt, completion in sampled:
            expected += plain_logprobs(policy, prompt, completion, 0.6)[0].tolist()
    found = [x for call in calls for x in call["old_logprobs"].flatten().tolist()]
    padding = len(found) - len(expected * passes)  # 0, the largest that a log-prob can be
    assert sorted(found) == pytest.approx(sorted(expected * passes) + [0] * padding, abs=1e-4)
