"""The mathematics of ppo_rlhf.py against derivations of its own, and the wiring of a real run."""

import math
from collections import defaultdict
from functools import partial

import algorithms
import numpy as np
import pytest
import spies
import torch
from algorithms import assert_same_gradient, set_weights
from plain import plain_logprobs
from models import tiny_classifier
from reviews import EOS, plain_model
from spies import watch_steps
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as AutoClassifier

import common.logprobs
import ppo_rlhf
from ppo_rlhf import Args, Critic, critic_values, explained_variance, gae, k2_kl
from ppo_rlhf import load_critic, policy_loss, shaped_rewards, value_loss, whiten
from runs import metrics_of

# 16 completions of 6 to 20 tokens, some of them cut off. What the tests count on is named here,
# so that a default may be tuned.
SMALL = dict(train_split="train", prompts_per_rollout=16, micro_batch_size=16, max_new_tokens=20)
SMALL |= dict(num_minibatches=2, update_epochs=2, beta=0.1, max_grad_norm=0.5, group_size=1)
SMALL |= dict(learning_rate=5e-4, critic_learning_rate=1e-3, clip_coef=0.2, vf_clip_coef=0.2)
SMALL |= dict(vf_coef=0.5)
RULE = "tiny/reviews/gold.py:sentiment"
ONLY_A_RULE = dict(reward_fn=[RULE], critic_init="sft")
CPU = torch.device("cpu")


def last_checkpoint(run_dir):
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


run = partial(algorithms.run, "ppo_rlhf", **SMALL)
spy_on = partial(spies.spy_by_name, ppo_rlhf)


def plain_reward_model():
    return AutoClassifier.from_pretrained(Args().reward_model, dtype=torch.float32).eval()


def critic_of(**flags):
    args = Args(**flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return load_critic(args, plain_model(), tokenizer, 104, CPU)


def as_critic(model):
    return Critic(model, model.score, trained=model)


def until(*lengths, width):
    """A mask of the first tokens in each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


# --- rewards of tokens --------------------------------------------------------------------------
def test_shaped_rewards_by_hand():
    # Row 0 ends before the padding, row 1 fills all columns, row 2 is a single token.
    mask = until(2, 3, 1, width=3)
    logprobs = torch.tensor([[-1.0, -2.0, 0], [-1.0, -3.0, -0.5], [-2.0, 0, 0]])
    ref = torch.tensor([[-3.0, -1.0, 0], [-1.0, -1.0, -2.5], [-4.0, 0, 0]])
    # Likelier than under the reference costs: row 0, token 0 has log-ratio +2, so -0.1 x 2.
    expected = [[-0.2, 0.1 + 5, 0], [0, 0.2, -0.2 - 7], [-0.2 + 0.5, 0, 0]]
    scores = torch.tensor([5.0, -7.0, 0.5])
    found = shaped_rewards(scores, logprobs - ref, mask, 0.1)
    torch.testing.assert_close(found, torch.tensor(expected))
    without = torch.tensor([[0, 5.0, 0], [0, 0, -7.0], [0.5, 0, 0]])
    torch.testing.assert_close(shaped_rewards(scores, logprobs - ref, mask, 0.0), without)


# --- advantages ---------------------------------------------------------------------------------
def double_sum(rewards, values, gamma, lam):
    """The paper's, of one completion: V is 0 after its last token."""
    values = torch.cat([values, torch.zeros_like(values[:1])])
    deltas = rewards + gamma * values[1:] - values[:-1]
    advantages = torch.zeros_like(rewards)
    for t in range(len(rewards)):
        for k in range(len(rewards) - t):
            advantages[t] += (gamma * lam) ** k * deltas[t + k]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.5, 0.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    torch.manual_seed(0)
    mask = until(7, 1, 4, width=7)
    rewards, values = torch.randn(2, *mask.shape, dtype=torch.float64) * mask
    advantages, returns = gae(rewards, values, gamma, lam)
    for i, length in enumerate((7, 1, 4)):
        expected = double_sum(rewards[i, :length], values[i, :length], gamma, lam)
        torch.testing.assert_close(advantages[i, :length], expected)
    torch.testing.assert_close(returns, advantages + values)


def test_whiten_by_hand():
    values = torch.tensor([[1.0, 2.0, 50.0], [70.0, 3.0, 6.0]])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    # Mean 12/4, variance (4 + 1 + 0 + 9)/4: of the population, not 14/3.
    z = np.array([[-2, -1, 0], [0, 0, 3]]) / np.sqrt(3.5)
    torch.testing.assert_close(whiten(values, mask).double(), torch.tensor(z))
    # All equal, as when every score is the same and there is no critic: 0, not 0/0.
    assert (whiten(torch.full((2, 3), 7.0), mask) == 0).all()
    # Values of +-1e-4 have variance 1e-8, and 1e-8 is added to it.
    tiny = whiten(1e-4 * torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]), mask)[mask]
    assert tiny.tolist() == pytest.approx([2**-0.5, -(2**-0.5), 2**-0.5, -(2**-0.5)], rel=1e-4)


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    returns = torch.tensor([[1.0, 2.0, 90.0], [-90.0, 3.0, 4.0]])
    values = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 2.0]])
    # R - V = 0, 0, 0, 2: variance 3/4, against 5/4.
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.4)
    # Of returns that are all equal the variance counts as 1e-8.
    found = explained_variance(values, 0 * returns, mask).item()
    assert found == pytest.approx(1 - 0.5 / 1e-8)


