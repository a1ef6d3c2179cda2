"""docs/play.html in a real browser: its formulas against the scripts', its texts against both."""

import json
import math
import re
from pathlib import Path
from random import Random

import pytest
import torch
from browser import needs_browser
from pytest import approx

import grpo
import ppo_rlhf
from docs.experiments.studies.one_prompt import leaf, mask_of, padded, ppo_advantages
from reinforce import baseline_advantages

pytestmark = pytest.mark.docs
PAGE = Path("docs/play.html")
MEASURED = json.loads(Path("docs/results/one_prompt.json").read_text())["numbers"]
LEVELS = {"GRPO": ("token", "clip"), "GSPO": ("sequence", "clip"), "CISPO": ("token", "cispo")}
SETTING = "r1=1.5&base=leave_one_out&std=no&c=1&loss=CISPO&steps=7&p1.2=-3.2"
# All numbers that functions of the page return; all that it shows, with their arithmetic.
CALL = """const flat = (x) => (typeof x === "number" ? [x] : Object.values(x).flatMap(flat));
return arguments[0].map(([name, args]) => flat(play[name](...args)));"""
READ = """return Object.fromEntries([...document.querySelectorAll("b[id]")].map((x) =>
[x.id, [Number(x.textContent), x.ariaDescription]]));"""


def loss_and_gradients(new, old, ref, A, low, high, beta, loss):
    """grpo_loss of completions in lists, and its gradient by autograd."""
    logprobs, mask, (level, kind) = leaf(padded(new)), mask_of(new), LEVELS[loss]
    weights = grpo.token_weights(mask.double(), "sequence", max_new_tokens=0)
    rows = (logprobs, padded(old), padded(ref), torch.tensor(A).double(), mask)
    coefs = dict(clip_low=low, clip_high=high, beta=beta)
    value = (weights * grpo.grpo_loss(*rows, **coefs, level=level, loss_type=kind)).sum()
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
    browser.open(page=PAGE.absolute().as_uri())
    assert browser.run("return play.D").items() <= MEASURED.items()
    calls = [call for seed in range(20) for call in random_calls(seed)]
    for found, call in zip(browser.run(CALL, [call[:2] for call in calls]), calls, strict=True):
        assert found == approx([float(x) for x in call[2]], rel=1e-6, abs=1e-6), call[0]


PRESSED = {  # every button, one after the other, from base=none&std=no: what is then shown
    'data-rewards="add"': {"A0": 12.82, "A3": 5.93},
    'data-rewards="times"': {"A0": 1282.13, "A3": 593.16},
    'data-rewards="equal"': {"A0": 860.53, "A3": 860.53},
    'data-address="c=3&t=9&p3.9=-3.1011"': {"ratio": 1.5, "slope": 1.5 * -0.8276},
    'data-address="beta=0.04&r3=3.5"': {"barsGold": -1, "bestGold": 0.93, "peakGold": 0.72},
    'data-address="lam=0&v0.4=0.8876"': {"A0.3": 5.5, "A0.4": -1.89, "A0.5": 2.81},
    'data-address="base=none&std=no&r0=12.8213&r1=9.4466&r2=6.2218&r3=5.9316&steps=100"':
        {"now0": 0.37, "now1": 0.27, "now2": 0.18, "now3": 0.17},
    'data-steps="20"': {"steps": 120},
    'data-steps="1"': {"steps": 121},
    'data-steps="-400"': {"steps": 0, "nowKl": 0},
    'data-address=""': {"A0": 1.3, "A3": -0.83, "bestLearned": 2.82, "peakLearned": 0},
}  # fmt: skip


@needs_browser
def test_each_button_and_the_answers_to_the_questions(browser):
    assert {*re.findall(r"<button (data-.+?)>", PAGE.read_text())} == {*PRESSED}
    browser.open(page=PAGE.absolute().as_uri(), address="base=none&std=no")
    for button, answer in PRESSED.items():
        shown = browser.run(f"all('button[{button}]')[0].click(); fromAddress(); {READ}")
        assert {name: shown[name][0] for name in answer} == approx(answer, abs=0.02), button


@needs_browser
def test_a_setting_in_the_address_is_shown_and_nothing_is_loaded(browser):
    for dark in (False, True):
        browser.open(page=PAGE.absolute().as_uri(), width=360, dark=dark, address=SETTING)
        assert browser.run("return document.documentElement.scrollWidth") == 360
    assert browser.run("return performance.getEntriesByType('resource')") == []
    assert "http" not in PAGE.read_text() and browser.hash() == f"#{SETTING}"
    shown, rewards = browser.run(READ), [2.8213, 1.5, -3.7782, -4.0684]
    A = baseline_advantages(torch.tensor(rewards), 4, "leave_one_out").tolist()
    assert [shown[f"A{c}"][0] for c in range(4)] == approx(A, abs=6e-5)
    new = [[-3.2 if x == MEASURED["new"][1][2] else x for x in row] for row in MEASURED["new"]]
    rows = (new, MEASURED["old"], MEASURED["ref"], A, 0.2, 0.2, 0)
    assert shown["gradient"][0] == approx(loss_and_gradients(*rows, "CISPO")[1 + 11 + 2], abs=6e-5)
    of_ppo = ppo_advantages(MEASURED | {"reward": rewards})["A"][1].tolist()
    assert [shown[f"A1.{t}"][0] for t in range(12)] == approx(of_ppo, abs=6e-3)
    assert browser.run("return ['up', 'down'].map((x) => all('#group .' + x).length)") == [23, 24]
    kl = browser.run("return all('#grows .value')[0].getAttribute('d').split('L')")
    assert len(kl) == 8 and float(kl[0].split()[1]) > float(kl[-1].split()[1])  # y: from the top
    parts = {how.split(":")[0]: number for number, how in shown.values()}
    plain = [how for how in parts if re.fullmatch(r"([-+*/()., \dx²e]|exp|min|sqrt)+", how)]
    for how in plain:
        value = eval(how.replace(" x ", " * ").replace("²", " ** 2"), vars(math) | {"min": min})
        assert value == approx(parts[how], rel=2e-3, abs=6e-3), how
    assert len(plain) > 100
