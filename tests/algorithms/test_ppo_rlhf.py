"""The mathematics of ppo_rlhf.py against derivations of its own, and the wiring of a real run."""

import math
from functools import partial

import algorithms
import numpy as np
import pytest
import torch
import spies
from reviews import plain_logprobs, plain_model
from transformers import AutoModelForSequenceClassification as AutoClassifier
from transformers import AutoTokenizer, GPT2Config, LlamaConfig

import ppo_rlhf
from ppo_rlhf import (
    Args,
    adapt_beta,
    critic_values,
    explained_variance,
    gae,
    k2_kl,
    load_critic,
    policy_loss,
    shaped_rewards,
    value_loss,
    whiten,
)
from runs import metrics_of

# 16 completions of 6 to 20 tokens, some of them cut off. What the tests count on is named here,
# so that a default may be tuned.
SMALL = dict(train_split="train", prompts_per_rollout=16, micro_batch_size=16, max_new_tokens=20)
SMALL |= dict(num_minibatches=2, update_epochs=2, beta=0.1, max_grad_norm=0.5, vf_coef=0.5)
SMALL |= dict(learning_rate=5e-4, critic_learning_rate=1e-3, clip_coef=0.2, vf_clip_coef=0.2)
ONE_STEP = dict(num_minibatches=1, update_epochs=1)
RULE = "tiny/reviews/gold.py:sentiment"
ONLY_A_RULE = dict(reward_model=None, reward_fn=[RULE], critic_init="sft")
CPU = torch.device("cpu")


def last_checkpoint(run_dir):
    return torch.load(max(run_dir.glob("checkpoint_*.pt")), weights_only=True)


run = partial(algorithms.run, "ppo_rlhf", **SMALL)
spy_on = partial(spies.spy_by_name, ppo_rlhf)


def spy_on_gradients(monkeypatch):
    """Record the gradients of each call of clip_grad_norm_, which then scales nothing."""
    gradients = []

    def capture(parameters, max_norm):
        assert max_norm == SMALL["max_grad_norm"]
        gradients.append([p.grad.clone() for p in parameters])
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", capture)
    return gradients


def plain_reward_model():
    return AutoClassifier.from_pretrained(Args().reward_model, dtype=torch.float32).eval()


def critic_of(**flags):
    args = Args(**flags)
    return load_critic(args, AutoTokenizer.from_pretrained(args.model), 104, CPU)


def until(*lengths, width):
    """A mask of the first tokens in each row."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def sampled(call):
    """Which tokens were sampled, of a call of a loss: those with a weight."""
    return call["weights"] > 0


# Whole row, one token, and lengths between.
MASK = until(7, 1, 6, 3, 4, 2, 5, width=7)


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


def brute_force_gae(rewards, values, mask, gamma, lam):
    """The double sum of the paper over each row's own tokens, V being 0 after the last."""
    advantages = torch.zeros_like(rewards)
    for i in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[i, t]]
        r, v = [rewards[i, t].item() for t in at], [values[i, t].item() for t in at] + [0.0]
        for k in range(len(at)):
            advantages[i, at[k]] = sum(
                (gamma * lam) ** (j - k) * (r[j] + gamma * v[j + 1] - v[j])
                for j in range(k, len(at))
            )
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.5, 0.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, *MASK.shape, dtype=torch.float64) * MASK
    advantages, returns = gae(rewards, values, gamma, lam)
    expected = brute_force_gae(rewards, values, MASK, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values) * MASK)


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

    def of(*values):
        filled = torch.zeros(2, 3).masked_scatter(mask, torch.tensor(values))
        return explained_variance(filled, returns, mask).item()

    assert of(1.0, 2.0, 3.0, 4.0) == 1
    assert of(8.0, 9.0, 10.0, 11.0) == 1  # a constant error is no variance
    assert of(2.5, 2.5, 2.5, 2.5) == 0
    # R - V = 0, 0, 0, 2: variance 3/4, against 5/4.
    assert of(1.0, 2.0, 3.0, 2.0) == pytest.approx(0.4)
    # Returns of +-1e-5 have variance 1e-10, which counts as 1e-8.
    returns = 1e-5 * torch.tensor([[1.0, -1.0, 9.0], [9.0, 1.0, -1.0]])
    assert of(0.0, 0.0, 0.0, 0.0) == pytest.approx(1 - 1e-10 / 1e-8, rel=1e-4)


