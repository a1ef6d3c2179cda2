"""What no library would notice: weights, tokenizers and rows that are not what was asked for."""

import copy
import json
import re

import pytest
import torch
from datasets import Dataset
from encoded import message
from models import save_model
from runs import write_splits
from scripts import ONE_PER_LOADER, REVIEWS, SPECS, WITH_ROLLOUTS, short_flags, with_flag
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer, BertConfig, LlamaConfig

import dpo
import grpo
import rm_bradley_terry
import sft
from runtime.chats import UnusableRow
from runtime.rows import encode_rows, load_rows

POLICY = "tiny/arithmetic/policy"
CPU = torch.device("cpu")


def row_of(prompt, completion, **columns):
    """A row that every script can use."""
    row = dict(prompt=prompt, completion=completion, label=True, answer="3")
    return row | dict(chosen=completion, rejected=f"{completion}0") | columns


def load(name, rows, tmp_path, tokenizer, **flags):
    """The split of these rows by the loader of a script."""
    script, more = SPECS[name].module, [[2]] if SPECS[name].kind == "rows" else []
    args = script.Args(dataset=write_splits(tmp_path / "data", rows), **flags)
    return getattr(script, SPECS[name].loader)(args, "train", tokenizer, *more)


def fails(name, tmp_path, error, message, **flags):
    """Run a script; it must end with this error, and leave no folder."""
    script, output_dir = SPECS[name].module, tmp_path / "runs"
    args = script.Args(**SPECS[name].short_flags | flags | {"output_dir": str(output_dir)})
    with pytest.raises(error, match=message):
        script.main(args)
    assert [*output_dir.glob("*")] == []


def save(folder, tokenizer, without=None):
    """The tiny policy in a folder, with another tokenizer, or without one of its weights."""
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    weights = model.state_dict()
    if without:
        del weights[without]
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- models -------------------------------------------------------------------------------------
def test_weights_that_are_missing_are_not_made_up_nor_others_left_out(tokenizer, tmp_path):
    of_reviews = AutoTokenizer.from_pretrained("tiny/reviews/policy")
    folder = save(tmp_path / "model", tokenizer, without="model.norm.weight")
    with pytest.raises(ValueError, match=r"not those of LlamaForCausalLM: .*'model.norm.weight'"):
        grpo.load_model(AutoModelForCausalLM, folder, tokenizer, 10)
    with pytest.raises(ValueError, match=r"'missing_keys': {'score.weight'}"):
        grpo.load_model(AutoModelForSequenceClassification, POLICY, tokenizer, 10)
    with pytest.raises(ValueError, match=r"'unexpected_keys': {'score.weight'}"):
        grpo.load_model(AutoModelForCausalLM, "tiny/reviews/reward_model", of_reviews, 10)
    args = rm_bradley_terry.Args(model=folder)  # it may add a head, and nothing else
    with pytest.raises(ValueError, match=r"not those of Llama.*'model.norm.weight'"):
        rm_bradley_terry.load_classifier(args, tokenizer, [2], CPU)


