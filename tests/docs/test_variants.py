"""The diffs of the pages of variants: each applies to its script, equals plain loops, and runs.

A variant that no longer applies: write its diff anew, against the script as it is.
"""

import math

import algorithms
import pytest
import torch
from algorithms import assert_same_gradient
from plain import plain_logprobs
from reviews import plain_model
from runs import metrics_of, read
from scripts import short_flags
from spies import spy_by_name, spy_on, watch_steps
from transformers import AutoTokenizer

from docs.experiments.lib.runs import load_script, write_jsonl
from docs.experiments.lib.variants import PAGES, variants, write_variant
from docs.experiments.studies.hints import with_hint
from docs.samplers import known

VARIANTS = variants()
POLICY, TEACHERS = "tiny/arithmetic/policy", ["tiny/arithmetic/teacher", "tiny/arithmetic/base"]
FLAGS = {"echo": dict(beta=0.0, reward_fn=f"{__file__}:same")}  # all other gradients are 0


def same(completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture
def variant(request, tmp_path):
    """The module of a script with the change in it."""
    return load_script(write_variant(request.param, tmp_path).name, tmp_path)


def of(name):
    return pytest.mark.parametrize("variant", [name], indirect=True)


def test_a_diff_is_short_and_the_pages_have_no_others():
    assert sum(page.read_text().count("```diff") for page in PAGES) == len(VARIANTS) == 6
    for _, _, diff in VARIANTS.values():
        assert sum(line.startswith("+") for line in diff.splitlines()) <= 25


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, name) for name in ("off_policy_mask", "echo")],
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
    two_steps = algorithms.ONE_STEP | dict(total_rollouts=2, micro_batch_size=16)
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


@of("off_policy_mask")
def test_an_objective_and_its_slope_at_each_token(variant):
    logprobs, old, advantages = some_tokens()
    losses, _ = variant.variant_loss(logprobs, old, None, advantages, MASK, **CLIPS)
    expected, num_off = [], 0
    for log_ratios, a in zip((logprobs - old).tolist(), advantages.tolist(), strict=True):
        is_off = a < 0 and -sum(log_ratios) / 2 > 0.1
        num_off += is_off
        expected += [clipped(math.exp(x), 0.0 if is_off else a) for x in log_ratios]
    assert 5 < num_off < sum(advantages < 0) - 5
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


# --- a model that reads something else, or is one of several ------------------------------------
def run_on(rows, variant, folder, monkeypatch, script, **flags):
    """The sequences that were sampled, by call, the first step's gradient, and what is logged."""
    for split in ("train", "test"):
        write_jsonl(folder / f"{split}.jsonl", rows)
    sampled, steps = spy_on(variant, monkeypatch, "generate"), watch_steps(monkeypatch)
    flags = short_flags(script, **algorithms.ONE_STEP | dict(micro_batch_size=3)) | flags
    run_dir = variant.main(variant.Args(output_dir=str(folder), dataset=str(folder), **flags))
    return [sequences for _, (sequences, _) in sampled], steps[0][1], metrics_of(run_dir)


def by_prompt(rows, column):
    encode = AutoTokenizer.from_pretrained(POLICY)
    return {tuple(encode(row["prompt"]).input_ids): row[column] for row in rows}


ROWS = read("tiny/arithmetic/prompts/train.jsonl")[:12]


@of("hint")
def test_the_gradient_is_that_of_the_kl_to_the_start_that_reads_the_hint(
    variant, tmp_path, monkeypatch
):
    """Rewards are equal, so GRPO's own is 0. At each token (log pi - log pi_0) grad log pi."""
    rows, encode = [with_hint(row) for row in ROWS], AutoTokenizer.from_pretrained(POLICY)
    flags = dict(beta=0.3, kl_placement="unbiased", reward_fn=[f"{__file__}:same"])
    run = run_on(rows, variant, tmp_path, monkeypatch, "grpo_variants", **flags)
    (_, sequences, _), gradient, _ = run
    policy, start, hinted = plain_model(POLICY), plain_model(POLICY), by_prompt(rows, "hinted")
    for prompt, y in sequences:
        logprobs, _ = plain_logprobs(policy, prompt, y)
        of_start, _ = plain_logprobs(start, encode(hinted[tuple(prompt)]).input_ids, y)
        kl = ((logprobs - of_start).detach() * logprobs).mean()
        (0.3 * kl / len(sequences)).backward()
    assert_same_gradient(gradient, [weight.grad for weight in policy.parameters()])


