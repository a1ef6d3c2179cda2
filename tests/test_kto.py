"""kto.py: the value function, its reference point, labelled completions and a real run."""

import itertools
import math
import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from models import CHAT, tiny_model
from reviews import (
    EOS,
    POLICY,
    STILL,
    read,
    dataset,
    metrics_of,
    weights_of,
    watch_steps,
    batch_rows,
    plain_model,
    ids,
    plain_logprobs,
)
from safetensors.torch import load_file
from transformers import AutoTokenizer

import dpo
import kto
from common import logprobs as common_logprobs
from kto import Args, kto_loss, kto_metrics, reference_point, sum_logprobs

# What the tests count on is named here, so that a default may be tuned. The peak learning rate is
# large, so that log-ratios are not all near 0.
SMALL = dict(epochs=0.4, batch_size=8, micro_batch_size=8, warmup_ratio=0, learning_rate=2e-3)
SMALL |= dict(beta=0.5, desirable_weight=1.0, eval_rows=4, eval_every=100, max_new_tokens=4)
WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.5)


def rows_of(split, count):
    return read(f"tiny/reviews/labels/{split}.jsonl")[:count]


def run(tmp_path, train=20, **flags):
    """A real run on the first labelled reviews, of one step unless told; returns its folder."""
    if "dataset" not in flags:
        flags["dataset"] = dataset(tmp_path, rows_of("train", train), rows_of("test", 10))
    return kto.main(Args(output_dir=str(tmp_path / "runs"), **{**SMALL, **flags}))


def spy_on(monkeypatch, name):
    """The positional arguments and the result of each call of a function of kto.py."""
    calls, original = [], getattr(kto, name)

    def spy(*args, **options):
        result = original(*args, **options)
        calls.append((args, result))
        return result

    monkeypatch.setattr(kto, name, spy)
    return calls


# --- the same with nothing but transformers, one completion at a time, without padding ----------


def plain_logratio(policy, reference, sequence):
    """r(x, y) of a prompt's and a completion's token ids."""
    with torch.no_grad():
        ref_logprob = sum(plain_logprobs(reference, *sequence))
    return sum(plain_logprobs(policy, *sequence)) - ref_logprob


def by_hand(logratios, mismatched, labels, beta, desirable_weight=1.0, undesirable_weight=1.0):
    """The loss of each completion and z0, in the paper's own words: numbers in plain loops."""
    z0 = 0.0
    for r in mismatched:
        z0 += r / len(mismatched)
    if z0 < 0:
        z0 = 0.0
    losses = []
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
        (0.0, 0.0, True, 1.0, (1.0, 1.0), 1 / 2, -1 / 4),
        (0.0, 0.0, False, 1.0, (1.0, 1.0), 1 / 2, 1 / 4),
        (1.5, 1.5, True, 0.4, (2.0, 5.0), 1, -0.2),
        (1.5, 1.5, False, 0.4, (2.0, 5.0), 5 / 2, 0.5),
        # beta (r - z0) = ln 3: sigmoid = 3/4. Of value w 3/4 the loss keeps w 1/4, and where the
        # completion is undesirable the value is w 1/4. The slope is w beta 3/16 either way.
        (2 * LN3, 0.0, True, 0.5, (1.0, 1.0), 1 / 4, -3 / 32),
        (2 * LN3, 0.0, False, 0.5, (1.0, 1.0), 3 / 4, 3 / 32),
        (1 + LN3, 1.0, True, 1.0, (4.0, 8.0), 1, -3 / 4),
        (1 + LN3, 1.0, False, 1.0, (4.0, 8.0), 6, 3 / 2),
        # The same below it.
        (1 - LN3, 1.0, True, 1.0, (4.0, 8.0), 3, -3 / 4),
        (1 - LN3, 1.0, False, 1.0, (4.0, 8.0), 2, 3 / 2),
    ],
)
def test_loss_and_gradient_by_hand(r, z0, label, beta, weights, loss, slope):
    logratios = torch.tensor([r, z0], requires_grad=True)
    losses = kto_loss(logratios, torch.tensor(z0), torch.tensor([label, True]), beta, *weights)
    # Each completion for itself.
    assert losses.tolist() == pytest.approx([loss, weights[0] / 2])
    losses[0].backward()
    assert logratios.grad.tolist() == pytest.approx([slope, 0], abs=1e-6)


def test_loss_of_a_step_is_that_of_the_paper_in_plain_loops():
    rng = random.Random(0)
    for case in range(60):
        count = rng.randint(1, 7)
        logratios = [rng.gauss(0, 4) for _ in range(count)]
        mismatched = [rng.gauss(0, 2) for _ in range(rng.randint(1, 7))]
        labels = [rng.random() < 0.5 for _ in range(count)]
        beta = rng.choice([0.1, 0.5, 2.0])
        weights = [rng.uniform(0.3, 3), rng.uniform(0.3, 3)]
        expected, expected_z0 = by_hand(logratios, mismatched, labels, beta, *weights)
        z0 = reference_point(torch.tensor(mismatched, dtype=torch.float64))
        assert z0.item() == pytest.approx(expected_z0, abs=1e-12)
        logratios = torch.tensor(logratios, dtype=torch.float64)
        losses = kto_loss(logratios, z0, torch.tensor(labels), beta, *weights)
        assert losses.shape == (count,)
        assert losses.tolist() == pytest.approx(expected, rel=1e-6), case


@pytest.mark.parametrize(
    ("logratios", "z0"), [([1.0, 3.0, -1.0], 1), ([-4.0, 1.0], 0), ([0.5], 0.5), ([-2.0, 2.0], 0)]
)
def test_the_reference_point_is_a_mean_and_never_negative(logratios, z0):
    assert reference_point(torch.tensor(logratios)).item() == z0