# --- clipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.5, 2.0, 1.2 * 2, 0.0),  # above, to be raised: clipped, no gradient
        (1.5, -2.0, 1.5 * -2, 1.5 * -2),  # above, to be lowered: free
        (0.5, 2.0, 0.5 * 2, 0.5 * 2),  # below, to be raised: free
        (0.5, -2.0, 0.8 * -2, 0.0),  # below, to be lowered: clipped, no gradient
        (1.1, 2.0, 1.1 * 2, 1.1 * 2),  # inside
        (0.9, -2.0, 0.9 * -2, 0.9 * -2),
    ],
)
def test_clipping_in_each_sign_and_side(ratio, advantage, value, gradient):
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    advantage = torch.tensor([[advantage]])
    loss, _ = policy_loss(log_ratio, zero, zero, advantage, zero, one, 0.2, 0.0, 0.0)
    assert -loss.item() == pytest.approx(value)
    (-loss).backward()
    assert log_ratio.grad.item() == pytest.approx(gradient)  # d(rho A)/d(log rho) = rho A


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
    result, sums = value_loss(values, old, returns, torch.ones(1, 1), clip)
    assert result.item() == pytest.approx(loss)
    result.backward()
    assert values.grad.item() == pytest.approx(gradient)
    assert sums["value/loss"].item() == pytest.approx(loss)
    assert sums["value/clip_fraction"] == (gradient == 0)


def test_rounding_is_not_counted_as_clipping():
    """V_old + (V - V_old) need not be V to the last bit."""
    values, old_values, returns = torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0))
    for clip_coef, least in ((1000.0, 0), (None, 0), (0.2, 1)):
        _, sums = value_loss(values, old_values, returns, torch.ones(50, 40), clip_coef)
        assert (sums["value/clip_fraction"] > 0) == least


# --- KL -----------------------------------------------------------------------------------------


def three_policies():
    """Logits of pi, and log-probs of pi, pi_old and pi_ref, over a vocabulary of 7: (7, 1) each."""
    torch.manual_seed(0)
    logits, old, ref = torch.randn(3, 7, 1, dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)


def exact_kl(logp, ref):
    return (logp.exp() * (logp - ref)).sum()


@pytest.mark.parametrize("on_policy", [True, False])
def test_k2_as_a_loss_has_the_gradient_of_the_kl_whoever_drew_the_tokens(on_policy):
    logits, logp, old, ref = three_policies()
    (exact,) = torch.autograd.grad(exact_kl(logp, ref), logits, retain_graph=True)
    drawn_from = logp.detach() if on_policy else old
    expectation = (drawn_from.exp() * k2_kl(logp, drawn_from, ref)).sum()
    # Its value is E_pi[log^2] / 2, which is not the KL.
    by_hand = sum(
        p * (math.log(p / q) ** 2) / 2 for p, q in zip(logp.detach().exp(), ref.exp(), strict=True)
    )
    assert expectation.item() == pytest.approx(by_hand.item())
    expectation.backward()
    torch.testing.assert_close(logits.grad, exact)
    assert exact.abs().max() > 0.1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),  # on target
        (6.6, 1 + 0.1 * 128 / 1000),  # a tenth above
        (7.3, 1 + 0.2 * 128 / 1000),  # clipped on either side
        (-3.0, 1 - 0.2 * 128 / 1000),  # k1 is noisy around 0
    ],
)
def test_adapt_beta_by_hand(kl, factor):
    assert adapt_beta(0.3, kl, 6.0, 1000, 128) == pytest.approx(0.3 * factor, rel=1e-12)


