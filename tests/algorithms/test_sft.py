"""sft.py: the loss, what is learned and what is not, and how rows become tokens."""

import shutil
from functools import partial

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


# --- conversations: which turns are learned is in test_conversations.py -------------------------
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}={% else %}"
    "#{{ m['content'] }}<eos>{% endif %}{% endfor %}"
)


def conversation(*texts):
    return [message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


FOUR = conversation("1+2", "1,3", "3+4", "4,7")
DATA = [FOUR, conversation("5+1", "6"), conversation("1+2", "3", "1", "1", "2+2", "2,4"), FOUR[:2]]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({}, ["1+2=", "#1,3<eos>", "3+4=", "#4,7<eos>"]),
        (dict(train_on_prompt=True), ["1+2=#1,3<eos>3+4=", "#4,7<eos>"]),
        (dict(max_length=17), ["1+2=", "#1,3<eos>"]),
    ],
)
def test_a_conversation_is_one_text_of_which_the_answers_are_learned(
    flags, parts, tmp_path, capsys
):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHAT
    args = sft.Args(dataset=write_splits(tmp_path, [{"messages": FOUR}]), **flags)
    ((text,),) = sft.load_demonstrations(args, "train", tokenizer, [2])
    assert tokenizer.decode(text.ids) == "".join(parts)
    lengths = [len(tokenizer(part, add_special_tokens=False).input_ids) for part in parts]
    expected = [i % 2 for i, length in enumerate(lengths) for _ in range(length)]
    assert list(text.is_learned) == expected
    assert tokenizer.decode(text.prompt()) == "".join(parts[:-1])
    printed = "train: of these rows, turns dropped {'longer than --max-length': 1}\n"
    assert (printed in capsys.readouterr().out) == ("max_length" in flags)


def test_a_step_learns_all_turns_of_its_conversations(tmp_path, monkeypatch):
    """As if each turn were a row with a prompt of its own."""
    steps, folders = watch_steps(monkeypatch), []
    write_splits(tmp_path / "data", [{"messages": turns} for turns in DATA])
    parts = [
        dict(prompt=x, completion=y)
        for turns in DATA
        for x, y in sft.to_turns(sft.Args(), dict(messages=turns))
    ]
    write_splits(tmp_path / "parts", parts)
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT)
    for data, size in (("data", 4), ("parts", len(parts))):
        flags = dict(model=str(tmp_path / "model"), dataset=str(tmp_path / data), epochs=1)
        flags |= dict(train_split="train", eval_split="test", micro_batch_size=2)
        folders.append(run(tmp_path / "runs", batch_size=size, **flags))
    (_, gradient, _), (_, other, _) = steps
    assert_same_gradient(gradient, other)
    ours, theirs = map(metrics_of, folders)
    assert ours[0]["eval/loss"] == pytest.approx(theirs[0]["eval/loss"], rel=1e-6)
    assert ours[1]["objective/loss"] == pytest.approx(theirs[1]["objective/loss"], rel=1e-6)
