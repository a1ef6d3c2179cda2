"""dpo.py: the losses, the log-probabilities of pairs, the reference, and a real run."""

import math
from decimal import Decimal
from functools import partial

import algorithms
import pytest
import spies
import torch
from algorithms import assert_same_gradient, set_weights
from plain import plain_logprobs
from reviews import EOS, batch_rows, ids, plain_kl, plain_model, sampled_ids
from runs import metrics_of, read
from spies import watch_steps

import dpo
from dpo import Args, PreferencePair, Prompt, micro_batches_of_pairs, pair_losses

# Three batches of the first reviews. The rate is large, so that log-ratios are not all near 0.
SMALL = dict(train_split="train[:20]", epochs=0.4, learning_rate=2e-3, beta=0.5, max_new_tokens=4)
run = partial(algorithms.run, "dpo", **SMALL)
spy_on = partial(spies.spy_on, dpo)
# Each loss with all that belongs to it.
REFERENCED = [dict(loss="sigmoid", label_smoothing=0.2), dict(loss="ipo"), dict(loss="apo_zero")]
REFERENCED += [dict(loss="sigmoid_norm", label_smoothing=0.1)]
REFERENCED = [flags | dict(nll_coef=0.5) for flags in REFERENCED]
FREE = [dict(loss="simpo", gamma=0.3, nll_coef=0.5), dict(loss="orpo")]


# --- the same with nothing but transformers, one completion at a time, without padding ----------
def plain_pair(args, policy, reference, row):
    """Loss and metrics of one pair of reviews, in the formulas' own words."""
    prompt = ids("<bos> " + row["prompt"])
    sides = [ids(row[side] + " <eos>") for side in ("chosen", "rejected")]
    logprobs = [plain_logprobs(policy, prompt, side)[0].sum() for side in sides]
    refs = [0, 0]
    if args.loss in ("sigmoid", "sigmoid_norm", "apo_zero", "ipo"):
        with torch.no_grad():
            refs = [plain_logprobs(reference, prompt, side)[0].sum() for side in sides]
    scales = [1 if args.loss in ("sigmoid", "apo_zero") else len(side) for side in sides]
    good, bad = ((a - b) / n for a, b, n in zip(logprobs, refs, scales, strict=True))
    if args.loss == "ipo":
        loss = (good - bad - 1 / (2 * args.beta)) ** 2
    elif args.loss == "apo_zero":  # 1 - sigmoid(x) = 1 / (1 + e^x)
        loss = 1 / (1 + torch.exp(args.beta * good)) + 1 / (1 + torch.exp(-args.beta * bad))
    elif args.loss == "orpo":  # -log sigmoid(log a - log b) = log(1 + b / a)
        odds = [good.exp() / (1 - good.exp()), bad.exp() / (1 - bad.exp())]
        loss = -good + args.beta * torch.log(1 + odds[1] / odds[0])
    else:  # -log sigmoid(x) = log(1 + e^-x)
        x = args.beta * (good - bad)
        if args.loss == "simpo":
            x = x - args.gamma
        eps = args.label_smoothing
        loss = (1 - eps) * torch.log1p(torch.exp(-x)) + eps * torch.log1p(torch.exp(x))
    loss = loss - args.nll_coef * logprobs[0] / len(sides[0])
    return loss, {
        "loss": loss.item(),
        "reward/chosen": args.beta * good.item(),
        "reward/rejected": args.beta * bad.item(),
        "reward/margin": args.beta * (good - bad).item(),
        "reward/accuracy": float(good > bad),
        "policy/logprob_chosen": logprobs[0].item(),
        "policy/logprob_rejected": logprobs[1].item(),
    }


def mean(pairs, name):
    return sum(pair[name] for pair in pairs) / len(pairs)