# --- the policy's loss --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl_coef", "ent_coef", "scale"),
    [(0.3, 0.0, 0.0), (0.0, 0.7, 0.0), (0.3, 0.7, 2.0)],
)
def test_policy_loss_has_the_gradient_of_the_objective_by_enumeration(kl_coef, ent_coef, scale):
    # With pi_old uniform, each of the 7 tokens once is the expectation over tokens of pi_old.
    logits, logp, _, ref = three_policies()
    p = logp.exp()
    old = torch.full_like(ref, -math.log(7))
    advantages = scale * torch.randn(7, 1, dtype=torch.float64)
    entropy = -(p * logp).sum()
    weights = torch.full((7, 1), 1 / 7, dtype=torch.float64)
    wide = 100.0  # nothing is clipped
    loss, _ = policy_loss(
        logp, old, ref, advantages, entropy.expand(7, 1), weights, wide, kl_coef, ent_coef
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    # The expected advantage up, KL(pi || pi_ref) down, entropy up; d H/d z_k = -p_k (log p_k + H).
    (exact,) = torch.autograd.grad(-(p * advantages).sum() + kl_coef * exact_kl(logp, ref), logits)
    exact = exact + ent_coef * (p * (logp + entropy)).detach()
    torch.testing.assert_close(found, exact)
    assert exact.abs().max() > 0.01


def test_policy_metrics_by_hand():
    # Rows to be raised, to be lowered and to be left alone, of 4, 3 and 2 tokens.
    ratio = torch.tensor([[1.5, 0.5, 1.3, 1.1], [1.5, 0.5, 0.7, 1.0], [1.5, 0.5, 1.0, 1.0]])
    mask = until(4, 3, 2, width=4)
    advantages = torch.tensor([[0.5], [-0.5], [0.0]]) * mask
    entropy = torch.tensor([[1.0, 2, 3, 4], [5.0, 6, 7, 0], [8.0, 9, 0, 0]])
    zeros = torch.zeros(3, 4)
    loss, sums = policy_loss(
        ratio.log(), zeros, 3.0 * mask, advantages, entropy, mask / 70, 0.2, 0.9, 0.01
    )
    assert sums["policy/clip_fraction_high"] == 2  # row 0, tokens 0 and 2
    assert sums["policy/clip_fraction_low"] == 2  # row 1, tokens 1 and 2
    ratios = (1.5, 0.5, 1.3, 1.1, 1.5, 0.5, 0.7, 1.5, 0.5)
    assert sums["policy/ratio"].item() == pytest.approx(sum(ratios))
    assert sums["policy/entropy"] == 45
    # KL(pi_old || pi) by k3 on tokens of pi_old: ratio - 1 - log ratio
    terms = [r - 1 - math.log(r) for r in ratios]
    assert sums["policy/approx_kl"].item() == pytest.approx(sum(terms), rel=1e-5)
    # The surrogate alone: min with 1.2 in row 0; in row 1 the larger of the ratio and 0.8.
    surrogate = -0.5 * (1.2 + 0.5 + 1.2 + 1.1) + 0.5 * (1.5 + 0.8 + 0.8)
    assert sums["policy/loss"].item() == pytest.approx(surrogate, rel=1e-5)
    assert loss.item() * 70 - surrogate > 1  # the other terms are in the loss


# --- padding ------------------------------------------------------------------------------------


def test_what_stands_at_padding_reaches_no_mean_and_no_variance():
    torch.manual_seed(3)
    values, returns = torch.randn(2, *MASK.shape)

    def dirty(x):
        return x.masked_fill(~MASK, math.nan)

    found = whiten(dirty(values), MASK)
    assert torch.equal(found, whiten(values, MASK))
    assert (found[~MASK] == 0).all()
    found = explained_variance(dirty(values), dirty(returns), MASK)
    assert found == explained_variance(values, returns, MASK)


# --- the critic ---------------------------------------------------------------------------------


def tiny_critic(architecture="llama", score_mean=None):
    torch.manual_seed(0)
    settings = dict(vocab_size=18, num_labels=1, pad_token_id=0, initializer_range=0.3)
    if architecture == "gpt2":  # its positions are absolute: an offset shows
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **settings)
    else:
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        config = LlamaConfig(num_attention_heads=4, **sizes, **settings)
    if score_mean is not None:
        config.score_mean = score_mean
    return AutoClassifier.from_config(config).eval()


ROW = [1, 7, 9, 5, 3, 8, 2]


@torch.no_grad()
def values_of(critic, row, *others):
    """Values of a row's completion, behind three tokens of prompt, from a batch with others."""
    pairs = [*others, (row[:3], row[3:])]
    *_, values = critic_values(critic, critic.score, pairs, torch.arange(len(pairs)))
    assert len(values) == max(len(completion) for _, completion in pairs)
    assert (values[len(row) - 3 :] == 0).all()
    return values[: len(row) - 3]


