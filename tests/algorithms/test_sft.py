"""sft.py: the loss, what is learned and what is not, and how rows become tokens."""

import shutil
from functools import partial
from itertools import groupby

import algorithms
import pytest
import torch
from algorithms import assert_same_gradient, set_weights
from encoded import message
from reviews import batch_rows, plain_model
from spies import spy_on, watch_steps
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import sft
from runs import metrics_of, read, write_splits

BASE = "tiny/arithmetic/base"
run = partial(algorithms.run, "sft")


def plain_loss(model, tokenizer, rows, train_on_prompt):
    """The mean cross-entropy of the rows' tokens, one row at a time."""
    total, count = 0.0, 0
    for row in rows:
        ids = tokenizer(row["prompt"] + row["completion"] + "<eos>").input_ids
        start = 1 if train_on_prompt else len(tokenizer(row["prompt"]).input_ids)
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
        total = total + cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum")
        count += len(ids) - start
    return total / count


# --- the loss -----------------------------------------------------------------------------------
@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_losses_are_the_token_means_of_plain_cross_entropy(tmp_path, monkeypatch, train_on_prompt):
    """Of two steps, with their gradients, and of the held-out rows after them."""
    steps = watch_steps(monkeypatch)
    sampled, tokenizer = spy_on(sft, monkeypatch, "generate"), AutoTokenizer.from_pretrained(BASE)
    flags = dict(eval_split="test", eval_rows=20, eval_samples=15, micro_batch_size=3)
    flags |= dict(max_new_tokens=6, temperature=0.5, train_on_prompt=train_on_prompt)
    run_dir = run(tmp_path, epochs=0.5, **flags)
    _, *logged = metrics_of(run_dir)
    model, rows, last = plain_model(BASE), read("tiny/arithmetic/sft/train.jsonl"), logged[-1]
    for number, (weights, gradient, _) in enumerate(steps):
        set_weights(model, weights)
        batch = [rows[i] for i in batch_rows(number, 8, 32, seed=1)]
        expected = plain_loss(model, tokenizer, batch, train_on_prompt)
        assert logged[number]["objective/loss"] == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        assert_same_gradient(gradient, [p.grad for p in model.parameters()])
    held_out = read("tiny/arithmetic/sft/test.jsonl")[:20]
    expected = plain_loss(plain_model(run_dir), tokenizer, held_out, train_on_prompt)
    assert last["eval/loss"] == pytest.approx(expected.item(), rel=1e-4)
    _, (sequences, _) = sampled[-1]
    prompts, completions = zip(*sequences, strict=True)
    # Sampled from whole prompts in any case.
    assert [*prompts] == [tokenizer(row["prompt"]).input_ids for row in held_out[:15]]
    cut_off = sum(completion[-1] != 2 for completion in completions)
    assert last["eval/truncated_fraction"] == pytest.approx(cut_off / 15) and 0 < cut_off < 15
    assert last["eval/length_mean"] == pytest.approx(sum(map(len, completions)) / 15)


# --- conversations: more on rows to tokens in test_rows.py --------------------------------------
# The second drops all but the last character of earlier answers, as Qwen3's template does thoughts.
KEEPS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}={% else %}"
    "#{{ m['content'] }}<eos>{% endif %}{% endfor %}"
)
DROPS = KEEPS.replace("#{{ m['content']", "#{{ m['content'] if loop.last else m['content'][-1:]")