def test_gradient_equals_finite_differences():
    logratios = torch.tensor([-3.0, 0.2, 4.0, 1.0], dtype=torch.float64, requires_grad=True)
    labels, z0 = torch.tensor([True, False, False, True]), torch.tensor(0.7, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda r: kto_loss(r, z0, labels, 0.8, 1.3, 0.6), logratios)


def test_far_from_the_reference_point_nothing_is_pushed():
    # What is learned, and what stays on the wrong side: sigmoid(+-1e4) is 0 or 1, exactly.
    logratios = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    labels = torch.tensor([True, True, False, False])
    losses = kto_loss(logratios, torch.tensor(0.0), labels, 1.0, 2.0, 3.0)
    assert losses.tolist() == [0, 2, 3, 0]
    losses.sum().backward()
    assert logratios.grad.tolist() == [0, 0, 0, 0]


def test_a_small_loss_keeps_its_digits():
    """What is left of w - v in float32 when v is nearly w: e^-40 in all digits, not 0."""
    losses = kto_loss(torch.tensor([40.0]), torch.tensor(0.0), torch.tensor([True]), 1.0, 1.0, 1.0)
    assert losses.item() == pytest.approx(math.exp(-40), rel=1e-5, abs=0)


def test_a_good_completion_above_z0_is_worth_what_a_bad_one_as_far_below_it_is():
    logratios, z0 = torch.tensor([-2.0, 0.5, 3.0]), torch.tensor(1.25)
    good, bad = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    mirrored = 2 * z0 - logratios
    losses = kto_loss(logratios, z0, good, 0.7, 1.5, 9.0)
    torch.testing.assert_close(losses, kto_loss(mirrored, z0, bad, 0.7, 9.0, 1.5))
    # The two values of one completion add up to the weight.
    bad_losses = kto_loss(logratios, z0, bad, 0.7, 9.0, 1.5)
    assert (losses + bad_losses).tolist() == pytest.approx([1.5] * 3)


def test_labels_that_contradict_each_other_are_weighed_by_enumeration():
    # Four completions, each liked with a probability q of its own. At a fixed z0 the expected loss
    # of one is q w_D sigmoid(-x) + (1 - q) w_U sigmoid(x), x = beta (r - z0): it falls with r where
    # q w_D > (1 - q) w_U, rises where it is less, and has no optimum in between as DPO's has.
    likes = torch.tensor([0.9, 0.6, 0.4, 0.1])
    for weights, signs in [((1.0, 1.0), [-1, -1, 1, 1]), ((1.0, 2.0), [-1, 1, 1, 1])]:
        logratios = torch.tensor([-1.0, 0.0, 2.0, 0.5], requires_grad=True)
        z0 = torch.tensor(0.3)
        good, bad = (
            kto_loss(logratios, z0, torch.full((4,), label), 0.5, *weights)
            for label in (True, False)
        )
        (likes * good + (1 - likes) * bad).sum().backward()
        assert logratios.grad.sign().tolist() == signs


def test_metrics_equal_plain_loops_and_have_none_of_a_kind_that_is_absent():
    logratios, z0 = [2.0, -1.0, 0.5, 4.0, -3.0], 0.75
    beta, weights = 0.5, (1.2, 0.7)
    for labels in ([True, False, False, True, True], [True] * 5, [False] * 5):
        tensors = [torch.tensor(values) for values in (logratios, z0, labels)]
        metrics = kto_metrics(*tensors, beta, *weights)
        losses, _ = by_hand(logratios, [z0], labels, beta, *weights)
        expected = {"objective/loss": sum(losses) / 5, "objective/kl": z0}
        for name, kind in (("desirable", True), ("undesirable", False)):
            rewards = [
                beta * r for r, label in zip(logratios, labels, strict=True) if label == kind
            ]
            if rewards:
                expected[f"reward/{name}"] = sum(rewards) / len(rewards)
        if len(set(labels)) == 2:
            margin = expected["reward/desirable"] - expected["reward/undesirable"]
            expected["reward/margin"] = margin
        assert metrics == pytest.approx(expected)


# --- rows to tokens -----------------------------------------------------------------------------


def labelled(tmp_path, rows, chat_template=None, stop_ids=(EOS,), **flags):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = chat_template
    args = Args(dataset=dataset(tmp_path, rows), **flags)
    return kto.load_labelled(args, "train", tokenizer, list(stop_ids))


def message(role, content):
    return {"role": role, "content": content}


def test_completions_end_with_exactly_one_stop_id(tmp_path):
    rows = rows_of("test", 50)
    completions = [row["completion"] for row in rows]
    rows[1]["completion"] += " <eos> the film"  # it ended before
    labelled_rows = labelled(tmp_path, rows)
    assert len(labelled_rows) == 50
    for row, completion, labelled_row in zip(rows, completions, labelled_rows, strict=True):
        prompt_ids, completion_ids = labelled_row.sequence
        assert prompt_ids == ids("<bos> " + row["prompt"])
        assert completion_ids == ids(completion + " <eos>")
        assert labelled_row.label is row["label"]
        assert labelled_row.text == row["prompt"]
    (row,) = labelled(tmp_path, rows[:1], stop_ids=[EOS, *ids(".")])  # any stop id ends it
    assert row.sequence[1] == ids(rows[0]["completion"].split(".")[0] + ".")