@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
@of("teachers")
def test_the_gradient_of_each_row_is_that_of_its_teacher(
    variant, divergence, tmp_path, monkeypatch
):
    rows = [row | {"teacher": TEACHERS[i % 3 > 0]} for i, row in enumerate(ROWS)]
    flags = dict(teacher=TEACHERS, divergence=divergence, prompts_per_rollout=8)
    run = run_on(rows, variant, tmp_path, monkeypatch, "distill", **flags)
    (before, sequences, _), gradient, logged = run
    policy, teacher_of = plain_model(POLICY), by_prompt(rows, "teacher")
    teachers = {name: plain_model(name) for name in TEACHERS}

    def of_row(prompt, y):
        """log pi and log T (T, V), and those of the tokens y (T,)."""
        both = []
        for model in (policy, teachers[teacher_of[tuple(prompt)]]):
            logits = model(torch.tensor([prompt + y])).logits[0, len(prompt) - 1 : -1]
            both.append(logits.log_softmax(dim=1))
        return *both, *(x[range(len(y)), y] for x in both)

    def kl(pairs):
        found = [of_row(*pair) for pair in pairs]
        return sum((log_pi - log_t).sum().item() for _, _, log_pi, log_t in found) / len(pairs)

    assert logged[0]["eval/kl"] == pytest.approx(kl(before), rel=1e-4)
    assert logged[1]["objective/kl"] == pytest.approx(kl(sequences), rel=1e-4)
    assert {teacher_of[tuple(prompt)] for prompt, _ in sequences} == {*TEACHERS}
    for prompt, y in sequences:
        all_pi, all_t, log_pi, log_t = of_row(prompt, y)
        loss = (all_pi.exp() * (all_pi - all_t.detach())).sum()
        if divergence == "sampled":
            loss = ((log_pi - log_t).detach() * log_pi).sum()
        (loss / len(sequences)).backward()
    assert_same_gradient(gradient, [weight.grad for weight in policy.parameters()])


@pytest.mark.parametrize("teacher", [{}, {"teacher": "another"}])
@of("teachers")
def test_a_row_without_one_of_the_teachers_is_named(variant, teacher, tmp_path, monkeypatch):
    rows = [row | {"teacher": TEACHERS[0]} for row in ROWS]
    rows[3] = ROWS[3] | teacher
    with pytest.raises(ValueError, match=r"row 3 of train.*is not in list"):
        run_on(rows, variant, tmp_path, monkeypatch, "distill", teacher=TEACHERS)


# --- samplers that are not the policy -----------------------------------------------------------
@pytest.mark.parametrize("age", [0, 1])
def test_another_sampler_draws_from_changed_logits_of_older_weights(age):
    """The two most likely tokens, in the second rollout; the head has grown since the first."""
    sampler, policy, heads = known.Sampler(known.top_two, age), plain_model(POLICY), []
    for _ in range(2):
        heads.append(policy.lm_head.weight.detach().clone())
        options = dict(max_new_tokens=6, temperature=1.3, stop_ids=[2], rng=torch.Generator())
        ((prompt, y),), logprobs = sampler.generate(policy, [[5, 6, 7]], **options)
        policy.lm_head.weight.data *= 1.5
    policy.lm_head.weight.data.copy_(heads[1 - age])
    logits = policy(torch.tensor([prompt + y])).logits[0, len(prompt) - 1 : -1]
    highest = (logits / 1.3).topk(2).values
    expected = (logits[range(len(y)), y] / 1.3) - highest.logsumexp(dim=1)
    torch.testing.assert_close(logprobs[0], expected, atol=1e-5, rtol=1e-5)
