"""From texts to tokens: chat messages, their templates, and what tokenizers add by themselves."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from common.tokens import (
    UnusableRow,
    content,
    encode,
    encode_pair,
    find_stop_ids,
    token_texts,
)

# Knows two roles, as many templates do, and leaves out the text of any other.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] | trim }}={% endif %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}<eos>{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    tokenizer.chat_template = CHAT
    return tokenizer


def message(role, text):
    return {"role": role, "content": text}


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


# --- chat messages --------------------------------------------------------------------------------


def test_text_parts_are_joined(tokenizer):
    ids = encode(tokenizer, [message("user", "1+2"), message("assistant", "3")])
    assert tokenizer.decode(ids) == "1+2=3<eos>"
    in_parts = [message("user", text_parts("1", "+2")), message("assistant", text_parts("3"))]
    assert encode(tokenizer, in_parts) == ids


def test_other_parts_are_refused(tokenizer):
    prompt = [message("user", [{"type": "image", "url": "x.png"}, *text_parts("1+2")])]
    with pytest.raises(ValueError, match=r"only parts of type `text`.*'image'"):
        encode(tokenizer, prompt)
    with pytest.raises(ValueError, match=r"only parts of type `text`.*'image'"):
        encode_pair(tokenizer, prompt, [message("assistant", "3")], [2])


@pytest.mark.parametrize("wrong", [{"content": "1+2"}, {"role": None, "content": "1+2"}, "1+2"])
def test_a_message_without_a_role_is_refused(wrong, tokenizer):
    for call in (content, lambda wrong: encode(tokenizer, [wrong])):
        with pytest.raises(
            ValueError, match="every chat message needs a role and a content, found"
        ):
            call(wrong)


def test_a_role_that_the_template_leaves_out(tokenizer):
    turns = [message("human", "5+6"), message("assistant", "3")]
    error = "the chat template of tiny/arithmetic/policy leaves out what 'human' says"
    with pytest.raises(ValueError, match=error):
        encode(tokenizer, turns)
    with pytest.raises(ValueError, match=error):
        encode(tokenizer, turns[:1], add_generation_prompt=True)


def test_an_answer_that_the_template_leaves_out(tokenizer):
    with pytest.raises(ValueError, match="leaves out what 'gpt' says"):
        encode_pair(tokenizer, [message("user", "5+6")], [message("gpt", "3")], [2])


def test_an_assistants_turn_that_the_template_drops_makes_a_row_unusable(tokenizer):
    """What is left would be EOS alone: training would teach to answer nothing."""
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}={% endfor %}"
    )
    with pytest.raises(UnusableRow, match="whose completion the chat template leaves out"):
        encode_pair(tokenizer, [message("user", "5+6")], [message("assistant", "11")], [2])


@pytest.mark.parametrize("text", ["5+6", "  5+6\n"])
def test_a_template_may_trim(text, tokenizer):
    ids = encode(tokenizer, [message("user", text)], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "5+6="


@pytest.mark.parametrize("empty", ["", " \n", [], text_parts("", " "), None])
def test_an_empty_message_makes_a_row_unusable(empty, tokenizer):
    prompt, completion = [message("user", "5+6")], [message("assistant", "11")]
    for pair in (
        ([message("user", empty)], completion),
        (prompt, [message("assistant", empty)]),
    ):
        with pytest.raises(UnusableRow, match="with an empty prompt or completion"):
            encode_pair(tokenizer, *pair, [2])


@pytest.mark.parametrize("empty", ["", " \n", [], None])
def test_an_empty_prompt_or_completion_makes_a_row_unusable(empty, tokenizer):
    pairs = [("5+6=", empty)]
    if empty is not None:  # the prompt of text that has none
        pairs += [(empty, "11"), (empty, [message("assistant", "11")])]
    for pair in pairs:
        with pytest.raises(UnusableRow, match="with an empty prompt or completion"):
            encode_pair(tokenizer, *pair, [2])


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


def test_a_completion_that_changes_its_prompts_tokens_is_refused(tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt %}#{% endif %}"
    prompt = [message("user", "5+6")]
    assert encode_pair(tokenizer, prompt, [message("assistant", "#11")], [2])
    with pytest.raises(UnusableRow, match="prompt's last token is another one"):
        encode_pair(tokenizer, prompt, [message("assistant", "11")], [2])


def test_a_completion_of_two_messages_is_refused(tokenizer):
    two = [message("assistant", "#"), message("assistant", "11")]
    with pytest.raises(UnusableRow, match="several messages"):
        encode_pair(tokenizer, [message("user", "5+6")], two, [2])


def test_a_template_may_leave_out_an_assistants_thoughts(tokenizer):
    """As those of reasoning models do: only what others say must stand in the text."""
    tokenizer.chat_template = CHAT.replace("m['content'] }}<eos>", "m['content'][-1:] }}<eos>")
    ids = encode(tokenizer, [message("user", "1+2"), message("assistant", "1,3#3")])
    assert tokenizer.decode(ids) == "1+2=3<eos>"


def test_without_an_eos_a_completion_ends_with_the_first_stop_id(tokenizer):
    tokenizer.eos_token = None
    _, completion = encode_pair(tokenizer, "1+2=", "#3", [9, 13])  # none of the text's own
    assert completion == [*tokenizer("#3", add_special_tokens=False).input_ids, 9]


def test_what_a_tool_says_may_be_written_otherwise(tokenizer):
    """Templates write it as JSON, with its quotes escaped."""
    tool = "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% endif %}{% endfor %}"
    tokenizer.chat_template = CHAT.replace("{% endfor %}", tool)
    turns = [message("user", "1+2"), message("tool", '"3"'), message("assistant", "#3")]
    assert encode(tokenizer, turns)[-1] == tokenizer.eos_token_id


def test_a_template_that_reads_parts_alone_gives_no_stop_id_of_its_own(tokenizer):
    """Nothing is written of a string: what comes "after" it is not the whole text."""
    tokenizer.chat_template = "<bos>{% for m in messages %}{% endfor %}1+"
    assert find_stop_ids("no/such/folder", tokenizer) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("name", ["gpt2", "phi-3-mini"])
def test_the_texts_of_tokens_join_to_the_text(name):
    folder = Path("../shared/real/tokenizers", name)
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " Été: 3 \U0001f642\U0001f642 日本\n\tend"
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    for end in range(1, len(ids) + 1):  # some cut a character in two
        pieces = token_texts(tokenizer, ids[:end])
        joined = "".join(pieces).rstrip("\ufffd")
        assert len(pieces) == end and tokenizer.decode(ids).startswith(joined)
    assert joined == tokenizer.decode(ids) and pieces[-1] == tokenizer.eos_token and "\ufffd" not in "".join(pieces)
    assert {"\U0001f642", "日"} <= {piece.strip() for piece in pieces}