# --- clipping -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "target", "clip", "loss", "gradient"),
    [
        # V_old is 1. The gradient of 1/2 (V - R)^2 is V - R.
        (1.1, 3.0, 0.2, 1.9**2 / 2, -1.9),  # inside the clip
        (0.9, 3.0, 0.2, 2.1**2 / 2, -2.1),
        (1.5, 3.0, 0.2, 1.8**2 / 2, 0.0),  # beyond it, towards R: held at 1.2
        (0.5, -2.0, 0.2, 2.8**2 / 2, 0.0),  # the same from above: held at 0.8
        (0.5, 3.0, 0.2, 2.5**2 / 2, -2.5),  # beyond it, away from R: free
        (1.5, -2.0, 0.2, 3.5**2 / 2, 3.5),
        (4.0, 3.0, 0.2, 1.8**2 / 2, 0.0),  # through R, and still nearer to it than 1.2 is: held
        (5.0, 3.0, 0.2, 2.0**2 / 2, 2.0),  # through R and farther from it than 1.2: free
        (1.5, 3.0, None, 1.5**2 / 2, -1.5),  # no clip
    ],
)
def test_value_clipping(value, target, clip, loss, gradient):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(1, 1).double(), torch.tensor([[target]]).double()
    result, sums = value_loss(values, old, returns, clip)
    assert result.item() == pytest.approx(loss)
    result.backward()
    assert values.grad.item() == pytest.approx(gradient)
    assert sums["value/loss"].item() == pytest.approx(loss)
    assert sums["value/clip_fraction"] == (gradient == 0)


def test_rounding_is_not_counted_as_clipping():
    """V_old + (V - V_old) need not be V to the last bit."""
    values, old_values, returns = torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0))
    for clip_coef, least in ((1000.0, 0), (None, 0), (0.2, 1)):
        _, sums = value_loss(values, old_values, returns, clip_coef)
        assert (sums["value/clip_fraction"] > 0) == least


# --- the policy's loss --------------------------------------------------------------------------
def test_policy_loss_has_the_gradient_of_the_objective_by_enumeration():
    # Over 7 tokens. With pi_old uniform, each of them once is the expectation under pi_old.
    torch.manual_seed(0)
    logits, ref_logits = torch.randn(2, 7, 1, dtype=torch.float64)
    logp, ref = logits.requires_grad_().log_softmax(0), ref_logits.log_softmax(0)
    old = torch.full_like(ref, -math.log(7))
    advantages = 2 * torch.randn(7, 1, dtype=torch.float64)
    losses, _ = policy_loss(logp, old, advantages, clip_coef=100.0)  # nothing is clipped
    loss = (losses + 0.3 * k2_kl(logp, old, ref)).mean()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    # The expected advantage up, KL(pi || pi_ref) down.
    kl = (logp.exp() * (logp - ref)).sum()
    objective = (logp.exp() * advantages).sum() - 0.3 * kl
    (exact,) = torch.autograd.grad(-objective, logits)
    torch.testing.assert_close(found, exact)
    assert exact.abs().max() > 0.01


