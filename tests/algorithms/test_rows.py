"""Rows of data sets to token ids, in the four scripts that train on completions as they are given.

Their forms and their errors: tests/run/test_data.py.
"""

import ast
import math

import pytest
from encoded import message, with_lists
from models import CHAT
from reviews import EOS, MERGED, POLICY, dataset, ids
from scripts import SPECS
from transformers import AutoTokenizer


EACH = pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].kind == "rows"])
PAIRS = pytest.mark.parametrize("name", ["rm_bradley_terry", "dpo"])
EMPTY = "with an empty prompt or completion (in a csv also NA and null)"
CHATS = pytest.mark.parametrize("chat", [False, True])


def load(name, tmp_path, rows, chat_template=None, stop_ids=(EOS,), **flags):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = chat_template
    script = SPECS[name].module
    args = script.Args(dataset=dataset(tmp_path, rows), model=POLICY, **flags)
    return with_lists(getattr(script, SPECS[name].loader)(args, "train", tokenizer, list(stop_ids)))


def row_of(prompt, completion, rejected=" it", **columns):
    """That every script can use."""
    row = dict(prompt=prompt, completion=completion, label=True)
    return row | dict(chosen=completion, rejected=rejected) | columns


def as_messages(row):
    sides = ("completion", "chosen", "rejected")
    messages = {column: [message("assistant", row[column])] for column in sides}
    return row | messages | {"prompt": [message("user", row["prompt"])]}


def sequences_of(name, row):
    """Prompt and completion of a loaded row, or both sides of a pair with the prompt."""
    if name == "sft":
        return [text.ids for text in row]
    if name == "kto":
        return [row.prompt.ids + row.completion_ids]
    if name == "dpo":
        return [row.prompt.ids + row.chosen_ids, row.prompt.ids + row.rejected_ids]
    return [row.prompt_ids + row.chosen_ids, row.prompt_ids + row.rejected_ids]


def assert_sequences(name, rows, prompt, completions):
    """Of each row the completion, beside which a pair has `it`."""
    for row, completion in zip(rows, completions, strict=True):
        expected = [ids(f"<bos> {prompt} {completion}"), ids(f"<bos> {prompt} it <eos>")]
        assert sequences_of(name, row) == expected[: len(sequences_of(name, row))]
        if name in ("dpo", "kto"):
            assert row.prompt.ids == ids("<bos> " + prompt)


@EACH
def test_a_completion_ends_with_its_first_stop_id(name, tmp_path):
    rows = [row_of("on wednesday", text) for text in (" a film", " a film <eos> <pad>")]
    loaded = load(name, tmp_path, rows)
    assert_sequences(name, loaded, "on wednesday", ["a film <eos>", "a film <eos>"])
    stop_ids = [EOS, *ids(".")]
    loaded = load(name, tmp_path, [row_of("on wednesday", " a film .")], stop_ids=stop_ids)
    assert_sequences(name, loaded, "on wednesday", ["a film ."])
    with pytest.raises(ValueError, match="'whose completion goes on after a stop id': 1"):
        load(name, tmp_path, [row_of("on wednesday", " a film . it")], stop_ids=stop_ids)


@CHATS
@EACH
def test_rows_as_long_as_allowed_are_kept_and_others_dropped(name, chat, tmp_path, capsys):
    fits, long = " the plot was dull", " the plot was really dull"
    over = "on wednesday i saw jaws ."
    rows = [row_of("on wednesday", text) for text in (" a film", fits, long)]
    rows += [row_of(over, " the plot was dull"), row_of("on wednesday", " \n")]
    dropped = {"longer than --max-length": 2, EMPTY: 1}
    is_pair = name in ("dpo", "rm_bradley_terry")
    if is_pair:
        rows += [row_of("on wednesday", "  it "), row_of("on wednesday", " a film", long)]
        rows += [row_of("on wednesday", " a film", "")]
        dropped = {"longer than --max-length": 3, EMPTY: 2}
        dropped["with chosen equal to rejected"] = 1  # as tokens
    tail, length = "", 8  # <bos> on wednesday, and five more
    if chat:
        rows, tail, length = [*map(as_messages, rows)], " <eos> . the :", 12
    else:  # one word of two: the prompt would end with another token than when it stands alone
        rows.append(row_of("the plot was we", "ak"))
        dropped[MERGED] = 1
    loaded = load(name, tmp_path, rows, chat_template=chat and CHAT, max_length=length)
    completions = ["a film <eos>", "the plot was dull <eos>"]
    assert_sequences(name, loaded, "on wednesday" + tail, completions)
    report, *_ = capsys.readouterr().out.splitlines()
    count, _, rest = report.removeprefix("train: 2 rows, dropped ").rpartition("; longest ")
    assert ast.literal_eval(count) == dropped
    longest = len(ids("<bos> " + over + tail + fits + " <eos>"))
    unread = [column for column in rows[0] if column not in READ[name]]
    assert rest == f"{longest} tokens; not read: {unread}"


