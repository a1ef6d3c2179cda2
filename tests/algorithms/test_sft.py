"""sft.py: the loss, what is learned and what is not, and how rows become tokens."""

import json
import shutil
from functools import partial

import algorithms
import pytest
import torch
from algorithms import assert_same_gradient, set_weights
from reviews import batch_rows, plain_model
from spies import spy_on, watch_steps
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import common.logprobs
import sft
from common.logprobs import completion_states
from runs import metrics_of, read

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
class Rows(list):
    def checksum(self):
        return 0


@pytest.mark.parametrize(
    ("train_on_prompt", "expected"),
    [
        (False, [([1, 5, 6], [7, 2]), ([1], [8, 9, 9, 2])]),
        (True, [([1], [5, 6, 7, 2]), ([1], [8, 9, 9, 2])]),  # all but the first of all
    ],
)
def test_only_completion_tokens_are_learned_unless_asked(
    train_on_prompt, expected, tmp_path, monkeypatch
):
    data = [[([1, 5, 6], [7, 2])], [([1], [8, 9, 9, 2])]]
    monkeypatch.setattr(sft, "load_demonstrations", lambda *args: Rows(data))
    calls = {}
    for name in ("rollout_logprobs", "generate", "completion_logprobs"):
        calls[name] = spy_on(sft, monkeypatch, name)
    run(tmp_path, train_on_prompt=train_on_prompt, batch_size=2, epochs=1, eval_samples=2)
    second = {name: arguments[1] for name, ((arguments, _), *_) in calls.items()}
    assert second["rollout_logprobs"] == expected
    assert sorted(second["completion_logprobs"]) == sorted(expected)
    assert second["generate"] == [[1, 5, 6], [1]]  # sampled from whole prompts in any case


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
    _, (completions, _) = sampled[-1]
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
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


FOUR = conversation("1+2", "1,3", "3+4", "4,7")
DATA = [FOUR, conversation("5+1", "6"), conversation("1+2", "3", "1", "1", "2+2", "2,4"), FOUR[:2]]


def load(folder, template, conversations, **flags):
    """Their turns, and the texts of these."""
    folder.mkdir()
    lines = "".join(json.dumps({"messages": turns}) + "\n" for turns in conversations)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(lines)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = template
    args = sft.Args(dataset=str(folder), **flags)
    rows = [*sft.load_demonstrations(args, "train", tokenizer, [2])]
    return rows, [[(tokenizer.decode(x), tokenizer.decode(y)) for x, y in row] for row in rows]


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (KEEPS, {}, [("1+2=#1,3<eos>3+4=", "#4,7<eos>"), ("1+2=", "#1,3<eos>")]),
        (DROPS, {}, [("1+2=#3<eos>3+4=", "#4,7<eos>"), ("1+2=", "#1,3<eos>")]),
        (KEEPS, dict(train_on_prompt=True), [("1+2=#1,3<eos>3+4=", "#4,7<eos>")]),
        (KEEPS, dict(max_length=17), [("1+2=", "#1,3<eos>")]),
        (KEEPS, dict(max_length=18), [("1+2=#1,3<eos>3+4=", "#4,7<eos>"), ("1+2=", "#1,3<eos>")]),
    ],
)
def test_a_conversation_is_a_row_of_its_turns_the_last_one_first(
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
    assert texts[0] == [("1=#<eos>2=#3<eos>4=", "#5<eos>"), ("1=#<eos>2=", "#3<eos>")]
    printed = capsys.readouterr().out
    assert (
        "train: of these rows, turns dropped {'with a tool call instead of a text': 1}" in printed
    )
    assert "train: 2 rows, dropped {'with an empty prompt or completion (in a csv" in printed


@pytest.mark.parametrize("template", [KEEPS, DROPS])
def test_turns_that_are_read_together_are_those_read_alone(template, tmp_path, monkeypatch):
    """In float64, states and gradients; and a conversation's tokens are read once."""
    rows, _ = load(tmp_path / "data", template, DATA)
    sequences = sft.loss_sequences(sft.Args(), rows)
    model = plain_model(BASE).double()
    for name in ("float32", "float"):  # what the model computes in them
        monkeypatch.setattr(torch, name, torch.float64)
    trees = spy_on(common.logprobs, monkeypatch, "PrefixTree")
    (inds,) = sft.micro_batches_of_turns(rows, 9)
    together = completion_states(model, [sequences[i] for i in inds])[0]
    (_, tree) = trees[-1]
    if template == KEEPS:  # the last token is predicted, not read
        (one, _, other, _), lengths = rows, [len(x) + len(y) - 1 for (x, y), *_ in rows]
        shared = len("1+2=#")  # by the first, the third and the last
        assert len(tree.ids) == sum(lengths) - 2 * shared - len("1,3") and one[0] != other[0]
    gradients = []
    for states in (together, torch.cat([completion_states(model, [s])[0] for s in sequences])):
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        gradients.append([weight.grad.clone() for weight in model.model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(together, states, rtol=1e-11, atol=1e-11)
    for ours, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 1), (2, 9), (3, 1)])
def test_a_conversation_stays_in_one_micro_batch(ranks, size, tmp_path, monkeypatch):
    rows, _ = load(tmp_path / "data", KEEPS, DATA)
    row_of = [i for i, row in enumerate(rows) for _ in row]
    monkeypatch.setattr(common.logprobs, "WORLD_SIZE", ranks)
    batches = []
    for rank in range(ranks):
        monkeypatch.setattr(common.logprobs, "RANK", rank)
        batches.append([inds.tolist() for inds in sft.micro_batches_of_turns(rows, size)])
    assert len({len(of_rank) for of_rank in batches}) == 1  # as FSDP needs
    batches = [inds for of_rank in batches for inds in of_rank]
    assert sorted(i for inds in batches for i in inds) == [*range(len(row_of))]
    for inds in batches:
        found = [row_of[i] for i in inds]
        assert len({*found}) <= size and all(found.count(i) == row_of.count(i) for i in found)


def test_a_step_learns_all_turns_of_its_conversations(tmp_path, monkeypatch):
    """As if each turn were a row with a prompt of its own."""
    steps, folders = watch_steps(monkeypatch), []
    load(tmp_path / "data", KEEPS, DATA)
    parts = [
        dict(prompt=x, completion=y)
        for turns in DATA
        for x, y in sft.to_texts(sft.Args(), dict(messages=turns))
    ]
    (tmp_path / "parts").mkdir()
    for split in ("train", "test"):
        (tmp_path / "parts" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, parts)))
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
