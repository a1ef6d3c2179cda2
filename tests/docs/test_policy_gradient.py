"""The worked examples of docs/policy_gradient.md and docs/kl.md: read from the pages, derived with
plain Python, and compared with the scripts' functions."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import dpo
import grpo
import kto
import ppo_rlhf
import reinforce
import sft
from docs.experiments import theory

PAGES = {name: Path(f"docs/{name}.md").read_text() for name in ("policy_gradient", "kl")}
GRADIENT, KL = (" ".join(text.split()) for text in PAGES.values())  # on one line
REF, FAR, NEAR = (0.4, 0.3, 0.2, 0.1), (0.01, 0.09, 0.3, 0.6), (0.3, 0.3, 0.25, 0.15)
EPS = 0.2


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def rows_of(name):
    """The cells of a table on a page, by the first cell or, where that repeats, the first two."""
    (text,) = [
        found
        for page in PAGES.values()
        for found in re.findall(rf"<!-- table {name} -->\n(.*?)<!-- end table -->", page, re.S)
    ]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]
    keys = [line[0] for line in lines]
    return {
        k if keys.count(k) == 1 else (k, line[1]): line for k, line in zip(keys, lines, strict=True)
    }


def numbers(cells):
    return [float(x) for cell in cells for x in re.findall(r"-?\d+\.?\d*", cell)]


def close(cells, expected, digits):
    """Each number of the page is the expected one, rounded to its digits."""
    assert numbers(cells) == pytest.approx(expected, abs=0.501 * 10**-digits)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(logits):
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def slope(function, at, j, step=1e-5):
    """The derivative of a function of logits by the j-th, as a central difference."""
    up, down = list(at), list(at)
    up[j], down[j] = up[j] + step, down[j] - step
    return (function(up) - function(down)) / (2 * step)


def gradient(function, p):
    at = [math.log(x) for x in p]
    return [slope(function, at, j) for j in range(len(p))]


def test_the_json_and_the_pages_hold_what_is_computed():
    found, saved = theory.compute(), json.loads(Path("docs/results/theory.json").read_text())
    assert found["tables"] == saved["tables"]
    assert {f"theory_{name}" for name in saved["numbers"]} == set(saved["tables"])
    for name, table in saved["tables"].items():
        assert [*rows_of(name).values()] == table["rows"], name


# --- policy_gradient.md -------------------------------------------------------------------------
P, R = (0.5, 0.3, 0.2), (1.0, 0.0, 2.0)


def score(o):
    """grad log pi(o) by the logits of a softmax."""
    return [(o == j) - P[j] for j in range(3)]


def test_reinforce_by_enumeration():
    mean_reward = sum(p * r for p, r in zip(P, R, strict=True))
    exact = gradient(lambda x: sum(p * r for p, r in zip(softmax(x), R, strict=True)), P)
    assert exact == pytest.approx([p * (r - mean_reward) for p, r in zip(P, R, strict=True)])
    estimate = [sum(P[o] * R[o] * score(o)[j] for o in range(3)) for j in range(3)]
    assert estimate == pytest.approx(exact)
    told = ", ".join(f"{x:.2f}" for x in exact)
    assert f"Half of the first plus a fifth of the third is $({told})$" in GRADIENT
    assert f"$J = 0.5 + 0 + 0.4 = {mean_reward:.1f}$" in GRADIENT
    first, third = (", ".join(f"{x:.1f}" for x in score(o)) for o in (0, 2))
    assert rf"$1 \times ({first})$" in GRADIENT and rf"$2 \times ({third})$" in GRADIENT


def test_the_baselines_table():
    squares = [sum(x * x for x in score(o)) for o in range(3)]
    best = sum(P[o] * R[o] * squares[o] for o in range(3))
    best /= sum(P[o] * squares[o] for o in range(3))
    signal = sum((P[j] * (R[j] - 0.9)) ** 2 for j in range(3))

    def variance(b):
        return sum(P[o] * (R[o] - b) ** 2 * squares[o] for o in range(3)) - signal

    exact = {"-1": -1, "0": 0, "0.9, the mean reward": 0.9, f"{best:.3f}, the best": best, "3": 3}
    table = rows_of("theory_baselines")
    assert [*table] == [*exact]
    for name, b in exact.items():
        close(table[name][1:2], [P[j] * (R[j] - 0.9) for j in range(3)], 2)
        close(table[name][2:], [variance(b)], 3)
    # The parabola: lowest at b*, as at 0 again at twice that, and without a baseline in between.
    assert variance(best) < min(variance(best - 0.01), variance(best + 0.01))
    assert variance(2 * best) == pytest.approx(variance(0))
    assert variance(2 * best - 0.01) < variance(0) < variance(2 * best + 0.01)
    assert 0.3 < variance(0.9) / variance(0) < 0.4  # "a third"
    # Adding 1 to each reward is b - 1.
    shifted = sum(P[o] * (R[o] + 1) ** 2 * squares[o] for o in range(3)) - signal
    assert shifted == pytest.approx(variance(-1))
    # The scripts' own baselines are those of the page, with 4 samples of one prompt.
    for name, expected in {"leave_one_out": 2 / 3, "batch_mean": 1 / 2}.items():
        found = reinforce.baseline_advantages(torch.tensor([1.0, 0, 0, 1]), 4, name)
        assert found.tolist() == pytest.approx([expected, -expected, -expected, expected])
    found = grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), 4, scale=False)
    assert found.tolist() == pytest.approx([2 / 3 * 3 / 4 * sign for sign in (1, -1, -1, 1)])


TREE = {"a": (0.6, 0.5), "b": (0.4, 0.25)}


def test_the_two_views():
    start = sum(p * right for p, right in TREE.values())
    assert rf"= {start:.1f}$, and $A(s_1, \text{{b}}) = 0.25 - 0.4 = -0.15$" in GRADIENT
    table, sums = rows_of("theory_views"), {"a": 0.0, "b": 0.0}
    for first, (p, right) in TREE.items():
        for second, chance, reward in (("right", right, 1), ("wrong", 1 - right, 0)):
            bandit, of_first, of_second = reward - start, right - start, reward - right
            assert of_first + of_second == pytest.approx(bandit)
            cells = table[f"{first}, {second}"]
            close(cells[1:], [p * chance, reward, bandit, of_first, of_second], 2)
            sums[first] += chance * bandit
    for first, (_, right) in TREE.items():  # the mean of the bandit's is the token's
        assert sums[first] == pytest.approx(right - start)
    right = TREE["b"][1]
    assert f"standard deviation is {math.sqrt(right * (1 - right)):.3f}" in GRADIENT
    # The expected gradient by the first token's logits is the same in both views.
    exact = gradient(
        lambda x: sum(p * r for p, (_, r) in zip(softmax(x), TREE.values(), strict=True)),
        (0.6, 0.4),
    )
    assert exact[1] == pytest.approx(0.4 * (TREE["b"][1] - start))


def test_rewards_before_a_token_have_no_share_in_its_gradient():
    """Two tokens of two kinds each, with a reward per token: every completion with its chance."""
    first_rewards, second_rewards = (0.3, -0.8), ((1.0, 0.0), (0.4, 3.0))
    chances = (0.6, 0.4), ((0.5, 0.5), (0.25, 0.75))

    def expected_reward(first, second):
        """Of logits of the first token, and of the second after either first one."""
        p, after = softmax(first), [softmax(x) for x in second]
        return sum(
            p[i] * after[i][j] * (first_rewards[i] + second_rewards[i][j])
            for i in range(2)
            for j in range(2)
        )

    first = [math.log(x) for x in chances[0]]
    second = [[math.log(x) for x in row] for row in chances[1]]
    exact = {"first": [slope(lambda x: expected_reward(x, second), first, j) for j in range(2)]}
    for i in range(2):

        def of_second(x, i=i):
            return expected_reward(first, [x if i == k else second[k] for k in range(2)])

        exact[i] = [slope(of_second, second[i], j) for j in range(2)]

    estimates = {(key, kind): [0.0, 0.0] for key in exact for kind in ("to go", "whole", "past")}
    for i in range(2):
        for j in range(2):
            chance = chances[0][i] * chances[1][i][j]
            r_1, r_2 = first_rewards[i], second_rewards[i][j]
            weights = {"to go": (r_1 + r_2, r_2), "whole": (r_1 + r_2,) * 2, "past": (0.0, r_1)}
            for kind, (of_first, of_last) in weights.items():
                for logit in range(2):
                    score = (i == logit) - chances[0][logit]
                    estimates["first", kind][logit] += chance * of_first * score
                    score = (j == logit) - chances[1][i][logit]
                    estimates[i, kind][logit] += chance * of_last * score
    for (key, kind), estimate in estimates.items():
        expected = [0.0, 0.0] if kind == "past" else exact[key]
        assert estimate == pytest.approx(expected, abs=1e-9), (key, kind)
    assert all(abs(x) > 0.01 for gradient in exact.values() for x in gradient)
    # The script's reward-to-go: GAE with lambda = 1 and without a critic.
    rewards = tensor([[first_rewards[1], second_rewards[1][1]]])
    to_go, _ = ppo_rlhf.gae(rewards, torch.zeros_like(rewards), 1.0, 1.0)
    assert to_go[0].tolist() == pytest.approx([-0.8 + 3.0, 3.0])


def n_step(rewards, values, gamma, t, n):
    """A^(n)_t, as the page's first form; after the end rewards and values are 0."""
    at = lambda x, i: x[i] if i < len(x) else 0.0  # noqa: E731
    found = sum(gamma**i * at(rewards, t + i) for i in range(n))
    return found + gamma**n * at(values, t + n) - values[t]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_is_the_average_of_n_steps_and_has_the_two_ends(gamma):
    rng = torch.Generator().manual_seed(0)
    known = torch.randn(2, 5, generator=rng, dtype=torch.float64)
    rewards, values = known.tolist()

    def gae(lam):
        return ppo_rlhf.gae(known[:1], known[1:], gamma, lam)[0][0].tolist()

    for lam in (0.3, 0.95):
        for t, found in enumerate(gae(lam)):
            steps = [n_step(rewards, values, gamma, t, n) for n in range(1, 700)]
            mixed = sum((1 - lam) * lam**i * step for i, step in enumerate(steps))
            assert found == pytest.approx(mixed, rel=1e-9)
    for t in range(5):
        following = values[t + 1] if t < 4 else 0.0
        assert gae(0.0)[t] == pytest.approx(rewards[t] + gamma * following - values[t])
        sampled = sum(gamma ** (i - t) * rewards[i] for i in range(t, 5))
        assert gae(1.0)[t] == pytest.approx(sampled - values[t])


