"""The tables of docs/policy_gradient.md and the scripts' functions behind them: derived again with
plain Python."""

import math

import pytest
import torch
from by_hand import close, rows_of, tensor

import dpo
import grpo
import kto
import ppo_rlhf
import reinforce
import sft
from docs.experiments import policy_gradient

TABLES = policy_gradient.tables({})
P, R = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)
TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}
EPS = 0.2


def score(o):
    """grad log pi(o) by the logits of a softmax."""
    return [(o == j) - P[j] for j in range(3)]


def test_the_baselines_table():
    squares = [sum(x * x for x in score(o)) for o in range(3)]
    best = sum(P[o] * R[o] * squares[o] for o in range(3))
    best /= sum(P[o] * squares[o] for o in range(3))
    signal = sum((P[j] * (R[j] - 0.9)) ** 2 for j in range(3))

    def variance(b):
        return sum(P[o] * (R[o] - b) ** 2 * squares[o] for o in range(3)) - signal

    exact = {"-1": -1, "0": 0, "0.9, the mean reward": 0.9, f"{best:.3f}, the best": best}
    table = rows_of(TABLES["policy_gradient baselines"])
    assert [*table] == [*exact]
    for name, b in exact.items():
        close(table[name][1:2], [P[j] * (R[j] - 0.9) for j in range(3)], 2)
        close(table[name][2:], [variance(b)], 3)
    # The scripts' own baselines are those of the page, with 4 samples of one prompt.
    for name, expected in {"leave_one_out": 2 / 3, "batch_mean": 1 / 2}.items():
        found = reinforce.baseline_advantages(torch.tensor([1.0, 0, 0, 1]), 4, name)
        assert found.tolist() == pytest.approx([expected, -expected, -expected, expected])
    found = grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), 4, scale="none")
    assert found.tolist() == pytest.approx([2 / 3 * 3 / 4 * sign for sign in (1, -1, -1, 1)])


def test_the_two_views():
    start = sum(p * right for p, right in TREE.values())
    table, sums = rows_of(TABLES["policy_gradient views"]), {"a": 0.0, "b": 0.0}
    for first, (p, right) in TREE.items():
        for second, chance, reward in (("correct", right, 1), ("wrong", 1 - right, 0)):
            bandit, of_first, of_second = reward - start, right - start, reward - right
            assert of_first + of_second == pytest.approx(bandit)
            cells = table[f"{first}, {second}"]
            close(cells[1:], [p * chance, reward, bandit, of_first, of_second], 2)
            sums[first] += chance * bandit
    for first, (_, right) in TREE.items():  # the mean of the bandit's is the token's
        assert sums[first] == pytest.approx(right - start)


def n_step(rewards, values, gamma, t, n):
    """A^(n)_t, as the page's first form; after the end rewards and values are 0."""
    at = lambda x, i: x[i] if i < len(x) else 0.0  # noqa: E731
    found = sum(gamma**i * at(rewards, t + i) for i in range(n))
    return found + gamma**n * at(values, t + n) - values[t]


def test_gae_is_the_average_of_n_steps_and_has_the_two_ends():
    gamma = 0.9
    rng = torch.Generator().manual_seed(0)
    known = torch.randn(2, 5, generator=rng, dtype=torch.float64)
    rewards, values = known.tolist()

    def gae(lam):
        return ppo_rlhf.gae(known[:1], known[1:], gamma, lam)[0][0].tolist()

    for lam in (0.3, 0.95):
        for t, found in enumerate(gae(lam)):
            steps = [n_step(rewards, values, gamma, t, n) for n in range(1, 400)]
            mixed = sum((1 - lam) * lam**i * step for i, step in enumerate(steps))
            assert found == pytest.approx(mixed, rel=1e-7)
    for t in range(5):
        following = values[t + 1] if t < 4 else 0.0
        assert gae(0.0)[t] == pytest.approx(rewards[t] + gamma * following - values[t])
        sampled = sum(gamma ** (i - t) * rewards[i] for i in range(t, 5))
        assert gae(1.0)[t] == pytest.approx(sampled - values[t])


def test_the_lambda_table():
    """Of token b, whose true advantage is 0.25 - 0.4."""
    for name, cells in rows_of(TABLES["policy_gradient lambdas"]).items():
        lam = float(name)
        by_end = [0.5 - 0.4 + lam * (reward - 0.5) for reward in (1, 0)]
        average = 0.25 * by_end[0] + 0.75 * by_end[1]
        square = 0.25 * (by_end[0] - average) ** 2 + 0.75 * (by_end[1] - average) ** 2
        close(cells[1:], [average, average + 0.15, math.sqrt(square)], 3)


