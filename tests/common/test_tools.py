"""The columns `tools` and `chat_template_kwargs`, and turns that call a tool, in every script."""

import json

import pytest
from scripts import ONE_PER_LOADER, SPECS, short_flags

from common.tokens import encode_completions
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
    return tokenizer.decode(rows.encoded[0][1][1 if name in ("sft", "distill") else 0])


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