@pytest.mark.parametrize("chat", [False, True])
def test_long_completions_are_cut_off_and_unusable_rows_dropped_and_both_are_counted(
    tmp_path, capsys, chat
):
    good, fits, long = " a film", " the plot was dull", " the plot was really dull"
    short, full, over = "on wednesday", "on wednesday i saw jaws .", "on wednesday i saw jaws . it"
    table = [
        (short, good, "a film <eos>"),
        (short, fits, "the plot was dull <eos>"),  # just as long as it may be
        (short, long, long),
        (full, good, "a"),  # room for one token
        (over, good),  # no room at all
        (over + " was", good),
        (short, ""),  # nothing there
        (short, " \n"),
        (short, None),
        (None, good),
        (" ", good),
    ]
    rows = [dict(zip(("prompt", "completion"), row, strict=False), label=True) for row in table]
    flags, tail = dict(max_length=8), ""  # <bos> on wednesday, and room for five
    if chat:
        for row in rows:
            row["prompt"] = [message("user", row["prompt"])]
            row["completion"] = [message("assistant", row["completion"])]
        flags, tail = dict(max_length=12, chat_template=CHAT), " <eos> . the :"
    else:
        # One word of two: the prompt would end with another token than when it stands alone.
        rows.append({"prompt": short, "completion": "s it", "label": False})
    assert [row.sequence for row in labelled(tmp_path, rows, **flags)] == [
        (ids("<bos> " + prompt + tail), ids(completion)) for prompt, _, completion in table[:4]
    ]
    printed = capsys.readouterr().out
    assert printed.startswith(f"train: 4 of {len(rows)} rows; dropped 2 whose prompt leaves no")
    assert "; dropped 5 with an empty prompt or completion, first " in printed
    merged = "; dropped 1 whose completion merges with the prompt's last token (a space may help)"
    assert (merged in printed) == (not chat)
    summary = "train: 4 of 4 desirable; 0 pairs split in two; 2 cut off at --max-length "
    assert f"{summary}{flags['max_length']}\n" in printed


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"prompt": "on wednesday", "completion": " a film", "label": True}, {}),
        ({"prompt": "on wednesday", "completion": " a film", "label": 1}, {}),
        (
            {"x": "on wednesday", "y": " a film", "z": True},
            dict(prompt_column="x", completion_column="y", label_column="z"),
        ),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_prompts_and_columns_of_a_row(tmp_path, row, flags, chat):
    row = row | {"answer": "5", "note": 3}
    (labelled_row,) = labelled(tmp_path, [row], chat=chat, chat_template=chat and CHAT, **flags)
    prompt_ids = ids("<bos> on wednesday" + (" <eos> . the :" if chat else ""))
    sequence = (prompt_ids, ids("a film <eos>"))
    assert labelled_row._asdict() == {
        "text": [message("user", "on wednesday")] if chat else "on wednesday",
        "sequence": sequence,
        "label": True,
        "columns": {"answer": "5", "note": 3},
        "mismatched": sequence,
    }
    assert labelled_row.label is True  # also of a 1, which torch.where would refuse


@pytest.mark.parametrize("kind", ["strings", "strings as chat", "messages", "conversations"])
def test_preference_pairs_are_taken_apart_and_counted(tmp_path, capsys, kind):
    pairs = [
        {"prompt": "on wednesday", "chosen": " a film", "rejected": " it"},
        {"prompt": "on monday", "chosen": " the plot was dull", "rejected": " a film"},
    ]
    chat = kind != "strings"
    if kind in ("messages", "conversations"):
        for pair in pairs:
            pair["prompt"] = [message("user", pair["prompt"])]
            before = pair.pop("prompt") if kind == "conversations" else []
            for side in ("chosen", "rejected"):
                pair[side] = [*before, message("assistant", pair[side])]
    flags = dict(chat=kind == "strings as chat", chat_template=chat and CHAT)
    rows = labelled(tmp_path, [pair | {"label": 7} for pair in pairs], **flags)
    days = ("wednesday", "monday")
    days = [ids(f"<bos> on {day}" + (" <eos> . the :" if chat else "")) for day in days]
    assert [(*row.sequence, row.label) for row in rows] == [
        (days[0], ids("a film <eos>"), True),
        (days[0], ids("it <eos>"), False),
        (days[1], ids("the plot was dull <eos>"), True),
        (days[1], ids("a film <eos>"), False),
    ]
    assert [row.columns for row in rows] == [{}] * 4
    printed = capsys.readouterr().out
    assert "train: 4 of 4 rows\ntrain: 2 of 4 desirable; 2 pairs split in two; 0 cut" in printed


def pair_of(kind, prompt, chosen, rejected):
    """A row of that kind: strings or messages, with a prompt of their own or with one in both."""
    if kind in ("strings", "named columns"):
        names = ("x", "y", "z") if kind == "named columns" else ("prompt", "chosen", "rejected")
        return dict(zip(names, (prompt, chosen, rejected), strict=True))
    if kind == "whole strings":
        return {"chosen": prompt + chosen, "rejected": prompt + rejected}
    user = [message("user", prompt)]
    sides = [[message("assistant", side)] for side in (chosen, rejected)]
    if kind == "messages":
        return {"prompt": user, "chosen": sides[0], "rejected": sides[1]}
    return {"chosen": user + sides[0], "rejected": user + sides[1]}  # conversations


FLAGS_OF_KIND = {
    "strings": dict(),
    "whole strings": dict(prompt_column="none"),
    "named columns": dict(prompt_column="x", chosen_column="y", rejected_column="z"),
    "messages": dict(),
    "conversations": dict(),
}
KINDS = pytest.mark.parametrize("kind", FLAGS_OF_KIND)