def test_the_lambda_table_and_the_n_steps():
    rewards, values = (-0.02, 0.01, 1.0), (0.5, 0.6, 0.8)
    for name, cells in rows_of("theory_lambdas").items():
        lam, expected = float(name), []
        for t in range(3):
            deltas = [rewards[i] + (*values, 0.0)[i + 1] - values[i] for i in range(t, 3)]
            expected.append(sum(lam**i * delta for i, delta in enumerate(deltas)))
        close(cells[1:], expected, 3)
    one, two, three = (n_step(rewards, values, 1.0, 0, n) for n in (1, 2, 3))
    assert f"token 1 are {one:.2f}, {two:.2f} and {three:.2f}." in GRADIENT


def test_what_lambda_trades():
    for name, cells in rows_of("theory_critic").items():
        lam = float(name)
        # delta_1 = 0.5 - 0.4, delta_2 = reward - 0.5; right with probability 1/4
        found = [0.1 + lam * (reward - 0.5) for reward in (1, 0)]
        mean = 0.25 * found[0] + 0.75 * found[1]
        deviation = math.sqrt(0.25 * (found[0] - mean) ** 2 + 0.75 * (found[1] - mean) ** 2)
        assert mean + 0.15 == pytest.approx(0.25 * (1 - lam))
        assert deviation == pytest.approx(math.sqrt(3) / 4 * lam)
        close(cells[1:], [mean, mean + 0.15, deviation], 3)