@pytest.mark.parametrize(("architecture", "score_mean"), [("llama", None), ("gpt2", 0.7)])
def test_critic_values_are_the_head_on_the_token_before(architecture, score_mean):
    critic = tiny_critic(architecture, score_mean)
    with torch.no_grad():
        hidden = critic.base_model(torch.tensor([ROW])).last_hidden_state[0]
        expected = torch.stack([hidden[t - 1] @ critic.score.weight[0] for t in range(3, 7)])
    torch.testing.assert_close(values_of(critic, ROW), expected - (score_mean or 0))
    assert expected.std() > 0.1


@pytest.mark.parametrize(("prompt", "completion"), [(1, 2), (1, 9), (9, 1)])
def test_critic_values_do_not_depend_on_padding(prompt, completion):
    critic = tiny_critic("gpt2")
    ids = torch.randint(1, 18, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    other = (ids[:prompt], ids[prompt : prompt + completion])
    found, alone = values_of(critic, ROW, other, other), values_of(critic, ROW)
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_rows_may_be_picked_in_any_order_and_none_has_values_and_gradients_of_zero():
    critic = tiny_critic(score_mean=0.7)
    pairs = [(ROW[:3], ROW[3:]), (ROW[:1], ROW[1:]), (ROW, [4])]
    everything = critic_values(critic, critic.score, pairs, torch.arange(3))
    found = critic_values(critic, critic.score, pairs, torch.tensor([2, 0]))
    torch.testing.assert_close(found, everything[[2, 0]], atol=1e-5, rtol=1e-5)
    none = critic_values(critic, critic.score, pairs, torch.arange(0))
    assert none.shape == (0, 6)
    none.sum().backward()
    # FSDP's processes add up gradients together: each must have one for every weight.
    assert all(p.grad is not None and not p.grad.any() for p in critic.parameters())


def same_weights(model, other):
    others = other.state_dict()
    return {k for k, x in model.state_dict().items() if k in others and torch.equal(x, others[k])}


@pytest.mark.parametrize("critic_init", ["reward_model", "sft", "scratch"])
def test_what_a_critic_starts_as(critic_init):
    critic = critic_of(critic_init=critic_init)
    reward_model, policy = plain_reward_model(), plain_model()
    assert critic.state_dict().keys() == reward_model.state_dict().keys()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in critic.parameters())
    assert not critic.training
    from_reward_model, from_policy = (
        same_weights(critic, reward_model),
        same_weights(critic, policy),
    )
    names = {*critic.state_dict()}
    if critic_init == "reward_model":
        assert from_reward_model == names  # with its head
    elif critic_init == "sft":
        assert from_policy == names - {"score.weight"} and "score.weight" not in from_reward_model
    else:
        assert not from_reward_model and not from_policy
        again, other = (critic_of(critic_init="scratch", seed=seed) for seed in (1, 2))
        assert same_weights(critic, again) == names
        assert all("norm" in name for name in same_weights(critic, other))  # all 1


# --- the loop -----------------------------------------------------------------------------------


def test_ratio_is_one_before_any_update(tmp_path, monkeypatch):
    calls, scored = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "completion_logprobs")
    run(tmp_path, temperature=0.6, micro_batch_size=4, beta=0.0)
    assert len(calls) == 8  # two micro-batches in each of two minibatches, twice
    # On a GPU the last bits depend on the batch: the old log-probs are of the first pass's own.
    inds = [call["inds"].tolist() for call in scored]
    assert len(inds) == 12 and inds[:4] == inds[4:8]
    for number, call in enumerate(calls):
        sums, tokens = call["result"][1], sampled(call).sum()
        same = torch.equal(call["logprobs"], call["old_logprobs"])
        assert same == (number < 2), "exactly 1 before the first step, and never again"
        assert (sums["policy/approx_kl"] == 0) == same
        assert not same or sums["policy/ratio"] == tokens
        assert (call["old_logprobs"][sampled(call)] < 0).any()


@torch.no_grad()
def plain_rollout(rollout, temperature):
    """Log-probs and values of each completion, and its score, one at a time."""
    policy, reward_model = plain_model(), plain_reward_model()
    mean = reward_model.config.score_mean
    assert abs(mean) > 0.01  # the test needs one that shows
    for prompt, completion in zip(rollout["prompts"], rollout["result"], strict=True):
        row = torch.tensor([prompt + completion])
        values = reward_model.score(reward_model.model(row).last_hidden_state)[0, :-1, 0] - mean
        logprobs = torch.stack(plain_logprobs(policy, prompt, completion, temperature))
        yield logprobs, values[-len(completion) :], reward_model(row).logits.item() - mean


