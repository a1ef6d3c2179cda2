"""docs/variants.md: each diff applies to its script, its function equals plain loops, and it runs.

A variant that no longer applies: write its diff anew, against the script as it is.
"""

import math
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import algorithms
import pytest
import torch
from runs import metrics_of
from scripts import short_flags

from docs.exercises.add_bug import Edit, apply

BLOCK = re.compile(r"<!-- variant (\w+) (\w+)\.py (\w+) -->\n```diff\n(.*?)```", re.DOTALL)
PAGE = Path("docs/variants.md").read_text()
VARIANTS = {name: (script, function, diff) for name, script, function, diff in BLOCK.findall(PAGE)}
FLAGS = {
    "apo_down": dict(loss="apo_zero"),
    "icepop": dict(importance_cap=5.0),
    "high_entropy": dict(beta=0.0),
    "vespo": dict(beta=0.0, loss_norm="token"),
}


@pytest.fixture
def variant(request, tmp_path, monkeypatch):
    """The module of a script with the change in it."""
    script, _, diff = VARIANTS[request.param]
    path = tmp_path / f"{script}.py"
    path.write_text(Path(path.name).read_text())
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old, new = ("".join(f"{x[1:]}\n" for x in lines if x[0] != sign) for sign in "+-")
        apply(Edit(path.name, old, new), tmp_path)
    name = f"{script}_{request.param}"
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # pydantic looks its types up there
    spec.loader.exec_module(module)
    return module


def of(name):
    return pytest.mark.parametrize("variant", [name], indirect=True)


def test_a_diff_is_short_and_the_page_has_no_other():
    assert PAGE.count("```diff") == len(VARIANTS) == 8
    assert all(len(diff.splitlines()) <= 12 for _, _, diff in VARIANTS.values())


@pytest.mark.parametrize(
    ("name", "variant"), [(name, name) for name in VARIANTS], indirect=["variant"]
)
def test_two_steps_take_their_gradient_from_the_changed_function(
    name, variant, tmp_path, monkeypatch
):
    script, function, _ = VARIANTS[name]
    original, calls = getattr(variant, function), []

    def zero_from_the_second_call_on(*args, **options):
        found = original(*args, **options)
        calls.extend([1] * torch.is_grad_enabled())  # not an evaluation
        if isinstance(found, tuple):  # of the losses and what is logged
            return found[0] * (len(calls) == 1), *found[1:]
        return found * (len(calls) == 1)

    monkeypatch.setattr(variant, function, zero_from_the_second_call_on)
    two_steps = algorithms.ONE_STEP | dict(total_rollouts=2, epochs=0.5, micro_batch_size=16)
    flags = short_flags(script, **two_steps) | FLAGS.get(name, {})
    run_dir = variant.main(variant.Args(output_dir=str(tmp_path), **flags))
    norms = [row["policy/grad_norm"] for row in metrics_of(run_dir)[1:]]
    assert len(calls) == len(norms) == 2
    assert norms[0] > 1e-3 and norms[1] == 0


# --- the functions, one token at a time ---------------------------------------------------------
MASK, CLIPS = torch.ones(60, 2).bool(), dict(clip_low=0.2, clip_high=0.2)


def some_tokens():
    """Log-probs of the policy and of the old one (60, 2), and advantages (60,)."""
    torch.manual_seed(0)
    logprobs, old = torch.rand(2, 60, 2, dtype=torch.float64).clamp(min=0.05).log()
    return logprobs.requires_grad_(), old, torch.randn(60, dtype=torch.float64)


def clipped(ratio, a):
    """PPO's objective and its derivative by log pi."""
    if ratio > 1.2 and a > 0:
        return 1.2 * a, 0.0
    if ratio < 0.8 and a < 0:
        return 0.8 * a, 0.0
    return ratio * a, ratio * a


def assert_tokens(losses, logprobs, expected):
    """Values and slopes of an objective at each token, and the losses with their gradient."""
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    values, slopes = zip(*expected, strict=True)
    assert (-losses).flatten().tolist() == pytest.approx(values)
    assert (-gradient).flatten().tolist() == pytest.approx(slopes)


