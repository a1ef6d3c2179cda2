"""From texts to tokens: chat messages, their templates, and what tokenizers add by themselves."""

import json

import pytest
from scripts import SCRIPTS
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.generation import encode, find_stop_ids
from common.logprobs import UnusableRow, encode_pair

EACH = pytest.mark.parametrize("name", SCRIPTS)
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


@pytest.fixture
def model(tokenizer, tmp_path):
    """A folder with the tiny policy and the template."""
    source = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    source.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def message(role, content):
    return {"role": role, "content": content}


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def load(name, model, tmp_path, prompt, chosen, rejected=None):
    """The rows that a script makes of a usable row and of this one, with its default flags."""
    row = dict(prompt=prompt, completion=chosen, chosen=chosen, rejected=rejected, answer="3")
    row["label"] = True
    # One form in a file: of a column with strings and lists `datasets` makes something else.
    form = text_parts if "[{'type'" in str(row) or "'content': []" in str(row) else str
    good = dict(prompt=[message("user", form("1+2"))], rejected=[message("assistant", form("4"))])
    good["chosen"] = good["completion"] = [message("assistant", form("3"))]
    (tmp_path / "data").mkdir(exist_ok=True)
    for split in ("train", "test"):
        lines = [json.dumps(x) + "\n" for x in (good | {"answer": "3", "label": False}, row)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines))
    script, tokenizer = SCRIPTS[name], AutoTokenizer.from_pretrained(model)
    args = script.Args(dataset=str(tmp_path / "data"), model=model)
    if name in ("reinforce", "ppo_rlhf", "grpo"):
        return script.load_prompts(args, "train", tokenizer)
    loaders = {
        "sft": "load_sequences",
        "rm_bradley_terry": "load_preferences",
        "dpo": "load_preference_pairs",
        "kto": "load_labelled",
    }
    load_rows = getattr(script, loaders[name])
    return load_rows(args, "train", tokenizer, [2])


# --- chat messages --------------------------------------------------------------------------------


def test_text_parts_are_joined(tokenizer):
    ids = encode(tokenizer, [message("user", "1+2"), message("assistant", "3")])
    assert tokenizer.decode(ids) == "1+2=3<eos>"
    in_parts = [message("user", text_parts("1", "+2")), message("assistant", text_parts("3"))]
    assert encode(tokenizer, in_parts) == ids


@EACH
def test_other_parts_are_refused_by_row(name, model, tmp_path):
    prompt = [message("user", [{"type": "image", "url": "x.png"}, *text_parts("1+2")])]
    sides = [[message("assistant", text_parts(text))] for text in "34"]
    with pytest.raises(
        SCRIPTS[name].InputError, match=r"row 1 of train: only parts of type `text`.*'image'"
    ):
        load(name, model, tmp_path, prompt, *sides)


@EACH
@pytest.mark.parametrize("roles", [("human", "gpt"), ("human", "assistant")])
def test_a_role_that_the_template_leaves_out(name, model, roles, tmp_path):
    sides = [[message(roles[1], text)] for text in "34"]
    error = f"row 1 of train: the chat template of {model} leaves out what 'human' says"
    with pytest.raises(SCRIPTS[name].InputError, match=error):
        load(name, model, tmp_path, [message(roles[0], "5+6")], *sides)


@pytest.mark.parametrize("name", ["sft", "rm_bradley_terry", "dpo", "kto"])
def test_an_answer_that_the_template_leaves_out(name, model, tmp_path):
    sides = [[message("gpt", text)] for text in "34"]
    with pytest.raises(SCRIPTS[name].InputError, match="leaves out what 'gpt' says"):
        load(name, model, tmp_path, [message("user", "5+6")], *sides)


@pytest.mark.parametrize("text", ["5+6", "  5+6\n"])
def test_a_template_may_trim(text, tokenizer):
    ids = encode(tokenizer, [message("user", text)], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "5+6="


@EACH
@pytest.mark.parametrize("empty", ["", " \n", [], text_parts("", " "), None])
def test_an_empty_message_is_dropped_and_counted(name, empty, model, tmp_path, capsys):
    form = text_parts if isinstance(empty, list) else str
    prompt, good = [message("user", form("5+6"))], [message("assistant", form("11"))]
    if name in ("reinforce", "ppo_rlhf", "grpo"):
        rows = load(name, model, tmp_path, [message("user", empty)], good, good)
    else:
        rows = load(name, model, tmp_path, prompt, [message("assistant", empty)], good)
    assert len(rows) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 rows; dropped 1 " in printed
    assert "empty" in printed


def test_an_empty_answer_within_a_conversation_is_dropped(model, tmp_path, capsys):
    turns = [message("user", "1+2"), message("assistant", ""), message("user", "5+6")]
    turns.append(message("assistant", "11"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    sft, tokenizer = SCRIPTS["sft"], AutoTokenizer.from_pretrained(model)
    ((prompt, completion),) = sft.load_sequences(
        sft.Args(dataset=str(tmp_path)), "train", tokenizer, [2]
    )
    assert tokenizer.decode(prompt + completion).endswith("5+6=11<eos>")
    assert "1 of 2 rows; dropped 1 with an empty prompt or completion" in capsys.readouterr().out


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


@EACH
def test_prompts_do_not_end_with_an_appended_eos(name, appending, tmp_path):
    model = str(tmp_path / "m")
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").save_pretrained(model)
    appending.chat_template = CHAT
    appending.save_pretrained(model)
    assert AutoTokenizer.from_pretrained(model)("1").input_ids[-1] == 2
    *_, row = load(name, model, tmp_path, "5+6=", "#11", "#12")
    completions = []
    if name == "sft":
        prompt_ids, *completions = row
    elif name == "rm_bradley_terry":
        prompt_ids = row.chosen_ids[:5]
        completions = [row.chosen_ids, row.rejected_ids]  # with their prompts
    elif name == "dpo":
        prompt_ids = row.prompt_ids
        completions = [row.chosen_ids, row.rejected_ids]
    elif name == "kto":
        prompt_ids, *completions = row.sequence
    else:
        prompt_ids = row.ids
    assert [ids.count(2) for ids in completions] == [1] * len(completions)
    assert appending.decode(prompt_ids) == "<bos>5+6="


@pytest.mark.parametrize("name", ["sft", "rm_bradley_terry", "dpo", "kto"])
def test_a_completion_of_several_messages_is_dropped_and_counted(name, model, tmp_path, capsys):
    """It would end for training at its first EOS, and lose the rest without a word."""
    several = [message("assistant", "#"), message("user", "?"), message("assistant", "11")]
    rows = load(name, model, tmp_path, [message("user", "5+6")], several, several[2:])
    assert len(rows) == 1
    assert "1 of 2 rows; dropped 1 with a completion of several messages" in capsys.readouterr().out


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