def test_policy_loss_and_metrics_by_hand():
    # Rows to be raised, to be lowered and to be left alone, of 4, 3 and 2 tokens.
    ratio = torch.tensor([[1.5, 0.5, 1.3, 1.1], [1.5, 0.5, 0.7, 1.0], [1.5, 0.5, 1.0, 1.0]])
    mask = until(4, 3, 2, width=4)
    advantages = torch.tensor([[0.5], [-0.5], [0.0]]) * mask
    zeros = torch.zeros(3, 4)
    ratio = ratio.where(mask, 1.0)
    losses, sums = policy_loss(ratio.log(), zeros, advantages, 0.2)
    assert sums["policy/clip_fraction_high"] == 2  # row 0, tokens 0 and 2
    assert sums["policy/clip_fraction_low"] == 2  # row 1, tokens 1 and 2
    ratios = (1.5, 0.5, 1.3, 1.1, 1.5, 0.5, 0.7, 1.5, 0.5)
    # KL(pi_old || pi) by k3 on tokens of pi_old: ratio - 1 - log ratio
    terms = [r - 1 - math.log(r) for r in ratios]
    assert sums["policy/approx_kl"].item() == pytest.approx(sum(terms), rel=1e-5)
    # The surrogate: at most 1.2 where the ratio is to be raised, at least 0.8 where to be lowered.
    surrogate = -0.5 * (1.2 + 0.5 + 1.2 + 1.1) + 0.5 * (1.5 + 0.8 + 0.8)
    assert losses.sum().item() == pytest.approx(surrogate, rel=1e-5)
    assert sums["policy/loss"] == losses.sum()
    # k2 is 1/2 log^2(pi / pi_ref) times the ratio.
    k2 = [r * (math.log(r) - 3) ** 2 / 2 for r in ratios]
    found = k2_kl(ratio.log(), zeros, torch.full((3, 4), 3.0))[mask]
    assert found.tolist() == pytest.approx(k2, rel=1e-5)


# --- the critic ---------------------------------------------------------------------------------
ROW = [1, 7, 9, 5, 3, 8, 2]


@pytest.mark.parametrize(("architecture", "score_mean"), [("llama", 0.0), ("gpt2", 0.7)])
def test_critic_values_are_the_head_on_the_token_before(architecture, score_mean):
    """In rows that are padded, with other lengths of prompts and completions."""
    critic = tiny_classifier(architecture, score_mean=score_mean)
    pairs = [(ROW[:3], ROW[3:]), (ROW[:1], ROW[1:3]), (ROW + ROW, [4]), (ROW[:1], ROW + ROW)]
    with torch.no_grad():
        found = critic_values(as_critic(critic), pairs, torch.arange(4))
        for values, (prompt, completion) in zip(found, pairs, strict=True):
            hidden = critic.base_model(torch.tensor([prompt + completion])).last_hidden_state[0]
            for t in range(14):
                expected = torch.zeros(())
                if t < len(completion):
                    expected = hidden[len(prompt) + t - 1] @ critic.score.weight[0]
                    expected = expected - score_mean
                torch.testing.assert_close(values[t], expected, atol=1e-5, rtol=1e-5)
    assert found.std() > 0.1


def same_weights(model, other):
    others = other.state_dict()
    return {k for k, x in model.state_dict().items() if k in others and torch.equal(x, others[k])}


@pytest.mark.parametrize("critic_init", ["reward_model", "sft"])
def test_what_a_critic_starts_as(critic_init):
    critic = critic_of(critic_init=critic_init).trained
    reward_model, policy = plain_reward_model(), plain_model()
    assert critic.state_dict().keys() == reward_model.state_dict().keys()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in critic.parameters())
    assert not critic.training
    from_reward_model = same_weights(critic, reward_model)
    from_policy = same_weights(critic, policy)
    names = {*critic.state_dict()}
    if critic_init == "reward_model":
        assert from_reward_model == names  # with its head
    else:
        assert from_policy == names - {"score.weight"} and "score.weight" not in from_reward_model