@KINDS
@pytest.mark.parametrize("flags", [dict(), dict(chat=True), dict(max_length=20)])
def test_pairs_are_read_as_dpo_reads_them(tmp_path, kind, flags):
    """Its prompts, and its completions: chosen, and then rejected."""
    rows = read("tiny/reviews/preferences/train.jsonl")[:40]
    rows = [pair_of(kind, row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    args = dict(dataset=dataset(tmp_path, rows), **FLAGS_OF_KIND[kind], **flags)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = CHAT
    pairs = dpo.load_preference_pairs(dpo.Args(**args), "train", tokenizer, [EOS])
    expected = []
    for pair in pairs:
        expected.append((pair.text, (pair.prompt_ids, pair.chosen_ids), True))
        expected.append((pair.text, (pair.prompt_ids, pair.rejected_ids), False))
    assert len(expected) == 80
    found = kto.load_labelled(Args(**args), "train", tokenizer, [EOS])
    assert [row[:3] for row in found] == expected
    ends = [row.sequence[1][-1] == EOS for row in found]
    assert all(ends) == ("max_length" not in flags) and any(ends)


@pytest.mark.parametrize(
    ("kind", "nothing"),
    [
        ("strings", None),
        ("strings", ""),
        ("strings", " \n"),
        ("messages", ""),
        ("conversations", ""),
    ],
)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_pair_with_an_empty_side_is_dropped_whole(tmp_path, capsys, kind, nothing, side):
    """Its other side alone would make one kind of label more frequent than the other."""
    good = {"chosen": " a film", "rejected": " it"}
    rows = [pair_of(kind, "on wednesday", **good)]
    rows.append(pair_of(kind, "on monday", **good | {side: nothing}))
    labelled_rows = labelled(tmp_path, rows, chat_template=CHAT)
    printed = capsys.readouterr().out
    assert [row.label for row in labelled_rows] == [True, False]
    assert "train: 2 of 4 rows; dropped 2 with an empty prompt or completion, first " in printed
    assert "train: 1 of 2 desirable; " in printed


TURNS = [{"role": "user", "content": "on monday"}, {"role": "assistant", "content": "it"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "on monday", "completion": " it"},
        {"prompt": "on monday", "chosen": " it", "more": 1},
        {"chosen": "on monday it", "rejected": "on monday a film"},
        {"chosen": TURNS, "other": TURNS},
        {"completion": TURNS},
    ],
)
def test_an_error_about_columns_names_those_of_the_file(tmp_path, row):
    with pytest.raises(kto.InputError) as end:
        labelled(tmp_path, [row])
    assert "row 0 of train: " in str(end.value) and str(sorted(row)) in str(end.value)


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_nothing_can_be_learned_from_is_said(tmp_path, capsys, split):
    """One kind of label, and one prompt: of each split, and of neither where there are two."""
    rows = [
        {"prompt": "on monday", "completion": " it", "label": True},
        {"prompt": "on monday", "completion": " a film", "label": True},
        {"prompt": "on sunday", "completion": " a film", "label": False},
    ]
    one_kind = f"{split}: all labels are of one kind, so there is no margin to learn\n"
    one_prompt = f"{split}: all prompts are the same, so no pair is mismatched and z0 means "
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    for count, expected in ((2, True), (3, False)):
        args = Args(dataset=dataset(tmp_path, rows[:count]))
        kto.load_labelled(args, split, tokenizer, [EOS])
        printed = capsys.readouterr().out
        assert (one_kind in printed, one_prompt in printed) == (expected, expected)
    rows[0]["label"] = False  # one prompt, but two kinds
    kto.load_labelled(Args(dataset=dataset(tmp_path, rows[:2])), split, tokenizer, [EOS])
    printed = capsys.readouterr().out
    assert one_kind not in printed and one_prompt in printed
    rows[2] |= {"label": True}  # and two prompts, but one kind
    kto.load_labelled(Args(dataset=dataset(tmp_path, rows[1:])), split, tokenizer, [EOS])
    printed = capsys.readouterr().out
    assert one_kind in printed and one_prompt not in printed


def test_of_a_conversation_the_last_message_is_the_completion(tmp_path):
    turns = [
        message("user", "on monday"),
        message("assistant", "a film"),
        message("user", "and"),
        message("assistant", "it"),
    ]
    (row,) = labelled(tmp_path, [{"completion": turns, "label": False}], chat_template=CHAT)
    (same,) = labelled(
        tmp_path,
        [{"prompt": turns[:3], "completion": turns[3:], "label": False}],
        chat_template=CHAT,
    )
    assert row == same
    assert row.text == turns[:3]
    assert row.sequence[1] == ids("it <eos>")


def test_completions_and_labels_go_before_pairs(tmp_path):
    """A row that has all four columns is one that is labelled."""
    row = {"prompt": "on wednesday", "completion": " it", "label": False}
    (labelled_row,) = labelled(tmp_path, [row | {"chosen": " a film", "rejected": " a movie"}])
    assert labelled_row.sequence[1] == ids("it <eos>")
    assert labelled_row.label is False


# --- mismatched pairs ---------------------------------------------------------------------------


def test_each_completion_is_mismatched_once_and_with_another_prompt(tmp_path):
    for source in ("labels", "preferences"):
        rows = read(f"tiny/reviews/{source}/train.jsonl")[:300]
        labelled_rows = labelled(tmp_path, rows)
        prompts = {tuple(row.sequence[0]) for row in labelled_rows}
        assert len(prompts) < len(labelled_rows) / 1.5, "prompts repeat"
        sequences = {(*map(tuple, row.sequence),) for row in labelled_rows}
        for row in labelled_rows:
            prompt, _ = row.sequence
            mismatched_prompt, mismatched_completion = row.mismatched
            assert mismatched_prompt == prompt
            sources = [list(x) for x, y in sequences if list(y) == mismatched_completion]
            assert any(x != prompt for x in sources)
        completions = Counter(tuple(row.sequence[1]) for row in labelled_rows)
        assert Counter(tuple(row.mismatched[1]) for row in labelled_rows) == completions


@pytest.mark.parametrize("seed", range(40))
def test_no_prompt_is_matched_with_itself_where_the_data_allows(tmp_path, seed):
    """Completions that tell their prompt. Of N rows of which one prompt has m, at least 2 m - N
    must take a completion of their own prompt, and no more do."""
    rng = random.Random(seed)
    kinds = rng.randint(1, 6)
    prompts = [rng.randrange(kinds) for _ in range(rng.randint(2, 15))]
    if seed % 3 == 0:
        prompts += [0] * rng.randint(2, 30)
        rng.shuffle(prompts)
    words = "film movie plot acting music cast".split()
    rows = [{"prompt": words[k], "completion": f" {words[k]}", "label": True} for k in prompts]
    labelled_rows = labelled(tmp_path, rows)
    num_same = sum(row.sequence[1] == row.mismatched[1] for row in labelled_rows)
    assert num_same == max(0, 2 * max(Counter(prompts).values()) - len(prompts))


def test_no_row_is_matched_with_itself(tmp_path):
    """One prompt: then another of its completions."""
    words = "film movie plot acting music".split()
    rows = [{"prompt": "the", "completion": f" {word}", "label": True} for word in words]
    labelled_rows = labelled(tmp_path, rows)
    assert all(row.sequence[1] != row.mismatched[1] for row in labelled_rows)


def test_a_mismatched_completion_is_cut_off_where_its_new_prompt_leaves_no_room(tmp_path):
    rows = [
        {"prompt": "on monday", "completion": " the plot was dull .", "label": True},
        {"prompt": "on monday i saw jaws", "completion": " it", "label": False},
    ]
    long, short = labelled(tmp_path, rows, max_length=9)
    assert short.mismatched == (ids("<bos> on monday i saw jaws"), ids("the plot was"))
    assert long.mismatched == (ids("<bos> on monday"), ids("it <eos>"))


# --- the log-probabilities ----------------------------------------------------------------------

# Prompts and completions of many lengths, so that every row but the longest is padded.
SEQUENCES = [([1], [5, 2]), ([1, 7, 3, 4, 8, 7], [9, 8, 3, 4, 6, 2]), ([7, 3], [4])]


def test_log_probs_are_sums_over_the_completions_tokens_and_need_no_graph():
    model, graphs = tiny_model("llama"), []
    model.base_model.register_forward_hook(
        lambda module, args, output: graphs.append(output.last_hidden_state.requires_grad)
    )
    logprobs = sum_logprobs(Args(micro_batch_size=2), model, SEQUENCES)
    assert graphs and not any(graphs), "a graph costs memory"
    expected = torch.stack([sum(plain_logprobs(model, *sequence)) for sequence in SEQUENCES])
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-4, rtol=1e-4)


