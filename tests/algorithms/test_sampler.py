"""The sampler's own log-probs: that the policy that samples is the one that is trained, what is
logged where it is not, and the weights of --importance-cap.
"""

import math

import pytest
import torch
from algorithms import assert_same_gradient, run, set_weights
from plain import plain_logprobs
from reviews import EOS, plain_model
from runs import metrics_of
from scripts import SPECS
from spies import spy_by_name, spy_on, watch_steps

import grpo_variants
from runtime.checks import check_sampling_kl

ROLLOUTS = ["grpo", "grpo_variants", "ppo_rlhf", "reinforce", "distill"]


@pytest.mark.parametrize("name", ROLLOUTS)
def test_on_a_cpu_the_policy_that_samples_is_the_one_that_trains(name, tmp_path):
    first, second = metrics_of(run(name, tmp_path, total_rollouts=2))[1:]
    for row in (first, second):
        assert 0 <= row["policy/sampling_kl"] < 1e-10
        assert row.get("policy/sampling_ratio_max", 1) == pytest.approx(1, abs=1e-5)


@pytest.fixture
def other_sampler(monkeypatch):
    """Rollouts, not evaluations, are drawn at twice the temperature. What was drawn."""

    def put_in(name):
        module = SPECS[name].module
        original = module.generate

        def generate(model, prompts, *, temperature, **options):
            temperature *= 1 if len(prompts) == 4 else 2  # an evaluation has four
            return original(model, prompts, temperature=temperature, **options)

        monkeypatch.setattr(module, "generate", generate)
        return spy_on(module, monkeypatch, "generate")

    return put_in


def log_ratios(sampled, model):
    """log(pi_old / pi_sampler) of the tokens of each completion."""
    _, (sequences, logprobs) = sampled
    ratios = []
    for (prompt, completion), found in zip(sequences, logprobs, strict=True):
        expected, _ = plain_logprobs(model, prompt, completion, 2.0)
        torch.testing.assert_close(found[: len(completion)], expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            ratios.append(plain_logprobs(model, prompt, completion)[0] - expected)
    return ratios


@pytest.mark.parametrize(
    "name, flags",
    [
        ("grpo", dict(num_minibatches=2)),
        ("grpo", dict(micro_batch_size=3)),  # one step: pi_old is pi_theta
        ("grpo_variants", dict(num_minibatches=2)),
        ("grpo_variants", dict(mask_truncated=True, max_new_tokens=8)),
        ("ppo_rlhf", dict(prompts_per_rollout=9)),
        ("reinforce", dict(micro_batch_size=3)),
        ("distill", dict(prompts_per_rollout=9)),
    ],
)
def test_another_sampler_is_measured_and_named(name, flags, other_sampler, tmp_path):
    sampled, model = other_sampler(name), plain_model(SPECS[name].module.Args.model)
    with pytest.warns(UserWarning, match="the sampler's log-probs are not the policy's"):
        row = metrics_of(run(name, tmp_path, **flags))[1]
    ratios = log_ratios(sampled[1], model)
    if "mask_truncated" in flags:
        ends = [completion[-1] == EOS for _, completion in sampled[1][1][0]]
        assert 0 < sum(ends) < len(ends)
        ratios = [ratio for ratio, ended in zip(ratios, ends, strict=True) if ended]
    log_ratio = torch.cat(ratios).double()
    k3 = [math.exp(x) - 1 - x for x in log_ratio.tolist()]
    assert row["policy/sampling_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)
    if name != "grpo":
        largest = log_ratio.exp().max().item()
        assert row["policy/sampling_ratio_max"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.filterwarnings("error")
def test_a_sampler_whose_distance_is_no_number_is_named_too():
    check_sampling_kl(0.0)
    for kl in (math.nan, math.inf):
        with pytest.warns(UserWarning, match="the sampler's log-probs are not the policy's"):
            check_sampling_kl(kl)


def test_the_gradient_with_a_cap_is_trls_token_truncate(other_sampler, tmp_path, monkeypatch):
    """By the definition of vllm_importance_sampling_correction: a token's loss times
    min(exp(log pi_old - log pi_sampler), cap), in the second step too."""
    steps, sampled = watch_steps(monkeypatch), other_sampler("grpo_variants")
    judged = spy_on(grpo_variants, monkeypatch, "rule_rewards")
    flags = dict(beta=0.0, group_size=8, micro_batch_size=5, importance_cap=0.6)
    flags |= dict(update_epochs=2, clip_coef=9.0)  # no ratio is clipped
    with pytest.warns(UserWarning, match="policy/sampling_kl"):
        run("grpo_variants", tmp_path, **flags)
    policy, (_, rewards) = plain_model(grpo_variants.Args.model), judged[1]
    set_weights(policy, steps[0][0])  # pi_old
    ratios = [ratio.exp() for ratio in log_ratios(sampled[1], policy)]
    assert (torch.cat(ratios) < 0.6).any() and (torch.cat(ratios) > 0.6).any()
    groups = rewards.view(-1, 8)
    std = groups.std(dim=1, keepdim=True)
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)).flatten()
    _, (sequences, _) = sampled[1]
    old = [plain_logprobs(policy, *sequence)[0].detach() for sequence in sequences]
    for theta, gradient, _ in steps:
        set_weights(policy, theta)
        for i, sequence in enumerate(sequences):
            ratio = (plain_logprobs(policy, *sequence)[0] - old[i]).exp()
            weights = ratios[i].clamp(max=0.6) * advantages[i].item() / len(sequences)
            (-(weights * ratio).mean()).backward()
        assert_same_gradient(gradient, [parameter.grad for parameter in policy.parameters()])
    assert len(steps) == 2


def test_ipo_takes_the_samplers_log_probs_for_those_of_pi_old(other_sampler, tmp_path, monkeypatch):
    sampled = other_sampler("grpo_variants")
    losses = spy_by_name(grpo_variants, monkeypatch, "variant_loss")
    with pytest.warns(UserWarning, match="policy/sampling_kl"):
        run("grpo_variants", tmp_path, loss="ipo", num_minibatches=2)
    _, (_, drawn_with) = sampled[1]
    given = torch.cat([call["old_logprobs"] for call in losses])
    assert sorted(given.flatten().tolist()) == sorted(drawn_with.flatten().tolist())


def test_rounds_of_sampling_keep_each_completions_log_probs():
    """Of rounds whose longest completions differ in length."""
    lengths = iter([(3, 2, 1, 1), (5, 4)])

    def sample(prompt_ids, temperature, rng):
        longest = next(lengths)
        sequences = [([1], [2] * n) for n in longest]
        rows = [[-float(n)] * n + [0.0] * (max(longest) - n) for n in longest]
        return sequences, torch.tensor(rows)

    args = grpo_variants.Args(group_size=2, prompts_per_rollout=2, max_sampling_rounds=2)
    rules = {"rule": lambda prompts, sequences: torch.tensor([float(len(o)) for _, o in sequences])}
    prompts = iter([grpo_variants.Prompt("", [1], {})] * 9)
    sequences, logprobs, *_ = grpo_variants.roll_out(args, sample, rules, prompts, None)
    assert [len(completion) for _, completion in sequences] == [3, 2, 5, 4]
    for (_, completion), found in zip(sequences, logprobs, strict=True):
        n = len(completion)
        assert found.tolist() == [-float(n)] * n + [0.0] * (5 - n)
