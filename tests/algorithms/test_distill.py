"""The mathematics of distill.py against enumerations, a step against plain transformers."""

import time
from functools import partial
from pathlib import Path

import pytest
import spies
import torch
from by_hand import tensor
from reviews import plain_logprobs, plain_model
from spies import watch_steps

import distill
from distill import Args, discounted_sums, distillation_loss
from runs import metrics_of, read

spy_on = partial(spies.spy_on, distill)
SMALL = dict(total_rollouts=1, prompts_per_rollout=6, micro_batch_size=4)
SMALL |= dict(train_split="train[:64]", eval_split="test[:4]")


def run(tmp_path, **flags):
    """A real run in a few seconds; returns its folder."""
    output_dir = f"{tmp_path}/{time.time_ns()}"  # two runs may begin in one second
    return distill.main(Args(output_dir=output_dir, **SMALL | flags))


# --- the gradient, by enumeration -----------------------------------------------------------------
# Tokens 0, 1, 2; a token depends on the one before it, the first on 0. 0 ends, and so do 3 tokens.
COMPLETIONS = [[0], [1, 0], [2, 0]]
COMPLETIONS += [[a, b, c] for a in (1, 2) for b in (1, 2) for c in (0, 1, 2)]


def table(seed):
    """Log-probs of the next token (3, 3), a row for each token before it, and their logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(dim=1)


def token_logprobs(tables, completion):
    """Those of a completion's tokens (3,), 0 after its end, with a table for each position."""
    before = [0, *completion]
    found = [tables[t][before[t], token] for t, token in enumerate(completion)]
    return torch.stack([*found, *[torch.zeros(()).double()] * (3 - len(found))])


def expected_estimate(discount):
    """E of the gradient of -distillation_loss over all completions."""
    (logits, policy), (_, teacher) = table(1), table(2)
    mean = torch.zeros_like(logits)
    for y in COMPLETIONS:
        logprobs, teacher_logprobs = (token_logprobs(3 * [p], y)[None] for p in (policy, teacher))
        advantages = discounted_sums((teacher_logprobs - logprobs).detach(), discount)
        loss = distillation_loss(logprobs, advantages, num_completions=1)
        (gradient,) = torch.autograd.grad(-loss, logits, retain_graph=True)
        mean += logprobs.sum().exp().detach() * gradient
    return mean


def next_token_kl(tables, teacher, t):
    """E over prefixes of t tokens of KL(pi || T) of the next token; no KL after the end."""
    total = 0.0
    for prefix in {tuple(y[:t]) for y in COMPLETIONS if len(y) > t}:
        reached = token_logprobs(tables, prefix).sum().exp()
        policy = tables[t][[0, *prefix][-1]]
        total = total + reached * (policy.exp() * (policy - teacher[[0, *prefix][-1]])).sum()
    return total


def test_discount_1_is_the_gradient_of_the_kl_over_completions():
    (logits, policy), (_, teacher) = table(1), table(2)
    kl = 0.0
    for y in COMPLETIONS:
        log_pi, log_teacher = (token_logprobs(3 * [p], y).sum() for p in (policy, teacher))
        kl = kl + log_pi.exp() * (log_pi - log_teacher)
    (exact,) = torch.autograd.grad(-kl, logits)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(expected_estimate(1.0), exact)


def test_discount_0_is_that_of_the_next_tokens_kl_with_the_prefix_held_fixed():
    (logits, policy), (_, teacher) = table(1), table(2)
    kl = 0.0
    for t in range(3):
        tables = [policy.detach() if position < t else policy for position in range(3)]
        kl = kl + next_token_kl(tables, teacher, t)
    (exact,) = torch.autograd.grad(-kl, logits)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(expected_estimate(0.0), exact)
    assert (expected_estimate(0.0) - expected_estimate(1.0)).abs().max() > 0.01


