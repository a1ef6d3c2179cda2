"""The mathematics of grpo.py against derivations of its own, and the wiring of a real run."""

import math
from collections import defaultdict
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from statistics import mean, stdev

import algorithms
import pytest
import spies
import torch
from algorithms import assert_same_gradient, set_weights
from plain import plain_logprobs
from reviews import EOS, plain_model
from scripts import REVIEWS
from spies import watch_steps
from transformers import AutoTokenizer

import common.logprobs
import grpo
from grpo import Args, gdpo_advantages, group_advantages, grpo_loss, k3_kl, length_penalty
from grpo import ratio_sums, token_weights
from runs import metrics_of

POLICY = "tiny/arithmetic/policy"
LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# Groups of four completions of four prompts, and one step on them.
run = partial(algorithms.run, "grpo", train_split="train[:64]")
spy_on = partial(spies.spy_on, grpo)
spy_by_name = partial(spies.spy_by_name, grpo)


def weighted_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, weights, **coefs):
    losses = grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, **coefs)
    return (weights * losses).sum()


# --- passes -------------------------------------------------------------------------------------
def test_every_pass_reads_each_prompt_once(tmp_path, monkeypatch):
    """The reward model's, those of pi_old and of the reference, and the two updates' passes."""
    trees = spies.spy_on(common.logprobs, monkeypatch, "PrefixTree")
    sampled = spy_on(monkeypatch, "generate")
    flags = REVIEWS | dict(reward_fn=[], eval_reward_fn=None, beta=0.1, max_new_tokens=6)
    run(tmp_path, micro_batch_size=4, update_epochs=2, train_split="train[:8]", **flags)
    (arguments, (completions, _)) = sampled[1]  # after those of the evaluation
    sequences = [*zip(arguments[1], completions, strict=True)]
    scored, predicted = set(), set()  # prefixes by prompt; the last token predicts nothing
    for prompt, completion in sequences:
        row = prompt + completion
        prefixes = [(tuple(prompt), tuple(row[: end + 1])) for end in range(len(row))]
        scored.update(prefixes)
        predicted.update(prefixes[:-1])
    passes = [(rows, len(tree.ids)) for (rows, _), tree in trees]
    prompt, completion = sequences[0]
    first = next(i for i, (rows, _) in enumerate(passes) if prompt + completion in rows)
    num_nodes = [number for _, number in passes[first : first + 20]]  # a pass for each prompt
    assert sum(num_nodes[:4]) == len(scored)
    for start in (4, 8, 12, 16):
        assert sum(num_nodes[start : start + 4]) == len(predicted)


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
    # All eight: mean 10/8, squares 26, sample variance (26 - 8 (10/8)^2) / 7 = 27/14.
    of_batch = unscaled / (math.sqrt(27 / 14) + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="batch"), of_batch)


def test_group_advantages_are_rounded_only_at_the_end():
    # In float32 the mean and the deviation of 49 numbers are off by more than the last bit.
    rewards = 100 + 3 * torch.randn(980, generator=torch.Generator().manual_seed(0))
    for group_size, scale in ((2, "group"), (49, "group"), (49, "none")):
        found = group_advantages(rewards, group_size, scale).view(-1, group_size).tolist()
        groups = rewards.view(-1, group_size).tolist()
        for group, advantages in zip(groups, found, strict=True):
            exact = [Fraction(reward) for reward in group]
            divisor = stdev(exact) + 1e-4 if scale == "group" else 1
            expected = [float(r - mean(exact)) / divisor for r in exact]
            assert advantages == pytest.approx(expected, rel=6e-8)  # 2 ** -24: half of the last bit


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