def test_the_importance_ratio():
    new = (0.4, 0.3, 0.3)
    ratios = [a / b for a, b in zip(new, P, strict=True)]
    assert ratios == pytest.approx([0.8, 1, 1.5])
    weighted = sum(p * rho * r for p, rho, r in zip(P, ratios, R, strict=True))
    assert weighted == pytest.approx(sum(p * r for p, r in zip(new, R, strict=True)))
    assert rf"0.2 \times 1.5 \times 2 = {weighted:.1f}$" in GRADIENT
    assert f"twenty ratios of 1.1 make {1.1**20:.1f}" in GRADIENT


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
    table = rows_of("theory_clip")
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


def test_the_shorter_form_of_the_clip():
    for ratio in (0.3, 0.7, 0.85, 1.0, 1.15, 1.3, 4.0):
        for a in (0.5, -0.5):
            short = a * (min(ratio, 1 + EPS) if a > 0 else max(ratio, 1 - EPS))
            assert clip_objective(grpo, ratio, a)[0] == pytest.approx(short)
    # The frequent mistake: at A = -1 and 0.7 it is the clipped term, and it does not move.
    value, derivative, _ = clip_objective(ppo_rlhf, 0.7, -1.0)
    assert (value, derivative) == (pytest.approx(-0.8), 0.0)
    assert "$-0.8 < -0.7$" in GRADIENT


def test_the_penalty_instead_of_the_clip():
    """The derivative of rho A - beta (rho - 1 - log rho) with respect to log rho."""

    def objective(log_ratio, a, beta):
        rho = math.exp(log_ratio)
        return rho * a - beta * (rho - 1 - log_ratio)

    def derivative(rho, a, beta):
        at = math.log(rho)
        return (objective(at + 1e-6, a, beta) - objective(at - 1e-6, a, beta)) / 2e-6

    table = rows_of("theory_penalty")
    assert len(table) == 6
    for (sign, ratio), cells in table.items():
        a, rho = float(sign), float(ratio)
        held = (a > 0 and rho > 1 + EPS) or (a < 0 and rho < 1 - EPS)
        with_clip = 0.0 if held else rho * a
        close(cells[2:], [with_clip, derivative(rho, a, 1), derivative(rho, a, 3)], 1)
    # Where the two forces balance, at weight 3; at weight 1 and A = 1 nowhere.
    balance = [3 / (3 - a) for a in (1, -1)]
    assert [derivative(rho, a, 3) for rho, a in zip(balance, (1, -1), strict=True)] == (
        pytest.approx([0.0, 0.0], abs=1e-6)
    )
    assert f"that is {balance[0]:g} for $A = 1$ and {balance[1]:g} for $A = -1$" in GRADIENT
    assert [derivative(rho, 1, 1) for rho in (0.1, 1.0, 9.0)] == pytest.approx([1.0] * 3, rel=1e-6)
    # policy/approx_kl is that KL: its mean over tokens of the old policy.
    k3_means = sum(q * (p / q - 1 - math.log(p / q)) for p, q in zip(FAR, NEAR, strict=True))
    assert k3_means == pytest.approx(kl(NEAR, FAR))