def test_log_probs_values_and_scores_are_those_of_plain_forward_passes(tmp_path, monkeypatch):
    rollouts, scored = (spy_on(monkeypatch, f) for f in ("generate", "completion_logprobs"))
    shaped, estimated = spy_on(monkeypatch, "shaped_rewards"), spy_on(monkeypatch, "gae")
    flags = dict(temperature=0.6, total_rollouts=2, micro_batch_size=5)
    last = metrics_of(run(tmp_path, **flags))[1]

    def before_update(calls):
        """Of the old policy and of the reference, in turn for each of four micro-batches."""
        logprobs = torch.zeros(2, 16, calls[0]["result"].shape[1])
        for number, call in enumerate(calls):
            logprobs[number % 2, call["inds"]] = call["result"]
        return logprobs

    assert len(scored) == 2 * (8 + 8)  # of two rollouts; the update has eight micro-batches
    (old, ref), (late_old, late_ref) = before_update(scored[:8]), before_update(scored[16:24])
    values, close = estimated[0]["values"], dict(atol=1e-4, rtol=1e-4)
    for i, (logprobs, plain_values, score) in enumerate(plain_rollout(rollouts[1], 0.6)):
        for found, expected in ((old, logprobs), (ref, logprobs), (values, plain_values)):
            torch.testing.assert_close(found[i][: len(expected)], expected, **close)
            assert (found[i][len(expected) :] == 0).all()
        assert shaped[0]["scores"][i].item() == pytest.approx(score, abs=1e-4)
    assert torch.equal(shaped[0]["k1"], old - ref)
    assert last["rewards/reward_model"] == last["reward/mean"]
    assert last["reward/mean"] == pytest.approx(shaped[0]["scores"].mean().item(), abs=1e-4)
    num_tokens = sum(map(len, rollouts[1]["result"]))
    assert last["value/mean"] == pytest.approx(values.sum().item() / num_tokens, abs=1e-4)

    # After an update the log-probs are the new policy's, and the reference's still the old ones.
    for i, (logprobs, _, _) in enumerate(plain_rollout(rollouts[2], 0.6)):
        torch.testing.assert_close(late_ref[i][: len(logprobs)], logprobs, **close)
        assert (late_old[i][: len(logprobs)] - logprobs).abs().max() > 1e-3
    assert torch.equal(shaped[1]["k1"], late_old - late_ref)


def test_each_pass_trains_on_every_completion_once(tmp_path, monkeypatch):
    calls = spy_on(monkeypatch, "policy_loss")
    run(tmp_path, num_minibatches=3, micro_batch_size=4)
    # 16 rows in minibatches of 6, 5, 5: in micro-batches of 4 and 2, 4 and 1, 4 and 1.
    assert [len(call["weights"]) for call in calls] == [4, 2, 4, 1, 4, 1] * 2
    for a, b in zip(calls[::2], calls[1::2], strict=True):
        for call in (a, b):
            expected = sampled(call) / (sampled(a).sum() + sampled(b).sum())
            torch.testing.assert_close(call["weights"], expected)

    def rows(some):
        return [
            tuple(o[m].tolist())
            for c in some
            for o, m in zip(c["old_logprobs"], sampled(c), strict=True)
        ]

    once, twice = rows(calls[:6]), rows(calls[6:])
    assert len(set(once)) == 16
    assert sorted(once) == sorted(twice)
    assert once[:6] != twice[:6], "each pass has an order of its own"


