"""What goes wrong with texts, tokenizers, files and models, a line each: a row is dropped, a run
ends, a warning is printed. Beside them what is sound, of which nothing is said. Whole runs:
tests/run/test_data.py.
"""

import json
import warnings
from string import ascii_letters

import pytest
from datasets import Dataset, Features, Image, Value
from datasets.exceptions import DatasetGenerationError
from encoded import encode_pair, message
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import metaspace, of_bytes, of_characters, word_pieces

import sft
from common.tokens import encode
from runtime.chats import UnusableRow
from runtime.checks import check_model, check_source, check_tokenizer, check_training
from runtime.model import load_tokenizer
from runtime.rows import load_rows

POLICY = "tiny/arithmetic/policy"


def assert_said(kind, said, call, *arguments):
    """That a call raises, or warns, or says nothing."""
    if kind is UserWarning:
        with pytest.warns(kind, match=said):
            call(*arguments)
    elif kind:
        with pytest.raises(kind, match=said):
            call(*arguments)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(*arguments)


# --- texts ----------------------------------------------------------------------------------------
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}={% endif %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
OPENING = CHAT.replace("m.content }}<", "m.content.split('>')[-1] }}<")
OPENING += "{% if add_generation_prompt %},+{% endif %}"
OTHERWISE = CHAT.replace("}}={%", "}}{{ '=' if loop.last else '+=' }}{%")  # once it is answered
NOTHING = "{% for m in messages if m.role == 'user' %}{{ m.content }}={% endfor %}"
LAST = CHAT.replace("m.content }}<", "m.content[-1:] }}<")
THOUGHTLESS = CHAT.replace("m.content }}<", "m.content.split('</think>')[-1] }}<")
ANY_ROLE = "{% for m in messages %}{{ m.role[:0] + m.content }}{% endfor %}"
NAMED = "{# renamed, trained #}{% for m in messages %}{{ m.content | trim }}{% endfor %}"
CALLS = CHAT.replace("m.content }}<", "m.tool_calls[0].function.arguments | tojson }}<")
TOOL = CHAT.replace("{% endfor", "{{ m.content | tojson if m.role == 'tool' }}{% endfor")
ASKED = [message("user", "5+6")]
EMPTY = "with an empty prompt or completion"
ROLE = "every chat message needs a role and a content"
SPECIAL = "with a special token in the text of a message"
LEFT_OUT = "whose completion the chat template leaves out"
PARTS = [{"type": "text", "text": text} for text in ("", " ")]
IMAGE = {"type": "image", "url": "x.png"}
ALONE = object()  # in the place of a completion: a text without one


def answer(content, **more):
    return [message("assistant", content, **more)]


def calling(arguments, content=""):
    call = {"function": {"name": "f", "arguments": arguments}}
    return answer(content, tool_calls=[call])


TURN = {"role": "user", "content": "5+6"}
SAYS_A_CHAT = [json.dumps(says) for says in ([TURN], TURN, {"messages": [TURN]})]
SAYS_A_CHAT += [" " + json.dumps([{"from": "human", "value": "5+6"}]), str([TURN])]
SAYS_A_CHAT += [json.dumps(SAYS_A_CHAT[0]), str(SAYS_A_CHAT[4])]
THOUGHT = answer("<think>1,3#</think>3")

CASES = [
    # template, prompt, completion, kind, what is said
    *[(None, "5+6=", empty, UnusableRow, EMPTY) for empty in ("", " \n", [], None)],
    *[(CHAT, ASKED, answer(empty), UnusableRow, EMPTY) for empty in (" \n", [], PARTS, None)],
    *[(CHAT, empty, answer("11"), UnusableRow, EMPTY) for empty in ([], [message("user", "")])],
    (None, 12, "11", ValueError, "expected a string or a list of chat messages, found 12"),
    (None, "5+6=", {"role": "user"}, ValueError, "expected a string or a list .*, found {'role'"),
    *[(CHAT, [turn], "3", ValueError, ROLE) for turn in ({"content": "1+2"}, "1+2")],
    (CHAT, [message(None, "1+2")], "3", ValueError, ROLE),
    (CHAT, [message("user", [IMAGE, *PARTS])], "3", ValueError, "only parts of type `text`.*'imag"),
    (None, "<bos>1+2=", "3", ValueError, "two BOS"),
    (
        CHAT,
        [message("human", "5+6")],
        "3",
        ValueError,
        "chat template of .*policy knows no role 'h",
    ),
    (ANY_ROLE, [message("gpt", "3"), *ASKED], "11", ValueError, "knows no role 'gpt'"),
    (ANY_ROLE + "{# gpt #}", [*ASKED, message("gpt", "3"), *ASKED], "11", None, None),
    (CALLS, [*ASKED, message("tool", "4")], calling({"1": 2}), ValueError, "knows no role 'tool'"),
    (TOOL, [*ASKED, message("tool", '"3"')], answer("#3"), None, None),  # with quotes escaped
    (CHAT, [message("system", "9"), *ASKED], "11", ValueError, "leaves out what 'system' says"),
    (NAMED, [message("system", "9"), *ASKED], "11", None, None),
    (CHAT, ASKED, [message("tool", "4"), *answer("3")], UnusableRow, "several messages"),
    (CHAT, ASKED, [message("user", "11")], UnusableRow, "is not an assistant's turn"),
    # A special token would end a turn, or open another's.
    (CHAT, ASKED, answer("11<eos>1"), UnusableRow, SPECIAL),
    (CHAT, [message("user", "5<eos>"), *answer("1"), *ASKED], "11", UnusableRow, SPECIAL),
    (CALLS, ASKED, calling({"1": "<eos>"}), UnusableRow, SPECIAL),
    (CHAT, answer("1+2"), "3", UnusableRow, "prompt ends with an assistant's turn"),
    (CHAT, ASKED, answer(None, tool_calls=[1]), UnusableRow, "a tool call instead of a text"),
    # What is left would be EOS alone: training would teach to answer nothing.
    (NOTHING, ASKED, answer("11"), UnusableRow, LEFT_OUT),
    (LAST, ASKED, answer("1,3#3"), UnusableRow, LEFT_OUT),
    # A thought may go, and an earlier one without a word.
    (THOUGHTLESS, ASKED, THOUGHT, UserWarning, "leaves out the thought of a completion"),
    (THOUGHTLESS, [*ASKED, *THOUGHT, *ASKED], "11", None, None),
    (CHAT, ASKED, THOUGHT, None, None),
    (OTHERWISE, ASKED, answer("11"), UserWarning, r"sampled after '=', trained after '\+='"),
    # The place where the two depart would lie within the answer, or there is none.
    (OPENING, ASKED, answer(",,1"), UnusableRow, "whose answer begins as the chat template's open"),
    (OPENING, ASKED, answer("1,#</think>"), UnusableRow, "whose answer begins as"),
    (CHAT, "5+6=", "11", UserWarning, "--chat: without it string prompts get no chat template"),
    (CHAT, "5+6=11", ALONE, None, None),
    *[(None, says, "11", ValueError, "a text that says a chat") for says in SAYS_A_CHAT],
    (None, "5+6=", SAYS_A_CHAT[0], UserWarning, "a text that says a chat"),
    (CHAT, [message("user", SAYS_A_CHAT[1])], "11", ValueError, "a text that says a chat"),
    (NAMED, ASKED, answer("  3"), UserWarning, "trims the white space before a text"),
    (NAMED, ASKED, answer("3\n"), None, None),
    (NAMED, ASKED, answer("3", name="5"), UserWarning, "reads no 'name'"),
    (NAMED, ASKED, answer("3", name="", tool_calls=[], train=None), None, None),
    (CALLS, ASKED, calling('{"1": 2}'), UserWarning, "of a call as a quoted text"),
    (CALLS, ASKED, calling({"1": 2}), None, None),
    (CHAT, "5+6=<pad>", "11", None, None),  # a template has written it
    *[(None, sound, "11", None, None) for sound in ("5+6=", "[1,2,3]", '{"role":1}', '"11')],
]


@pytest.mark.parametrize(("template", "prompt", "completion", "kind", "said"), CASES)
def test_what_is_said_of_a_text(template, prompt, completion, kind, said, tokenizer):
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<think>", "</think>", *"\"'{}[]: \\\n", *ascii_letters])
    if completion is ALONE:
        assert_said(kind, said, encode, tokenizer, prompt)
    else:
        assert_said(kind, said, encode_pair, tokenizer, prompt, completion, [2])