def test_stale_rollouts():
    """Completions of the policy P, one optimiser step of a policy that has moved on."""
    now, advantages = (0.4, 0.3, 0.3), [r - 0.9 for r in R]
    weights = [p / q for p, q in zip(now, P, strict=True)]
    held = [w > 1 + EPS if a > 0 else w < 1 - EPS for w, a in zip(weights, advantages, strict=True)]
    assert held == [False, False, True]
    products = [w * a for w, a in zip(weights, advantages, strict=True)]
    cases = {  # whose completions, and the coefficient of each
        "not corrected": (P, advantages),
        "clipped ratio to the behaviour policy": (P, [*products[:2], 0.0]),
        "decoupled": (P, products),
        "decoupled, weights up to 1.25": (P, [*products[:2], 1.25 * 1.1]),
        "no staleness: own completions": (now, advantages),
    }
    table, means = rows_of("theory_stale"), {}
    assert [*table] == [*cases]
    for name, (sampled_from, coefficients) in cases.items():
        each = [[c * ((i == j) - now[j]) for j in range(3)] for i, c in enumerate(coefficients)]
        mean = [
            sum(p * row[j] for p, row in zip(sampled_from, each, strict=True)) for j in range(3)
        ]
        squares = [sum((x - m) ** 2 for x, m in zip(row, mean, strict=True)) for row in each]
        variance = sum(p * x for p, x in zip(sampled_from, squares, strict=True))
        close(table[name][1:2], coefficients, 2)
        close(table[name][2:3], mean, 3)
        close(table[name][3:], [variance], 2)
        means[name] = mean, variance
    exact = gradient(lambda x: sum(p * r for p, r in zip(softmax(x), R, strict=True)), now)
    for name in ("decoupled", "no staleness: own completions"):
        assert means[name][0] == pytest.approx(exact, abs=1e-9)
    # "exactly the gradient of mu, that of section 1"
    of_mu = gradient(lambda x: sum(p * r for p, r in zip(softmax(x), R, strict=True)), P)
    assert means["not corrected"][0] == pytest.approx(of_mu, abs=1e-9)
    # "raises the first completion most, which by now is only average"
    clipped = means["clipped ratio to the behaviour policy"][0]
    assert max(clipped) == clipped[0] > 0
    assert sum(p * r for p, r in zip(now, R, strict=True)) == pytest.approx(R[0])
    variances = [variance for _, variance in means.values()]
    assert variances[4] < variances[3] < variances[2]