def test_in_between_a_later_kl_counts_by_its_distance():
    """The derivative of position s's KL by the choice of token t, times discount^(s - t)."""
    (_, teacher), exact = table(2), 0.0
    logits = [table(1)[0] for _ in range(3)]  # a copy for each position
    tables = [copy.log_softmax(dim=1) for copy in logits]
    for s in range(3):
        kl = next_token_kl(tables, teacher, s)
        gradients = torch.autograd.grad(-kl, logits[: s + 1], retain_graph=True)
        for t, gradient in enumerate(gradients):
            exact = exact + 0.6 ** (s - t) * gradient
    torch.testing.assert_close(expected_estimate(0.6), exact)


def test_the_example_on_the_page():
    """Its two tokens and their numbers; behind them a token of padding."""
    rewards = tensor([[0.9 / 0.5, 0.4 / 0.8, 1.0]]).log()
    logprobs = tensor([[0.5, 0.8, 1.0]]).log()
    page = Path("docs/distill.md").read_text()
    for discount, advantages, loss in ((0.0, (0.59, -0.69), 0.25), (1.0, (-0.11, -0.69), -0.23)):
        found = discounted_sums(rewards, discount)
        assert found.tolist() == [pytest.approx([*advantages, 0.0], abs=0.0051)]
        assert distillation_loss(logprobs, found, 1).item() == pytest.approx(loss, abs=0.0051)
        assert f"${advantages[0]}$ and ${advantages[1]}$" in page and f"${loss}$" in page


# --- a run ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_each_step_and_what_is_logged_are_those_of_plain_transformers(
    discount, tmp_path, monkeypatch
):
    """Of the weights that sampled; in micro-batches of 4 and 2, without a rest of the step before.
    The teacher stays as it was."""
    sampled, steps = spy_on(monkeypatch, "generate"), watch_steps(monkeypatch)
    run_dir = run(tmp_path, total_rollouts=2, discount=discount, max_grad_norm=3.0)
    policy, teacher = plain_model(Args.model), plain_model(Args.teacher)
    rows, rollouts = metrics_of(run_dir)[1:], read(run_dir / "rollouts.jsonl")
    for step, (weights, gradient, clipped_to) in enumerate(steps):
        for parameter, weight in zip(policy.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        policy.zero_grad()
        (_, prompts, *_), completions = sampled[step + 1]  # the first is an evaluation
        kls = []
        for i, pair in enumerate(zip(prompts, completions, strict=True)):
            logprobs = plain_logprobs(policy, *pair)
            with torch.no_grad():
                rewards = [T - p for T, p in zip(plain_logprobs(teacher, *pair), logprobs)]
            kls.append(-sum(rewards).item())
            advantages = []
            for t in range(len(rewards)):
                later = enumerate(rewards[t:])
                advantages.append(sum(discount**distance * r for distance, r in later))
            (-sum(A * p for A, p in zip(advantages, logprobs)) / 6).backward()
            if i < 4:
                shown = rollouts[step]["completions"][i]
                assert shown["advantage"] == pytest.approx([*map(float, advantages)], abs=1e-3)
                assert shown["reward"] == pytest.approx(-kls[-1], abs=1e-3)
        assert clipped_to == 3.0 and max(g.abs().max() for g in gradient) > 0.01
        for found, parameter in zip(gradient, policy.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-5)
        assert rows[step]["objective/kl"] == pytest.approx(sum(kls) / 6, rel=1e-4)


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path, monkeypatch):
    steps = watch_steps(monkeypatch)
    row = metrics_of(run(tmp_path, teacher=Args.model))[1]
    assert row["objective/kl"] == 0 and row["policy/entropy"] > 0.1
    assert all(g.abs().max() == 0 for g in steps[0][1])


def test_a_teacher_with_another_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="tokenizer of tiny/reviews/policy is not that of --model"):
        run(tmp_path, teacher="tiny/reviews/policy")
    assert [*tmp_path.glob("*/*")] == []