# --- the losses ---------------------------------------------------------------------------------
def losses_of(chosen, rejected, **flags):
    """Of sums over tokens where the loss takes these, else of means; the reference's are all 0."""
    lengths = torch.tensor([[4, 2]])
    args, logprobs = Args(**flags), torch.stack([chosen, rejected], dim=1)
    if args.loss not in ("sigmoid", "apo_zero"):
        logprobs = logprobs * lengths
    losses, metrics = pair_losses(args, logprobs, torch.zeros_like(logprobs), lengths)
    assert not any(values.requires_grad for values in metrics.values())
    return losses


LN3 = math.log(3)
SMOOTH, IPO, SIMPO = dict(label_smoothing=0.1), dict(loss="ipo"), dict(loss="simpo", beta=2.0)
APO_ZERO = dict(loss="apo_zero", beta=0.5)


def smooth_loss(p):
    return -0.9 * math.log(p) - 0.1 * math.log(1 - p)


@pytest.mark.parametrize(
    ("chosen", "rejected", "flags", "loss", "slope"),
    [
        # beta h = ln 3: sigmoid = 1 / (1 + 1/3) = 3/4 and 1/4 on the other side
        (1 + 2 * LN3, 1, dict(beta=0.5), -math.log(3 / 4), -0.5 / 4),
        (1, 1 + 2 * LN3, dict(beta=0.5), -math.log(1 / 4), -0.5 * 3 / 4),
        # 0.9 of the one and 0.1 of the other: slope beta (0.75 - 0.9) and beta (0.25 - 0.9)
        (0, 4 * LN3, SMOOTH | dict(beta=0.25), smooth_loss(1 / 4), -0.25 * 0.65),
        # beyond the label's own certainty 1 - eps the slope turns back
        (3 * LN3, 0, SMOOTH | dict(beta=1.0), smooth_loss(27 / 28), 27 / 28 - 0.9),
        # -log sigmoid(-1e4) = 1e4, and that of 1e4 is 0: finite
        (0, 2e4, SMOOTH | dict(beta=0.5), 0.9 * 1e4, -0.5 * 0.9),
        (0, 0, IPO | dict(beta=0.5), 1, -2),  # (0 - 1)^2, slope 2 (0 - 1)
        (3, 1, IPO | dict(beta=0.25), 0, 0),  # 2 - 1/0.5: at the distance aimed for
        (5, 0, IPO | dict(beta=0.25), 9, 6),  # beyond it, and pulled back
        # sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4, both of slope 3/16: 1 - 3/4 + 1/4, then
        # two that have risen alike, 1 - 3/4 + 3/4, whose difference is 0
        (2 * LN3, -2 * LN3, APO_ZERO, 1 / 2, -0.5 * 3 / 16),
        (2 * LN3, 2 * LN3, APO_ZERO, 1, -0.5 * 3 / 16),
        # beta (m_w - m_l) - gamma is -ln 3 and -ln 9; the slope is beta (sigmoid - 1)
        (-1, -1, SIMPO | dict(gamma=LN3), -math.log(1 / 4), -2 * 3 / 4),
        (-1 - LN3, -1, SIMPO | dict(gamma=0), -math.log(1 / 10), -2 * 9 / 10),  # sigmoid(-ln 9)
    ],
)
def test_loss_and_gradient_by_hand(chosen, rejected, flags, loss, slope):
    sides = torch.tensor([[chosen, 0.0], [rejected, 0.0]], dtype=torch.float64, requires_grad=True)
    losses = losses_of(*sides, **flags)
    assert losses[0].item() == pytest.approx(loss)
    losses[0].backward()
    assert sides.grad[:, 0].tolist() == pytest.approx([slope, -slope])
    assert sides.grad[:, 1].tolist() == [0, 0]  # each pair for itself


@pytest.mark.parametrize("flags", [dict(loss="simpo", gamma=0.3), dict(loss="orpo")])
def test_an_impossible_rejected_completion_gives_a_finite_loss_and_gradient(flags):
    logprobs = torch.tensor([[-3.0, -math.inf]], requires_grad=True)
    lengths = torch.tensor([[2, 3]])
    args = Args(**flags)
    loss, _ = pair_losses(args, logprobs, torch.zeros_like(logprobs), lengths)
    # The comparison is won for certain: what is left is ORPO's NLL per token.
    assert loss.tolist() == [1.5 if args.loss == "orpo" else 0]
    loss.backward()
    assert logprobs.grad.tolist() == [[-0.5 if args.loss == "orpo" else 0, 0]]