def test_a_tokenizer_larger_than_the_embedding(tokenizer, tmp_path):
    tokenizer.add_tokens([f"word{i}" for i in range(50)])
    folder = save(tmp_path / "model", tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has more tokens than the embedding"):
        grpo.load_model(AutoModelForCausalLM, folder, tokenizer, 10)


def test_the_positions_of_a_text_in_a_model_of_images_too(tokenizer, monkeypatch):
    """Such as Gemma 3's: they stand in the configuration of its text."""

    def get_text_config(config, **options):
        of_text = copy.copy(config)
        of_text.max_position_embeddings = 8
        return of_text

    monkeypatch.setattr(LlamaConfig, "get_text_config", get_text_config)
    grpo.load_model(AutoModelForCausalLM, POLICY, tokenizer, 8)
    with pytest.raises(ValueError, match="has fewer positions than the 9 of the --max flags"):
        grpo.load_model(AutoModelForCausalLM, POLICY, tokenizer, 9)


# --- whole runs -----------------------------------------------------------------------------------
def failing_runs():
    """Script, rows of its data set if they are others, flags, and what is said."""
    flags = dict(model=POLICY, dataset="tiny/arithmetic/prompts")
    flags["reward_model"] = "tiny/reviews/reward_model"
    for name in with_flag("reward_model"):
        yield name, None, flags, "reward_model is not that of --model"
    for name in [*with_flag("reference"), *with_flag("teacher")]:  # those of the other task
        is_reviews = "reviews" in SPECS[name].module.Args.model
        other = "tiny/arithmetic/policy" if is_reviews else "tiny/reviews/policy"
        flags = short_flags(name, reference=other, teacher=other)
        yield name, None, flags, f"tokenizer of {other} is not that of --model"
    for name in SPECS:
        each = [dict(max_length=129), dict(max_new_tokens=126)]
        if name in WITH_ROLLOUTS:
            each = [dict(max_prompt_length=64, max_new_tokens=65)]
        for flags in each:
            if short_flags(name, **flags):
                yield name, None, flags, "has fewer positions than"
    for name in ONE_PER_LOADER:
        rows = [{"question": "1+2=", "reply": "#3"}]
        said = r"no column .* in --dataset: it has \['question', 'reply'\]"
        yield name, rows, {}, said
    # Another column, or the beginning of two conversations, is not taken instead of a typed one.
    scripts = dict(prompt="kto", completion="kto", label="kto", chosen="dpo", answer="grpo")
    for column, name in (scripts | dict(margin="rm_bradley_terry")).items():
        yield name, [row_of("1+2=", "#3")], {f"{column}_column": "typo"}, "no column .*typo"


@pytest.mark.parametrize(("name", "rows", "flags", "said"), failing_runs())
def test_a_run_that_fails_at_its_start(name, rows, flags, said, tmp_path):
    if rows:
        flags = flags | {"dataset": write_splits(tmp_path / "data", rows)}
    fails(name, tmp_path, ValueError, said, **flags)


@pytest.mark.parametrize("name", with_flag("reward_model"))
@pytest.mark.parametrize("num_labels", [2, "BERT"])
def test_a_reward_model_of_another_kind(name, num_labels, tmp_path):
    config = AutoConfig.from_pretrained("tiny/reviews/policy", num_labels=2)
    if num_labels == "BERT":
        config = BertConfig(vocab_size=200, num_hidden_layers=1, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config)
    folder = save_model(tmp_path / "model", model, "tiny/reviews/policy")
    flags = REVIEWS | dict(reward_model=folder)
    fails(name, tmp_path, ValueError, f"{folder}: no `score` head", **flags)


# --- rows ---------------------------------------------------------------------------------------
# Rows of completions: tests/algorithms/test_rows.py.
@pytest.mark.parametrize("name", [name for name in ONE_PER_LOADER if name in WITH_ROLLOUTS])
def test_prompts_that_do_not_fit_are_dropped_and_counted(name, tokenizer, tmp_path, capsys):
    rows = [row_of("1+2=", "#3"), row_of("", "#3"), row_of("1+2+3+4+5=", "#15")]
    rows += [row_of("2+2=", ""), row_of(None, "#4")]
    assert len(load(name, rows, tmp_path, tokenizer, max_prompt_length=5)) == 2
    printed, first = capsys.readouterr().out.splitlines()
    assert first == "    '<bos>1+2='"  # as the model meets it
    assert re.match(r"train: 2 rows, dropped \{", printed)
    assert re.search(r"'longer than --max-[a-z-]+': 1[,}]", printed)
    assert sum(map(int, re.findall(r"empty[^']*': (\d)[,}]", printed))) == 2
    rest = "not read: ['completion'" if name == "distill" else "for reward functions: {'completion'"
    assert f"; longest 11 tokens; {rest}" in printed  # with BOS


def test_desirable_completions_are_counted(tokenizer, tmp_path, capsys):
    rows = [row_of("1+2=", "#3"), row_of("1+2=", "#4", label=False)]
    load("kto", rows, tmp_path, tokenizer)
    assert "train: 1 of them desirable\n" in capsys.readouterr().out


# --- forms in which data come --------------------------------------------------------------------
def test_a_single_file(tmp_path):
    rows = [row_of(f"{i}+2=", "#3") for i in range(4)]
    table = Dataset.from_list(rows)
    table.to_json(tmp_path / "rows.jsonl")
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for kind in ("jsonl", "json", "csv", "parquet"):
        dataset = str(tmp_path / f"rows.{kind}")
        loaded = load_rows(dataset, None, "train[50%:]", {"prompt"})
        assert loaded["prompt"] == ["2+2=", "3+2="]


BESIDE = ("train_unfiltered.jsonl", "train.old.jsonl", "train.jsonl.bak", "eval.jsonl")


@pytest.mark.parametrize(
    ("files", "dataset"),
    [
        (("train.jsonl", "test.jsonl", *BESIDE, "old/train.jsonl"), "."),
        (("train.csv", "test.json", "retrain.csv"), "."),
        (("data/train-00000-of-00001.parquet",), "."),  # as on the hub
        (("rows[v2].jsonl", "rowsv.jsonl", "rows2.jsonl"), "rows[v2].jsonl"),
        (("a[bc]/train.jsonl", "ab/train.jsonl"), "a[bc]"),
    ],
)
def test_the_files_that_are_named_and_no_others(files, dataset, tmp_path):
    """`datasets` alone takes each file with the split in its name, and `[v2]` for a pattern."""
    for number, name in enumerate(files):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        table = Dataset.from_list([row_of(f"{number}+2=", "#3")])
        writer = {".csv": table.to_csv, ".parquet": table.to_parquet}
        writer.get(path.suffix, table.to_json)(path)
    dataset = str(tmp_path / dataset)
    for number, split in enumerate(("train[:100%]", "test")):
        if split == "train[:100%]" or any("test" in file for file in files):
            assert load_rows(dataset, None, split, {"prompt"})["prompt"] == [f"{number}+2="]


def test_text_is_trained_without_a_prompt(tokenizer, tmp_path):
    """Stop ids within it are of its turns, or documents."""
    expected = ["<bos>1+2=#3<eos>", "<bos>1+2=#3<eos>", "<bos>1+2=<eos>#3<eos>4<eos>"]
    texts = ["1+2=#3", "1+2=#3<eos>", "1+2=<eos>#3<eos>4"]
    rows = load("sft", [{"text": text} for text in texts], tmp_path, tokenizer)
    for [(ids, is_learned)], text in zip(rows, expected, strict=True):
        assert list(is_learned) == [0] + [1] * (len(ids) - 1)  # all but the BOS
        assert tokenizer.decode(ids) == text


TURNS = [message("user", "1+2="), message("assistant", "#3")]
OTHER = [TURNS[0], message("assistant", "#4")]


def pairs_of(row, **flags):
    return sft.to_turns(sft.Args(**flags), row)


def test_pairs_of_dialogues_as_text():
    """hh-rlhf; the answers begin alike, and hold the marker that only one of them has."""
    before = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: 1+2?\n\nAssistant:"
    row = dict(chosen=before + " it is 3", rejected=before + " it is 4. Assistant: or 5")
    expected = (before, " it is 3", " it is 4. Assistant: or 5")
    assert dpo.to_pair(dpo.Args(), row) == expected


@pytest.mark.parametrize(
    "row",
    [
        dict(chosen="Assistant: 3", rejected=None),
        dict(chosen=TURNS, rejected=None),
        dict(chosen=TURNS[1:], rejected=OTHER[1:]),
        dict(prompt=None, chosen="3", rejected="4"),
    ],
)
def test_pairs_without_a_side_or_a_prompt_are_dropped(row, tokenizer, tmp_path):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    whole = row_of("1+2=", "#3")
    if isinstance(row["chosen"], list):
        whole |= dict(prompt=None, chosen=TURNS, rejected=OTHER)
    assert len(load("dpo", [whole, row], tmp_path, tokenizer)) == 1


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([message("assistant", "hi"), *TURNS], 1),
        ([*TURNS, *OTHER], 2),
        ([TURNS[0], message("assistant", "#3", weight=0), *OTHER], 1),  # OpenAI's
        ([TURNS[0], message("assistant", "#3", weight=0)], "only ['user', 'assistant']"),
        ([], "with no assistant's reply to learn, only []"),
        (None, "with no assistant's reply to learn, only []"),
        ([message("assistant", "hi")], "only ['assistant']"),
        ([TURNS[0], message("gpt", "#3")], "only ['user', 'gpt']"),
        ("[]", ValueError),
    ],
)
def test_which_turns_are_learned(turns, expected):
    if expected is ValueError:
        with pytest.raises(ValueError, match="`messages` is not a list of chat messages: '"):
            pairs_of(dict(messages=turns))
    elif isinstance(expected, str):  # why the row is dropped
        with pytest.raises(UnusableRow, match=re.escape(expected)):
            pairs_of(dict(messages=turns))
    else:
        pairs = pairs_of(dict(messages=turns, text="1+2=#3"))
        assert len(pairs) == expected and pairs[-1] == (turns[:-1], turns[-1:])
        assert pairs_of(dict(messages=turns), train_on_prompt=True) == pairs[-1:]