def test_the_entropy_bonus():
    """One token has advantage 1, all others 0. At the best policy the gradient is 0."""
    sizes = [
        json.loads(Path(f"tiny/{x}/policy/config.json").read_text())
        for x in ("arithmetic", "reviews")
    ]
    sizes = [*(x["vocab_size"] for x in sizes), 151_936]
    columns = theory.compute()["tables"]["theory_entropy"]["columns"]
    assert [int(x.split()[1].replace(",", "")) for x in columns[1:4]] == sizes

    def residual(coefficient, size, odds):
        """The gradient of minus PPO's loss by the best token's logit; odds of the others to it."""
        best = torch.tensor(1 / (1 + odds), dtype=torch.float64)
        rest = best.expand(size - 1) * odds / (size - 1)
        logits = torch.cat([best[None], rest]).log().requires_grad_()
        logprobs = logits.log_softmax(dim=0)
        p = logprobs.exp()
        entropy = -(p * logprobs).sum()
        advantages, old = torch.zeros(size, 1).double(), logprobs.detach()[:, None]
        advantages[0] = 1.0
        bonus = entropy.expand(size, 1)
        loss, _ = ppo_rlhf.policy_loss(
            logprobs[:, None],
            old,
            None,
            advantages,
            bonus,
            p.detach()[:, None],
            EPS,
            0.0,
            coefficient,
        )
        return torch.autograd.grad(-loss, logits)[0][0].item()

    table = rows_of("theory_entropy")
    for name, cells in table.items():
        c = float(name)
        for cell, size in zip(cells[1:4], sizes, strict=True):
            odds = (size - 1) * math.exp(-1 / c)
            assert float(cell) == pytest.approx(odds / (1 + odds), rel=0.1)
            low, best, high = (residual(c, size, factor * odds) for factor in (0.8, 1, 1.25))
            assert low < 0 < high and abs(best) < 1e-4 * (high - low)
        # pi_ref e^(A / c), normalised, with a half each in the reference: by search
        assert float(cells[4]) == pytest.approx(1 / (1 + math.exp(1 / c)), rel=0.1)
        if c == 0.2:
            grid = [math.exp(-0.001 * i) for i in range(700, 9000)]
            best = max(grid, key=lambda x: (1 - x) - 0.2 * kl((1 - x, x), (0.5, 0.5)))
            assert float(cells[4]) == pytest.approx(best, rel=0.1)
    half = 1 / math.log(151_935)
    assert rf"$c_e = 1 / \log(n_V - 1) = {half:.3f}$" in GRADIENT
    assert 1 / (1 + math.exp(1 / half) / 151_935) == pytest.approx(0.5)
    # H = log n - KL(pi || uniform)
    entropy = -sum(p * math.log(p) for p in FAR)
    assert entropy == pytest.approx(math.log(4) - kl(FAR, [0.25] * 4))

    def entropy_of(logits):
        return -sum(p * math.log(p) for p in softmax(logits))

    for rare, told in ((0.01, "0.045"), (1e-6, "0.000014")):
        at = [math.log(1 - rare), math.log(rare)]
        found = slope(entropy_of, at, 1, step=1e-3)
        by_hand = -rare * (math.log(rare) + entropy_of(at))
        assert found == pytest.approx(by_hand, rel=1e-3)
        assert float(told) == pytest.approx(by_hand, rel=0.03) and f"is {told}" in GRADIENT


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
    args = dpo.check_args(dpo.Args(beta=0.3))
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


# --- kl.md --------------------------------------------------------------------------------------
ESTIMATORS = {
    "k1": lambda p, q: math.log(p / q),
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
}


def test_the_tokens_of_the_far_policy():
    for i, (token, cells) in enumerate(rows_of("theory_kl_tokens").items()):
        assert token == "abcd"[i]
        terms = [k(FAR[i], REF[i]) for k in ESTIMATORS.values()]
        close(cells[1:], [REF[i], FAR[i], *terms], 3)
    terms = [f"{ESTIMATORS['k1'](p, q):.3f}" for p, q in zip(FAR, REF, strict=True)]
    terms = [f"({x})" if x.startswith("-") else x for x in terms]
    added = " + ".join(f"{p:g} \\times {x}" for p, x in zip(FAR, terms, strict=True))
    assert f"$KL(\\pi \\Vert \\pi_{{ref}}) = {added} = {kl(FAR, REF):.3f}$ nats" in KL


def test_bias_and_deviation_of_k1_k2_k3():
    moments = {}
    for (policy, name), cells in rows_of("theory_kl_values").items():
        p, old = (NEAR, REF) if policy == "near" else (FAR, NEAR)
        terms = [ESTIMATORS[name](a, b) for a, b in zip(p, REF, strict=True)]
        mean = sum(a * x for a, x in zip(p, terms, strict=True))
        deviation = math.sqrt(sum(a * (x - mean) ** 2 for a, x in zip(p, terms, strict=True)))
        stale = sum(a * x for a, x in zip(old, terms, strict=True))
        exact = kl(p, REF)
        close(cells[2:], [exact, mean, mean - exact, deviation, stale], 3)
        assert theory.kl_moments(p)[name] == pytest.approx((mean, deviation))
        moments[policy, name] = mean - exact, deviation
    for policy in ("near", "far"):
        assert moments[policy, "k1"][0] == pytest.approx(0, abs=1e-12)
        assert moments[policy, "k3"][0] == pytest.approx(0, abs=1e-12)
        assert moments[policy, "k2"][0] > 1e-4
    near, far = (moments[x, "k3"][1] / moments[x, "k1"][1] for x in ("near", "far"))
    assert (round(near, 1), round(far)) == (0.1, 3)  # "a tenth", "three times"


def gradients_by_differences():
    """What a loss of each kind has as its gradient: the tokens' chances stay, the term moves."""

    def expected(drawn, term):
        def function(logits):
            p = softmax(logits)
            return sum(w * term(p[i], i) for i, w in enumerate(drawn))

        return gradient(function, FAR)

    k = ESTIMATORS
    fixed = {name: [f(a, b) for a, b in zip(FAR, REF, strict=True)] for name, f in k.items()}
    found = {
        "full KL(π ‖ ref)": gradient(lambda x: kl(softmax(x), REF), FAR),
        "full KL(ref ‖ π)": gradient(lambda x: kl(REF, softmax(x)), FAR),
    }
    for name, f in k.items():
        found[name] = expected(FAR, lambda p, i, f=f: f(p, REF[i]))
        found[f"{name} in the reward"] = expected(
            FAR, lambda p, i, name=name: fixed[name][i] * math.log(p)
        )
    for name in ("k1", "k3"):
        f = k[name]
        found[f"rho {name}"] = expected(FAR, lambda p, i, f=f: p / FAR[i] * f(p, REF[i]))
    k2, k3 = k["k2"], k["k3"]
    found["k2, tokens of π_old"] = expected(NEAR, lambda p, i: k2(p, REF[i]))
    found["rho k2, tokens of π_old"] = expected(NEAR, lambda p, i: FAR[i] / NEAR[i] * k2(p, REF[i]))
    found["rho k3, tokens of π_old"] = expected(NEAR, lambda p, i: p / NEAR[i] * k3(p, REF[i]))
    return found


