"""What grpo_variants.py has beside grpo.py, against derivations of its own; that with default flags
the two are one; and whole rollouts of both.
"""

import math
from collections import defaultdict
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
from runs import metrics_of
from safetensors.torch import load_file
from spies import watch_steps
from transformers import AutoTokenizer

import common.logprobs
import grpo
import grpo_variants
from grpo_variants import Args, gdpo_advantages, group_advantages, length_penalty
from grpo_variants import scaled_advantages, token_weights, variant_loss

POLICY = "tiny/arithmetic/policy"
LAST_NUMBER = "tiny/arithmetic/reward.py:last_number"
# Groups of four completions of four prompts, and one step on them.


def run(folder, script="grpo_variants", **flags):
    return algorithms.run(script, folder, train_split="train[:64]", **flags)


spy_on = partial(spies.spy_on, grpo_variants)
spy_by_name = partial(spies.spy_by_name, grpo_variants)


# --- beside grpo.py -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "rate", "same_rate"),
    [
        ({}, {}, {}),
        (
            dict(update_epochs=2, num_minibatches=2, loss_norm="token", clip_coef_high=0.3),
            dict(anneal_lr=False),
            dict(lr_schedule="constant_with_warmup"),
        ),
        (dict(num_minibatches=1, scale_rewards="none", loss_norm="constant", beta=0.0), {}, {}),
    ],
)
def test_what_both_can_do_ends_with_the_same_weights_to_the_bit(flags, rate, same_rate, tmp_path):
    """And the metrics of grpo.py are among those of grpo_variants.py."""
    plain_flags = {*grpo.Args.__dataclass_fields__} - {"anneal_lr"}
    assert plain_flags < {*Args.__dataclass_fields__}
    for flag in plain_flags - {"exp_name"}:
        assert getattr(grpo.Args(), flag) == getattr(Args(), flag), flag
    sizes = dict(total_rollouts=3, prompts_per_rollout=8, micro_batch_size=5, eval_rows=4)
    run_dirs = []
    for script, more in ((grpo, rate), (grpo_variants, same_rate)):
        args = script.Args(output_dir=str(tmp_path), **sizes, **flags, **more)
        run_dirs.append(script.main(args))
    plain, variants = (load_file(run_dir / "model.safetensors") for run_dir in run_dirs)
    assert plain.keys() == variants.keys()
    assert all(torch.equal(plain[name], variants[name]) for name in plain)
    for row, row_of_variants in zip(*map(metrics_of, run_dirs), strict=True):
        for name in row:
            if name == "policy/sampling_kl":  # about 1e-14, computed in another order
                assert row[name] < 1e-9 and row_of_variants[name] < 1e-9
            elif not name.startswith("time/"):
                assert row[name] == row_of_variants[name], name


# --- advantages ---------------------------------------------------------------------------------
def test_scaled_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0])
    for scale in ("group", "none"):
        found = scaled_advantages(rewards, 4, scale)
        assert torch.equal(found, group_advantages(rewards, 4, scale))
    # All eight: mean 10/8, squares 26, sample variance (26 - 8 (10/8)^2) / 7 = 27/14.
    unscaled = torch.tensor([0.5, -0.5, -0.5, 0.5, -2, 0, 0, 2])
    of_batch = unscaled / (math.sqrt(27 / 14) + 1e-4)
    torch.testing.assert_close(scaled_advantages(rewards, 4, "batch"), of_batch)


@pytest.mark.parametrize("scale", ["batch", "mean"])
def test_equal_rewards_give_exactly_zero(scale):
    values = torch.tensor([0.0, 0.1, -0.7, 1 / 3, 123456.789, -7.77e18])
    for group_size in (2, 3, 7, 49, 200):
        advantages = scaled_advantages(values.repeat_interleave(group_size), group_size, scale)
        assert (advantages == 0).all(), group_size