def test_maxrl_divides_by_the_share_that_is_right():
    # 1/4 right: 1 / (1/4) - 1 and -1. 3/4: 1 / (3/4) - 1 and -1. None and all teach nothing.
    rewards = torch.tensor([0.0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    expected = [-1, -1, 3, -1, 1 / 3, 1 / 3, -1, 1 / 3, *[0] * 8]
    assert group_advantages(rewards, 4, "mean").tolist() == pytest.approx(expected)
    # A mean of -1/2: what is better stays so, and is multiplied by no more than G.
    found = group_advantages(torch.tensor([-1.0, 1, -1, -1]), 4, "mean")
    assert found.tolist() == pytest.approx([-2, 6, -2, -2])


# --- several rewards: GDPO ------------------------------------------------------------------------
def test_gdpo_tells_combinations_apart_that_the_sum_does_not():
    """The example of docs/grpo.md: groups of two with (0, 0) and (1, 0), with (0, 0) and (1, 1)."""
    rewards = torch.tensor([[0.0, 1, 0, 1], [0.0, 0, 0, 1]])
    summed = group_advantages(rewards.sum(dim=0), 2)
    assert summed.tolist() == pytest.approx([-0.71, 0.71, -0.71, 0.71], abs=5e-3)
    found = gdpo_advantages(rewards, torch.ones(2), 2)
    assert found.tolist() == pytest.approx([-0.55, 0.55, -1.10, 1.10], abs=5e-3)


def test_gdpo_equals_plain_loops():
    random = torch.Generator().manual_seed(0)
    rewards = [torch.randn(12, generator=random) * size + size for size in (1, 50, 0.01)]
    weights, total = [1.0, 0.5, -2.0], []
    for start in range(0, 12, 4):
        for i in range(start, start + 4):
            total.append(0)
            for weight, values in zip(weights, rewards, strict=True):
                group = values[start : start + 4].tolist()
                advantage = values[i].item() - mean(group)
                total[-1] += weight * advantage / (stdev(group) + 1e-4)
    expected = [(a - mean(total)) / (stdev(total) + 1e-4) for a in total]
    found = gdpo_advantages(torch.stack(rewards), torch.tensor(weights), 4)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_groups_that_teach_have_advantages():
    """In the first all weighted sums are 1, in the second GDPO's advantages cancel out."""
    first, second = torch.tensor([[1.0, 0, 0, 1, 1, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0.5, 0, 0]])
    cancel = torch.tensor([[0.0, 1, 0, 1], [1.0, 0, 1, 0]])
    flags = dict(reward_fn=["a.py:a", "b.py:b"], reward_weights=[1.0, 2.0], group_size=4)
    gdpo = flags | dict(multi_objective_aggregation="normalize_then_sum")
    rewards = torch.stack([first, second])
    for more, rows, expected in (
        (flags, rewards, [False, True]),
        (flags | dict(reward_weights=[0.0, 1.0]), torch.stack([first, 0 * first]), [False, False]),
        (gdpo, rewards, [True, True]),
        (gdpo | dict(reward_weights=[1.0, 1.0]), cancel, [False]),
        (gdpo | dict(reward_weights=[0.0, 1.0]), cancel, [True]),
    ):
        args = Args(**more)
        assert grpo.groups_that_teach(args, rows).tolist() == expected
        if args.multi_objective_aggregation == "normalize_then_sum":
            found = gdpo_advantages(rows, torch.tensor(args.reward_weights), 4).view(-1, 4)
            assert (found != 0).any(dim=1).tolist() == expected


# --- one ratio for a completion: GSPO, LUSPO -----------------------------------------------------
@pytest.mark.parametrize("norm", ["sequence", "constant"])
def test_the_ratio_of_a_completion_equals_plain_loops(norm):
    """GSPO: -(1/G) sum_i min(s_i A_i, clip(s_i) A_i). LUSPO: terms times |o_i|, here over 10."""
    torch.manual_seed(2)
    lengths = [5, 1, 3, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    logprobs, old = (-torch.rand(4, 6) * mask for _ in range(2))
    logprobs[0, 2] = 0  # a token that is certain counts in the mean
    logprobs.requires_grad_()
    advantages, weights = torch.tensor([1.0, -0.5, 2.0, -1.5]), token_weights(mask, norm, 10)
    clip, sequence = dict(clip_low=0.05, clip_high=0.08), dict(level="sequence")
    loss = weighted_loss(logprobs, old, None, advantages, mask, weights, **clip, **sequence)
    flags = dict(importance_sampling_level="sequence", loss_norm=norm, beta=0.0)
    args = Args(clip_coef=0.05, clip_coef_high=0.08, **flags)
    sums = ratio_sums(args, logprobs, old, advantages, mask)
    expected, kl, clipped = 0, 0, [0, 0]
    for i, length in enumerate(lengths):
        log_ratio = sum(logprobs[i, t] - old[i, t] for t in range(length)) / length
        s, a = log_ratio.exp(), advantages[i]
        inside = min(max(s.item(), 0.95), 1.08)
        outside = (s > 1.08 and a > 0) or (s < 0.95 and a < 0)
        weight = 1 if norm == "sequence" else length / 10
        expected = expected - weight * (inside * a if outside else s * a) / 4
        kl += sum(math.expm1(x) - x for x in (logprobs - old)[i, :length].tolist())
        clipped[int(s > 1)] += length * int(outside)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (found,) = torch.autograd.grad(loss, logprobs)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(found * mask, gradient)
    assert 0 < (gradient.abs().sum(dim=1) > 0).sum() < 4  # one is clipped, one is not
    names = ("policy/clip_fraction_low", "policy/clip_fraction_high")
    assert [sums[name] for name in names] == clipped
    assert sums["policy/approx_kl"].item() == pytest.approx(kl, rel=1e-4)


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
    arguments = (torch.zeros(1, 1), None, torch.tensor([advantage]), torch.ones(1, 1).bool())
    loss = grpo_loss(log_ratio, *arguments, clip_low=0.2, clip_high=0.28)
    assert -loss.item() == pytest.approx(value)
    (-loss).backward()
    assert log_ratio.grad.item() == pytest.approx(gradient)  # d(rho A)/d(log rho) = rho A


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.5, 2.0, 1.28), (1.5, -1.0, 1.28), (0.5, 2.0, 0.8), (0.5, -1.0, 0.8), (1.1, 2.0, 1.1)],
)
def test_cispo_weighs_the_gradient_of_log_pi_by_the_clipped_ratio(ratio, advantage, weight):
    """Under `clip` the first and the fourth have no gradient at all (the test above)."""
    old = torch.tensor([[-2.0]])
    logprobs = (old + math.log(ratio)).requires_grad_()
    advantages, mask, clip = torch.tensor([advantage]), torch.ones(1, 1).bool(), (0.2, 0.28)
    kinds = dict(clip_low=clip[0], clip_high=clip[1], loss_type="cispo")
    loss = grpo_loss(logprobs, old, None, advantages, mask, **kinds)
    args = Args(loss="cispo", clip_coef=clip[0], clip_coef_high=clip[1])
    sums = ratio_sums(args, logprobs, old, advantages, mask)
    assert -loss.item() == pytest.approx(weight * advantage * (-2 + math.log(ratio)))
    # It clips on both sides, whatever the sign of the advantage.
    assert sums["policy/clip_fraction_low"] == (weight == 0.8)
    assert sums["policy/clip_fraction_high"] == (weight == 1.28)
    (-loss).backward()
    assert logprobs.grad.item() == pytest.approx(weight * advantage)