# --- tokenizers: a text comes back from its ids ---------------------------------------------------
ACCENTS = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
UNKNOWN = "with characters that the tokenizer of --model does not know"
TOKENIZERS = {
    "no token for +": (of_characters(), "1+2=3", UserWarning, r"tokenizer of .* loses \['\+'\]"),
    "nor for umlauts": (of_characters(), "grün", UnusableRow, UNKNOWN),
    "<unk>": (of_characters(unk_token="<unk>"), "1+2", UserWarning, r"loses \['\+'\]"),
    "lower-cases": (of_characters(normalizer=normalizers.Lowercase()), "Ab", UnusableRow, UNKNOWN),
    "strips accents": (of_characters(normalizer=ACCENTS), "né", UnusableRow, UNKNOWN),
    "lines to spaces": (
        of_characters(" ", normalizer=normalizers.Replace("\n", " ")),
        "a\nb",
        UserWarning,
        r"loses \['\\n'\]",
    ),
    "NFKC": (of_characters(normalizer=normalizers.NFKC()), "ﬁne=Ａ²", None, None),
    "NFD": (of_characters("\u0301", normalizer=normalizers.NFD()), "n\u00e9", None, None),
    "bytes": (of_bytes(), "  Ä+1\n\n\t\u22122  日本 ", None, None),
    "space always": (metaspace("always"), " a  b=\nc ", None, None),
    "space first": (metaspace("first"), "a b=\n1", None, None),
    "word pieces": (word_pieces(), "unaffable 1+2=1", None, None),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_what_is_said_of_a_tokenizer(case, recwarn):
    tokenizer, text, kind, said = TOKENIZERS[case]
    assert_said(kind, said, encode, tokenizer, text)
    if kind is UserWarning:  # once, not for each row
        assert_said(None, None, encode, tokenizer, text)


# --- what is trained begins where sampling begins -------------------------------------------------
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["x", " x", "  return a\n  b", "\n\nx"])
def test_an_answer_that_begins_with_white_space_begins_behind_the_header(text):
    merges = [("Ċ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]  # of new lines and spaces
    tokenizer = of_bytes(merges, ["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turns in (ASKED, [*ASKED, *answer("  1"), *ASKED]):
        prompt_ids, ids = encode_pair(tokenizer, turns, answer(text), [end])
        assert prompt_ids == encode(tokenizer, turns, add_generation_prompt=True)
        assert ids == [*tokenizer(text).input_ids, end]


def test_an_answer_that_would_get_a_space_is_dropped():
    tokenizer = metaspace("always", [(":", "x")], ["<eos>"])
    tokenizer.chat_template = CHAT.replace("}}=", "}}:")
    end = tokenizer.convert_tokens_to_ids("<eos>")
    with pytest.raises(UnusableRow, match="whose answer is another text when it is tokenised by"):
        encode_pair(tokenizer, ASKED, answer("x1"), [end])
    _, ids = encode_pair(tokenizer, ASKED, answer("y1"), [end])  # no token of both
    assert tokenizer.decode(ids) == "y1<eos>"


# --- files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "row"), [("first.csv", "1,2, 3"), ("quotes.csv", '1,"a \\"b\\", c"')]
)
def test_a_field_without_a_column_is_not_left_out(name, row, tmp_path):
    (tmp_path / name).write_text(f"prompt,completion\n{row}\n4,5\n")
    with pytest.raises(DatasetGenerationError):
        load_rows(str(tmp_path / name), None, "train", set())


def test_a_field_too_many_in_each_row_moves_no_column(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.csv").write_text("prompt,answer\nx,2,3\ny,5,6\n")
    with pytest.raises((ValueError, DatasetGenerationError)):
        load_rows(str(tmp_path), None, "train", set())


def test_a_comma_at_the_end_of_each_line_moves_no_column(tmp_path):
    (tmp_path / "train.csv").write_text("prompt,completion,source\n1,2,a,\n3,4,b,\n")
    rows = load_rows(str(tmp_path), None, "train", set())
    assert rows[1] == {"prompt": 3, "completion": 4, "source": "b"}


def test_pictures_are_not_read(tmp_path):
    features = Features({"prompt": Value("string"), "images": [Image()]})
    rows = [{"prompt": "1+2=", "images": [{"bytes": b"no picture", "path": None}]}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.warns(UserWarning, match=r"pictures and sound are not read: \['images'\]"):
        assert load_rows(str(tmp_path), None, "train", {"prompt"})[0] == {"prompt": "1+2="}


# --- models ---------------------------------------------------------------------------------------
def test_quantised_weights(tmp_path):
    config = dict(model_type="llama", quantization_config=dict(quant_method="fp8"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"--model, .*: {tmp_path} is quantised"):
        check_source(str(tmp_path))


def test_two_tokenizers_of_one_vocabulary(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ think }}"
    tokenizer.save_pretrained(tmp_path)
    folder, plain = str(tmp_path), AutoTokenizer.from_pretrained(POLICY)
    assert_said(None, None, check_tokenizer, folder, load_tokenizer(folder, '{"think": false}'))
    assert_said(None, None, check_tokenizer, POLICY, tokenizer)  # it has no template
    said = "reads chats in the template of --model, not its own"
    assert_said(UserWarning, said, check_tokenizer, folder, plain)


def test_adapters_cannot_train_an_end_that_is_like_other_tokens(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    args = sft.Args(lora_rank=4, output_dir=str(tmp_path))
    assert_said(None, None, check_training, args, model, 2)
    embedding = model.get_input_embeddings().weight.data
    embedding[2] = embedding[3]
    said = "--lora-rank: token 2, which ends texts, is untrained"
    assert_said(UserWarning, said, check_training, args, model, 2)


def test_longrope_ends_at_its_original_length(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    nothing = {"missing_keys": (), "unexpected_keys": ()}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "x"}}):
        model.config.rope_parameters = parameters
        check_model(model, nothing, tokenizer, 32)
        with pytest.raises(ValueError, match="fewer positions than the 33 of the --max flags: 32"):
            check_model(model, nothing, tokenizer, 33)