def test_the_gradients_table():
    table, found = rows_of("theory_kl_gradients"), gradients_by_differences()
    assert {*table} == {*found}
    for name, of_scripts in theory.kl_gradients()[1].items():  # through k2_kl and k3_kl
        assert of_scripts["mean"] == pytest.approx(found[name], abs=1e-8), name
    full = {name: found[f"full {name}"] for name in ("KL(π ‖ ref)", "KL(ref ‖ π)")}
    exact, zero = kl(FAR, REF), [0.0] * 4
    # the closed forms on the page
    logs = [math.log(a / b) for a, b in zip(FAR, REF, strict=True)]
    by_hand = [a * (x - exact) for a, x in zip(FAR, logs, strict=True)]
    assert full["KL(π ‖ ref)"] == pytest.approx(by_hand, abs=1e-8)
    by_hand = [a - b for a, b in zip(FAR, REF, strict=True)]
    assert full["KL(ref ‖ π)"] == pytest.approx(by_hand, abs=1e-8)
    for name, cells in table.items():
        close(cells[1:5], found[name], 3)
        told = {"nothing": zero, **full}.get(cells[6])
        if told is None:
            assert cells[6] == "neither"
            for other in (zero, *full.values()):
                assert max(abs(a - b) for a, b in zip(found[name], other, strict=True)) > 0.1
        else:
            assert found[name] == pytest.approx(told, abs=1e-8)
    back = full["KL(ref ‖ π)"][0] / full["KL(π ‖ ref)"][0]
    assert round(back) == 8 and "eight times as hard" in KL
    assert found["k3 in the reward"][0] > 0 and found["k3 in the reward"][1] > 0


def test_rho_k3_has_the_gradient_of_rho_k2_at_every_token():
    """One token's term moves with its log-prob; rho in front of k2 is a constant."""
    for p, old, q in [*zip(FAR, NEAR, REF, strict=True), *zip(FAR, FAR, REF, strict=True)]:
        at = math.log(p)

        def rho_k3(x, old=old, q=q):
            return math.exp(x) / old * ESTIMATORS["k3"](math.exp(x), q)

        def k2(x, q=q):
            return ESTIMATORS["k2"](math.exp(x), q)

        now = tensor(at).requires_grad_()
        old_logprob, ref_logprob = tensor(old).log(), tensor(q).log()
        weighted = (now - old_logprob).exp() * grpo.k3_kl(now, ref_logprob)
        by_scripts = [
            torch.autograd.grad(term, now)[0].item()
            for term in (weighted, ppo_rlhf.k2_kl(now, old_logprob, ref_logprob))
        ]
        assert by_scripts == pytest.approx([-p / old * math.log(q / p)] * 2)
        slopes = [(f(at + 1e-5) - f(at - 1e-5)) / 2e-5 for f in (rho_k3, k2)]
        assert slopes[0] == pytest.approx(p / old * slopes[1], rel=1e-6, abs=1e-7)
        assert slopes[1] == pytest.approx(-math.log(q / p), rel=1e-6, abs=1e-7)


def test_the_variances_of_the_gradients():
    """The gradient of one token is a coefficient times grad log pi, 1[i = j] - pi_j."""
    logs = [math.log(a / b) for a, b in zip(FAR, REF, strict=True)]
    u = [b / a for a, b in zip(FAR, REF, strict=True)]
    rho = [a / b for a, b in zip(FAR, NEAR, strict=True)]
    k3 = [x - 1 + y for x, y in zip(u, logs, strict=True)]
    coefficients = {
        "k1": (FAR, [1.0] * 4),
        "k2": (FAR, logs),
        "k3": (FAR, [1 - x for x in u]),
        "rho k1": (FAR, [1 + x for x in logs]),
        "rho k3": (FAR, logs),
        "k2, tokens of π_old": (NEAR, logs),
        "rho k2, tokens of π_old": (NEAR, [a * b for a, b in zip(rho, logs, strict=True)]),
        "rho k3, tokens of π_old": (NEAR, [a * b for a, b in zip(rho, logs, strict=True)]),
        "k1 in the reward": (FAR, logs),
        "k2 in the reward": (FAR, [x * x / 2 for x in logs]),
        "k3 in the reward": (FAR, k3),
    }
    found = {"full KL(π ‖ ref)": 0.0, "full KL(ref ‖ π)": 0.0}
    for name, (drawn, c) in coefficients.items():
        each = [[c[i] * ((i == j) - FAR[j]) for j in range(4)] for i in range(4)]
        mean = [sum(drawn[i] * each[i][j] for i in range(4)) for j in range(4)]
        off = [sum((x - m) ** 2 for x, m in zip(some, mean, strict=True)) for some in each]
        found[name] = sum(w * x for w, x in zip(drawn, off, strict=True))
    table = rows_of("theory_kl_gradients")
    assert {*table} == {*found}
    for name, cells in table.items():
        close(cells[5:6], [found[name]], 2)
    assert f"is {found['k3'] / found['k2']:.0f} times k2's" in KL