def test_reference_and_reward_model_stay_while_policy_and_critic_move(tmp_path, monkeypatch):
    loaded, critics = spy_on(monkeypatch, "load_model"), spy_on(monkeypatch, "load_critic")
    run_dir = run(tmp_path, total_rollouts=2)
    policy, reference, reward_model, critic = (call["result"] for call in loaded)
    assert critic is critics[0]["result"] and critic is not reward_model
    for model, start, moves in (
        (policy, plain_model(), True),
        (reference, plain_model(), False),
        (reward_model, plain_reward_model(), False),
        (critic, plain_reward_model(), True),
    ):
        start = start.state_dict()
        assert set(start) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, start[name]) != moves, name
    assert all(p.grad is None for m in (reference, reward_model) for p in m.parameters())
    assert metrics_of(run_dir)[-1]["objective/kl"] != 0
    weights, _ = last_checkpoint(run_dir)["critic"]
    for name, tensor in critic.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        (dict(), ["policy", "policy", "reward_model", "reward_model"]),  # the last is the critic
        (dict(beta=0.0, critic_init="sft"), ["policy", "reward_model"]),
        (ONLY_A_RULE, ["policy", "policy"]),
        (ONLY_A_RULE | dict(beta=0.0, critic_init="scratch"), ["policy"]),
    ],
)
def test_no_model_is_loaded_that_is_not_needed(tmp_path, monkeypatch, flags, loaded):
    calls = spy_on(monkeypatch, "load_model")
    last = metrics_of(run(tmp_path, **flags))[-1]
    assert [call["source"].rpartition("/")[2] for call in calls] == loaded
    with_reference, with_model = loaded.count("policy") == 2, "reward_model" in loaded
    assert ("objective/kl" in last) == with_reference
    assert ("rewards/reward_model" in last) == with_model
    assert ("rewards/sentiment" in last) == (not with_model)
    if not with_model:
        assert last["rewards/sentiment"] == last["reward/mean"]


def test_a_rule_and_a_reward_model_are_weighted(tmp_path):
    last = metrics_of(run(tmp_path, reward_fn=[RULE], reward_weights=[2.0, 0.5]))[-1]
    expected = 2 * last["rewards/sentiment"] + 0.5 * last["rewards/reward_model"]
    assert last["reward/mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("critic_init", ["sft", "scratch"])
def test_the_loop_uses_the_critic_asked_for(tmp_path, monkeypatch, critic_init):
    estimated, rollouts = spy_on(monkeypatch, "gae"), spy_on(monkeypatch, "generate")
    run(tmp_path, critic_init=critic_init)
    critic = critic_of(critic_init=critic_init)
    prompt, completion = rollouts[1]["prompts"][0], rollouts[1]["result"][0]
    with torch.no_grad():  # nothing is subtracted: it has not learnt scores
        hidden = critic.model(torch.tensor([prompt + completion])).last_hidden_state
        values = critic.score(hidden)[0, :-1, 0]
    found = estimated[0]["values"][0][: len(completion)]
    torch.testing.assert_close(found, values[-len(found) :], atol=1e-5, rtol=1e-4)


def test_missing_eos_penalty_reaches_the_advantages_of_truncated_completions(tmp_path, monkeypatch):
    calls, rollouts = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "generate")
    flags = dict(gae_lambda=1.0, beta=0.0, whiten_advantages=False, seed=2, **ONE_STEP)
    without, with_it = (
        metrics_of(run(tmp_path, missing_eos_penalty=penalty, **flags))[-1] for penalty in (0, 3)
    )
    mask, rollout = sampled(calls[0]), rollouts[1]
    finished = torch.tensor([row[-1] in rollout["stop_ids"] for row in rollout["result"]])
    truncated = mask.sum(dim=1) == 20  # in an order of their own; none ends just there
    assert truncated.sum() == (~finished).sum() and 0 < truncated.sum() < 16
    change = calls[1]["advantages"] - calls[0]["advantages"]
    expected = -3.0 * (truncated[:, None] & mask)
    torch.testing.assert_close(change * mask, expected, atol=1e-5, rtol=0)

    fraction = truncated.float().mean().item()
    assert without["completions/truncated_fraction"] == pytest.approx(fraction)
    assert with_it["reward/mean"] == without["reward/mean"]
    assert without["objective/reward"] == pytest.approx(without["reward/mean"])
    assert with_it["objective/reward"] == pytest.approx(without["reward/mean"] - 3 * fraction)