# --- the loop -----------------------------------------------------------------------------------
def test_ratio_is_one_before_any_update(tmp_path, monkeypatch):
    calls, scored = spy_on(monkeypatch, "policy_loss"), []
    for module in (ppo_rlhf, common.logprobs):  # in the steps, and of the old log-probs
        scored.append(spies.spy_by_name(module, monkeypatch, "completion_logprobs"))
    run(tmp_path, temperature=0.6, micro_batch_size=4, beta=0.0)
    assert len(calls) == 8  # two micro-batches in each of two minibatches, twice
    # On a GPU the last bits depend on the batch: the old log-probs are of the first pass's own.
    in_steps, of_old = ([call["inds"].tolist() for call in calls] for calls in scored)
    assert len(in_steps) == 8 and in_steps[:4] == of_old
    for number, call in enumerate(calls):
        _, sums = call["result"]
        same = torch.equal(call["logprobs"], call["old_logprobs"])
        assert same == (number < 2), "exactly 1 before the first step, and never again"
        assert (sums["policy/approx_kl"] == 0) == same
        assert (call["old_logprobs"] < 0).any()


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        (dict(), ["policy", "policy", "reward_model", "reward_model"]),  # the last is the critic
        (dict(beta=0.0, critic_init="sft"), ["policy", "policy", "reward_model"]),
        (ONLY_A_RULE, ["policy", "policy", "policy"]),
        (ONLY_A_RULE | dict(beta=0.0, critic_init="policy"), ["policy"]),
    ],
)
def test_no_model_is_loaded_that_is_not_needed(tmp_path, monkeypatch, flags, loaded):
    calls = spy_on(monkeypatch, "load_model")
    last = metrics_of(run(tmp_path, **flags))[-1]
    assert [call["source"].rpartition("/")[2] for call in calls] == loaded
    with_reference, with_model = flags.get("beta") != 0, "reward_model" in loaded
    assert ("objective/kl" in last) == with_reference
    assert ("rewards/reward_model" in last) == with_model
    assert ("rewards/sentiment" in last) == (not with_model)
    if not with_model:
        assert last["rewards/sentiment"] == last["reward/mean"]


def test_in_its_warm_up_the_critic_learns_alone(tmp_path, monkeypatch):
    steps = watch_steps(monkeypatch)
    flags = dict(total_rollouts=3, critic_warmup_rollouts=2, update_epochs=1, num_minibatches=1)
    run(tmp_path, **flags)
    policies, critics = steps[::2], steps[1::2]

    def moved(models):
        before, after = (torch.cat([w.flatten() for w in step[0]]) for step in models)
        return not torch.equal(before, after)

    assert [moved(policies[i : i + 2]) for i in (0, 1)] == [False, False]
    assert [moved(critics[i : i + 2]) for i in (0, 1)] == [True, True]
    # The third rollout moves it, by Adam's first step: no moments of the warm-up are in it.
    run_dir = next(tmp_path.iterdir())
    end, (before, gradient, max_norm) = plain_model(run_dir), policies[2]
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    rate = metrics_of(run_dir)[3]["policy/learning_rate"]
    for weight, g, after in zip(before, gradient, end.parameters(), strict=True):
        g = g * min(1.0, max_norm / (norm + 1e-6))
        torch.testing.assert_close(after, weight - rate * g / (g.abs() + 1e-8), rtol=0, atol=2e-6)


# Each with all that belongs to it.
WHOLE = [
    dict(gamma=0.9, gae_lambda=0.8, temperature=0.6, vf_coef=1.5)
    | dict(missing_eos_penalty=3.0, max_new_tokens=15),
    dict(kl_placement="loss", whiten_advantages=False, vf_clip_coef=None, ent_coef=0.3)
    | dict(reward_fn=[RULE], reward_weights=[2.0, 0.5], critic_init="sft")
    | dict(reward_model=Args().reward_model, group_size=2, prompts_per_rollout=8),
    dict(beta=0.0, critic_init="policy"),
]


