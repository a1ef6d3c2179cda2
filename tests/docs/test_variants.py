"""docs/variants.md: each diff applies to its script, its function equals plain loops, and it runs.

A variant that no longer applies: write its diff anew, against the script as it is.
"""

import math

import algorithms
import pytest
import torch
from reviews import plain_model
from runs import metrics_of
from scripts import short_flags
from spies import spy_by_name

from common.logprobs import completion_logprobs
from docs.experiments.lib.runs import load_script
from docs.experiments.lib.variants import PAGE, variants, write_variant
from docs.samplers import known

VARIANTS = variants()
FLAGS = {
    "apo_down": dict(loss="apo_zero"),
    "echo": dict(beta=0.0, reward_fn=f"{__file__}:same"),  # all other gradients are 0
    "icepop": dict(importance_cap=5.0),
    "high_entropy": dict(beta=0.0),
    "score_centering": dict(importance_cap=2.0),
    "vespo": dict(beta=0.0, loss_norm="token"),
}
OF_THE_LOOP = {"adaptive_beta", "target_kl"}  # their functions return no losses


def same(completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture
def variant(request, tmp_path):
    """The module of a script with the change in it."""
    return load_script(write_variant(request.param, tmp_path).name, tmp_path)


def of(name):
    return pytest.mark.parametrize("variant", [name], indirect=True)


def test_a_diff_is_short_and_the_page_has_no_other():
    assert PAGE.read_text().count("```diff") == len(VARIANTS) == 13
    assert all(len(diff.splitlines()) <= 12 for _, _, diff in VARIANTS.values())


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, name) for name in VARIANTS if name not in OF_THE_LOOP],
    indirect=["variant"],
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


def off_policy_mask(log_ratios, a, now):
    is_off = a < 0 and -sum(log_ratios) / 2 > 0.1
    return [clipped(math.exp(x), 0.0 if is_off else a) for x in log_ratios]


def squared_log_ratio(log_ratios, a, now):
    objectives = [(x, *clipped(math.exp(x), a)) for x in log_ratios]
    return [(value - 0.001 * x**2, slope - 0.002 * x) for x, value, slope in objectives]


def vespo(log_ratios, a, now):
    w, (k, c) = math.exp(sum(log_ratios)), (3, 2) if a < 0 else (2, 3)
    weight = w**k * math.exp(c * (1 - w)) * a
    return [(weight * x, weight) for x in now]


def dual_clip(log_ratios, a, now):
    ratios = map(math.exp, log_ratios)
    return [(3 * a, 0.0) if a < 0 and ratio > 3 else clipped(ratio, a) for ratio in ratios]


RULES = (off_policy_mask, squared_log_ratio, vespo, dual_clip)


@pytest.mark.parametrize(
    ("variant", "rule"), [(rule.__name__, rule) for rule in RULES], indirect=["variant"]
)
def test_an_objective_and_its_slope_at_each_token(variant, rule):
    logprobs, old, advantages = some_tokens()
    name = VARIANTS[rule.__name__][1]
    arguments = dict(
        grpo_loss=(None, advantages),
        variant_loss=(None, advantages, MASK),
        policy_loss=(advantages[:, None], 0.2),
    )[name]
    options = {} if name == "policy_loss" else CLIPS
    losses, _ = getattr(variant, name)(logprobs, old, *arguments, **options)
    expected, num_changed = [], 0
    for now, before, a in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True):
        log_ratios = [x - y for x, y in zip(now, before, strict=True)]
        of_row = rule(log_ratios, a, now)
        num_changed += of_row != [clipped(math.exp(x), a) for x in log_ratios]
        expected += of_row
    assert num_changed > 5 and (num_changed == 60 or num_changed < sum(advantages < 0) - 5)
    values, slopes = zip(*expected, strict=True)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert (-losses).flatten().tolist() == pytest.approx(values)
    assert (-gradient).flatten().tolist() == pytest.approx(slopes)


@of("off_policy_mask")
def test_padding_does_not_count_in_the_mean_of_a_completion(variant):
    """0.15 nats over one token, not over two."""
    arguments = (torch.tensor([[-1.15, 0.0]]), torch.tensor([[-1.0, 0.0]]), None)
    mask = torch.tensor([[True, False]])
    losses, _ = variant.variant_loss(*arguments, -torch.ones(1), mask, **CLIPS)
    assert (losses == 0).all()


