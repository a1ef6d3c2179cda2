"""What users of such programs have reported: inputs that would train on something else in silence,
or end a run late. A row each.
"""

import re
import sys
import warnings

import pytest
from datasets import Dataset, Features, Image, Value
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, TokenizersBackend

import runtime.processes
import sft
from common.tokens import encode, load_tokenizer
from runtime.checks import check_model, check_source, check_tokenizer, check_training, checked_files
from runtime.rows import load_rows
from runtime.saving import rollout_row
from grpo_tools import encode_reply, text_ids

POLICY = "tiny/arithmetic/policy"


# --- files ----------------------------------------------------------------------------------------
FILES = {
    "cut.jsonl": ('{"prompt": "1"}\n{"prompt": "2"', "line 2: Expecting"),
    "python.jsonl": ("{'prompt': '1'}\n", "line 1: Expecting property name"),
    "commas.jsonl": ('{"prompt": "1"},\n{"prompt": "2"}\n', "line 1: Extra data"),
    "empty.jsonl": ("", "the file is empty"),
    "header.csv": ("prompt,completion\n", "no data"),
    "first.csv": ("prompt,completion\n1,2, 3\n4,5\n", "Length of header"),
    "later.csv": ("prompt,completion\n4,5\n1,2, 3\n", "Expected 2 fields in line 3, saw 3"),
    "quotes.csv": ('prompt,completion\n1,"a \\"b\\", c"\n', "Length of header"),
    "latin1.jsonl": ('{"prompt": "1"}\n{"prompt": "é"}\n'.encode("latin1"), "line 2: 'utf-8'"),
    "latin1.csv": ("prompt\n1\né\n".encode("latin1"), "line 3: 'utf-8'"),
    "utf16.jsonl": ('{"prompt": "1"}\n'.encode("utf16"), "line 1: 'utf-8'"),
    "lines.txt": ("a document\n", "lines of text"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_rows_is_named_with_its_line(name, tmp_path):
    text, message = FILES[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"--dataset .*{name}: (.*{re.escape(message)})"):
        load_rows(str(tmp_path / name), None, "train", set())


def test_a_comma_at_the_end_of_each_line_moves_no_column(tmp_path):
    (tmp_path / "train.csv").write_text("prompt,completion,source\n1,2,a,\n3,4,b,\n")
    rows = load_rows(str(tmp_path), None, "train", set())
    assert rows[1] == {"prompt": 3, "completion": 4, "source": "b"}


@pytest.mark.parametrize("file", ["data/train.csv", "train.tsv"])
def test_a_field_too_many_is_an_error_wherever_the_file_is(file, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    separator = "," if path.suffix == ".csv" else "\t"
    path.write_text("prompt,answer\nx,2,3\ny,5,6\n".replace(",", separator))
    dataset = path if path.suffix == ".tsv" else tmp_path
    with pytest.raises(ValueError, match=r"more fields than there are columns|Length of header"):
        load_rows(str(dataset), None, "train", set())


def test_pictures_are_not_read(tmp_path):
    features = Features({"prompt": Value("string"), "images": [Image()]})
    rows = [{"prompt": "1+2=", "images": [{"bytes": b"no picture", "path": None}]}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "train.parquet")
    with pytest.warns(UserWarning, match=r"pictures and sound are not read: \['images'\]"):
        assert load_rows(str(tmp_path), None, "train", {"prompt"})[0] == {"prompt": "1+2="}


def test_a_pointer_instead_of_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors is a pointer of Git LFS"):
        check_source(str(tmp_path))


# --- chat templates -------------------------------------------------------------------------------
NAMED = "{# renamed, trained #}{% for m in messages %}{{ m.content | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (dict(content="  3"), "trims the white space before a text"),
        (dict(content="3", name="5"), "reads no 'name'"),
        (dict(content="3", train=False), "reads no 'train'"),
        (dict(content="3", name="", tool_calls=[], train=None), None),
        (dict(content="3\n"), None),
    ],
)
def test_what_a_template_loses_is_said(message, said, tokenizer, recwarn):
    tokenizer.chat_template = NAMED
    tokenizer.add_tokens([" ", "\n"])
    encode(tokenizer, [{"role": "user", "content": "1"}, {"role": "assistant"} | message])
    found = "".join(str(warning.message) for warning in recwarn)
    assert said in found if said else not found


CALLS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
    "{% elif m.role == 'assistant' %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_calls_that_would_be_learned_otherwise(tokenizer):
    """A call as OpenAI writes it, a special token in one, and a reply that a template drops."""
    tokenizer.chat_template = CALLS
    tokenizer.add_tokens([*'"{}: \\'])
    user = {"role": "user", "content": "1+2="}
    call = {"function": {"name": "f", "arguments": '{"1": 2}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.warns(UserWarning, match="writes the arguments of a call as a quoted text"):
        encode(tokenizer, [user, turn])
    call["function"]["arguments"] = {"1": 2}
    with pytest.raises(ValueError, match="knows no role 'tool'"):
        encode(tokenizer, [user, {"role": "tool", "content": "4"}, turn])
    call["function"]["arguments"] = {"1": "<eos>"}
    with pytest.raises(ValueError, match="with a special token in the text of a message"):
        encode(tokenizer, [user, turn])


@pytest.mark.filterwarnings("error")
def test_two_tokenizers_of_one_vocabulary(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ think }}"
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer(str(tmp_path), load_tokenizer(str(tmp_path), '{"think": false}'))
    check_tokenizer(POLICY, tokenizer)  # it has no template
    with pytest.warns(UserWarning, match="reads chats in the template of --model, not its own"):
        check_tokenizer(str(tmp_path), AutoTokenizer.from_pretrained(POLICY))


def test_a_source_that_is_no_model(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_text("GGUF")
    monkeypatch.chdir(tmp_path)
    for source in ("model.gguf", "tiny/arithmetic/base", "nothing"):
        with pytest.raises(ValueError, match=rf"\n--model, .*: {source} is no hub name, and no fo"):
            load_tokenizer(source)


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


# --- tokenizers -----------------------------------------------------------------------------------
def llama_2():
    """One that falls back to bytes, and puts a space before a text."""
    vocabulary = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    vocabulary |= {character: 257 + i for i, character in enumerate("▁0123456789+=;")}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return TokenizersBackend(tokenizer_object=tokenizer, unk_token="<unk>")


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
    vocabulary = {token: i for i, token in enumerate([*"0123456789=;", "=8"])}
    merging = TokenizersBackend(tokenizer_object=Tokenizer(BPE(vocabulary, [("=", "8")])))
    assert text_ids(merging, "8=5", vocabulary["="]) == merging("8=5").input_ids == [8, 10, 5]


def test_text_for_the_log_never_ends_a_run():
    tokenizer = llama_2()
    smile = tokenizer("\U0001f642").input_ids[1:]
    for ids in ([*smile, 259], [*smile, smile[0], 259], [*smile, *smile[:2], 259, 260]):
        (row,) = rollout_row(tokenizer, [([257], ids)], {})["completions"]
        assert len(row["tokens"]) == len(ids) and row["tokens"][-1] in "012"


def test_bytes_that_are_no_character_are_read_once():
    """Of a tokenizer of bytes; a stream of text would read all of them again at each of them."""
    vocabulary = {token: i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    model = Tokenizer(BPE(vocabulary, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer = TokenizersBackend(tokenizer_object=model)
    smile = tokenizer("\U0001f642").input_ids
    assert len(smile) == 4
    for ids in (smile[:1] * 48, smile[:1] * 5 + smile, smile[:1] * 32 + smile, smile[:2] + smile):
        (row,) = rollout_row(tokenizer, [(smile, ids)], {})["completions"]
        assert len(row["tokens"]) == len(ids) and "".join(row["tokens"]) == tokenizer.decode(ids)


def test_a_cache_that_cannot_be_written_is_named():
    said = r"--dataset x: PermissionError: .* denied: '/cache/rows\.lock'"
    with pytest.raises(ValueError, match=said), checked_files("x", []):
        raise PermissionError(13, "Permission denied", "/cache/rows.lock")


def test_other_ranks_print_in_every_locale(monkeypatch):
    monkeypatch.setattr(runtime.processes, "RANK", 1)
    monkeypatch.setattr("sys.stdout", sys.stdout)
    with warnings.catch_warnings():
        runtime.processes.join_processes()
    assert sys.stdout.errors == "backslashreplace"  # of a character that latin-1 lacks


# --- models ---------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("error")
def test_adapters_cannot_train_an_end_that_is_like_other_tokens():
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    check_training(sft.Args(lora_rank=4), model, stop_id=2)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    embedding = model.get_input_embeddings().weight.data
    embedding[2] = embedding[3]
    with pytest.warns(UserWarning, match="--lora-rank: token 2, which ends texts, is untrained"):
        check_training(sft.Args(lora_rank=4), model, stop_id=2)


def test_longrope_ends_at_its_original_length(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    nothing = {"missing_keys": (), "unexpected_keys": ()}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "x"}}):
        model.config.rope_parameters = parameters
        check_model(model, nothing, tokenizer, 32)
        with pytest.raises(ValueError, match="fewer positions than the 33 of the --max flags: 32"):
            check_model(model, nothing, tokenizer, 33)