def test_a_rank_without_rows_runs_the_same_passes(monkeypatch):
    model, passes = tiny_model("llama"), []
    model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(common_logprobs, "WORLD_SIZE", 2)
    monkeypatch.setattr(common_logprobs, "all_reduce_sum", lambda values: values)
    counts = []
    for rank in (0, 1):
        monkeypatch.setattr(common_logprobs, "RANK", rank)
        sum_logprobs(Args(micro_batch_size=1), model, SEQUENCES)  # the first call checks the head
        passes.clear()
        sum_logprobs(Args(micro_batch_size=1), model, SEQUENCES)
        counts.append(len(passes))
    assert counts == [2, 2]


# --- a run --------------------------------------------------------------------------------------


def set_weights(model, weights):
    flat = torch.nn.utils.parameters_to_vector(weights)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("flags", [dict(), WEIGHTS])
def test_loss_gradient_and_metrics_of_each_step_are_those_of_plain_transformers(
    tmp_path, monkeypatch, flags
):
    steps, loaded = watch_steps(monkeypatch), spy_on(monkeypatch, "load_labelled")
    flags = dict(epochs=1.6, micro_batch_size=3, max_length=24, seed=5, **flags)
    run_dir = run(tmp_path, **flags)
    args, rows = Args(**{**SMALL, **flags}), loaded[0][1]
    lengths = [len((row["prompt"] + row["completion"]).split()) for row in rows_of("train", 20)]
    assert max(lengths) > 24 > min(lengths), "some must be cut off"
    reference, policy = plain_model(), plain_model()
    weights = (args.desirable_weight, args.undesirable_weight)
    assert len(steps) == 4
    mismatched_means = []
    for number, logged in enumerate(metrics_of(run_dir)[1:]):
        policy_weights, gradient, _ = steps[number]
        set_weights(policy, policy_weights)
        batch = [rows[i] for i in batch_rows(number, 8, 20, args.seed)]
        with torch.no_grad():  # all of the step's, and no gradient
            mismatched = [plain_logratio(policy, reference, row.mismatched).item() for row in batch]
        logratios = [plain_logratio(policy, reference, row.sequence) for row in batch]
        labels = [row.label for row in batch]
        losses, z0 = by_hand([r.item() for r in logratios], mismatched, labels, args.beta, *weights)
        mismatched_means.append(sum(mismatched) / 8)
        assert logged["objective/kl"] == pytest.approx(z0, rel=1e-3, abs=1e-4)
        assert logged["objective/loss"] == pytest.approx(sum(losses) / 8, rel=1e-4)
        for name, kind in (("desirable", True), ("undesirable", False)):
            rewards = [
                args.beta * r.item()
                for r, label in zip(logratios, labels, strict=True)
                if label == kind
            ]
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
        norm = math.sqrt(sum(g.double().square().sum() for g in expected))
        assert logged["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
        differences = [a - b for a, b in zip(gradient, expected, strict=True)]
        assert sum(d.square().sum() for d in differences).sqrt() < 1e-3 * norm
    assert min(mismatched_means) < -0.1, "z0 must be clamped once"
    assert max(mismatched_means) > 0.1, "and once not"


def sampled_ids(sample):
    """The tokens of a sampled completion: its words, and the stop token where there was one."""
    words = ids(sample["completion"])
    assert sample["length"] - len(words) in (0, 1)
    return words + [EOS] * (sample["length"] - len(words))


# By heart, and with hardly anything undesirable, all of the data gets more probable: z0 leaves 0.
BY_HEART = dict(eval_split="train", epochs=4, desirable_weight=4.0, undesirable_weight=0.1)


@pytest.mark.parametrize("flags", [dict(), dict(temperature=0.7, **BY_HEART)])
def test_evaluation_is_that_of_plain_transformers(tmp_path, monkeypatch, flags):
    # Prompts are completed in groups of 2 x 4, and scored in groups of 2 x 3.
    loaded = spy_on(monkeypatch, "load_labelled")
    flags = dict(batch_size=4, micro_batch_size=3, eval_rows=9, max_new_tokens=24, **flags)
    run_dir = run(tmp_path, **flags)
    args = Args(**{**SMALL, **flags})
    first, *_, last = metrics_of(run_dir)
    policy, reference = plain_model(run_dir / "model"), plain_model()
    rows = loaded[1][1][:9]
    samples = read(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 9 + [last["step"]] * 9
    samples = samples[9:]
    assert [sample["prompt"] for sample in samples] == [row.text for row in rows]
    kl = 0
    with torch.no_grad():
        logratios = [plain_logratio(policy, reference, row.sequence).item() for row in rows]
        mismatched = [plain_logratio(policy, reference, row.mismatched).item() for row in rows]
        for sample in samples:
            sequence = (ids("<bos> " + sample["prompt"]), sampled_ids(sample))
            logprobs = plain_logprobs(policy, *sequence, args.temperature)
            ref_logprobs = plain_logprobs(reference, *sequence, args.temperature)
            kl += (sum(logprobs) - sum(ref_logprobs)).item() / 9
    labels = [row.label for row in rows]
    weights = [flags.get(flag, 1.0) for flag in WEIGHTS]
    losses, z0 = by_hand(logratios, mismatched, labels, args.beta, *weights)
    assert (z0 > 0.1) == ("desirable_weight" in flags)
    good = [r for r, label in zip(logratios, labels, strict=True) if label]
    bad = [r for r, label in zip(logratios, labels, strict=True) if not label]
    margin = args.beta * (sum(good) / len(good) - sum(bad) / len(bad))
    lengths = [sample["length"] for sample in samples]
    assert any(EOS in sampled_ids(sample) for sample in samples)
    assert any(EOS not in sampled_ids(sample) for sample in samples)
    assert last["eval/loss"] == pytest.approx(sum(losses) / 9, rel=1e-4)
    assert last["eval/margin"] == pytest.approx(margin, rel=1e-3)
    assert last["eval/kl"] == pytest.approx(kl, rel=1e-3)
    assert kl > 0.05
    assert last["eval/length_mean"] == pytest.approx(sum(lengths) / 9)
    assert first["eval/kl"] == pytest.approx(0, abs=1e-6)


def test_evaluations_draw_with_the_same_numbers_and_the_flags_temperature(tmp_path):
    def samples(**flags):
        run_dir = run(tmp_path, max_new_tokens=12, **STILL, **flags)
        return [sample["completion"] for sample in read(run_dir / "samples.jsonl")]

    first = samples()
    assert first[:4] == first[4:]
    assert samples(seed=2) != first
    model, tokenizer = plain_model(), AutoTokenizer.from_pretrained(POLICY)
    for row, completion in zip(rows_of("test", 4), samples(temperature=1e-4), strict=False):
        prompt = torch.tensor([ids("<bos> " + row["prompt"])])
        greedy = model.generate(prompt, do_sample=False, max_new_tokens=12)[0, prompt.shape[1] :]
        assert completion == tokenizer.decode(greedy, skip_special_tokens=True)


def test_a_reward_function_gets_the_other_columns_and_scores_the_samples(tmp_path):
    (tmp_path / "reward_of_kto.py").write_text(
        "def score(prompts, completions, answer, note):\n"
        "    assert [p.split()[-1] for p in prompts] == note\n"
        "    return [a if a == 1 else a + len(c) / 1000 for a, c in zip(answer, completions)]\n"
    )
    rows = [
        row | dict(answer=i / 2, note=row["prompt"].split()[-1])
        for i, row in enumerate(rows_of("test", 10))
    ]
    flags = dict(eval_reward_fn=f"{tmp_path}/reward_of_kto.py:score", eval_rows=10, batch_size=2)
    run_dir = run(tmp_path, dataset=dataset(tmp_path, rows), **flags)
    samples = read(run_dir / "samples.jsonl")[-10:]
    rewards = [i / 2 + len(s["completion"]) / 1000 for i, s in enumerate(samples)]
    rewards[2] = 1
    assert [s["reward"] for s in samples] == pytest.approx(rewards)
    last = metrics_of(run_dir)[-1]
    assert last["eval/reward"] == pytest.approx(sum(rewards) / 10)
    assert last["eval/accuracy"] == 0.8  # of about 0, 0.5, 1, ... all but the first two


@pytest.mark.parametrize(
    "flags",
    [
        dict(eval_reward_fn="none"),
        dict(eval_reward_fn="none", dataset=Args.dataset, train_split="train[:20]"),
        dict(),  # the gold reward is that of the default dataset alone
    ],
)
def test_without_a_reward_function_there_is_no_reward(tmp_path, flags):
    run_dir = run(tmp_path, **flags)
    for row in metrics_of(run_dir):
        names = {name for name in row if name.startswith("eval/")}
        assert names == {f"eval/{k}" for k in "loss margin kl length_mean".split()}
    assert all("reward" not in sample for sample in read(run_dir / "samples.jsonl"))


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_train_without_a_margin(tmp_path, capsys, label):
    rows = [row | {"label": label} for row in rows_of("train", 20)]
    run_dir = run(tmp_path, dataset=dataset(tmp_path, rows), epochs=2)
    printed = capsys.readouterr().out
    assert f"train: {20 * label} of 20 desirable; " in printed
    assert "train: all labels are of one kind" in printed
    first, *_, last = metrics_of(run_dir)
    assert not {"reward/margin", "eval/margin"} & (first.keys() | last.keys())
    absent, present = ("undesirable", "desirable") if label else ("desirable", "undesirable")
    assert f"reward/{absent}" not in last
    assert (last[f"reward/{present}"] > 0) == label


def test_steps_follow_the_schedule_and_are_counted(tmp_path, monkeypatch):
    # A clock that goes one second with each look at it.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, strftime=time.strftime)
    clock.time_ns = time.time_ns
    monkeypatch.setattr(kto, "time", clock)
    loaded = spy_on(monkeypatch, "load_labelled")
    flags = dict(epochs=3.5, eval_every=3, warmup_ratio=0.25)
    before, *steps = metrics_of(run(tmp_path, **flags))
    # 3.5 x 20 / 8 = 8.75 steps, int(0.25 x 9) = 2 of warm-up, then down to 0 over the 7 others
    assert [step["step"] for step in steps] == list(range(1, 10))
    assert [row["step"] for row in (before, *steps) if "eval/loss" in row] == [0, 3, 6, 9]
    rates = [step["policy/learning_rate"] / 2e-3 for step in steps]
    # The first step moves the policy, so the first loss alone is that of the reference itself.
    assert [step["objective/loss"] == 0.5 for step in steps[:2]] == [True, False]
    assert rates == pytest.approx([1 / 3, 2 / 3, *(left / 7 for left in range(7, 0, -1))])
    assert [s["time/epoch"] for s in steps] == pytest.approx([0.4 * n for n in range(1, 10)])
    for number, step in enumerate(steps):
        batch = [loaded[0][1][i] for i in batch_rows(number, 8, 20, seed=1)]
        num_tokens = sum(
            len(x) + len(y) for row in batch for x, y in (row.sequence, row.mismatched)
        )
        assert step["time/tokens_per_second"] == num_tokens  # in one second


def test_a_step_is_that_of_adamw_with_the_flags(tmp_path, monkeypatch):
    steps = watch_steps(monkeypatch)
    after = weights_of(run(tmp_path, weight_decay=10.0, max_grad_norm=0.05))
    ((weights, gradient, max_norm),) = steps
    norm = math.sqrt(sum(g.double().square().sum() for g in gradient))
    assert max_norm == 0.05 < norm
    names = [name for name, _ in plain_model().named_parameters()]
    for name, old, unclipped in zip(names, weights, gradient, strict=True):
        # AdamW's first step: both moments are the gradient's own, so it is lr g / (|g| + 1e-8).
        g = unclipped * 0.05 / norm
        expected = old - 2e-3 * g / (g.abs() + 1e-8) - 2e-3 * 10 * old
        torch.testing.assert_close(after[name], expected, atol=2e-5, rtol=1e-5)


# --- the reference, and micro-batches -----------------------------------------------------------


@pytest.mark.parametrize("flags", [dict(), dict(micro_batch_size=3), WEIGHTS, dict(beta=2.0)])
def test_rows_met_before_any_update_have_a_log_ratio_of_exactly_zero(tmp_path, flags):
    # Three steps are an epoch of 24 rows, and the rate is nearly 0.
    run_dir = run(tmp_path, train=24, epochs=2, **STILL, **flags)
    before, *steps = metrics_of(run_dir)
    rows = rows_of("train", 24)
    for number, step in enumerate(steps):
        labels = [rows[i]["label"] for i in batch_rows(number, 8, 24, seed=1)]
        weights = [flags.get(f"{'' if k else 'un'}desirable_weight", 1.0) for k in labels]
        loss = sum(weights) / 16  # half of their mean
        if number < 3:
            names = ("objective/kl", "reward/desirable", "reward/undesirable", "reward/margin")
            assert [step[name] for name in names] == [0, 0, 0, 0]
            assert step["objective/loss"] == loss
        else:  # in other micro-batches, that is with other roundings
            assert step["objective/loss"] == pytest.approx(loss, rel=1e-5)
    assert before["eval/margin"] == 0
    assert len(steps) == 6


def test_a_row_that_is_met_again_in_the_first_epochs_last_batch_keeps_what_was_found_first(
    tmp_path, monkeypatch
):
    # The third batch has 4 of 20 rows, and of the second epoch 4 that were met before. Each call
    # gives a number of its own, so that a batch shows which call its references are from.
    calls = itertools.count()
    monkeypatch.setattr(
        kto,
        "sum_logprobs",
        lambda args, model, sequences: torch.full((len(sequences),), float(next(calls))),
    )
    points = spy_on(monkeypatch, "reference_point")
    run(tmp_path, epochs=1, micro_batch_size=8)
    batches = [logratios for ((logratios,), _) in points if len(logratios) == 8]
    first, second, third = (len(set(batch.tolist())) for batch in batches)
    assert first == second == 1 < third


@pytest.mark.parametrize(("epochs", "met", "passes"), [(0.4, 8, 1), (2, 20, 3)])
def test_the_kept_reference_is_that_of_the_untouched_checkpoint_where_it_is_needed(
    tmp_path, monkeypatch, epochs, met, passes
):
    loaded = spy_on(monkeypatch, "load_labelled")
    calls = spy_on(monkeypatch, "sum_logprobs")
    points = spy_on(monkeypatch, "reference_point")
    run(tmp_path, epochs=epochs)
    # Of training rows and their mismatched pairs, then of 4 held-out ones and theirs.
    assert [len(args[2]) for args, _ in calls[: 2 * passes + 2]] == [8] * (2 * passes) + [4] * 2
    rows = loaded[0][1]
    for reference_calls, sequences in (
        (calls[:passes], [row.sequence for row in rows]),
        (calls[passes : 2 * passes], [row.mismatched for row in rows]),
    ):
        scored = [id(sequence) for args, _ in reference_calls for sequence in args[2]]
        assert len({*scored}) == met
        assert {*scored} <= {*map(id, sequences)}
    # The reference is what the log-probs of a step lack to its log-ratios.
    model = plain_model()
    mismatched_calls = [call for call in calls[2 * passes + 4 :] if len(call[0][2]) == 8]
    points = [point for point in points if len(point[0][0]) == 8]
    references = {}
    for (args, logprobs), ((logratios,), _) in zip(mismatched_calls, points, strict=True):
        ref_logprobs = logprobs - logratios
        for sequence, ref in zip(args[2], ref_logprobs.tolist(), strict=True):
            assert references.setdefault(id(sequence), ref) == pytest.approx(ref, abs=1e-4)
            with torch.no_grad():
                assert ref == pytest.approx(sum(plain_logprobs(model, *sequence)).item(), abs=1e-3)
    assert len(references) == met


def assert_same_training(run_dir, other_dir):
    """The same metrics in each step, and weights that have moved alike.

    Not to the bit: a sum in another order is rounded otherwise, and AdamW divides a gradient by its
    own size, which blows up the rounding of gradients that are nearly 0. The weights are 1e-5 of
    their way apart, or less; 1e-3 of it is allowed.
    """
    for row, other in zip(metrics_of(run_dir), metrics_of(other_dir), strict=True):
        for name in (row.keys() | other.keys()) - {"time/tokens_per_second"}:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=2e-5), name
    assert abs(row["reward/margin"]) > 0.004, "nothing was learned"
    start = load_file(f"{POLICY}/model.safetensors")
    weights, others = weights_of(run_dir), weights_of(other_dir)
    moved = sum((weights[k] - start[k].float()).square().sum() for k in start)
    assert sum((weights[k] - others[k]).square().sum() for k in start) < 1e-6 * moved


@pytest.mark.parametrize("flags", [dict(), WEIGHTS])
def test_micro_batch_size_changes_the_forward_passes_and_not_the_training(
    tmp_path, monkeypatch, flags
):
    loaded, passes = (spy_on(monkeypatch, f) for f in ("load_labelled", "completion_logprobs"))
    runs = []
    for size in (8, 1, 3):
        runs.append(run(tmp_path, epochs=1.6, micro_batch_size=size, **flags))
        assert max(len(values) for _, values in passes) == size
        passes.clear()
    train_sequences = [row.sequence for row in loaded[0][1]]
    lengths = {len(prompt) + len(completion) for prompt, completion in train_sequences}
    assert len(lengths) > 5, "ragged lengths"
    for other in runs[1:]:
        assert_same_training(runs[0], other)
    points = [row["objective/kl"] for row in metrics_of(runs[0])[1:]]
    assert len(points) == 4 and max(points) > 0.1, "the reference point must have left 0"


def test_padding_may_be_any_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = None
    plain_model().save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").pad_token_id is None
    flags = dict(epochs=0.8, max_new_tokens=12)
    assert_same_training(
        run(tmp_path, **flags), run(tmp_path, model=str(tmp_path / "policy"), **flags)
    )


def test_completions_of_similar_length_share_a_micro_batch(tmp_path, monkeypatch):
    calls = spy_on(monkeypatch, "completion_logprobs")
    run(tmp_path, batch_size=20, epochs=1, micro_batch_size=4)
    lengths = []  # of each micro-batch
    for (_, sequences, inds), _ in calls:
        lengths.append([len(sequences[i][0]) + len(sequences[i][1]) for i in inds])
    assert [len(micro_batch) for micro_batch in lengths] == [4] * 5
    assert all(min(a) >= max(b) for a, b in itertools.pairwise(lengths))
    assert max(lengths[0]) > min(lengths[-1])


def test_a_run_of_pairs_is_that_of_their_sides(tmp_path):
    """Split in two by hand, in the same order."""
    pairs = read("tiny/reviews/preferences/train.jsonl")[:10]
    rows = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    runs = []
    for name, data in (("pairs", pairs), ("sides", rows)):
        (tmp_path / name).mkdir()
        runs.append(run(tmp_path, dataset=dataset(tmp_path / name, data), epochs=1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = (
            [{k: v for k, v in row.items() if k[:5] != "time/"} for row in read(run_dir / name)]
            for run_dir in runs
        )
        assert ours == theirs
    ours, theirs = map(weights_of, runs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