def conversation(*texts):
    return [message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


FOUR = conversation("1+2", "1,3", "3+4", "4,7")
DATA = [FOUR, conversation("5+1", "6"), conversation("1+2", "3", "1", "1", "2+2", "2,4"), FOUR[:2]]


def load(folder, template, conversations, **flags):
    """Their rows, and of each text what is given, learned, given, learned ..."""
    write_splits(folder, [{"messages": turns} for turns in conversations])
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = template
    args = sft.Args(dataset=str(folder), **flags)
    rows = [*sft.load_demonstrations(args, "train", tokenizer, [2])]

    def parts(text):
        pairs = groupby(zip(text.is_learned, text.ids, strict=True), key=lambda pair: pair[0])
        found = [(is_learned, [token for _, token in pairs]) for is_learned, pairs in pairs]
        assert [is_learned for is_learned, _ in found] == [0, 1] * (len(found) // 2)
        return [tokenizer.decode(ids) for _, ids in found]

    return rows, [[parts(text) for text in row] for row in rows]


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (KEEPS, {}, [["1+2=", "#1,3<eos>", "3+4=", "#4,7<eos>"]]),
        # A text of its own, if the template has changed an earlier turn.
        (DROPS, {}, [["1+2=", "#1,3<eos>"], ["1+2=#3<eos>3+4=", "#4,7<eos>"]]),
        (KEEPS, dict(train_on_prompt=True), [["1+2=#1,3<eos>3+4=", "#4,7<eos>"]]),
        (KEEPS, dict(max_length=17), [["1+2=", "#1,3<eos>"]]),
        (KEEPS, dict(max_length=18), [["1+2=", "#1,3<eos>", "3+4=", "#4,7<eos>"]]),
    ],
)
def test_a_conversation_is_one_text_of_which_the_answers_are_learned(
    template, flags, expected, tmp_path, capsys
):
    _, texts = load(tmp_path / "data", template, [FOUR], **flags)
    assert texts == [expected]
    is_lost = flags == dict(max_length=17)
    printed = "train: of these rows, turns dropped {'longer than --max-length': 1}\n"
    assert (printed in capsys.readouterr().out) == is_lost


def test_a_conversation_keeps_the_turns_that_are_usable(tmp_path, capsys):
    turns = conversation("1", "", "2", "3", "4", "5")
    turns[1]["tool_calls"] = [{"name": "add"}]
    _, texts = load(tmp_path / "data", KEEPS, [turns, conversation("1", ""), FOUR[:2]])
    assert texts[0] == [["1=#<eos>2=", "#3<eos>", "4=", "#5<eos>"]]
    printed = capsys.readouterr().out
    reason = "with a tool call instead of a text, which the template leaves out"
    assert f"train: of these rows, turns dropped {{{reason!r}: 1}}" in printed
    assert "train: 2 rows, dropped {'with an empty prompt or completion (in a csv" in printed


def test_a_turn_of_weight_0_is_read_and_not_learned(tmp_path):
    turns = conversation("1", "2", "3", "4", "5", "6")
    turns[3]["weight"] = 0
    (row,), (texts,) = load(tmp_path / "data", KEEPS, [turns])
    assert texts == [["1=", "#2<eos>", "3=#4<eos>5=", "#6<eos>"]]
    ((prompt, completion),), (is_learned,) = sft.loss_sequences(sft.Args(), [row])
    assert prompt + completion == list(row[0].ids) and len(prompt) == 2
    assert is_learned == list(row[0].is_learned[2:])
    assert row[0].prompt() == list(row[0].ids[:-3])


def test_a_step_learns_all_turns_of_its_conversations(tmp_path, monkeypatch):
    """As if each turn were a row with a prompt of its own."""
    steps, folders = watch_steps(monkeypatch), []
    load(tmp_path / "data", KEEPS, DATA)
    parts = [
        dict(prompt=x, completion=y)
        for turns in DATA
        for x, y in sft.to_turns(sft.Args(), dict(messages=turns))
    ]
    write_splits(tmp_path / "parts", parts)
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(KEEPS)
    for data, size in (("data", 4), ("parts", len(parts))):
        flags = dict(model=str(tmp_path / "model"), dataset=str(tmp_path / data), epochs=1)
        flags |= dict(train_split="train", eval_split="test", micro_batch_size=2)
        folders.append(run(tmp_path / "runs", batch_size=size, **flags))
    (_, gradient, _), (_, other, _) = steps
    assert_same_gradient(gradient, other)
    ours, theirs = map(metrics_of, folders)
    assert ours[0]["eval/loss"] == pytest.approx(theirs[0]["eval/loss"], rel=1e-6)
    assert ours[1]["objective/loss"] == pytest.approx(theirs[1]["objective/loss"], rel=1e-6)
