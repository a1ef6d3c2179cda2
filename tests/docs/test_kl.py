"""The tables of docs/kl.md and the scripts' estimators behind them: derived again with plain
Python."""

import math

import pytest
import torch
from by_hand import close, gradient, kl, rows_of, softmax

import grpo
from docs.experiments.studies import kl as kl_page

TABLES = kl_page.tables({})
REF, FAR, NEAR = (0.4, 0.3, 0.2, 0.1), (0.01, 0.09, 0.3, 0.6), (0.3, 0.3, 0.25, 0.15)
ESTIMATORS = {
    "k1": lambda p, q: math.log(p / q),
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
}


def test_mean_and_deviation_of_k1_k2_k3():
    for (policy, name), cells in rows_of(TABLES["kl values"]).items():
        p, old = (NEAR, REF) if policy == "near" else (FAR, NEAR)
        terms = [ESTIMATORS[name](a, b) for a, b in zip(p, REF, strict=True)]
        mean = sum(a * x for a, x in zip(p, terms, strict=True))
        deviation = math.sqrt(sum(a * (x - mean) ** 2 for a, x in zip(p, terms, strict=True)))
        stale = sum(a * x for a, x in zip(old, terms, strict=True))
        close(cells[2:], [kl(p, REF), mean, deviation, stale], 3)
        if name != "k2":
            assert mean == pytest.approx(kl(p, REF))


def gradients_by_differences():
    """What a loss of each kind has as its gradient: the tokens' chances stay, the term moves."""

    def expected(drawn, term):
        def function(logits):
            p = softmax(logits)
            return sum(w * term(p[i], i) for i, w in enumerate(drawn))

        return gradient(function, FAR)

    k1, k2, k3 = ESTIMATORS.values()
    return {
        "k1": expected(FAR, lambda p, i: k1(p, REF[i])),
        "k2": expected(FAR, lambda p, i: k2(p, REF[i])),
        "k3": expected(FAR, lambda p, i: k3(p, REF[i])),
        "rho k1": expected(FAR, lambda p, i: p / FAR[i] * k1(p, REF[i])),
        "rho k3, tokens of π_old": expected(NEAR, lambda p, i: p / NEAR[i] * k3(p, REF[i])),
        "rho k2, tokens of π_old": expected(NEAR, lambda p, i: FAR[i] / NEAR[i] * k2(p, REF[i])),
        "k1 in the reward": expected(FAR, lambda p, i: k1(FAR[i], REF[i]) * math.log(p)),
        "k3 in the reward": expected(FAR, lambda p, i: k3(FAR[i], REF[i]) * math.log(p)),
    }


def test_the_gradients_table():
    table, found = rows_of(TABLES["kl gradients"]), gradients_by_differences()
    exact, zero = kl(FAR, REF), [0.0] * 4
    logs = [math.log(a / b) for a, b in zip(FAR, REF, strict=True)]
    full = {  # the closed forms
        "KL(π ‖ ref)": [a * (x - exact) for a, x in zip(FAR, logs, strict=True)],
        "KL(ref ‖ π)": [a - b for a, b in zip(FAR, REF, strict=True)],
    }
    assert full["KL(π ‖ ref)"] == pytest.approx(gradient(lambda x: kl(softmax(x), REF), FAR))
    assert full["KL(ref ‖ π)"] == pytest.approx(gradient(lambda x: kl(REF, softmax(x)), FAR))
    assert found["rho k1"] == pytest.approx(full["KL(π ‖ ref)"], abs=1e-8)  # of the other table
    for name, cells in table.items():
        close(cells[1:5], found[name], 3)
        told = {"nothing": zero, **full}.get(cells[6])
        if told is None:
            assert cells[6] == "neither"
            for other in (zero, *full.values()):
                assert max(abs(a - b) for a, b in zip(found[name], other, strict=True)) > 0.1
        else:
            assert found[name] == pytest.approx(told, abs=1e-8)


def test_the_variances_of_the_gradients():
    """The gradient of one token is a coefficient times grad log pi, 1[i = j] - pi_j."""
    logs = [math.log(a / b) for a, b in zip(FAR, REF, strict=True)]
    u = [b / a for a, b in zip(FAR, REF, strict=True)]
    rho = [a / b for a, b in zip(FAR, NEAR, strict=True)]
    coefficients = {
        "k1": (FAR, [1.0] * 4),
        "k2": (FAR, logs),
        "k3": (FAR, [1 - x for x in u]),
        "rho k2, tokens of π_old": (NEAR, [a * b for a, b in zip(rho, logs, strict=True)]),
        # d/dlog pi of rho (u - 1 - log u) is rho (u - 1 - log u) + rho (1 - u) = -rho log u.
        "rho k3, tokens of π_old": (NEAR, [a * b for a, b in zip(rho, logs, strict=True)]),
        "k1 in the reward": (FAR, logs),
        "k3 in the reward": (FAR, [x - 1 + y for x, y in zip(u, logs, strict=True)]),
    }
    table = rows_of(TABLES["kl gradients"])
    assert {*table} == {*coefficients}
    for name, (drawn, c) in coefficients.items():
        each = [[c[i] * ((i == j) - FAR[j]) for j in range(4)] for i in range(4)]
        mean = [sum(drawn[i] * each[i][j] for i in range(4)) for j in range(4)]
        off = [sum((x - m) ** 2 for x, m in zip(some, mean, strict=True)) for some in each]
        close(table[name][5:6], [sum(w * x for w, x in zip(drawn, off, strict=True))], 2)


def test_beta_in_the_loss_and_in_the_reward():
    rewards = (1.0, 0.0, 0.0, 1.0)
    std = math.sqrt(sum((r - 0.5) ** 2 for r in rewards) / 3)
    # KLs of the four completions in the reward, at that price, and in the loss, after the scaling.
    nats = (3.0, 1.0, 0.0, 2.0)
    returns = [r - 0.04 * std * x for r, x in zip(rewards, nats, strict=True)]
    in_reward = grpo.group_advantages(torch.tensor(returns), 4, scale="none") / std
    in_loss = grpo.group_advantages(torch.tensor(rewards), 4).tolist()
    in_loss = [a - 0.04 * (x - 1.5) for a, x in zip(in_loss, nats, strict=True)]
    assert in_reward.tolist() == pytest.approx(in_loss, abs=2e-4)