def test_k3_becomes_less_steady_than_k1_as_the_policy_moves():
    """Along the path of the figure."""
    weights = [
        [q ** (1 - s) * p**s for q, p in zip(REF, FAR, strict=True)] for s in (0.4, 0.6, 0.9)
    ]
    path = [[w / sum(some) for w in some] for some in weights]
    deviations = [theory.kl_moments(tuple(p)) for p in path]
    steadier = [found["k3"][1] < found["k1"][1] for found in deviations]
    assert steadier == [True, True, False]
    assert all(a < b for a, b in pairwise(kl(p, REF) for p in path))


def test_the_kl_that_a_token_leads_to():
    """Two tokens. The models agree on the first, and on the second after `a`."""
    first, far = (0.5, 0.5), kl(FAR, REF)

    def whole(logits):
        return softmax(logits)[1] * far

    exact = gradient(whole, first)
    told = rf"$0.5 \times {far:.3f} = {whole([0.0, 0.0]):.3f}$ nats"
    assert told in KL and f"$({exact[0]:.3f}, {exact[1]:.3f})$" in KL
    # Every completion with its chance, through the scripts' functions.
    second = [(1.0, 0.0), *((p, math.log(p / q)) for p, q in zip(FAR, REF, strict=True))]
    chances = tensor([0.5, *(0.5 * p for p, _ in second[1:])])
    log_ratio = tensor([[0.0, x] for _, x in second])
    mask, no_score = torch.ones(5, 2, dtype=torch.bool), torch.zeros(5).double()
    rewards = ppo_rlhf.shaped_rewards(no_score, log_ratio, mask, 1.0)
    advantages, _ = ppo_rlhf.gae(rewards, torch.zeros_like(rewards), 1.0, 1.0)
    logits = torch.zeros(2).double().requires_grad_()
    logprobs = logits.log_softmax(dim=0)[[0, 1, 1, 1, 1]]
    (grad,) = torch.autograd.grad((chances * -advantages[:, 0] * logprobs).sum(), logits)
    assert grad.tolist() == pytest.approx(exact)
    # As a loss, each token by itself: the first log-ratio is 0 and so are its gradients.
    for estimate in (
        lambda x: ppo_rlhf.k2_kl(x, x.detach(), x.detach()),
        lambda x: grpo.k3_kl(x, x.detach()),
        lambda x: x - x.detach(),
    ):
        logprobs = logits.log_softmax(dim=0)[[0, 1, 1, 1, 1]]
        (grad,) = torch.autograd.grad((chances * estimate(logprobs)).sum(), logits)
        assert grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_nats_per_token_and_per_completion():
    assert f"$e^5 = {math.exp(5):.0f}$ times" in KL
    assert f"$e^{{0.25}} = {math.exp(5 / 20):.2f}$ times" in KL
    best_of = [f"{math.log(n) - (n - 1) / n:.1f} for $n = {n}$" for n in (8, 100)]
    assert ", ".join(best_of) in KL
    # Rewards without ties, so many that they are nearly continuous: the KL of the best of 8.
    size = 2000
    chances = [((i + 1) / size) ** 8 - (i / size) ** 8 for i in range(size)]
    assert kl(chances, [1 / size] * size) == pytest.approx(math.log(8) - 7 / 8, abs=1e-3)


def test_beta_in_the_loss_and_in_the_reward():
    rewards = (1.0, 0.0, 0.0, 1.0)
    std = math.sqrt(sum((r - 0.5) ** 2 for r in rewards) / 3)
    example = f"deviation of {std:.3f}: 0.04 in the loss costs {0.04 * std:.3f} of reward per nat"
    assert example in KL
    # KLs of the four completions in the reward, at that price, and in the loss, after the scaling.
    nats = (3.0, 1.0, 0.0, 2.0)
    returns = [r - 0.04 * std * x for r, x in zip(rewards, nats, strict=True)]
    in_reward = grpo.group_advantages(torch.tensor(returns), 4, scale=False) / std
    in_loss = grpo.group_advantages(torch.tensor(rewards), 4).tolist()
    in_loss = [a - 0.04 * (x - 1.5) for a, x in zip(in_loss, nats, strict=True)]
    assert in_reward.tolist() == pytest.approx(in_loss, abs=2e-4)


