"""The columns `tools` and `chat_template_kwargs`, and turns that call a tool, in every script; the
token ids of what a tool replies.
"""

import json
from array import array

import pytest
from scripts import ONE_PER_LOADER, SPECS, short_flags
from torch.utils._pytree import tree_leaves
from vocabularies import bpe, llama_2, made

from common.tokens import encode_completions
from grpo_tools import encode_reply, text_ids
from runtime.model import load_tokenizer

# For the digits of tiny/arithmetic: which tools there are, and what a turn calls.
CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}{{ style }}"
    "{% for m in messages %}{{ '=' if m.role == 'assistant' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{% for key in call.function.arguments %}{{ key }}{% endfor %}"
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("7", "8")]
CALL = {"function": {"name": "7", "arguments": {"1": 2}}}


def load(name, tokenizer, tmp_path, row, template=CHAT):
    """The first ids of a row of chats: those of its prompt."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    module = SPECS[name].module
    args = module.Args(dataset=str(tmp_path), **short_flags(name, chat=True))
    more = [[2]] if SPECS[name].kind == "rows" else []
    tokenizer = load_tokenizer(str(tmp_path))
    rows = getattr(module, SPECS[name].loader)(args, "train", tokenizer, *more)
    return tokenizer.decode(next(ids for ids in tree_leaves(rows) if isinstance(ids, array)))


@pytest.mark.parametrize("name", ONE_PER_LOADER)
@pytest.mark.parametrize("as_text", [False, True])
def test_every_script_shows_the_tools_of_a_row(name, as_text, tokenizer, tmp_path):
    row = dict(prompt="1+2", completion="3", chosen="3", rejected="4", label=1)
    columns = dict(tools=TOOLS, chat_template_kwargs={"style": "9"})
    row |= {key: json.dumps(value) if as_text else value for key, value in columns.items()}
    assert load(name, tokenizer, tmp_path, row).startswith("7,8,91+2=")
    del row["tools"], row["chat_template_kwargs"]
    assert load(name, tokenizer, tmp_path, row).startswith("1+2=")


def test_a_template_that_reads_no_tools(tokenizer, tmp_path):
    row = dict(prompt="1+2", completion="3", tools=TOOLS)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.warns(UserWarning, match="--dataset: .*'s chat template reads no 'tools'"):
        load("sft", tokenizer, tmp_path, row, template)


def test_a_turn_that_calls_a_tool_without_a_word_is_learned(tokenizer):
    tokenizer.chat_template = CHAT
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    # `datasets` gives each row the keys of all others.
    turn["tool_calls"][0]["function"]["arguments"]["5"] = None
    user = [{"role": "user", "content": "1+2", "tool_calls": None}]
    prompt_ids, [ids] = encode_completions(tokenizer, user, [[turn]], [2])
    assert (tokenizer.decode(prompt_ids), tokenizer.decode(ids)) == ("1+2=", "71<eos>")


# --- what a tool replies --------------------------------------------------------------------------
def test_a_reply_keeps_its_keys_and_an_empty_one_is_said(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<bos>{{ m.name }}{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>{% endif %}"
    )
    reply = {"role": "tool", "name": "5", "content": "7"}
    assert tokenizer.decode(encode_reply(tokenizer, reply, 2)) == "<bos>57<eos><bos>"
    with pytest.raises(ValueError, match="only parts of type `text` can be read, found 7"):
        encode_reply(tokenizer, reply | {"content": 7}, 2)
    with pytest.warns(UserWarning, match="--environment: a reply is empty"):
        assert encode_reply(tokenizer, "", 5) == []


def test_a_reply_has_the_ids_of_a_demonstration():
    tokenizer = llama_2()
    asked, whole = (tokenizer(text).input_ids for text in ("37+48=", "37+48=85;"))
    assert asked + text_ids(tokenizer, "85;", asked[-1]) == whole


def test_a_reply_that_begins_like_the_text_before_it_is_whole():
    tokenizer = llama_2()
    for before, reply in (("1", "11"), ("=", "=="), ("3", "3")):
        last_id = tokenizer(before).input_ids[-1]
        assert tokenizer.decode(text_ids(tokenizer, reply, last_id)) == reply


def test_a_reply_that_a_tokenizer_merges_with_the_text_before_it_is_whole():
    """ "=8=5" has the tokens "=8", "=", "5", so "=" is not where the reply begins."""
    merging = made(bpe("0123456789=;", [("=", "8")]))
    assert text_ids(merging, "8=5", last_id=10) == merging("8=5").input_ids == [8, 10, 5]
