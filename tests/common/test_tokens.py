"""Padding, stop ids, and the way from texts and chats to tokens."""

from os.path import commonprefix
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from encoded import encode_pair, message
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig
from vocabularies import llama_2, of_bytes

from common.tokens import encode, encode_completions, find_stop_ids, pad_rows
from runtime.model import load_tokenizer
from runtime.rows import encode_rows
from runtime.saving import checksum, rollout_row

# Knows two roles, as many templates do, and leaves out the text of any other.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] | trim }}={% endif %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}<eos>{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer(tokenizer):
    tokenizer.chat_template = CHAT
    tokenizer.add_tokens(["<think>", "</think>", '"', "\\", " "])  # what these texts have
    return tokenizer


# --- padding and stop ids -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("side", "expected_ids", "expected_mask"),
    [
        ("left", [[5, 6, 7], [0, 0, 0], [0, 8, 0]], [[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
        ("right", [[5, 6, 7], [0, 0, 0], [8, 0, 0]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
    ],
)
def test_pad_rows_masks_by_length_not_by_id(side, expected_ids, expected_mask):
    ids, mask = pad_rows([[5, 6, 7], [0], [8, 0]], "cpu", side=side)  # 0 is padding and real
    assert ids.tolist() == expected_ids and mask.int().tolist() == expected_mask
    assert ids.dtype == torch.long and mask.dtype == torch.bool
    ids, mask = pad_rows([[], [4]], "cpu", side=side)
    assert ids.tolist() == [[0], [4]] and mask.tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("eos", "of_config", "expected"),
    [
        (7, [9, 3], [7, 9, 3]),  # the one that is appended comes first
        (7, 9, [7, 9]),
        (7, None, [7]),
        (7, "no file", [7]),
        (None, [9, 3], [9, 3]),
        (0, [2], [0, 2]),  # id 0 is an id
    ],
)
def test_stop_ids_are_those_of_tokenizer_and_generation_config(tmp_path, eos, of_config, expected):
    if of_config != "no file":
        GenerationConfig(eos_token_id=of_config).save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=eos, chat_template=None)
    assert find_stop_ids(str(tmp_path), tokenizer) == expected
    if of_config is None:  # without any, nothing could end
        tokenizer.eos_token_id = None
        with pytest.raises(ValueError, match="neither tokenizer nor generation config has an EOS"):
            find_stop_ids(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT.replace("<eos>", "<bos><pad>"), [2, 1]),  # the first special token after the turn
        (CHAT.replace("<eos>", "3<pad>"), [2, 0]),  # a digit before it is none
        (CHAT.replace("<eos>", ""), [2]),
        # It reads parts alone, and writes nothing of a string: what comes "after" is not the end.
        ("<bos>{% for m in messages %}{% endfor %}1+", [2]),
    ],
)
def test_a_templates_end_of_an_assistants_turn_is_a_stop_id(template, expected, tokenizer):
    tokenizer.chat_template = template
    assert find_stop_ids("no/such/folder", tokenizer) == expected


# --- chat messages --------------------------------------------------------------------------------
def test_text_parts_are_joined(tokenizer):
    ids = encode(tokenizer, [message("user", "1+2"), message("assistant", "3")])
    assert tokenizer.decode(ids) == "1+2=3<eos>"
    parts = [{"type": "text", "text": text} for text in ("1", "+2")]
    in_parts = [message("user", parts), message("assistant", "3")]
    assert encode(tokenizer, in_parts) == ids


# --- strings --------------------------------------------------------------------------------------
@pytest.fixture
def appending():
    """A tokenizer that appends EOS to each text, as Llama's does with add_eos_token."""
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    both = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = both
    assert tokenizer("1+2=").input_ids[-1] == tokenizer.eos_token_id
    return tokenizer


def test_an_appended_eos_is_taken_off(appending, tokenizer):
    assert encode(appending, "1+2=") == encode(tokenizer, "1+2=")
    prompt, completion = encode_pair(appending, "1+2=", "#3", [2])
    assert tokenizer.decode(prompt + completion) == "<bos>1+2=#3<eos>"
    # One that the text itself ends with stays.
    assert encode(appending, "1+2=<eos>") == [*encode(tokenizer, "1+2="), 2, 2]


# What a prompt ends in for sampling, and what stands before a rendered answer; `,` opens a thought,
# `+` closes it.
OPENINGS = {
    "closed in both": (",+", ",+"),  # Qwen3 with enable_thinking false
    "open, then closed": (",", ",+"),  # Qwen3.5, Qwen3.6
    "open, then closed in another token": (",,", ",+"),  # Nemotron 3
    "open, and not rendered": (",", ""),  # DeepSeek-V3, R1
}