def test_target_kl_ends_the_passes(tmp_path, monkeypatch):
    calls = spy_on(monkeypatch, "policy_loss")
    flags = dict(update_epochs=3, micro_batch_size=4)  # two micro-batches a minibatch

    def steps(**more):
        calls.clear()
        run(tmp_path, **flags, **more)
        return len(calls) / 2

    assert steps(target_kl=None) == 6
    # By hand: the mean over the tokens of each pass, of two minibatches of two micro-batches.
    tokens = sum(sampled(call).sum().item() for call in calls[:4])
    sums = [call["result"][1]["policy/approx_kl"].item() for call in calls]
    first, second = sum(sums[:4]) / tokens, sum(sums[4:8]) / tokens
    last_minibatch = sum(sums[2:4]) * calls[2]["weights"].max().item()
    assert 1e-4 < 1.1 * first < second and 1.1 * first < last_minibatch
    assert steps(target_kl=0.99 * first) == 2
    assert steps(target_kl=1.01 * first) == 4
    assert steps(target_kl=1.01 * second) == 6
    # The logged means are over the passes that were made.
    last = metrics_of(run(tmp_path, **flags, target_kl=0.99 * first))[-1]
    for name in calls[0]["result"][1]:
        total = sum(call["result"][1][name].item() for call in calls[-4:])
        assert last[name] == pytest.approx(total / tokens, rel=1e-4, abs=1e-8), name

    # Under torchrun the sum over ranks decides, on all of them alike.
    def with_an_equal_rank(values):
        return 2 * values if values.dim() == 0 else values

    monkeypatch.setattr(ppo_rlhf, "all_reduce_sum", with_an_equal_rank)
    assert steps(target_kl=1.01 * first) == 2


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_kl_target_adapts_beta_between_rollouts(placement, tmp_path, monkeypatch):
    name = {"reward": "shaped_rewards", "loss": "policy_loss"}[placement]
    calls = spy_on(monkeypatch, name)
    flags = dict(total_rollouts=4, learning_rate=1e-3, max_new_tokens=12, kl_placement=placement)
    rows = metrics_of(run(tmp_path, **flags))[1:]
    assert [row["objective/beta"] for row in rows] == [0.1] * 4
    calls.clear()
    # With a horizon of 16, all completions of a rollout, beta changes by the whole error.
    target = rows[2]["objective/kl"] / 1.1  # a tenth under what there was
    run_dir = run(tmp_path, kl_target=target, kl_horizon=16.0, **flags)
    betas, errors = [0.1], []
    rows = metrics_of(run_dir)[1:]
    for row in rows:
        errors.append(row["objective/kl"] / target - 1)
        betas.append(betas[-1] * (1 + min(max(errors[-1], -0.2), 0.2)))
    assert errors[0] == -1  # the first rollout is the reference's own
    assert any(abs(error) < 0.2 for error in errors), "the test needs one that is not clipped"
    assert [row["objective/beta"] for row in rows] == pytest.approx(betas[:4])
    of_rollouts = calls[:: len(calls) // 4]
    assert [call["beta"] for call in of_rollouts] == pytest.approx(betas[:4])
    # What a resumed run begins with.
    assert last_checkpoint(run_dir)["beta"] == pytest.approx(betas[4])


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_kl_in_the_reward_or_in_the_loss(tmp_path, monkeypatch, placement):
    losses, shaped = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "shaped_rewards")
    in_reward, in_loss = (0.3, 0.0) if placement == "reward" else (0.0, 0.3)
    run_dir = run(tmp_path, total_rollouts=2, beta=0.3, kl_placement=placement)
    row = metrics_of(run_dir)[2]
    assert {call["beta"] for call in losses} == {in_loss}
    # The log-ratios of the second rollout, in plain numpy; nats a completion.
    call = shaped[1]
    k1 = call["k1"].double().numpy().sum(axis=1)
    assert row["objective/kl"] == pytest.approx(k1.mean(), rel=1e-4)
    assert abs(k1.mean()) > 1e-3
    # What a row was rewarded with in all: the score, and the KL only under "reward".
    total = call["scores"].double().numpy() - in_reward * k1
    np.testing.assert_allclose(call["result"].sum(dim=1).numpy(), total, rtol=1e-4, atol=1e-4)
    assert row["objective/non_score_reward"] == pytest.approx(-in_reward * k1.mean(), rel=1e-4)
    assert row["objective/reward"] == pytest.approx(total.mean(), rel=1e-4)
    assert row["reward/mean"] == pytest.approx(call["scores"].mean().item(), rel=1e-5)
    assert row["reward/std"] == pytest.approx(call["scores"].std(correction=0).item(), rel=1e-5)
    # The loss is measured against the reference, not against the policy of the rollout.
    late = losses[4]
    assert not torch.equal(late["ref_logprobs"], late["old_logprobs"])


