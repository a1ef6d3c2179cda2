"""docs/play.html in a real browser: its formulas against the scripts', its numbers against both."""

import json
import math
import re
from pathlib import Path
from random import Random

import pytest
import torch
from browser import needs_browser

import grpo
import ppo_rlhf
from docs.experiments.one_prompt import leaf, mask_of, padded
from reinforce import baseline_advantages

PAGE = Path("docs/play.html")
MEASURED = json.loads(Path("docs/results/one_prompt.json").read_text())["numbers"]
LEVELS = {"GRPO": ("token", "clip"), "GSPO": ("sequence", "clip"), "CISPO": ("token", "cispo")}
SETTING = (
    "r1=1.5&base=leave_one_out&std=no&c=1&t=2&p1.2=-3.2&loss=CISPO&high=0.1&beta=0.4&lam=0.5&v1.2=2&"
    "steps=7&kbeta=0.2"
)
# All numbers in what functions of the page return.
CALL = """
const flat = (x) => (typeof x === "number" ? [x] : Object.values(x).flatMap(flat));
return arguments[0].map(([name, args]) => flat(play[name](...args)));
"""
# Every number that is shown, with its arithmetic.
READ = "return [...document.querySelectorAll('b[id]')].map((x) => [x.id, x.textContent, x.ariaDescription])"


def loss_and_gradients(new, old, ref, advantages, low, high, beta, loss):
    """grpo_loss (completions of several lengths in lists) and its gradient by autograd."""
    level, loss_type = LEVELS[loss]
    logprobs, mask = leaf(padded(new)), mask_of(new)
    weights = grpo.token_weights(mask.double(), "sequence", max_new_tokens=0)
    rows = (logprobs, padded(old), padded(ref), torch.tensor(advantages).double(), weights)
    value, _ = grpo.grpo_loss(*rows, low, high, beta, level=level, loss_type=loss_type)
    (slopes,) = torch.autograd.grad(value, logprobs)
    return value.item(), slopes[mask]


def test_the_page_needs_nothing_else():
    text = PAGE.read_text()
    assert not re.findall(r"\bsrc=|@import|url\(|fetch\(|https?:", text)
    links = re.findall(r'href="(\w+)/"', text)
    assert len(links) == text.count("href=") and all(Path(f"docs/{x}.md").exists() for x in links)
    assert len(text.splitlines()) <= 500 and max(map(len, text.splitlines())) <= 120


def random_calls(seed):
    """Calls of the page's functions, and what the scripts' give."""
    rng = Random(seed)
    rewards = [rng.choice([1.0, 0.1]) if seed % 2 else rng.gauss(0, 3) for _ in range(4)]
    rewards = rewards if seed else [0.1] * 4
    old = [[-3 * rng.random() - 1 for _ in range(rng.randint(1, 9))] for _ in rewards]
    new, ref, values = ([[x + rng.gauss(0, 0.4) for x in row] for row in old] for _ in range(3))
    low, high, gamma, lam = (rng.random() for _ in range(4))
    r, mask, beta = torch.tensor(rewards), mask_of(old), seed % 3 / 5
    for divides, scale in ((True, "group"), (False, "none")):
        yield "advantages", [rewards, "group", divides], grpo.group_advantages(r, 4, scale)
    for kind in ("none", "leave_one_out"):
        yield "advantages", [rewards, kind, False], baseline_advantages(r, 4, kind)
    for loss in LEVELS:
        A, settings = rewards[::-1], dict(low=low, high=high, beta=beta, loss=loss)
        value, slopes = loss_and_gradients(new, old, ref, A, **settings)
        yield "grpoLoss", [new, old, ref, A, settings], [value, *slopes]
    token_rewards = ppo_rlhf.shaped_rewards(r, padded(old) - padded(ref), mask, beta)
    both = [ppo_rlhf.gae(token_rewards, padded(values), gamma, x)[0] for x in (0, lam)]
    for i, row in enumerate(values):
        ours = token_rewards[i][mask[i]].tolist()
        yield "shapedRewards", [rewards[i], old[i], ref[i], beta], ours
        yield "gae", [ours, row, gamma, lam], torch.cat([x[i][mask[i]] for x in both])
    x, y = leaf(new[0][0]), torch.tensor(ref[0][0]).double()
    kls = [x - y, ppo_rlhf.k2_kl(x, x.detach(), y), grpo.k3_kl(x, y)]
    slopes = [torch.autograd.grad(kl, x, retain_graph=True)[0] for kl in kls]
    yield "estimates", [x.item(), y.item()], [z for pair in zip(kls, slopes) for z in pair]


@needs_browser
def test_the_formulas_are_those_of_the_scripts(browser):
    browser.open(page=PAGE.absolute().as_uri())
    data = browser.run("return play.D")
    assert len(data) == 7 and data == {name: MEASURED[name] for name in data}
    calls = [call for seed in range(20) for call in random_calls(seed)]
    found = browser.run(CALL, [call[:2] for call in calls])
    for numbers, (name, _, expected) in zip(found, calls, strict=True):
        expected = [float(x) for x in expected]
        assert numbers == pytest.approx(expected, rel=1e-6, abs=1e-6), name
    assert found[0] == [0] * 4  # of equal rewards