@pytest.mark.parametrize("form", OPENINGS)
def test_templates_that_open_a_thought_keep_every_row(form, tokenizer, recwarn):
    asked, rendered = OPENINGS[form]
    reply = "{{ m['content'] }}<eos>"
    tokenizer.chat_template = CHAT.replace(reply, rendered + reply)
    tokenizer.chat_template += f"{{% if add_generation_prompt %}}{asked}{{% endif %}}"
    turns = [message("user", "5+6")]
    shared = commonprefix([asked, rendered])
    for reply in ("11", "12"):
        prompt_ids, ids = encode_pair(tokenizer, turns, [message("assistant", reply)], [2])
        assert tokenizer.decode(prompt_ids) == f"5+6={shared}"
        assert tokenizer.decode(ids) == f"{rendered[len(shared) :]}{reply}<eos>"
    before, after = asked[len(shared) :], rendered[len(shared) :]
    expected = f"is sampled after {before!r}, trained after {after!r}"
    # Once for each text.
    assert [expected in str(warning.message) for warning in recwarn] == [True] * (shared != asked)


def test_what_only_one_answer_is_opened_with_belongs_to_both_completions(tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt %},{% endif %}"
    with pytest.warns(UserWarning, match="is sampled after ',', trained after ''"):
        prompt_ids, both = encode_completions(tokenizer, QUESTION, [",1", "11"], [2])
    assert tokenizer.decode(prompt_ids) == "5+6="
    assert [tokenizer.decode(ids) for ids in both] == [",1<eos>", "11<eos>"]


