"""kto.py: the value function, its reference point, labelled completions and a real run."""

import math
from functools import partial

import algorithms
import pytest
import spies
import torch
from algorithms import assert_same_gradient, set_weights
from plain import plain_logprobs
from reviews import EOS, batch_rows, dataset, ids, plain_kl, plain_model, sampled_ids
from runs import metrics_of, read
from spies import watch_steps

import kto
from kto import Args, kto_loss, kto_metrics, mismatch

# Three batches of the first reviews. The rate is large, so that log-ratios are not all near 0.
SMALL = dict(train_split="train[:20]", epochs=0.4, learning_rate=2e-3, beta=0.5, max_new_tokens=4)
SMALL |= dict(desirable_weight=1.0)
WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.5)


run = partial(algorithms.run, "kto", **SMALL)
spy_on = partial(spies.spy_on, kto)


# --- the same with nothing but transformers, one completion at a time, without padding ----------
def plain_logratio(policy, reference, sequence):
    """r(x, y) of a prompt's and a completion's token ids."""
    with torch.no_grad():
        ref_logprob = plain_logprobs(reference, *sequence)[0].sum()
    return plain_logprobs(policy, *sequence)[0].sum() - ref_logprob


def plain_mismatch(sequences):
    """(x_i, y_(i+1)) of the rows of a step, y of the first for the last."""
    following = sequences[1:] + sequences[:1]
    return [(x, y) for (x, _), (_, y) in zip(sequences, following, strict=True)]


def by_hand(logratios, mismatched, labels, beta, desirable_weight=1.0, undesirable_weight=1.0):
    """The loss of each completion and z0, in the paper's own words: numbers in plain loops."""
    z0, losses = max(sum(mismatched) / len(mismatched), 0.0), []
    for r, desirable in zip(logratios, labels, strict=True):
        if desirable:
            value = desirable_weight * (1 / (1 + math.exp(-beta * (r - z0))))
            losses.append(desirable_weight - value)
        else:
            value = undesirable_weight * (1 / (1 + math.exp(-beta * (z0 - r))))
            losses.append(undesirable_weight - value)
    return losses, z0


# --- the loss -----------------------------------------------------------------------------------
LN3 = math.log(3)


@pytest.mark.parametrize(
    ("r", "z0", "label", "beta", "weights", "loss", "slope"),
    [
        # At the reference point sigmoid(0) = 1/2: half the weight, and the slope w beta / 4.
        (1.5, 1.5, True, 0.4, (2.0, 5.0), 1, -0.2),
        (1.5, 1.5, False, 0.4, (2.0, 5.0), 5 / 2, 0.5),
        # beta (r - z0) = ln 3: sigmoid = 3/4. Of value w 3/4 the loss keeps w 1/4, and where the
        # completion is undesirable the value is w 1/4. The slope is w beta 3/16 either way.
        (1 + LN3, 1.0, True, 1.0, (4.0, 8.0), 1, -3 / 4),
        (1 + LN3, 1.0, False, 1.0, (4.0, 8.0), 6, 3 / 2),
    ],
)
def test_loss_and_gradient_by_hand(r, z0, label, beta, weights, loss, slope):
    logratios = torch.tensor([r, z0], requires_grad=True)
    losses = kto_loss(logratios, torch.tensor(z0), torch.tensor([label, True]), beta, *weights)
    # Each completion for itself.
    assert losses.tolist() == pytest.approx([loss, weights[0] / 2])
    losses[0].backward()
    assert logratios.grad.tolist() == pytest.approx([slope, 0], abs=1e-6)


def test_a_small_loss_keeps_its_digits():
    """What is left of w - v in float32 when v is nearly w: e^-40 in all digits, not 0."""
    losses = kto_loss(torch.tensor([40.0]), torch.tensor(0.0), torch.tensor([True]), 1.0, 1.0, 1.0)
    assert losses.item() == pytest.approx(math.exp(-40), rel=1e-5, abs=0)