def test_a_margin_that_is_used_is_printed(tokenizer, tmp_path, capsys):
    rows = [row_of("1+2=", "#3", margin=0.5)]
    load("rm_bradley_terry", rows, tmp_path, tokenizer)
    assert "train: margins m from the column `margin`\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_a_prompt_becomes_a_chat_and_an_empty_one_is_dropped(name, tokenizer, tmp_path):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}#{% endif %}"
    rows = [row_of(prompt, "#3", solution="three") for prompt in ("", "1+2=")]
    for row in rows:
        del row["answer"]  # two would be an error
    flags = short_flags(name, chat=True, answer_column="solution")
    (prompt,) = load(name, rows, tmp_path, tokenizer, **flags)
    assert prompt.text == TURNS[:1] and tokenizer.decode(prompt.ids) == "1+2=#"
    assert name == "distill" or prompt.columns["answer"] == "three"


# --- what would be trained on otherwise than it stands in the file --------------------------------
PART = [{"type": "text", "text": "1+2="}]
DIALOGUE = "\n\nHuman: 1+2\n\nAssistant: "


PAIR = dict(chosen=f"{DIALOGUE}3", rejected=f"{DIALOGUE}4")
NO_COLUMN = "no column completion in --dataset"
NO_STRING = "in .'messages'. the content of"