READ = dict.fromkeys(("dpo", "rm_bradley_terry"), ("prompt", "chosen", "rejected"))
READ |= {"sft": ("prompt", "completion"), "kto": ("prompt", "completion", "label")}
COLUMNS = dict(prompt_column="x", chosen_column="y", rejected_column="z")
COLUMNS |= dict(completion_column="y", label_column="like")


@CHATS
@EACH
def test_columns_and_chats(name, chat, tmp_path):
    fields = SPECS[name].module.Args.__dataclass_fields__
    flags = {flag: column for flag, column in COLUMNS.items() if flag in fields}
    row = {"x": "on wednesday", "y": " a film", "z": " it", "like": 1, "answer": "5", "note": 3}
    options = flags | dict(chat=chat, chat_template=chat and CHAT)
    (loaded,) = load(name, tmp_path, [row], **options)
    prompt = "on wednesday" + (" <eos> . the :" if chat else "")
    assert_sequences(name, [loaded], prompt, ["a film <eos>"])
    if name in ("dpo", "kto"):
        used = {*flags.values()}
        assert loaded.prompt.text == ([message("user", row["x"])] if chat else row["x"])
        assert loaded.prompt.columns == {key: row[key] for key in row if key not in used}
    if name == "kto":
        assert loaded.label is True  # not 1, which torch.where would refuse
    if chat:  # messages stay as they are, and a string beside messages becomes one
        turns = zip("xyz", ("user", "assistant", "assistant"), strict=True)
        messages = {key: [message(role, row[key])] for key, role in turns if key in flags.values()}
        options["chat"] = False
        assert load(name, tmp_path, [row | messages], **options) == [loaded]
        for mixed in (messages | {"x": row["x"]}, {"x": messages["x"]}):
            (other,) = load(name, tmp_path, [row | mixed], **options)
            assert sequences_of(name, other) == sequences_of(name, loaded)


@PAIRS
def test_the_prompt_of_two_conversations_is_what_they_share(name, tmp_path, capsys):
    turns = [message("user", "on monday"), message("assistant", "a film"), message("user", "and")]
    good, bad = message("assistant", "it"), message("assistant", "a movie")
    rows = [dict(chosen=[*turns, good], rejected=[*turns, bad])]
    rows += [dict(chosen=[*turns, good], rejected=[*turns[:1], bad])]
    for beside in ({}, {"prompt": "on sunday"}):  # which does not count
        both = [row | beside for row in rows]
        (pair,) = load(name, tmp_path, both, chat_template=CHAT)
        prompt = "<bos> on monday <eos> . the : a film <eos> . and <eos> . the : "
        expected = [ids(prompt + side) for side in ("it <eos>", "a movie <eos>")]
        assert sequences_of(name, pair) == expected
    assert "dropped {'whose conversations begin differently': 1}" in capsys.readouterr().out
    texts = {"question": "on monday", "chosen": " it was dull", "rejected": " it was fun"}
    with pytest.raises(ValueError, match="'with an empty prompt, or without --prompt-column': 1"):
        load(name, tmp_path, [texts])


@pytest.mark.parametrize("label", [2, 0.5, None, "true"])
def test_a_label_is_0_or_1(tmp_path, label):
    row = {"prompt": "on monday", "completion": " it", "like": label}
    with pytest.raises(ValueError, match=f"--label-column like: {label!r} is neither 0 nor 1"):
        load("kto", tmp_path, [row], label_column="like")


@pytest.mark.parametrize("column", ["margin", "m"])
def test_margins_come_from_their_column(tmp_path, column):
    rows = [row_of("on monday", " a film", **{column: margin}) for margin in (0.5, -2.0, 3.0)]
    pairs = load("rm_bradley_terry", tmp_path, rows, margin_column=column)
    assert [pair.margin for pair in pairs] == [0.5, -2, 3]
    pairs = load("rm_bradley_terry", tmp_path, rows, margin_column=None)
    assert all(pair.margin == 0 for pair in pairs)
    with pytest.raises(
        ValueError, match=r"no column .*gaps.* in --dataset"
    ):  # asked for, not there
        load("rm_bradley_terry", tmp_path, rows, margin_column="gaps")
    for wrong in (math.nan, None):
        rows[1][column] = wrong
        with pytest.raises(ValueError, match=f"--margin-column {column}: {wrong} is no finite num"):
            load("rm_bradley_terry", tmp_path, rows, margin_column=column)