@of("apo_down")
def test_apo_down(variant):
    logratios = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    expected = []
    for chosen, rejected in logratios.tolist():
        worse = 1 / (1 + math.exp(-0.3 * chosen))
        expected.append(worse + 1 / (1 + math.exp(0.3 * (chosen - rejected))))
    assert variant.apo_zero_loss(logratios, 0.3).tolist() == pytest.approx(expected)


@of("dft")
def test_dft(variant):
    logprobs, _, _ = some_tokens()
    loss = variant.dft_loss(logprobs, 50)
    loss.backward()
    probs = [math.exp(x) for x in logprobs.flatten().tolist()]
    assert loss.item() == pytest.approx(-sum(p * math.log(p) for p in probs) / 50)
    assert logprobs.grad.flatten().tolist() == pytest.approx([-p / 50 for p in probs])


@of("adaptive_beta")
def test_adaptive_beta(variant, tmp_path, monkeypatch):
    """In the first case the KL is on target, then a tenth above; both sides are clipped."""
    for kl, error in ((6.0, 0), (6.6, 0.1), (7.3, 0.2), (-3.0, -0.2)):
        assert variant.adapt_beta(0.3, kl, 500) == pytest.approx(0.3 * (1 + error / 20), rel=1e-12)
    given = []

    def doubled(*args):
        given.append(args)
        return 2 * args[0]

    monkeypatch.setattr(variant, "adapt_beta", doubled)
    used = spy_by_name(variant, monkeypatch, "shaped_rewards")
    flags = short_flags("ppo_rlhf", **algorithms.ONE_STEP | dict(total_rollouts=3)) | {"beta": 0.1}
    run_dir = variant.main(variant.Args(output_dir=str(tmp_path), **flags))
    variant.main(variant.Args(**flags | {"total_rollouts": 4, "resume": str(run_dir)}))
    assert [call["beta"] for call in used] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    kls = [row["objective/kl"] for row in metrics_of(run_dir)[1:]]
    assert given == [(call["beta"], kl, 16) for call, kl in zip(used, kls, strict=True)]


@of("target_kl")
def test_target_kl(variant, tmp_path, monkeypatch):
    """Of six steps three; what is logged is the mean over their tokens."""
    original, scripted = variant.rollout_metrics, [0.0, 0.019, 0.021]

    def with_kl(*args):
        return (
            original(*args) | {"policy/approx_kl": scripted.pop(0)} if scripted else original(*args)
        )

    monkeypatch.setattr(variant, "rollout_metrics", with_kl)
    calls = spy_by_name(variant, monkeypatch, "policy_loss")
    steps = dict(update_epochs=3, num_minibatches=2, micro_batch_size=16)
    flags = short_flags("ppo_rlhf", **algorithms.ONE_STEP | steps)
    row = metrics_of(variant.main(variant.Args(output_dir=str(tmp_path), **flags)))[1]
    assert len(calls) == 3
    num_tokens = sum((call["old_logprobs"] < 0).sum().item() for call in calls)
    for name in ("policy/approx_kl", "policy/loss"):
        total = sum(call["result"][1][name].item() for call in calls)
        assert row[name] == pytest.approx(total / num_tokens, rel=1e-4) and total != 0


@of("icepop")
def test_icepop(variant):
    ratios = [0.01, 0.49, 0.5, 1.0, 4.9, 5.0, 5.1, 80.0]
    expected = [k if 0.5 <= k <= 5 else 0.0 for k in ratios]
    assert variant.masked_weights(torch.tensor(ratios)).tolist() == pytest.approx(expected)


@of("echo")
def test_echo(variant):
    logprobs = -torch.tensor([[1, 2, 3, 5, 7], [1, 2, 3, 0, 0], [2, 4, 8, 1, 5.0]])
    mask = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]]).bool()
    batch = [([9], [1] * length) for length in (5, 3, 5)]
    assert variant.environment_loss(logprobs, mask, batch).tolist() == [8 / 2, 0, (2 + 8 + 5) / 3]


