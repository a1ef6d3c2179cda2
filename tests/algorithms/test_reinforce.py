"""The mathematics of reinforce.py against enumerations, its identity with GRPO, a real run."""

import itertools
import math
from fractions import Fraction
from functools import partial

import algorithms
import pytest
import spies
import torch
from algorithms import assert_same_gradient, set_weights
from plain import plain_logprobs
from reviews import plain_model
from spies import watch_steps

import grpo
import reinforce
from reinforce import Args, baseline_advantages, policy_gradient_loss
from runs import metrics_of

BASELINES = ["none", "batch_mean", "leave_one_out"]
run = partial(algorithms.run, "reinforce", train_split="train[:64]")
spy_on = partial(spies.spy_on, reinforce)


# --- advantages -----------------------------------------------------------------------------------
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_equal_plain_loops(baseline):
    k = 3
    returns = torch.randn(4 * k, generator=torch.Generator().manual_seed(0))
    exact = [Fraction(value) for value in returns.tolist()]
    for i, found in enumerate(baseline_advantages(returns, k, baseline).tolist()):
        if baseline == "none":
            b = 0
        elif baseline == "batch_mean":
            b = sum(exact) / len(exact)
        else:
            others = [j for j in range(len(exact)) if j // k == i // k and j != i]
            b = sum(exact[j] for j in others) / len(others)
        assert found == pytest.approx(float(exact[i] - b), rel=1e-6)


@pytest.mark.parametrize("baseline", ["batch_mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(baseline):
    for k in (2, 3, 7, 64):
        assert baseline_advantages(torch.full([k], 0.1), k, baseline).eq(0).all()


# --- the gradient, by enumeration -----------------------------------------------------------------
# A policy of one parameter per context over completions of one or two tokens; 0 ends them.
COMPLETIONS = [[0], *([first, second] for first in (1, 2) for second in (0, 1, 2))]
REWARDS = dict(zip(map(tuple, COMPLETIONS), [1.0, 3.0, 2.0, 2.5, 4.0, 1.5, 3.5], strict=True))


def token_logprobs(logits, completion):
    """Log-probs of a completion's tokens, 0 after its end: context 0, then the first token's."""
    table = logits.log_softmax(dim=1)
    found = [table[0, completion[0]]]
    found += [table[completion[0], completion[1]]] if len(completion) > 1 else []
    return torch.stack([*found, *[torch.zeros(()).double()] * (2 - len(found))])


def probability(logits, completion):
    return token_logprobs(logits, completion).sum().exp()


@pytest.mark.parametrize(
    ("baseline", "factor"), [("none", 1), ("batch_mean", 1 / 2), ("leave_one_out", 1)]
)
def test_the_expected_estimate_is_the_gradient_of_the_expected_reward(baseline, factor):
    """Over all pairs of completions, each with its chance. batch_mean: each return is a part of its
    own baseline, hence (B - 1) / B, here 1 / 2.
    """
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = sum(probability(logits, o) * REWARDS[tuple(o)] for o in COMPLETIONS)
    (exact,) = torch.autograd.grad(expected, logits)
    found = torch.zeros_like(logits)
    for pair in itertools.product(COMPLETIONS, repeat=2):
        chance = math.prod(probability(logits, o).item() for o in pair)
        returns = torch.tensor([REWARDS[tuple(o)] for o in pair])
        advantages = baseline_advantages(returns, 2, baseline)
        logprobs = torch.stack([token_logprobs(logits, o) for o in pair])
        loss = policy_gradient_loss(logprobs, advantages, num_completions=2)
        (gradient,) = torch.autograd.grad(-loss, logits)
        found += chance * gradient
    torch.testing.assert_close(found, factor * exact, rtol=1e-6, atol=1e-8)


# --- the identity with GRPO -----------------------------------------------------------------------
def test_grpo_with_the_pages_flags_has_this_gradient():
    """(k - 1) / (k max_new_tokens) of it, where pi_old is pi: docs/grpo.md."""
    logprobs = -torch.rand(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(5) < torch.tensor([5, 2, 4, 1] * 3)[:, None]
    logprobs, rewards = (logprobs * mask).requires_grad_(), torch.arange(12.0) ** 2 % 7
    ours = policy_gradient_loss(logprobs, baseline_advantages(rewards, 4, "leave_one_out"), 12)
    advantages = grpo.group_advantages(rewards, 4, scale="none")
    old = logprobs.detach()
    losses, _ = grpo.grpo_loss(logprobs, old, None, advantages, clip_low=0.2, clip_high=0.2)
    weights = grpo.token_weights(mask, mask.sum(dim=1), "constant", max_new_tokens=5)
    (expected,) = torch.autograd.grad(ours, logprobs)
    (found,) = torch.autograd.grad((weights * losses).sum(), logprobs)
    torch.testing.assert_close(found[mask], (4 - 1) / (4 * 5) * expected[mask])


# --- a run ----------------------------------------------------------------------------------------
def test_gradient_and_metrics_of_a_rollout_are_those_of_one_completion_at_a_time(
    tmp_path, monkeypatch
):
    """The second rollout: of the first nothing is left."""
    sampled, judged = spy_on(monkeypatch, "generate"), spy_on(monkeypatch, "rule_rewards")
    steps = watch_steps(monkeypatch)
    flags = dict(baseline="batch_mean", max_new_tokens=11, micro_batch_size=5)
    row = metrics_of(run(tmp_path, total_rollouts=2, **flags))[2]
    policy = plain_model(Args.model)
    (_, (sequences, _)), (_, rewards) = sampled[2], judged[2]  # after an evaluation
    completions = [completion for _, completion in sequences]
    weights, gradient, _ = steps[1]
    set_weights(policy, weights)
    logprobs = torch.stack([plain_logprobs(policy, *sequence)[0].sum() for sequence in sequences])
    advantages = rewards - rewards.mean()
    (-(advantages * logprobs).sum() / 16).backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert_same_gradient(gradient, gradients)
    cut_off = [completion[-1] != 2 for completion in completions]
    expected = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "policy/grad_norm": sum(g.square().sum() for g in gradients).sqrt().item(),
        "completions/length_mean": sum(map(len, completions)) / 16,
        "completions/truncated_fraction": sum(cut_off) / 16,
    }
    for name, number in expected.items():
        assert row[name] == pytest.approx(number, rel=1e-3), name
    assert rewards.std() > 0.1 and 0 < sum(cut_off) < 16


def test_prompts_come_in_groups_of_their_own_for_each_rollout(tmp_path, monkeypatch):
    calls = spy_on(monkeypatch, "generate")
    run(tmp_path, total_rollouts=3, eval_every=2)
    assert [len(arguments[1]) for arguments, _ in calls] == [4, 16, 16, 4, 16, 4]
    rollouts = [arguments[1] for arguments, _ in calls if len(arguments[1]) == 16]
    assert rollouts[0] != rollouts[1] != rollouts[2]
    for prompts in rollouts:
        assert all(prompts[i] == prompts[i // 4 * 4] for i in range(16))


def test_a_rollout_of_one_completion_logs_numbers(tmp_path):
    _, row = metrics_of(run(tmp_path, prompts_per_rollout=1, group_size=1, baseline="none"))
    assert row["reward/std"] == 0 and all(math.isfinite(number) for number in row.values())