@pytest.mark.parametrize("loss_type", ["sapo", "dppo"])
def test_the_gates_of_sapo_and_dppo_equal_plain_loops(loss_type):
    torch.manual_seed(0)
    logprobs, old = torch.rand(2, 60, 2, dtype=torch.float64).clamp(min=0.02).log()
    logprobs.requires_grad_()
    advantages, mask = torch.randn(60, dtype=torch.float64), torch.ones(60, 2).bool()
    limits = dict(clip_low=0.15, clip_high=0.3)
    losses = grpo_loss(logprobs, old, None, advantages, mask, loss_type=loss_type, **limits)
    losses.sum().backward()
    held = {True: 0, False: 0}  # by the sign of the advantage
    for i, a in enumerate(advantages.tolist()):
        for t in range(2):
            p, q = math.exp(logprobs[i, t]), math.exp(old[i, t])
            if loss_type == "sapo":  # d rho / d log pi = rho, and the gate's slope is 4 g (1 - g)
                tau = 1.0 if a > 0 else 1.05
                g = 1 / (1 + math.exp(-tau * (p / q - 1)))
                value, slope = a * g * 4 / tau, a * 4 * g * (1 - g) * p / q
            else:
                stays = p - q <= 0.3 if a > 0 else q - p <= 0.15
                value = slope = a * p / q if stays else 0.0
                held[a > 0] += not stays
            assert losses[i, t].item() == pytest.approx(-value, rel=1e-5)
            assert logprobs.grad[i, t].item() == pytest.approx(-slope, rel=1e-5, abs=1e-9)
    assert loss_type == "sapo" or (5 < held[True] < 55 and 5 < held[False] < 55)
    # The log counts the tokens that `clip` would hold.
    sums = [ratio_sums(Args(loss=x), logprobs, old, advantages, mask) for x in (loss_type, "clip")]
    assert sums[0] == sums[1] and sums[0]["policy/clip_fraction_low"] > 0