def test_the_scales_of_beta_in_ppo_and_dpo():
    """The table of kl.md, its other three rows."""
    assert rf"$\beta = 0.2$: {1 / 0.2:.0f} nats cost 1 unit of reward" in KL
    assert f"$1 / 0.3 = {1 / 0.3:.1f}$ nats" in KL
    assert rf"a preference of $\sigma(1) = {1 / (1 + math.exp(-1)):.2f}$" in KL
    # PPO: advantages of standard deviation 2, whitened, and 0.04 in the loss, against 0.08 k1
    # subtracted from the advantages: the same gradient, half as long.
    assert (
        f"a standard deviation of 2: 0.04 in the loss costs {0.04 * 2:.2f} of reward per nat" in KL
    )
    raw, mask = tensor([[2.0, -2.0, 2.0, -2.0]]), torch.ones(1, 4, dtype=torch.bool)
    k1 = tensor([[0.5, -0.3, 0.0, 1.0]])
    found = []
    for advantages, beta in ((ppo_rlhf.whiten(raw, mask), 0.04), (raw - 0.08 * k1, 0.0)):
        now = (k1 - 1.0).requires_grad_()
        old, ref, none = now.detach(), now.detach() - k1, torch.zeros_like(k1)
        loss, _ = ppo_rlhf.policy_loss(now, old, ref, advantages, none, mask / 4, EPS, beta, 0.0)
        found += torch.autograd.grad(loss, now)
    torch.testing.assert_close(2 * found[0], found[1])
    # A reward with such a penalty is DPO's: its difference of implicit rewards is beta times h.
    args = dpo.check_args(dpo.Args(beta=0.3))
    totals = torch.tensor([[1 / 0.3, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.long)
    loss = dpo.pair_losses(args, *totals)[0].item()
    assert math.exp(-loss) == pytest.approx(1 / (1 + math.exp(-1)))


def test_the_adaptive_beta():
    args = ppo_rlhf.Args()
    n, horizon = args.prompts_per_rollout, args.kl_horizon
    assert f"$K = {n} / {horizon:.0f} = {n / horizon:g}$" in KL

    def adapt(nats):
        return ppo_rlhf.adapt_beta(0.2, nats, 6.0, horizon, n)

    assert adapt(9.0) == pytest.approx(0.2 * (1 + 0.1 * 0.2))
    assert adapt(5.4) == pytest.approx(0.2 * (1 - 0.1 * 0.1))
    assert adapt(-1.0) == pytest.approx(0.2 * (1 - 0.1 * 0.2))
    assert rf"$e$ is clipped to 0.2 and $\beta = {adapt(9.0):.3f}$; with one of 5.4" in KL
    assert rf"$e = -0.1$ and $\beta = {adapt(5.4):.3f}$" in KL
    assert f"about {math.ceil(math.log(2) / math.log(1.02) - 0.01)} of them to double" in KL


def test_which_direction_is_which():
    ref, table = (0.46, 0.03, 0.02, 0.03, 0.46), rows_of("theory_directions")
    both = {}
    for centre in range(1, 6):
        weights = [2.0 ** -((place - centre) ** 2) for place in range(1, 6)]
        p = [w / sum(weights) for w in weights]
        both[centre] = kl(p, ref), kl(ref, p)
        close(table[str(centre)][1:2], p, 2)
        close(table[str(centre)][2:], both[centre], 2)
    seeking = [sorted(both, key=lambda centre: both[centre][part])[:2] for part in (0, 1)]
    assert {*seeking[0]} == {1, 5} and seeking[1][0] == 3


def test_the_best_policy_under_either_direction():
    """Rewards 0 and -10, beta 1, a half each in the reference: by search."""
    grid = [math.exp(-0.0005 * i) for i in range(1, 30_000)]
    ref = (0.5, 0.5)
    best = [
        max(grid, key=lambda x: -10 * x - kl((1 - x, x), ref) if x < 1 else -math.inf),
        max(grid, key=lambda x: -10 * x - kl(ref, (1 - x, x)) if x < 1 else -math.inf),
    ]
    assert best[0] == pytest.approx(math.exp(-10) / (1 + math.exp(-10)), rel=1e-3)
    c = (-9 + math.sqrt(81 + 20)) / 2  # 1/2 / c + 1/2 / (c + 10) = 1
    assert best[1] == pytest.approx(0.5 / (c + 10), rel=1e-3)
    assert f"= {best[0]:.5f}$; under" in KL and f"leaves {best[1]:.3f}, a thousand times" in KL
    assert best[1] / best[0] == pytest.approx(1000, rel=0.1)
