"""sft.py: the loss, what is learned and what is not, and how rows become tokens."""

from functools import partial

import algorithms
import pytest
import torch
from algorithms import assert_same_gradient, set_weights
from reviews import batch_rows, plain_model
from spies import spy_on, watch_steps
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import sft
from runs import metrics_of, read
from sft import Args, Demonstration, learned_turns, to_texts

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
    data = [Demonstration("", [1, 5, 6], [7, 2]), Demonstration("", [1], [8, 9, 9, 2])]
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


# --- rows to tokens: more in test_rows.py -------------------------------------------------------
def test_every_assistant_turn_of_messages_is_a_completion():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]

    def pairs_of(args):
        return [to_texts(args, part) for part in learned_turns(args, {"messages": turns})]

    pairs = pairs_of(Args())
    assert pairs == [(turns[:1], turns[1:2]), (turns[:3], turns[3:])]
    assert pairs_of(Args(train_on_prompt=True)) == pairs[1:]