def conversation(*turns, **columns):
    return dict(messages=[*turns], **columns)


@pytest.mark.parametrize(
    ("name", "rows", "flags", "error"),
    [
        # `datasets` decodes such a string: `"3"` would lose its quotes, and `3` be a number.
        ("sft", [conversation(message("user", PART), message("assistant", '"3"'))], {}, NO_STRING),
        ("dpo", [PAIR], dict(chat=True), "--chat: "),
        ("dpo", [dict(prompt=None, chosen="3", rejected="4")], dict(chat=True), "no row is left"),
        # A column that was typed comes before both.
        ("sft", [conversation(*TURNS, question="1")], dict(prompt_column="question"), NO_COLUMN),
        ("sft", [dict(text="1+2=#3", question="1")], dict(prompt_column="question"), NO_COLUMN),
        ("sft", [dict(text="1+2=#3")], dict(chat=True), "--chat: a column `text` is learned as it"),
        (
            "grpo",
            [row_of("1+2=", "#3", x=4)],
            dict(answer_column="x"),
            "New column name answer already",
        ),
    ],
)
def test_rows_that_are_refused(name, rows, flags, error, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=error):
        load(name, rows, tmp_path, tokenizer, **flags)


def test_columns_for_reward_functions_are_named(tokenizer, tmp_path, capsys):
    """With what `datasets` takes them for."""
    (tmp_path / "train.csv").write_text("answer,x\n01234,TRUE\n,FALSE\n")
    rows = load_rows(str(tmp_path), None, "train", {"answer"})
    encode_rows(rows, lambda row: (row, [4]), tokenizer, 9, reader="reward functions")
    types = {"answer": "double", "x": "bool"}
    assert f"for reward functions: {types}" in capsys.readouterr().out


def test_of_two_files_of_a_split_none_is_taken(tmp_path):
    for kind in ("jsonl", "csv"):
        (tmp_path / f"train.{kind}").write_text("prompt\n1\n")
    with pytest.raises(ValueError, match=r"--dataset: .* several files, .*train.jsonl.*train.csv"):
        load_rows(str(tmp_path), None, "train[:1]", set())


def test_rows_that_look_like_an_agents_log_are_rows(tmp_path):
    row = dict(id="1", source="a", model="b", system_prompt="c", messages=TURNS)
    data = write_splits(tmp_path, [row])
    assert load_rows(data, None, "train", set())[0] == row
    assert load_rows(f"{data}/train.jsonl", None, "train", set())[0] == row