def test_maxrl_divides_by_the_share_that_is_right():
    # 1/4 right: 1 / (1/4) - 1 and -1. 3/4: 1 / (3/4) - 1 and -1. None and all teach nothing.
    rewards = torch.tensor([0.0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    expected = [-1, -1, 3, -1, 1 / 3, 1 / 3, -1, 1 / 3, *[0] * 8]
    assert scaled_advantages(rewards, 4, "mean").tolist() == pytest.approx(expected)
    # A mean of -1/2: what is better stays so, and is multiplied by no more than G.
    found = scaled_advantages(torch.tensor([-1.0, 1, -1, -1]), 4, "mean")
    assert found.tolist() == pytest.approx([-2, 6, -2, -2])


# --- several rewards: GDPO ------------------------------------------------------------------------
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
        assert grpo_variants.groups_that_teach(args, rows).tolist() == expected
        if args.multi_objective_aggregation == "normalize_then_sum":
            found = gdpo_advantages(rows, torch.tensor(args.reward_weights), 4).view(-1, 4)
            assert (found != 0).any(dim=1).tolist() == expected


# --- one ratio for a completion: GSPO, LUSPO -----------------------------------------------------
@pytest.mark.parametrize("norm", ["sequence", "constant"])
def test_the_ratio_of_a_completion_equals_plain_loops(norm):
    """GSPO: -(1/G) sum_i min(s_i A_i, clip(s_i) A_i). LUSPO: terms times |y_i|, here over 10."""
    torch.manual_seed(2)
    lengths = [5, 1, 3, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    logprobs, old = (-torch.rand(4, 6) * mask for _ in range(2))
    logprobs[0, 2] = 0  # a token that is certain counts in the mean
    logprobs.requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
    weights = token_weights(mask, torch.tensor(lengths), norm, 10)
    flags = dict(clip_low=0.05, clip_high=0.08, level="sequence")
    losses, sums = variant_loss(logprobs, old, None, advantages, mask, **flags)
    loss = (weights * losses).sum()
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


# --- other gates ----------------------------------------------------------------------------------
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
    loss, sums = variant_loss(logprobs, old, None, advantages, mask, **kinds)
    assert -loss.item() == pytest.approx(weight * advantage * (-2 + math.log(ratio)))
    # It clips on both sides, whatever the sign of the advantage.
    assert sums["policy/clip_fraction_low"] == (weight == 0.8)
    assert sums["policy/clip_fraction_high"] == (weight == 1.28)
    (-loss).backward()
    assert logprobs.grad.item() == pytest.approx(weight * advantage)


@pytest.mark.parametrize("loss_type", ["sapo", "dppo", "ipo"])
def test_the_gates_of_sapo_dppo_and_ipo_equal_plain_loops(loss_type):
    torch.manual_seed(0)
    logprobs, old = torch.rand(2, 60, 2, dtype=torch.float64).clamp(min=0.02).log()
    logprobs.requires_grad_()
    advantages, mask = torch.randn(60, dtype=torch.float64), torch.ones(60, 2).bool()
    limits = dict(clip_low=0.15, clip_high=0.3)
    rest = (logprobs, old, None, advantages, mask)
    losses, sums = variant_loss(*rest, loss_type=loss_type, **limits)
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
                if loss_type == "ipo":  # whatever the sign of A
                    stays = q - 0.15 <= p <= q + 0.3
                value = slope = a * p / q if stays else 0.0
                held[a > 0] += not stays
            assert losses[i, t].item() == pytest.approx(-value, rel=1e-5)
            assert logprobs.grad[i, t].item() == pytest.approx(-slope, rel=1e-5, abs=1e-9)
    least = {"sapo": -1, "dppo": 5, "ipo": 20}[loss_type]
    assert least < held[True] < 110 and least < held[False] < 110
    # The log counts the tokens that `clip` would hold.
    _, of_clip = variant_loss(*rest, loss_type="clip", **limits)
    assert sums == of_clip and sums["policy/clip_fraction_low"] > 0


# --- penalties and pass@k -------------------------------------------------------------------------
def test_length_penalty_by_hand():
    lengths = torch.tensor([1, 5, 6, 7, 9, 10])
    expected = torch.tensor([0, 0, 0, 0.25, 0.75, 1])
    assert torch.equal(length_penalty(lengths, max_new_tokens=10, buffer=4), expected)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion():
    outcomes = [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    prompts = [grpo_variants.Prompt(str(i), [i], {}) for i in range(4)]

    def sample(prompt_ids, temperature, rng):
        assert prompt_ids == [[i] for i in range(4) for _ in range(5)]
        return [(ids, [7]) for ids in prompt_ids], None

    def evaluate(**flags):
        rules = [lambda *_: torch.tensor(outcomes).flatten().double()]
        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        args = Args(eval_samples=5, **flags)
        return grpo_variants.evaluate(args, sample, rules, tokenizer, prompts)

    metrics, samples = evaluate()
    assert len(samples) == 20 and metrics["eval/accuracy"] == pytest.approx(9 / 20)
    for k in (2, 4):
        hits = [any(subset) for row in outcomes for subset in combinations(row, k)]
        assert metrics[f"eval/pass_at_{k}"] == pytest.approx(mean(hits))
    assert "eval/pass_at_8" not in metrics and 0.45 < metrics["eval/pass_at_2"] < 0.75
    weighted, _ = evaluate(reward_weights=[0.5])  # a half is neither right nor wrong
    assert weighted["eval/reward"] == pytest.approx(9 / 40) and "eval/accuracy" not in weighted


# --- the KL's place -------------------------------------------------------------------------------
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
    losses, _ = variant_loss(
        of_completions(logp),
        of_completions(old),
        of_completions(ref),
        torch.zeros(9),
        torch.ones(9, 2).bool(),
        clip_low=0.2,
        clip_high=0.2,
        beta=0.5,
        level=level,
        unbiased_kl=unbiased,
    )
    loss = (drawn * losses).sum()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    chances = torch.cat([torch.ones(1, dtype=torch.float64), old[0].exp()])  # of each prefix
    kl = 0.5 * chances @ (logp.exp() * (logp - ref)).sum(dim=1)
    (expected,) = torch.autograd.grad(kl, logits)
    assert torch.allclose(found, expected, atol=1e-12) == unbiased
    assert math.isclose(loss.item(), kl.item(), rel_tol=1e-9) == unbiased


# --- the loop -----------------------------------------------------------------------------------
BREVITY = """
def brevity(completions, **columns):
    return [-len(completion) for completion in completions]
"""


@pytest.fixture
def two_rewards(tmp_path):
    (tmp_path / "brevity.py").write_text(BREVITY)
    rewards = [LAST_NUMBER, f"{tmp_path}/brevity.py:brevity"]
    return dict(reward_fn=rewards, reward_weights=[2.0, 0.5])


def test_without_a_completion_that_ended_there_is_no_step(tmp_path, monkeypatch):
    """AdamW would move by its momentum."""
    steps = watch_steps(monkeypatch)
    flags = dict(mask_truncated=True, num_minibatches=16, total_rollouts=2, max_new_tokens=4)
    run(tmp_path, **flags)
    moved = []
    for (before, gradient, _), (after, _, _) in pairwise(steps):
        is_empty = all(g.abs().max() == 0 for g in gradient)
        moved.append((is_empty, not all(map(torch.equal, before, after))))
    assert {*moved} == {(True, False), (False, True)}
    assert moved.index((False, True)) < len(moved) - moved[::-1].index((True, False))
    with pytest.warns(UserWarning, match="--mask-truncated leaves no completion"):
        row = metrics_of(run(tmp_path, **flags | dict(max_new_tokens=1)))[-1]
    assert row["policy/grad_norm"] == row["objective/loss"] == 0


# Each with all that belongs to it. Runs of grpo.py are held against the functions of the other.
WHOLE = [
    (grpo, dict(scale_rewards="none", loss_norm="token", temperature=1.3, clip_coef_high=0.05)),
    (grpo, dict(loss_norm="constant", max_new_tokens=8)),
    (grpo, dict()),
    (
        grpo_variants,
        dict(missing_eos_penalty=3.0, overlong_buffer=8, scale_rewards="none", loss_norm="token")
        | dict(mask_truncated=True, temperature=1.3, max_new_tokens=8, clip_coef_high=0.05)
        | dict(ent_coef=0.3),
    ),
    (
        grpo_variants,
        dict(kl_placement="reward", scale_rewards="batch", loss_norm="constant", loss="cispo"),
    ),
    (
        grpo_variants,
        dict(missing_eos_penalty=0.5, scale_rewards="mean", loss="sapo", max_new_tokens=8),
    ),
    (grpo_variants, dict(missing_eos_penalty=0.5, loss="dppo", max_new_tokens=8)),
    (grpo_variants, dict(missing_eos_penalty=0.5, loss="ipo", max_new_tokens=8)),
    (
        grpo_variants,
        dict(kl_placement="unbiased", importance_sampling_level="sequence")
        | dict(multi_objective_aggregation="normalize_then_sum"),
    ),
]


@pytest.mark.parametrize(("script", "flags"), WHOLE)
def test_gradients_and_metrics_of_a_rollout_are_those_of_one_completion_at_a_time(
    script, flags, two_rewards, tmp_path, monkeypatch
):
    """The second rollout, of a policy that has left the reference: two passes of two steps."""
    sampled, judged = (spies.spy_on(script, monkeypatch, x) for x in ("generate", "rule_rewards"))
    batched = spies.spy_by_name(script, monkeypatch, "micro_batches")
    steps = watch_steps(monkeypatch)
    fixed = dict(update_epochs=2, num_minibatches=2, micro_batch_size=5, clip_coef=0.02)
    flags = fixed | dict(beta=0.3, learning_rate=1e-3) | two_rewards | flags
    row = metrics_of(run(tmp_path, script=script.__name__, total_rollouts=2, **flags))[2]
    args, policy, reference = Args(**flags), plain_model(POLICY), plain_model(POLICY)
    beta_in_reward = args.beta if args.kl_placement == "reward" else 0.0
    (_, (sequences, _)), steps = sampled[2], steps[4:]  # after a rollout
    completions = [completion for _, completion in sequences]
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
    reward_weights = torch.tensor(args.reward_weights, dtype=torch.float64)
    rewards = reward_weights @ torch.stack([right, brevity])
    shaped = rewards - beta_in_reward * k1 - args.missing_eos_penalty * cut_off
    if args.overlong_buffer:
        shaped -= length_penalty(lengths, args.max_new_tokens, args.overlong_buffer)
    advantages = scaled_advantages(shaped, 4, args.scale_rewards)
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
        rest = (lengths[minibatch], args.loss_norm, args.max_new_tokens)
        weights = token_weights(mask[minibatch], *rest)
        losses.append(0.0)
        for i, row_weights in zip(minibatch, weights, strict=True):
            logprobs, entropy = plain_logprobs(policy, *sequences[i], args.temperature)
            both = (logprobs[None], old[i][None])
            advantage, all_true = advantages[i][None], torch.ones(1, lengths[i]).bool()
            losses_of_tokens, loss_sums = variant_loss(
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
    assert cut_off.any() or "max_new_tokens" not in flags
    assert 0 < len(trained) < 16 or not args.mask_truncated


@pytest.mark.parametrize(
    ("script", "flags", "passes"),
    [
        (grpo, dict(beta=0.0), 1),  # new log-probs only
        (grpo, dict(num_minibatches=2, beta=0.0), 2),  # old and new
        (grpo, dict(update_epochs=2, beta=0.0), 3),  # old, and new ones twice
        (grpo_variants, dict(beta=0.1), 2),  # reference and new
        (grpo_variants, dict(beta=0.1, kl_placement="reward"), 3),  # old, reference and new
    ],
)
def test_no_forward_pass_is_paid_that_is_not_needed(script, flags, passes, tmp_path, monkeypatch):
    calls = spies.spy_on(common.logprobs, monkeypatch, "completion_logprobs")
    monkeypatch.setattr(script, "completion_logprobs", common.logprobs.completion_logprobs)
    run(tmp_path, script=script.__name__, **flags)
    assert sum(len(rows) for (_, _, rows, *_), _ in calls) == passes * 16


RULE = """
def rule(prompts, completions, **columns):
    return [float(i % 2) if prompt[0] in "036" else 0.5 for i, prompt in enumerate(prompts)]
"""


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_groups_of_equal_rewards_are_replaced_until_the_last_round(rounds, tmp_path, monkeypatch):
    """Prompts that begin with 0, 3 or 6 have different rewards, the others equal ones."""
    (tmp_path / "rule.py").write_text(RULE)
    sampled, losses = spy_on(monkeypatch, "generate"), spy_by_name(monkeypatch, "variant_loss")
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
    rows_of_data = grpo_variants.load_prompts(Args(), "train[:64]", tokenizer)
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