def test_values_for_the_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt and think %},{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    turns = [message("user", "5+6")]
    expected = {"{}": "5+6=", '{"think": true}': "5+6=,", '{"think": false}': "5+6="}
    for values, text in expected.items():
        loaded = load_tokenizer(str(tmp_path), values)
        assert loaded.decode(encode(loaded, turns, add_generation_prompt=True)) == text
    with pytest.raises(ValueError, match=r"--chat-template-kwargs: .* reads no \{'thin'\}"):
        load_tokenizer(str(tmp_path), '{"thin": true}')
    for value in ('"false"', '"True"'):
        with pytest.raises(ValueError, match="--chat-template-kwargs: true and false without quo"):
            load_tokenizer(str(tmp_path), f'{{"think": {value}}}')


def test_a_completion_ends_with_the_eos_or_else_with_another_stop_id(tmp_path, tokenizer):
    assert encode_pair(tokenizer, "5+6=", "11<eos> <pad>", [2])[1][-1] == 2  # nothing is lost
    for eos, expected in (("<eos>", [2, 9]), (None, [9, 2])):  # 2 by the template
        tokenizer.eos_token = eos
        GenerationConfig(eos_token_id=9).save_pretrained(tmp_path)
        stop_ids = find_stop_ids(str(tmp_path), tokenizer)
        _, completion = encode_pair(tokenizer, "1+2=", "#3", stop_ids)
        ids = tokenizer("#3", add_special_tokens=False).input_ids
        assert stop_ids == expected and completion == [*ids, stop_ids[0]]


# --- rows that cannot be used ---------------------------------------------------------------------
QUESTION = [message("user", "5+6")]
EMPTY = "with an empty prompt or completion (in a csv also NA and null)"


def load(tokenizer, rows, most=None):
    """The items of some texts: the row and its ids."""

    def encode_row(row):
        whole = dict(row)
        ids = encode(tokenizer, row.pop("text"))
        return (whole, ids), ids

    rows = Dataset.from_list(rows, split="train")
    return encode_rows(rows, encode_row, tokenizer, 9, most=most)


def texts(*values):
    return [{"text": value} for value in values]


@pytest.mark.filterwarnings("error")
def test_rows_that_are_left_are_reported(tokenizer, capsys):
    long = "1+2+3+4+5="
    with pytest.warns(UserWarning, match="MOST ROWS ARE LOST of train: 2 rows"):
        loaded = load(tokenizer, texts("", "1+2=", long, long, "3+4="))
    kept = [({"text": text}, encode(tokenizer, text)) for text in ("1+2=", "3+4=")]
    assert loaded == kept
    capsys.readouterr()
    load(tokenizer, texts(long, "1+2=", None, "3+4="))
    counts = {"longer than --max-length": 1, EMPTY: 1}  # in the order of the rows
    line = f"train: 2 rows, dropped {counts}; longest 11 tokens"
    assert capsys.readouterr().out.splitlines() == [line, "    '<bos>1+2='"]
    with pytest.raises(ValueError, match="--dataset: no row is left of train: 0 rows"):
        load(tokenizer, texts("", ""))
    with pytest.raises(ValueError, match="--dataset: row 1 of train: ValueError: every chat"):
        load(tokenizer, [{"text": [message(role, "5")]} for role in ("user", None)])
    # Rows behind the first that are wanted are not looked at.
    assert load(tokenizer, texts("", "1+2=", "3+4=", None), most=2) == kept
    assert f"dropped {{{EMPTY!r}: 1}}" in capsys.readouterr().out


def test_a_checksum_sees_what_has_changed(tokenizer, tmp_path):
    rows = [dict(text="1+2=", label=1), dict(text="1+3=", label=2)]
    changed = [rows[::-1], rows[:1], [rows[0], rows[1] | dict(label=1)]]
    changed += [[rows[0], rows[1] | dict(text="1+3")]]
    sums = [checksum(load(tokenizer, rows)) for rows in (rows, *changed)]
    assert sums[0] == checksum(load(tokenizer, rows), None, "some/name")
    many = [({}, [i]) for i in range(2500)]
    sums += [checksum(many), checksum([({}, [9]), *many[1:]])]  # the first, and far behind it
    for name in ("model.safetensors", "pytorch_model.bin", "config.json", "chat_template.jinja"):
        for value in (1, 2):
            (tmp_path / name).write_bytes(bytes([value]) * 2**24 + b"end")
            sums.append(checksum(load(tokenizer, rows), None, str(tmp_path)))
    assert len({*sums}) == len(sums)
    (tmp_path / "checkpoint.pt").write_bytes(b"of a run that goes on")
    assert checksum(load(tokenizer, rows), str(tmp_path)) == sums[-1]


def test_values_of_a_row_do_not_enter_the_next_split(tokenizer):
    tokenizer.chat_template = "{{ n }}" + CHAT
    row = {"text": [message("user", "1+2")]}
    load(tokenizer, [row | {"chat_template_kwargs": {"n": "5"}}])
    ((_, ids),) = load(tokenizer, [row])
    assert tokenizer.decode(ids) == "1+2="


def test_ranks_give_what_one_process_gives(tokenizer, monkeypatch):
    """Also with rows between them that are dropped."""
    rows = texts("1+2=", "", "3+4=", "1+2+3+4+5=", "5+6=", None, "1+2=", "7+8=")
    whole = load(tokenizer, rows)
    assert len(whole) == 5
    gathered = []
    monkeypatch.setattr("runtime.rows.WORLD_SIZE", 3)
    monkeypatch.setattr("runtime.rows.all_gather", lambda items: gathered.append(items) or items)

    def load_all(most=None):
        parts = []
        for rank in range(3):
            monkeypatch.setattr("runtime.rows.RANK", rank)
            parts += load(tokenizer, rows, most)
        return parts

    assert load_all() == whole
    assert len(gathered) == 4 * 3  # items, longest, reasons, first text
    assert load_all(most=1)[:1] == whole[:1]


# --- back to texts --------------------------------------------------------------------------------
def test_the_texts_of_tokens_join_to_the_text():
    """Tokens are bytes of UTF-8, of which several make a character."""
    tokenizer = of_bytes()
    text = " Été: \U0001f642\U0001f642 日本\n"
    ids = tokenizer(text).input_ids
    (row,) = rollout_row(tokenizer, [([], ids)], {})["completions"]
    assert len(row["tokens"]) == len(ids) > len(text) and "".join(row["tokens"]) == text
    assert {"É", "\U0001f642", "日"} <= {*row["tokens"]}


def test_rows_of_rollouts_have_numbers_of_their_own_tokens(tokenizer):
    sequences = [(tokenizer("1+2=").input_ids, tokenizer("#3").input_ids[1:])]
    columns = {"reward": torch.tensor([0.12345]), "log_ratio": torch.tensor([[0.5, -0.25, 9.0]])}
    (row,) = rollout_row(tokenizer, sequences, columns)["completions"]
    expected = dict(prompt="<bos>1+2=", tokens=["#", "3"], reward=0.123, log_ratio=[0.5, -0.25])
    assert row == expected


def test_bytes_that_are_no_character_are_a_text_too():
    tokenizer = llama_2()
    smile = tokenizer("\U0001f642").input_ids[1:]
    for ids in ([*smile, 259], [*smile, *smile[:2], 259, 260], [*32 * smile[:1], *smile, 259]):
        (row,) = rollout_row(tokenizer, [([257], ids)], {})["completions"]
        assert len(row["tokens"]) == len(ids) and row["tokens"][-1] in "012"