# --- penalties and pass@k -------------------------------------------------------------------------
def test_length_penalty_by_hand():
    lengths = torch.tensor([1, 5, 6, 7, 9, 10])
    expected = torch.tensor([0, 0, 0, 0.25, 0.75, 1])
    assert torch.equal(length_penalty(lengths, max_new_tokens=10, buffer=4), expected)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion():
    outcomes = [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    prompts = [grpo.Prompt(str(i), [i], {}) for i in range(4)]

    def sample(prompts, temperature, rng):
        assert [prompt.text for prompt in prompts] == [*"00000111112222233333"]
        return [(prompt.ids, [7]) for prompt in prompts], None

    def evaluate(**flags):
        rules = {"rule": lambda *_: torch.tensor(outcomes).flatten().float()}
        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        args = Args(eval_samples=5, **flags)
        return grpo.evaluate(args, sample, rules, None, tokenizer, prompts)

    metrics, samples = evaluate()
    assert len(samples) == 20 and metrics["eval/accuracy"] == pytest.approx(9 / 20)
    for k in (2, 4):
        hits = [any(subset) for row in outcomes for subset in combinations(row, k)]
        assert metrics[f"eval/pass_at_{k}"] == pytest.approx(mean(hits))
    assert "eval/pass_at_8" not in metrics and 0.45 < metrics["eval/pass_at_2"] < 0.75
    weighted, _ = evaluate(reward_weights=[0.5])  # a half is neither right nor wrong
    assert weighted["eval/reward"] == pytest.approx(9 / 40) and "eval/accuracy" not in weighted


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


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("unbiased", [True, False])
def test_the_unbiased_kl_and_its_gradient_by_enumeration(unbiased, level):
    """All completions of two tokens over three, drawn from a pi_old that pi has left: the sum over
    positions of the exact KL at a prefix, whose prefixes are pi_old's.
    """
    torch.manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)  # rows: prefix -, 0, 1, 2
    logp = logits.log_softmax(1)
    old, ref = (torch.randn(4, 3, dtype=torch.float64).log_softmax(1) for _ in range(2))
    first, second = torch.arange(9) // 3, torch.arange(9) % 3

    def of_completions(log_p):  # (9, 2)
        return torch.stack([log_p[0, first], log_p[first + 1, second]], dim=1)

    drawn = of_completions(old).sum(dim=1, keepdim=True).exp().expand(9, 2)
    loss = weighted_loss(
        of_completions(logp),
        of_completions(old),
        of_completions(ref),
        torch.zeros(9),
        torch.ones(9, 2).bool(),
        drawn,
        clip_low=0.2,
        clip_high=0.2,
        beta=0.5,
        level=level,
        unbiased_kl=unbiased,
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    chances = torch.cat([torch.ones(1, dtype=torch.float64), old[0].exp()])  # of each prefix
    kl = 0.5 * chances @ (logp.exp() * (logp - ref)).sum(dim=1)
    (expected,) = torch.autograd.grad(kl, logits)
    assert torch.allclose(found, expected, atol=1e-12) == unbiased
    assert math.isclose(loss.item(), kl.item(), rel_tol=1e-9) == unbiased


# --- the whole loss -----------------------------------------------------------------------------
def test_loss_metrics_by_hand():
    # Rows to be raised, to be lowered and to be left alone; the last column is padding.
    ratio = torch.tensor([[1.5, 1.25, 0.25, 0.75, 1.0]]).repeat(3, 1)
    advantages, zeros = torch.tensor([0.5, -0.5, 0.0]), torch.zeros(3, 5)
    args, mask = Args(clip_coef=0.2, clip_coef_high=0.3), torch.arange(5).expand(3, 5) < 4
    sums = ratio_sums(args, ratio.log(), zeros, advantages, mask)
    assert sums["policy/clip_fraction_high"] == 1  # 1.5 in row 0, above 1.3
    assert sums["policy/clip_fraction_low"] == 2  # 0.25 and 0.75 in row 1, below 0.8
    # KL(pi_old || pi) by k3 on tokens of pi_old: ratio - 1 - log ratio
    expected = 3 * sum(r - 1 - math.log(r) for r in (1.5, 1.25, 0.25, 0.75))
    assert sums["policy/approx_kl"].item() == pytest.approx(expected, rel=1e-5)


def test_the_kl_is_in_the_loss_where_there_is_a_reference():
    logprobs, old, ref = (
        torch.tensor([[-1.0, -2.0]]),
        torch.tensor([[-1.5, -2.25]]),
        torch.zeros(1, 2),
    )
    without = dict(
        advantages=torch.zeros(1), mask=torch.ones(1, 2).bool(), clip_low=0.2, clip_high=0.2
    )
    assert grpo_loss(logprobs, old, None, beta=0.5, **without).tolist() == [[0, 0]]
    k3 = [math.e - 1 - 1, math.e**2 - 2 - 1]
    found = grpo_loss(logprobs, old, ref, beta=0.5, **without)
    assert found[0].tolist() == pytest.approx([0.5 * x for x in k3], rel=1e-5)


def test_token_weights_by_hand():
    mask = torch.tensor([[True, False, False], [True, True, True]])  # four tokens
    by_sequence = mask * torch.tensor([[1 / 2], [1 / 6]])
    torch.testing.assert_close(token_weights(mask, "sequence", 5), by_sequence)
    torch.testing.assert_close(token_weights(mask, "token", 5), mask / 4)
    torch.testing.assert_close(token_weights(mask, "constant", 5), mask / 10)
    # A step of one token, and one whose completions are all left out.
    for norm, weight in (("sequence", 1), ("token", 1), ("constant", 1 / 5)):
        one = token_weights(mask[:1], norm, 5)
        torch.testing.assert_close(one, torch.tensor([[weight, 0.0, 0.0]]))
        assert token_weights(mask[:0], norm, 5).shape == (0, 3)


# --- the reward ---------------------------------------------------------------------------------
BREVITY = """
def brevity(completions, **columns):
    return [-len(completion) for completion in completions]
"""


@pytest.fixture
def two_rewards(tmp_path):
    (tmp_path / "brevity.py").write_text(BREVITY)
    rewards = [LAST_NUMBER, f"{tmp_path}/brevity.py:brevity"]
    return dict(reward_fn=rewards, reward_weights=[2.0, 0.5])


# --- the loop -----------------------------------------------------------------------------------
def test_without_a_completion_that_ended_there_is_no_step(tmp_path, monkeypatch):
    """AdamW would move by its momentum."""
    steps = watch_steps(monkeypatch)
    flags = dict(mask_truncated=True, num_minibatches=8, total_rollouts=2, max_new_tokens=4)
    run(tmp_path, **flags)
    moved = []
    for (before, gradient, _), (after, _, _) in pairwise(steps):
        is_empty = all(g.abs().max() == 0 for g in gradient)
        moved.append((is_empty, not all(map(torch.equal, before, after))))
    assert {*moved} == {(True, False), (False, True)}
    with pytest.warns(UserWarning, match="--mask-truncated leaves no completion"):
        row = metrics_of(run(tmp_path, **flags | dict(max_new_tokens=1)))[-1]
    assert row["policy/grad_norm"] == row["objective/loss"] == 0


# Each with all that belongs to it.
WHOLE = [
    dict(missing_eos_penalty=3.0, overlong_buffer=8, scale_rewards="none", loss_norm="token")
    | dict(mask_truncated=True, temperature=1.3, max_new_tokens=8, clip_coef_high=0.05)
    | dict(ent_coef=0.3),
    dict(kl_placement="reward", scale_rewards="batch", loss_norm="constant", loss="cispo"),
    dict(missing_eos_penalty=0.5, scale_rewards="mean", loss="sapo", max_new_tokens=8),
    dict(missing_eos_penalty=0.5, loss="dppo", max_new_tokens=8),
    dict(kl_placement="unbiased", importance_sampling_level="sequence")
    | dict(multi_objective_aggregation="normalize_then_sum"),
]


@pytest.mark.parametrize("flags", WHOLE)
def test_gradients_and_metrics_of_a_rollout_are_those_of_one_completion_at_a_time(
    flags, two_rewards, tmp_path, monkeypatch
):
    """The second rollout, of a policy that has left the reference: two passes of two steps."""
    sampled, judged = spy_on(monkeypatch, "generate"), spy_on(monkeypatch, "rule_rewards")
    batched, steps = spy_by_name(monkeypatch, "micro_batches"), watch_steps(monkeypatch)
    fixed = dict(update_epochs=2, num_minibatches=2, micro_batch_size=5, clip_coef=0.02)
    flags = fixed | dict(beta=0.3, learning_rate=1e-3) | two_rewards | flags
    row = metrics_of(run(tmp_path, total_rollouts=2, **flags))[2]
    args, policy, reference = Args(**flags), plain_model(POLICY), plain_model(POLICY)
    beta_in_reward = args.beta if args.kl_placement == "reward" else 0.0
    (arguments, (completions, _)), steps = sampled[2], steps[4:]  # after a rollout
    sequences = [*zip(arguments[1], completions, strict=True)]
    lengths = torch.tensor([*map(len, completions)])
    cut_off = torch.tensor([completion[-1] != EOS for completion in completions])

    set_weights(policy, steps[0][0])
    old, refs = [], []
    with torch.no_grad():
        for sequence in sequences:
            old.append(plain_logprobs(policy, *sequence, args.temperature)[0])
            refs.append(plain_logprobs(reference, *sequence, args.temperature)[0])
    k1 = torch.stack([(a - b).sum() for a, b in zip(old, refs, strict=True)])
    right, brevity = (rewards for _, rewards in judged[4:6])
    reward_weights = torch.tensor(args.reward_weights)
    rewards = reward_weights @ torch.stack([right, brevity])
    shaped = rewards - beta_in_reward * k1 - args.missing_eos_penalty * cut_off
    if args.overlong_buffer:
        shaped -= length_penalty(lengths, args.max_new_tokens, args.overlong_buffer)
    advantages = group_advantages(shaped, 4, args.scale_rewards)
    if args.multi_objective_aggregation == "normalize_then_sum":
        advantages = gdpo_advantages(torch.stack([right, brevity]), reward_weights, 4)

    minibatches = [call["inds"] for call in batched][-4:]
    epochs = [torch.cat(minibatches[:2]).tolist(), torch.cat(minibatches[2:]).tolist()]
    trained = [i for i in range(16) if not (args.mask_truncated and cut_off[i])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == trained and epochs[0] != epochs[1]
    num_tokens = 2 * lengths[trained].sum().item()
    mask = torch.arange(args.max_new_tokens) < lengths[:, None]  # (16, T)
    sums, losses, norms = defaultdict(float), [], []
    for minibatch, (weights_before, gradient, _) in zip(minibatches, steps, strict=True):
        set_weights(policy, weights_before)
        weights = token_weights(mask[minibatch], args.loss_norm, args.max_new_tokens)
        losses.append(0.0)
        for i, row_weights in zip(minibatch, weights, strict=True):
            logprobs, entropy = plain_logprobs(policy, *sequences[i], args.temperature)
            both = (logprobs[None], old[i][None])
            advantage, all_true = advantages[i][None], torch.ones(1, lengths[i]).bool()
            losses_of_tokens = grpo_loss(
                *both,
                refs[i][None],
                advantage,
                all_true,
                clip_low=args.clip_coef,
                clip_high=flags.get("clip_coef_high", args.clip_coef),
                beta=args.beta - beta_in_reward,
                level=args.importance_sampling_level,
                loss_type=args.loss,
                unbiased_kl=args.kl_placement == "unbiased",
            )
            loss = (row_weights[: lengths[i]] * losses_of_tokens).sum()
            loss_sums = ratio_sums(args, *both, advantage, all_true)
            loss = loss - args.ent_coef * (row_weights[: lengths[i]] * entropy).sum()
            loss.backward()
            losses[-1] += loss.item()
            sums["policy/entropy"] += entropy.sum().item() / num_tokens
            for name in ("approx_kl", "clip_fraction_low", "clip_fraction_high"):
                sums[f"policy/{name}"] += loss_sums[f"policy/{name}"].item() / num_tokens
        expected = [parameter.grad for parameter in policy.parameters()]
        assert_same_gradient(gradient, expected)
        norms.append(sum(g.square().sum() for g in expected).sqrt().item())

    groups = [rewards[i : i + 4].tolist() for i in range(0, 16, 4)]
    expected = sums | {
        "objective/loss": mean(losses),
        "policy/grad_norm": mean(norms),
        "objective/kl": k1[trained].mean().item(),
        "reward/mean": rewards.mean().item(),
        "rewards/last_number": right.mean().item(),
        "rewards/brevity": brevity.mean().item(),
        "reward/group_std": mean(map(stdev, groups)),
        "reward/frac_reward_zero_std": mean(len({*group}) == 1 for group in groups),
        "completions/length_mean": lengths.float().mean().item(),
        "completions/truncated_fraction": cut_off.float().mean().item(),
    }
    for name, number in expected.items():
        assert row[name] == pytest.approx(number, rel=2e-3, abs=1e-5), name
    assert k1.std() > 0.1 and len({*advantages.tolist()}) > 4
    assert sums["policy/clip_fraction_low"] + sums["policy/clip_fraction_high"] > 0
    assert 0 < len(trained) < 16 or not args.mask_truncated


@pytest.mark.parametrize("flags", [dict(num_minibatches=2), dict(update_epochs=2)])
def test_ratio_is_one_before_any_update_and_log_probs_are_those_sampled_from(
    flags, tmp_path, monkeypatch
):
    rollouts, calls = spy_on(monkeypatch, "generate"), spy_by_name(monkeypatch, "grpo_loss")
    sums = spy_by_name(monkeypatch, "ratio_sums")
    run(tmp_path, temperature=0.6, prompts_per_rollout=8, micro_batch_size=8, **flags)
    first_step, passes = (2, 1) if "num_minibatches" in flags else (4, 2)
    assert len(calls) == 4 * passes  # micro-batches of two steps
    for number, call in enumerate(calls):
        same = torch.equal(call["logprobs"], call["old_logprobs"])
        assert same == (number < first_step), "exactly 1 before the first step, and never again"
    assert sums[0]["result"]["policy/approx_kl"] == 0
    assert all((call["old_logprobs"] < 0).any() for call in calls)
    # The reference is still the same model.
    assert all(torch.equal(call["ref_logprobs"], call["old_logprobs"]) for call in calls)

    # All old log-probs, by a plain forward pass of the untouched policy.
    policy, expected = plain_model(POLICY), []
    _, (arguments, (sampled, _)), *_ = rollouts  # evaluation, rollout, evaluation
    with torch.no_grad():
        for prompt, completion in zip(arguments[1], sampled, strict=True):
            expected += plain_logprobs(policy, prompt, completion, 0.6)[0].tolist()
    found = [x for call in calls for x in call["old_logprobs"][call["mask"]].tolist()]
    assert sorted(found) == pytest.approx(sorted(expected * passes), abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        (dict(beta=0.0), 1),  # new log-probs only
        (dict(num_minibatches=2, beta=0.0), 2),  # old and new
        (dict(update_epochs=2, beta=0.0), 3),  # old, and new ones twice
        (dict(beta=0.1), 2),  # reference and new
        (dict(beta=0.1, kl_placement="reward"), 3),  # old, reference and new
    ],
)
def test_no_forward_pass_is_paid_that_is_not_needed(tmp_path, monkeypatch, flags, passes):
    calls = spies.spy_on(common.logprobs, monkeypatch, "completion_logprobs")
    monkeypatch.setattr(grpo, "completion_logprobs", common.logprobs.completion_logprobs)
    run(tmp_path, **flags)
    assert sum(len(rows) for (_, _, rows, *_), _ in calls) == passes * 16


RULE = """
def rule(prompts, completions, **columns):
    return [float(i % 2) if prompt[0] in "036" else 0.5 for i, prompt in enumerate(prompts)]
"""


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_groups_of_equal_rewards_are_replaced_until_the_last_round(rounds, tmp_path, monkeypatch):
    """Prompts that begin with 0, 3 or 6 have different rewards, the others equal ones."""
    (tmp_path / "rule.py").write_text(RULE)
    sampled, losses = spy_on(monkeypatch, "generate"), spy_by_name(monkeypatch, "grpo_loss")
    scored = spy_on(monkeypatch, "rollout_logprobs")
    flags = dict(reward_fn=[f"{tmp_path}/rule.py:rule"], total_rollouts=2, seed=2, eval_every=9)
    rows = metrics_of(run(tmp_path, max_sampling_rounds=rounds, num_minibatches=2, **flags))
    tokenizer = AutoTokenizer.from_pretrained(POLICY)

    def teaches(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)[0] in "036"

    calls = [[tuple(ids) for ids in arguments[1][::4]] for arguments, _ in sampled[1:-1]]
    order = [ids for prompts in calls for ids in prompts]
    assert len({*order}) == len(order)  # each prompt once: the data order goes on
    whole_order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    rows_of_data = grpo.load_prompts(Args(), "train[:64]", tokenizer)
    assert order == [tuple(rows_of_data[i].ids) for i in whole_order[: len(order)]]
    for row, trained_on, of_ref in zip(rows[1:], scored[::2], scored[1::2], strict=True):
        assert trained_on[0][1] == of_ref[0][1]
        (_, sequences, *_), _ = trained_on
        kept = []
        for used in range(1, rounds + 1):
            prompts = calls.pop(0)
            assert len(prompts) == 4 - len(kept)
            kept += [ids for ids in prompts if used == rounds or teaches(ids)]
            if len(kept) == 4:
                break
        assert [tuple(ids) for ids, _ in sequences] == [ids for ids in kept for _ in range(4)]
        assert row["prompts/with_signal"] == sum(map(teaches, kept))
        assert row["reward/frac_reward_zero_std"] == 1 - row["prompts/with_signal"] / 4
    assert calls == [] and sum(row["prompts/sampled"] for row in rows[1:]) == len(order)
    assert (rows[1]["prompts/with_signal"] < 4) == (rounds < 20)
    if rounds == 20:  # every completion has an advantage
        assert all((call["advantages"] != 0).all() for call in losses)
