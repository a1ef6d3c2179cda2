"""docs/play.html in a real browser: its formulas against the scripts'."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from browser import needs_browser
from pytest import approx

import grpo
import grpo_variants
import ppo_rlhf
from docs.experiments.studies.one_prompt import leaf, mask_of, padded
from reinforce import baseline_advantages
from runtime.functions import load_function

pytestmark = pytest.mark.docs
PAGE = Path("docs/play.html")
MEASURED = json.loads(Path("docs/results/one_prompt.json").read_text())["numbers"]
LEVELS = {"GRPO": ("token", "clip"), "GSPO": ("sequence", "clip"), "CISPO": ("token", "cispo")}
# All numbers that functions of the page return.
CALL = """const flat = (x) => (typeof x === "number" ? [x] : Object.values(x).flatMap(flat));
return arguments[0].map(([name, args]) => flat(play[name](...args)));"""


def loss_and_gradients(new, old, ref, A, low, high, beta, loss):
    """variant_loss of completions in lists, and its gradient by autograd."""
    logprobs, mask, (level, kind) = leaf(padded(new)), mask_of(new), LEVELS[loss]
    weights = grpo.token_weights(mask.double(), mask.sum(dim=1), "sequence", max_new_tokens=0)
    rows = (logprobs, padded(old), padded(ref), torch.tensor(A).double(), mask)
    coefs = dict(clip_low=low, clip_high=high, beta=beta)
    losses, _ = grpo_variants.variant_loss(*rows, **coefs, level=level, loss_type=kind)
    value = (weights * losses).sum()
    return [value.item(), *torch.autograd.grad(value, logprobs)[0][mask].tolist()]


def tilted(ref, rewards, beta):
    """Log-probs of pi proportional to pi_ref exp(r / beta), enumerated."""
    weights = [math.exp(x + r / beta) for x, r in zip(ref, rewards, strict=True)]
    return [math.log(weight / sum(weights)) for weight in weights]


def ascend(ref, A, beta, rate, steps):
    """Log-probs of a softmax after each step of gradient ascent on GRPO's objective, a rollout of
    each completion once for each step, by autograd; a gradient above norm 1 is scaled down to it.
    """
    ref, A = torch.tensor(ref).double(), torch.tensor(A).double()
    path = [ref]
    for _ in range(steps):
        logits = leaf(path[-1])
        logprobs = logits.log_softmax(0)
        u = (ref - logprobs).exp()
        ratio = (logprobs - logprobs.detach()).exp()
        objective = (ratio * A - beta * (u - 1 - u.log())).mean()
        (gradient,) = torch.autograd.grad(objective, logits)
        step = rate * gradient / max(1, gradient.norm().item())
        path.append((logits + step).detach().log_softmax(0))
    return torch.cat(path)


def random_calls(seed):
    """Calls of the page's functions, and what the scripts' give."""
    rng = Random(seed)
    rewards = [rng.choice([1.0, 0.1]) if seed % 2 else rng.gauss(0, 3) * seed for _ in range(4)]
    old = [[-3 * rng.random() - 1 for _ in range(rng.randint(1, 9))] for _ in rewards]
    new, ref, values = ([[x + rng.gauss(0, 0.4) for x in row] for row in old] for _ in range(3))
    low, high, gamma, lam = (rng.random() for _ in range(4))
    r, settings = torch.tensor(rewards), dict(low=low, high=high, beta=seed % 3 / 5)
    yield "advantages", [rewards, "group", True], grpo.group_advantages(r, 4)
    yield "advantages", [rewards, "group", False], grpo.group_advantages(r, 4, "none")
    for kind in ("none", "leave_one_out"):
        yield "advantages", [rewards, kind, False], baseline_advantages(r, 4, kind)
    for loss in LEVELS:
        args, named = [new, old, ref, rewards[::-1]], settings | dict(loss=loss)
        yield "grpoLoss", [*args, named], loss_and_gradients(*args, **named)
    row = padded(ref[:1]), padded(values[:1])  # token rewards and values
    deltas, advantages = (ppo_rlhf.gae(*row, gamma, x)[0][0] for x in (0, lam))
    yield "gae", [ref[0], values[0], gamma, lam], [*deltas, *advantages]
    policy = torch.tensor([rng.gauss(0, 1) for _ in rewards]).log_softmax(0).tolist()
    yield "tilted", [policy, rewards, beta := 0.2 + rng.random()], tilted(policy, rewards, beta)
    A, named = [rng.gauss(0, 4) for _ in rewards], dict(beta=seed % 3 / 5, rate=2 * high, steps=3)
    yield "descend", [policy, A, named], ascend(policy, A, **named)
    x, y = leaf(new[0][0]), torch.tensor(ref[0][0]).double()
    k1, k2, k3 = (x - y).item(), ppo_rlhf.k2_kl(x, x, y).item(), grpo.k3_kl(x, y)
    yield "estimates", [x.item(), y.item()], [k1, 1, k2, k1, k3.item(), *torch.autograd.grad(k3, x)]


@needs_browser
def test_the_formulas_are_those_of_the_scripts(browser):
    browser.open(PAGE)
    numbers = browser.run("return play.D")
    score = load_function("reward function", "tiny/reviews/gold.py:score")
    assert numbers.pop("gold") == [score(review=text) for text in MEASURED["completion"]]
    assert numbers.items() <= MEASURED.items()
    calls = [call for seed in range(20) for call in random_calls(seed)]
    for found, call in zip(browser.run(CALL, [call[:2] for call in calls]), calls, strict=True):
        assert found == approx([float(x) for x in call[2]], rel=1e-6, abs=1e-6), call[0]