def clip_objective(script, ratio, advantage):
    """A token's objective and its gradient by the log-prob, through the script's own loss."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    a = tensor([advantage])
    if script is grpo:
        loss, sums = grpo.grpo_loss(logprob, zero, None, a, one, EPS, EPS, 0.0)
    else:
        loss, sums = ppo_rlhf.policy_loss(logprob, zero, zero, a[None], zero, one, EPS, 0.0, 0.0)
    (grad,) = torch.autograd.grad(-loss, logprob)
    return -loss.item(), grad.item(), sums


@pytest.mark.parametrize("script", [grpo, ppo_rlhf], ids=["grpo", "ppo_rlhf"])
def test_the_clip_in_all_four_sign_cases(script):
    table = rows_of(TABLES["policy_gradient clip"])
    assert [*table] == [("+1", "0.7"), ("+1", "1.3"), ("-1", "0.7"), ("-1", "1.3")]
    for (sign, ratio), cells in table.items():
        a, rho = float(sign), float(ratio)
        inside = 1 - EPS if rho < 1 - EPS else 1 + EPS
        held = (a > 0 and rho > 1) or (a < 0 and rho < 1)
        value, grad = (inside * a, 0.0) if held else (rho * a, rho * a)
        close(cells[2:6], [rho * a, inside * a, value, grad], 1)
        objective, by_autograd, sums = clip_objective(script, rho, a)
        assert (objective, by_autograd) == pytest.approx((value, grad))
        higher, _, _ = clip_objective(script, rho * math.exp(1e-6), a)
        assert (higher - objective) / 1e-6 == pytest.approx(grad, abs=1e-5)
        for side in ("low", "high"):
            metric = f"policy/clip_fraction_{side}"
            assert sums[metric].item() == (metric in cells[6])
        assert ("held" in cells[6]) == held
    for a in (1.0, -1.0):
        for rho in (0.85, 1.0, 1.15):  # inside of the interval
            assert clip_objective(script, rho, a)[:2] == pytest.approx((rho * a, rho * a))


def test_the_coefficient_of_each_scripts_loss_is_that_of_the_table():
    """The gradient of minus the loss by each token's log-prob."""
    rng = torch.Generator().manual_seed(1)
    now, old, ref = 0.3 * torch.randn(3, 4, 5, generator=rng, dtype=torch.float64) - 2
    lengths = (5, 3, 1, 4)
    mask = tensor([[float(t < n) for t in range(5)] for n in lengths])
    now, old, ref = (x * mask for x in (now, old, ref))
    tokens = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    now.requires_grad_()

    def coefficients(loss):
        (grad,) = torch.autograd.grad(-loss, now)
        return [grad[i, t].item() for i, t in tokens]

    def at(x):
        return [x[i, t].item() for i, t in tokens]

    n, b = len(tokens), len(lengths)
    assert coefficients(sft.negative_log_likelihood(now, n)) == pytest.approx([1 / n] * n)

    returns = (1.0, 0.0, 2.0, -1.0)
    loss = reinforce.policy_gradient_loss(now, tensor(returns), b)
    assert coefficients(loss) == pytest.approx([returns[i] / b for i, _ in tokens])

    def free(rho, a):
        return not ((a > 0 and rho > 1 + EPS) or (a < 0 and rho < 1 - EPS))

    advantages = torch.randn(4, 5, generator=rng, dtype=torch.float64) * mask
    zero = torch.zeros_like(now)
    loss, _ = ppo_rlhf.policy_loss(now, old, ref, advantages, zero, mask / n, EPS, 0.0, 0.0)
    ratios = [math.exp(x - y) for x, y in zip(at(now), at(old), strict=True)]
    each = zip(ratios, at(advantages), strict=True)
    expected = [rho * a / n if free(rho, a) else 0.0 for rho, a in each]
    assert coefficients(loss) == pytest.approx(expected)
    assert 0 < expected.count(0.0) < n

    weights, beta = grpo.token_weights(mask, "sequence", 24), 0.04
    group = tensor(returns)
    loss, _ = grpo.grpo_loss(now, old, ref, group, weights, EPS, EPS, beta)
    expected = []
    for (i, _), rho, x, y in zip(tokens, ratios, at(now), at(ref), strict=True):
        pull = rho * returns[i] if free(rho, returns[i]) else 0.0
        expected.append((pull - beta * (1 - math.exp(y - x))) / (b * lengths[i]))
    assert coefficients(loss) == pytest.approx(expected)

    sums = [[x[i, :k].sum().item() for i, k in enumerate(lengths)] for x in (now, ref)]
    log_ratios = [x - y for x, y in zip(*sums, strict=True)]
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    # DPO: two pairs, whose sides are neighbours.
    args = dpo.Args(beta=0.3)
    totals = now.sum(dim=1).view(2, 2), ref.sum(dim=1).view(2, 2), torch.tensor([[5, 3], [1, 4]])
    loss = dpo.pair_losses(args, *totals)[0].sum() / 2
    h = [log_ratios[0] - log_ratios[1], log_ratios[2] - log_ratios[3]]
    chosen = [0.3 * sigmoid(-0.3 * x) / 2 for x in h]
    by_side = [chosen[0], -chosen[0], chosen[1], -chosen[1]]
    assert coefficients(loss) == pytest.approx([by_side[i] for i, _ in tokens])

    labels, z0 = torch.tensor([True, False, False, True]), 0.7
    ratio = (now - ref).sum(dim=1)
    loss = kto.kto_loss(ratio, torch.tensor(z0), labels, 0.1, 1.33, 1.0)
    expected = []
    for i, _ in tokens:
        p, desirable = sigmoid(0.1 * (log_ratios[i] - z0)), bool(labels[i])
        expected.append((1.33 if desirable else -1.0) * 0.1 * p * (1 - p) / b)
    assert coefficients(loss.sum() / b) == pytest.approx(expected, rel=1e-6)