@of("echo")
def test_echo_adds_to_the_loss_its_mean_over_completions(variant, tmp_path, monkeypatch):
    original, found = variant.environment_loss, []

    def noted(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(variant, "environment_loss", noted)
    flags = short_flags("grpo_tools", **algorithms.ONE_STEP) | FLAGS["echo"]
    run_dir = variant.main(variant.Args(output_dir=str(tmp_path), **flags))
    (loss,) = [row["objective/loss"] for row in metrics_of(run_dir)[1:]]  # 0 but for ECHO
    assert loss == pytest.approx(0.05 * torch.cat(found).mean().item()) and loss > 1e-3


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


# --- samplers that are not the policy -----------------------------------------------------------
@pytest.fixture
def policy():
    """Logits (1, 1, 5) of a policy, and distributions q: colder, two tokens, and another one."""
    torch.manual_seed(0)
    logits, other = torch.randn(2, 1, 1, 5, dtype=torch.float64)
    changed = [change(logits[0])[None] for change in (known.colder, known.top_two)]
    return logits.requires_grad_(), [x.softmax(dim=2) for x in (*changed, other)]


def gradient(value, logits):
    return torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]


@pytest.mark.parametrize("cap", [0.0, 1.1, 2.0])
def test_the_mean_of_the_centred_score_is_zero_by_enumeration(cap, policy):
    logits, samplers = policy
    log_pi, a = logits.log_softmax(dim=2), torch.tensor([-1.5]).double()
    for q in samplers:
        mean, centred_mean = 0, 0  # over the tokens y that q may draw
        for y in q.flatten().nonzero().flatten():
            ratio = (log_pi.exp() / q)[..., y].item()
            loss = -a * (min(ratio, cap) if cap else 1) * log_pi[..., y]
            mean += q[..., y] * gradient(loss, logits)
            centred_mean += q[..., y] * gradient(known.centred(loss, a, cap, log_pi, q), logits)
        assert centred_mean.abs().max() < 1e-7
        assert mean.abs().max() > 0.05 or cap == 2  # w = pi / q has the mean 0 by itself


def test_the_centred_score_is_that_of_the_policy_over_the_kept_tokens(policy):
    """And 0.7 times that of the policy at temperature 0.7."""
    logits, (colder, two, _) = policy
    log_pi, one = logits.log_softmax(dim=2), torch.ones(1).double()
    for y in two.flatten().nonzero().flatten():
        found = known.kept(log_pi[..., y], log_pi, two)
        assert found.item() == pytest.approx(two[..., y].log().item())
        log_colder = (logits / 0.7).log_softmax(dim=2)[..., y]
        for q, log_prob in ((two, found), (colder, 0.7 * log_colder)):
            centred = -known.centred(-log_pi[..., y], one, 0.0, log_pi, q)
            torch.testing.assert_close(gradient(log_prob, logits), gradient(centred, logits))


@pytest.mark.parametrize("age", [0, 1])
def test_q_is_the_distribution_that_was_sampled_from(age, monkeypatch):
    monkeypatch.setattr(known, "SAMPLER", known.Sampler(known.top_two, age))
    policy, prompts = plain_model("tiny/arithmetic/policy"), [[3, 4], [5, 6, 7]]
    for _ in range(2):
        options = dict(max_new_tokens=6, temperature=1.3, stop_ids=[2], rng=torch.Generator())
        sequences, logprobs = known.generate(policy, prompts, **options)
        policy.lm_head.weight.data *= 1.5
    rows, completions = torch.arange(2), [completion for _, completion in sequences]
    found = known.distributions(policy, sequences, rows, 1.3)
    tokens = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, completions)], True)
    is_token = torch.arange(tokens.shape[1]) < torch.tensor([*map(len, completions)])[:, None]
    log_pi, q = (x.gather(2, tokens[..., None]).squeeze(2)[is_token] for x in found)
    torch.testing.assert_close(q.log(), logprobs[is_token], atol=1e-5, rtol=1e-5)
    of_policy = completion_logprobs(policy, sequences, rows, 1.3)[is_token]
    torch.testing.assert_close(log_pi, of_policy, atol=1e-5, rtol=1e-5)
    assert (q.log() - log_pi).abs().max() > 0.01