@pytest.mark.parametrize("flags", WHOLE)
def test_gradients_and_metrics_of_a_rollout_are_those_of_one_completion_at_a_time(
    flags, tmp_path, monkeypatch
):
    """The second rollout, of a policy that has left the reference: two passes of two steps."""
    sampled, steps = spy_on(monkeypatch, "generate"), watch_steps(monkeypatch)
    batched, judged = spy_on(monkeypatch, "micro_batches"), spy_on(monkeypatch, "rule_rewards")
    flags = dict(total_rollouts=2, micro_batch_size=3, clip_coef=0.05) | flags
    row = metrics_of(run(tmp_path, **flags))[2]
    args = Args(**SMALL | flags)
    policy, reference, reward_model = plain_model(), plain_model(), plain_reward_model()
    critic = critic_of(critic_init=args.critic_init)
    backbone = policy if args.critic_init == "policy" else critic.backbone
    score_mean = reward_model.config.score_mean
    assert abs(score_mean) > 0.01  # the test needs one that shows
    beta_in_reward = args.beta if args.kl_placement == "reward" else 0.0
    (sequences, _), steps = sampled[2]["result"], steps[8:]  # after an evaluation and a rollout

    def go_to(step):
        """The models as they were before it."""
        set_weights(policy, steps[2 * step][0])
        set_weights(critic.trained, steps[2 * step + 1][0])

    def values_of_one(prompt, completion):
        hidden = backbone.base_model(torch.tensor([prompt + completion])).last_hidden_state
        values = critic.head(hidden)[0, len(prompt) - 1 : -1, 0]
        return values - getattr(backbone.config, "score_mean", 0.0)

    go_to(0)
    rewards, scores, k1, fixed = [], [], [], []
    with torch.no_grad():
        for i, (prompt, completion) in enumerate(sequences):
            old, _ = plain_logprobs(policy, prompt, completion, args.temperature)
            ref, _ = plain_logprobs(reference, prompt, completion, args.temperature)
            k1.append((old - ref).sum().item())
            reward = reward_model(torch.tensor([prompt + completion])).logits.item() - score_mean
            if args.reward_fn:
                reward = 2.0 * judged[-2]["result"][i].item() + 0.5 * reward
            rewards.append(reward)
            scores.append(reward - args.missing_eos_penalty * (completion[-1] != EOS))
            token_rewards = -beta_in_reward * (old - ref)
            token_rewards[-1] += scores[-1]
            values = values_of_one(prompt, completion)
            advantages = double_sum(token_rewards, values, args.gamma, args.gae_lambda)
            fixed.append([old, ref, values, advantages, advantages + values])
    all_values, all_advantages, all_returns = (
        torch.cat([numbers[i] for numbers in fixed]) for i in (2, 3, 4)
    )
    if args.whiten_advantages:  # over the rollout
        mean, std = all_advantages.mean(), all_advantages.std(correction=0)
        for numbers in fixed:
            numbers[3] = (numbers[3] - mean) / std

    minibatches = [call["inds"].tolist() for call in batched if len(call["inds"]) == 8][-4:]
    epochs = [minibatches[0] + minibatches[1], minibatches[2] + minibatches[3]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(16)] and epochs[0] != epochs[1]
    sums, losses, norms = defaultdict(float), [], {"policy": [], "value": []}
    for step, minibatch in enumerate(minibatches):
        go_to(step)
        losses.append(0.0)
        tokens = sum(len(sequences[i][1]) for i in minibatch)
        for i in minibatch:
            logprobs, entropy = plain_logprobs(policy, *sequences[i], args.temperature)
            old, ref, old_values, advantages, returns = fixed[i]
            surrogate, loss_sums = policy_loss(logprobs, old, advantages, args.clip_coef)
            k2 = (args.beta - beta_in_reward) * k2_kl(logprobs, old, ref)
            values = values_of_one(*sequences[i])
            v_losses, value_sums = value_loss(values, old_values, returns, args.vf_clip_coef)
            of_tokens = surrogate + k2 - args.ent_coef * entropy + args.vf_coef * v_losses
            loss = of_tokens.sum() / tokens
            loss.backward()
            losses[-1] += loss.item()
            loss_sums |= value_sums | {"policy/entropy": entropy.sum()}
            for name, value in loss_sums.items():
                sums[name] += value.item() / (2 * len(all_values))
        for number, (name, model) in enumerate((("policy", policy), ("value", critic.trained))):
            expected = [parameter.grad for parameter in model.parameters()]
            assert_same_gradient(steps[2 * step + number][1], expected)
            norms[name].append(sum(g.square().sum() for g in expected).sqrt().item())

    explained = 1 - (all_returns - all_values).var() / all_returns.var()
    cut_off = [completion[-1] != EOS for _, completion in sequences]
    expected = dict(sums) | {
        "objective/loss": np.mean(losses),
        "policy/grad_norm": np.mean(norms["policy"]),
        "value/grad_norm": np.mean(norms["value"]),
        "value/explained_variance": explained.item(),
        "reward/mean": np.mean(rewards),
        "reward/std": np.std(rewards),
        "completions/truncated_fraction": np.mean(cut_off),
        "objective/reward": np.mean(scores) - beta_in_reward * np.mean(k1),
    }
    if args.beta > 0:
        assert abs(np.mean(k1)) > 0.01
        expected["objective/kl"] = np.mean(k1)
    for name, number in expected.items():
        assert row[name] == pytest.approx(number, rel=2e-3, abs=1e-5), name
    assert 0 < np.mean(cut_off) < 1 and sums["policy/clip_fraction_high"] > 0
    assert sums["value/clip_fraction"] > 0 or args.vf_clip_coef is None


def test_the_saved_model_of_a_shared_critic_is_the_policy_alone(tmp_path):
    run_dir = run(tmp_path, critic_init="policy")
    assert [*last_checkpoint(run_dir)["critic"][0]] == ["weight"]
    _, info = AutoModelForCausalLM.from_pretrained(run_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