def log_odds(mean):
    """log(P / (1 - P)) and its derivative 1 / (1 - P) to 28 digits, P = e^mean."""
    p = Decimal(mean).exp()
    return float((p / (1 - p)).ln()), float(1 / (1 - p))


@pytest.mark.parametrize("mean", [-2e-7, -1e-4, -20.0])
def test_orpo_is_as_exact_as_float32_where_a_probability_is_near_1_or_0(mean):
    mean, other = (torch.tensor(x).item() for x in (mean, -1.5))  # in float32
    (a, slope_a), (b, slope_b) = log_odds(mean), log_odds(other)
    for sides, x in (([mean, other], a - b), ([other, mean], b - a)):
        means = torch.tensor(sides).view(2, 1).requires_grad_()
        loss = losses_of(*means, loss="orpo", beta=1.0)
        loss.backward()
        sigmoid = 1 / (1 + math.exp(x))  # of -x
        assert loss.item() == pytest.approx(-sides[0] - math.log(1 - sigmoid), rel=1e-5)
        slopes = [slope_a, slope_b] if sides[0] == mean else [slope_b, slope_a]
        expected = [-1 - sigmoid * slopes[0], sigmoid * slopes[1]]
        assert means.grad.squeeze(1).tolist() == pytest.approx(expected, rel=1e-5)


# The log-prob of a completion that is certain is 0 in float32, or above it by a rounding.
@pytest.mark.parametrize("chosen", [1e-7, -1e4])
@pytest.mark.parametrize("rejected", [1e-7, -1e4])
def test_orpo_is_finite_at_its_limits(chosen, rejected):
    means = torch.tensor([[chosen], [rejected]], requires_grad=True)
    loss = losses_of(*means, loss="orpo", beta=0.1)
    loss.backward()
    good, bad = means.grad.squeeze(1).tolist()
    assert math.isfinite(loss.item()) and loss.item() > -1e-6
    assert math.isfinite(good) and good <= -1  # at least that of the NLL
    assert math.isfinite(bad) and bad >= 0
    if rejected > -1e-6 and chosen <= -1:
        assert bad == pytest.approx(0.1)  # it is pushed down however sure it is


# --- micro-batches ------------------------------------------------------------------------------
def test_pairs_with_the_most_tokens_come_first():
    pairs = [
        PreferencePair(Prompt("", [1], {}), [5, 2], [7, 9, 2]),
        PreferencePair(Prompt("", [1, 7, 3, 4, 8, 7], {}), [9, 8, 3, 4, 6, 2], [2]),
        PreferencePair(Prompt("", [7, 3], {}), [4], [3, 9, 7, 8]),
    ]
    sequences = [sequence for pair in pairs for sequence in pair.sequences()]
    assert sequences[2:4] == [([1, 7, 3, 4, 8, 7], [9, 8, 3, 4, 6, 2]), ([1, 7, 3, 4, 8, 7], [2])]
    (pair_inds,) = micro_batches_of_pairs(sequences, 32)
    assert pair_inds.tolist() == [1, 2, 0]