def test_there_are_no_metrics_of_a_kind_that_is_absent():
    logratios, z0 = torch.tensor([2.0, -1.0]), torch.tensor(0.0)
    for label, name in ((True, "reward/desirable"), (False, "reward/undesirable")):
        metrics = kto_metrics(Args(beta=0.5), logratios, z0, torch.tensor([label, label]))
        assert metrics.keys() == {"objective/loss", "objective/z0", name}
        assert metrics[name] == 0.25


# --- mismatched pairs ---------------------------------------------------------------------------
def test_a_mismatched_completion_is_cut_off_where_its_new_prompt_leaves_no_room():
    """Each row has six tokens at most, so that each prompt leaves room for one."""
    sequences = [([1], [5, 6, 7, 8, 2]), ([1, 3, 3, 3, 4], [2])]
    assert mismatch(sequences, 6) == [([1], [2]), ([1, 3, 3, 3, 4], [5])]


# --- a run --------------------------------------------------------------------------------------
def test_loss_gradient_and_metrics_of_each_step_are_those_of_plain_transformers(
    tmp_path, monkeypatch
):
    steps, loaded = watch_steps(monkeypatch), spy_on(monkeypatch, "load_labelled")
    flags = dict(epochs=1.6, micro_batch_size=3, seed=5, **WEIGHTS)
    run_dir = run(tmp_path, **flags)
    args, rows = Args(**SMALL | flags), loaded[0][1]
    reference, policy = plain_model(), plain_model()
    weights = (args.desirable_weight, args.undesirable_weight)
    assert len(steps) == 4
    mismatched_means = []
    for number, logged in enumerate(metrics_of(run_dir)[1:]):
        policy_weights, gradient, _ = steps[number]
        set_weights(policy, policy_weights)
        batch = [rows[i] for i in batch_rows(number, 8, 20, args.seed)]
        sequences = [(row.prompt.ids, row.completion_ids) for row in batch]
        with torch.no_grad():  # all of the step's, and no gradient
            pairs = plain_mismatch(sequences)
            mismatched = [plain_logratio(policy, reference, pair).item() for pair in pairs]
        logratios = [plain_logratio(policy, reference, sequence) for sequence in sequences]
        labels = [row.label for row in batch]
        losses, z0 = by_hand([r.item() for r in logratios], mismatched, labels, args.beta, *weights)
        mismatched_means.append(sum(mismatched) / 8)
        if number == 0:  # the policy is the reference: exactly
            assert logged["objective/z0"] == logged["reward/desirable"] == 0
            assert logged["reward/undesirable"] == 0
        assert logged["objective/z0"] == pytest.approx(z0, rel=1e-3, abs=1e-4)
        assert logged["objective/loss"] == pytest.approx(sum(losses) / 8, rel=1e-4)
        for name, kind in (("desirable", True), ("undesirable", False)):
            of_kind = [r for r, label in zip(logratios, labels, strict=True) if label == kind]
            rewards = [args.beta * r.item() for r in of_kind]
            mean = sum(rewards) / len(rewards)
            assert logged[f"reward/{name}"] == pytest.approx(mean, rel=1e-3, abs=1e-4)
        margin = logged["reward/desirable"] - logged["reward/undesirable"]
        assert logged["reward/margin"] == pytest.approx(margin)
        # The gradient of the mean loss, by the derivative of each term: -+ w beta p (1 - p).
        for r, label in zip(logratios, labels, strict=True):
            p = 1 / (1 + math.exp(-args.beta * (r.item() - z0)))
            sign_and_weight = -weights[0] if label else weights[1]
            (sign_and_weight * args.beta * p * (1 - p) / 8 * r).backward()
        expected = [p.grad for p in policy.parameters()]
        assert_same_gradient(gradient, expected)
        norm = torch.nn.utils.get_total_norm(expected).item()
        assert logged["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert min(mismatched_means) < -0.1, "z0 must be clamped once"
    assert max(mismatched_means) > 0.1, "and once not"


# By heart, and with hardly anything undesirable, all of the data gets more probable: z0 leaves 0.
BY_HEART = dict(eval_split="train[:20]", epochs=4, desirable_weight=4.0, undesirable_weight=0.1)
BY_HEART |= dict(max_new_tokens=15)  # so that some samples end, and some do not


@pytest.mark.parametrize("flags", [dict(), dict(temperature=0.7, **BY_HEART)])
def test_evaluation_is_that_of_plain_transformers(tmp_path, monkeypatch, flags):
    loaded, mixed = spy_on(monkeypatch, "load_labelled"), spy_on(monkeypatch, "mismatch")
    flags = dict(max_new_tokens=24, generation_batch_size=4, eval_split="test[:10]") | flags
    flags |= dict(batch_size=4, micro_batch_size=3, eval_rows=9)
    run_dir = run(tmp_path, **flags)
    args = Args(**SMALL | flags)
    first, *_, last = metrics_of(run_dir)
    policy, reference = plain_model(run_dir), plain_model()
    rows = loaded[1][1][:9]
    samples = read(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 9 + [last["step"]] * 9
    samples = samples[9:]
    assert [sample["prompt"] for sample in samples] == [row.prompt.text for row in rows]
    sequences = [(list(row.prompt.ids), list(row.completion_ids)) for row in rows]
    ((order, _), _), *_, ((last_order, _), _) = mixed  # of the rows that are mismatched
    assert order == last_order and sorted(order) == sorted(sequences)
    with torch.no_grad():
        logratios = [plain_logratio(policy, reference, pair).item() for pair in sequences]
        mismatched = [plain_logratio(policy, reference, p).item() for p in plain_mismatch(order)]
    kl = plain_kl(policy, reference, samples, args.temperature)
    labels = [row.label for row in rows]
    weights = [flags.get(flag, 1.0) for flag in WEIGHTS]
    losses, z0 = by_hand(logratios, mismatched, labels, args.beta, *weights)
    assert (z0 > 0.1) == ("desirable_weight" in flags)
    good = [r for r, label in zip(logratios, labels, strict=True) if label]
    bad = [r for r, label in zip(logratios, labels, strict=True) if not label]
    margin = args.beta * (sum(good) / len(good) - sum(bad) / len(bad))
    lengths = [sample["length"] for sample in samples]
    assert {EOS in sampled_ids(sample) for sample in samples} == {True, False}
    assert last["eval/loss"] == pytest.approx(sum(losses) / 9, rel=1e-4)
    assert last["eval/margin"] == pytest.approx(margin, rel=1e-3)
    assert last["eval/kl"] == pytest.approx(kl, rel=1e-3)
    assert kl > 0.05
    assert last["eval/length_mean"] == pytest.approx(sum(lengths) / 9)
    assert first["eval/kl"] == pytest.approx(0, abs=1e-6)


def test_the_two_sides_of_a_held_out_pair_are_not_mismatched_with_each_other(tmp_path, monkeypatch):
    """They are neighbours: in that order 20 of 40 would be. By chance it is about one."""
    mixed, rows = spy_on(monkeypatch, "mismatch"), []
    pairs = {pair["prompt"]: pair for pair in read("tiny/reviews/preferences/test.jsonl")[:100]}
    for pair in [*pairs.values()][:20]:
        for side in ("chosen", "rejected"):
            rows.append(dict(prompt=pair["prompt"], completion=pair[side], label=side == "chosen"))
    flags = dict(dataset=dataset(tmp_path, rows), train_split="train", eval_split="test")
    run(tmp_path, batch_size=2, epochs=0.01, **flags)
    sides = [(ids("<bos> " + row["prompt"]), ids(row["completion"] + " <eos>")) for row in rows]
    for number in (0, -1):  # the evaluations before and after the step
        (order, _), mismatched = mixed[number]
        assert sorted(order) == sorted(sides)
        assert sum(pair in sides for pair in mismatched) < 5


def test_a_row_is_never_alone_in_a_step(tmp_path, monkeypatch):
    """It would be its own mismatched pair."""
    calls = spies.spy_on(kto, monkeypatch, "mismatch")
    run(tmp_path, train_split="train[:7]", eval_split="test[:9]", epochs=1, batch_size=3)
    sizes = [len(sequences) for (sequences, _), _ in calls]
    assert [size for size in sizes if size < 9] == [3, 4]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_one_row_has_no_reference_point(split, tmp_path):
    with pytest.raises(ValueError, match="takes two rows"):
        run(tmp_path, **{f"{split}_split": "test[:1]"})