@pytest.mark.parametrize("whiten_advantages", [True, False])
def test_whitening(tmp_path, monkeypatch, whiten_advantages):
    losses, values = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    shaped, estimated = spy_on(monkeypatch, "shaped_rewards"), spy_on(monkeypatch, "gae")
    flags = dict(whiten_advantages=whiten_advantages, gamma=0.9, gae_lambda=0.8)
    run(tmp_path, update_epochs=1, **flags)
    (before,), (call,) = shaped, estimated
    assert (call["gamma"], call["lam"]) == (0.9, 0.8)
    assert torch.equal(call["token_rewards"], before["result"])
    mask = before["mask"]
    # Over the rollout, not over a minibatch; the critic's targets are never whitened.
    advantages, old, returns = (
        torch.cat([c[name][sampled(c)] for c in calls]).double()
        for calls, name in ((losses, "advantages"), (values, "old_values"), (values, "returns"))
    )
    mean, scale = 0.0, 1.0
    if whiten_advantages:
        mean, scale = (returns - old).mean(), (returns - old).std(correction=0)
        assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(advantages, (returns - old - mean) / scale, atol=1e-4, rtol=1e-4)
    assert sorted(old.tolist()) == pytest.approx(sorted(call["values"][mask].tolist()))
    assert sorted(returns.tolist()) == pytest.approx(sorted(call["result"][1][mask].tolist()))


def test_coefficients_of_the_losses_are_read(tmp_path, monkeypatch):
    losses, values = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    gradients = spy_on_gradients(monkeypatch)
    run(tmp_path, **ONE_STEP)
    flags = dict(clip_coef=0.1, vf_clip_coef=0.3, ent_coef=0.7, vf_coef=1.5)
    run(tmp_path, **flags, **ONE_STEP | dict(update_epochs=2))  # of one step no ratio is clipped
    run(tmp_path, vf_clip_coef=None, **ONE_STEP)
    given = [(call["clip_coef"], call["ent_coef"]) for call in losses]
    assert given == [(0.2, 0), (0.1, 0.7), (0.1, 0.7), (0.2, 0)]
    assert [call["clip_coef"] for call in values] == [0.2, 0.3, 0.3, None]
    assert len(gradients) == 8  # each model is clipped by itself
    for a, b in zip(gradients[1], gradients[3], strict=True):  # the critic's, three times as large
        torch.testing.assert_close(3 * a, b, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(a, b) for a, b in zip(gradients[0], gradients[2], strict=True))


def test_what_was_logged(tmp_path, monkeypatch):
    losses, values = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    shaped, estimated = spy_on(monkeypatch, "shaped_rewards"), spy_on(monkeypatch, "gae")
    clipped = spies.spy_on(torch.nn.utils, monkeypatch, "clip_grad_norm_")
    flags = dict(total_rollouts=2, eval_every=1, micro_batch_size=4)
    rows = metrics_of(run(tmp_path, **flags))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    # The gold reward is a fraction, not right or wrong.
    assert all("eval/reward" in row and "eval/accuracy" not in row for row in rows)

    # The first rollout: two passes of two minibatches of two micro-batches.
    row, call, losses, values = rows[1], estimated[0], losses[:8], values[:8]
    tokens, mask = sum(sampled(c).sum().item() for c in losses), shaped[0]["mask"]
    assert tokens == 2 * mask.sum()
    for calls in (losses, values):
        for name in calls[0]["result"][1]:
            total = sum(c["result"][1][name].item() for c in calls)
            assert row[name] == pytest.approx(total / tokens, rel=1e-4, abs=1e-8), name
    norms = [norm.item() for _, norm in clipped]
    assert len(norms) == 2 * 4 * 2  # of policy and critic in turn, in each of four steps
    assert row["policy/grad_norm"] == pytest.approx(sum(norms[0:8:2]) / 4)
    assert row["value/grad_norm"] == pytest.approx(sum(norms[1:8:2]) / 4)
    total = sum(p["result"][0] + 0.5 * v["result"][0] for p, v in zip(losses, values, strict=True))
    assert row["objective/loss"] == pytest.approx(total.item() / 4, rel=1e-5)  # a minibatch

    v = call["values"][mask].double().numpy()
    r = call["result"][1][mask].double().numpy()
    expected = {
        "value/mean": v.mean(),
        "value/return_mean": r.mean(),
        "value/explained_variance": 1 - (r - v).var() / r.var(),
    }
    for name, number in expected.items():
        assert row[name] == pytest.approx(number, rel=1e-4), name