@of("off_policy_mask")
def test_off_policy_mask(variant):
    logprobs, old, advantages = some_tokens()
    losses, _ = variant.variant_loss(logprobs, old, None, advantages, MASK, **CLIPS)
    expected, masked = [], 0
    for log_ratios, a in zip((logprobs - old).tolist(), advantages.tolist(), strict=True):
        is_off = a < 0 and -sum(log_ratios) / 2 > 0.1
        masked += is_off
        expected += [clipped(math.exp(x), 0.0 if is_off else a) for x in log_ratios]
    assert_tokens(losses, logprobs, expected)
    assert 5 < masked < sum(a < 0 for a in advantages) - 5
    # A token of padding does not count in the mean: 0.15 nats over one token, not over two.
    short = torch.tensor([[True, False]])
    arguments = (torch.tensor([[-1.15, 0.0]]), torch.tensor([[-1.0, 0.0]]), None)
    losses, _ = variant.variant_loss(*arguments, -torch.ones(1), short, **CLIPS)
    assert (losses == 0).all()


@of("squared_log_ratio")
def test_squared_log_ratio(variant):
    logprobs, old, advantages = some_tokens()
    losses, _ = variant.grpo_loss(logprobs, old, None, advantages, **CLIPS)
    expected = []
    for log_ratios, a in zip((logprobs - old).tolist(), advantages.tolist(), strict=True):
        for log_ratio in log_ratios:
            value, slope = clipped(math.exp(log_ratio), a)
            expected.append((value - 0.001 * log_ratio**2, slope - 0.002 * log_ratio))
    assert_tokens(losses, logprobs, expected)


@of("vespo")
def test_vespo(variant):
    logprobs, old, advantages = some_tokens()
    losses, _ = variant.grpo_loss(logprobs, old, None, advantages, **CLIPS)
    expected = []
    rows = zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)
    for now, before, a in rows:
        w = math.exp(sum(now) - sum(before))
        k, c = (3, 2) if a < 0 else (2, 3)
        weight = w**k * math.exp(c * (1 - w)) * a
        expected += [(weight * x, weight) for x in now]
    assert_tokens(losses, logprobs, expected)


@of("apo_down")
def test_apo_down(variant):
    logratios = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    expected = []
    for chosen, rejected in logratios.tolist():
        worse = 1 / (1 + math.exp(-0.3 * chosen))
        expected.append(worse + 1 / (1 + math.exp(0.3 * (chosen - rejected))))
    assert variant.apo_zero_loss(logratios, 0.3).tolist() == pytest.approx(expected)


@of("dual_clip")
def test_dual_clip(variant):
    logprobs, old, advantages = some_tokens()
    losses, _ = variant.policy_loss(logprobs, old, advantages[:, None], 0.2)
    expected = []
    for log_ratios, a in zip((logprobs - old).tolist(), advantages.tolist(), strict=True):
        for ratio in map(math.exp, log_ratios):
            expected.append((3 * a, 0.0) if a < 0 and ratio > 3 else clipped(ratio, a))
    assert_tokens(losses, logprobs, expected)
    assert sum(slope == 0 and value < 0 for value, slope in expected) > 5


@of("dft")
def test_dft(variant):
    logprobs, _, _ = some_tokens()
    loss = variant.dft_loss(logprobs, 50)
    loss.backward()
    probs = [math.exp(x) for x in logprobs.flatten().tolist()]
    assert loss.item() == pytest.approx(-sum(p * math.log(p) for p in probs) / 50)
    assert logprobs.grad.flatten().tolist() == pytest.approx([-p / 50 for p in probs])


@of("icepop")
def test_icepop(variant):
    ratios = [0.01, 0.49, 0.5, 1.0, 4.9, 5.0, 5.1, 80.0]
    expected = [k if 0.5 <= k <= 5 else 0.0 for k in ratios]
    assert variant.masked_weights(torch.tensor(ratios)).tolist() == pytest.approx(expected)


@of("high_entropy")
def test_high_entropy(variant):
    entropy = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.arange(5) < torch.tensor([5, 1, 5, 4])[:, None]  # 15 tokens, of which 3 stay
    found = variant.is_undecided(entropy * mask, mask)
    highest = sorted(entropy[mask].tolist())[-3:]
    assert (found & mask).tolist() == [
        [is_token and h in highest for h, is_token in zip(*rows, strict=True)]
        for rows in zip(entropy.tolist(), mask.tolist(), strict=True)
    ]
    assert not found.requires_grad