# --- a run --------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", REFERENCED + FREE)
def test_loss_gradient_and_metrics_of_each_step_are_those_of_plain_transformers(
    tmp_path, monkeypatch, flags
):
    steps, loaded = watch_steps(monkeypatch), spy_on(monkeypatch, "load_model")
    has_reference = flags not in FREE
    flags = dict(epochs=0.8, micro_batch_size=3, seed=5, **flags)
    run_dir = run(tmp_path, **flags)
    assert len(loaded) == 1 + has_reference
    args, rows = Args(**SMALL | flags), read("tiny/reviews/preferences/train.jsonl")
    reference, policy = plain_model(), plain_model()
    assert len(steps) == 2
    for number, logged in enumerate(metrics_of(run_dir)[1:]):
        weights, gradient, _ = steps[number]
        set_weights(policy, weights)
        pairs = []
        for i in batch_rows(number, 8, 20, args.seed):
            loss, metrics = plain_pair(args, policy, reference, rows[i])
            (loss / 8).backward()
            pairs.append(metrics)
        assert logged["objective/loss"] == pytest.approx(mean(pairs, "loss"), rel=1e-4)
        if number == 0 and has_reference:  # the policy is the reference: exactly
            assert logged["reward/chosen"] == logged["reward/rejected"] == 0
            assert logged["reward/margin"] == 0 and logged["reward/accuracy"] == 0.5
        names = pairs[0].keys() - {"loss", "reward/accuracy"}
        for name in names | ({"reward/accuracy"} if number else set()):
            expected = mean(pairs, name)
            assert logged[name] == pytest.approx(expected, rel=1e-4, abs=2e-5), name
        expected = [p.grad for p in policy.parameters()]
        assert_same_gradient(gradient, expected)
        norm = torch.nn.utils.get_total_norm(expected).item()
        assert logged["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert abs(logged["reward/margin"]) > 0.004  # the second step has left the reference


@pytest.mark.parametrize("flags", [dict(temperature=0.7), dict(loss="orpo")])
def test_evaluation_is_that_of_plain_transformers(tmp_path, flags):
    flags = dict(batch_size=4, micro_batch_size=3, eval_rows=50, max_new_tokens=24, **flags)
    flags |= dict(generation_batch_size=4, eval_split="test[:10]")  # fewer than --eval-rows
    run_dir = run(tmp_path, **flags)
    args = Args(**SMALL | flags)
    last = metrics_of(run_dir)[-1]
    policy, reference = plain_model(run_dir), plain_model()
    rows = read("tiny/reviews/preferences/test.jsonl")[:10]
    samples = read(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 10 + [2] * 10
    samples = samples[10:]
    assert [sample["prompt"] for sample in samples] == [row["prompt"] for row in rows]
    with torch.no_grad():
        pairs = [plain_pair(args, policy, reference, row)[1] for row in rows]
    kl = plain_kl(policy, reference, samples, args.temperature)
    lengths = [sample["length"] for sample in samples]
    assert any(EOS in sampled_ids(sample) for sample in samples)
    assert any(EOS not in sampled_ids(sample) for sample in samples)
    assert last["eval/loss"] == pytest.approx(mean(pairs, "loss"), rel=1e-4)
    assert last["eval/margin"] == pytest.approx(mean(pairs, "reward/margin"), rel=1e-3)
    assert last["eval/pair_accuracy"] == pytest.approx(mean(pairs, "reward/accuracy"))
    assert last["eval/length_mean"] == pytest.approx(sum(lengths) / 10)
    kls = [row["eval/kl"] for row in metrics_of(run_dir) if "eval/kl" in row]
    if args.loss == "orpo":
        assert not kls, "there is no reference"
    else:
        assert kls == pytest.approx([0, kl], rel=1e-3, abs=1e-6)
        assert kl > 0.05


def test_a_token_that_the_sampler_was_certain_of_is_compared(tmp_path, monkeypatch):
    """Its log-prob of 0 is no padding: here the policy finds each first token far from certain."""
    generate = dpo.generate

    def certain(*args, **options):
        sequences, sampler_logprobs = generate(*args, **options)
        sampler_logprobs[:, 0] = 0.0
        return sequences, sampler_logprobs

    monkeypatch.setattr(dpo, "generate", certain)
    with pytest.warns(UserWarning, match="the sampler's log-probs are not the policy's"):
        row, *_ = metrics_of(run(tmp_path))
    assert row["policy/sampling_kl"] > 0.01


def test_each_loss_has_a_beta_of_its_own_by_default():
    betas = {"sigmoid": 0.3, "apo_zero": 0.3, "ipo": 1.0, "simpo": 5, "orpo": 5}
    assert {loss: Args(loss=loss).beta for loss in betas} == betas
    assert Args(loss="simpo", beta=2.0).beta == 2
