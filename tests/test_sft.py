"""sft.py: the loss, what is learned and what is not, and how rows become tokens."""

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

import sft
from common.generation import find_stop_ids
from sft import Args, encode_pair, make_batch, negative_log_likelihood, to_pairs

BASE = "tiny/arithmetic/base"
SMALL = dict(epochs=0.01, batch_size=16, micro_batch_size=16, eval_rows=8, eval_samples=2)


def run(tmp_path, **flags):
    return sft.main(Args(output_dir=str(tmp_path), **{**SMALL, **flags}))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def chat_tokenizer():
    """Words; <eos> ends a turn, and the template writes a newline's stand-in `nl` after it."""
    words = "<pad> <bos> <eos> <unk> user: assistant: nl a b c d".split()
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "<bos>{% for m in messages %} {{ m['role'] }}: {{ m['content'] }} <eos> nl{% endfor %}"
        "{% if add_generation_prompt %} assistant:{% endif %}"
    )
    return tokenizer


# --- the loss -----------------------------------------------------------------------------------


def test_loss_by_hand():
    logprobs = torch.log(torch.tensor([[0.9, 0.5, 0.25], [0.1, 0.125, 0.3]]))
    mask = torch.tensor([[False, True, True], [False, True, False]])
    # -(log 1/2 + log 1/4 + log 1/8) / 3 = (1 + 2 + 3) log 2 / 3
    assert negative_log_likelihood(logprobs, mask, 3).item() == pytest.approx(2 * math.log(2))


def test_loss_ignores_what_is_not_masked():
    logprobs = torch.tensor([[math.nan, -1.0, math.inf]], requires_grad=True)
    loss = negative_log_likelihood(logprobs, torch.tensor([[False, True, False]]), 1)
    assert loss.item() == 1
    loss.backward()
    assert logprobs.grad.tolist() == [[0, -1, 0]]


def test_only_completion_tokens_are_learned_unless_asked():
    pairs = [([1, 5, 6], [7, 2]), ([1], [8, 9, 9, 2])]
    cpu = torch.device("cpu")
    ids, mask, loss_mask = make_batch(Args(), pairs, 0, cpu)
    assert ids.tolist() == [[1, 5, 6, 7, 2], [1, 8, 9, 9, 2]]
    assert loss_mask.tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    _, mask, loss_mask = make_batch(Args(train_on_prompt=True), [([1, 5], [2]), ([1], [2])], 0, cpu)
    assert loss_mask.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_real_eos_is_learned_where_padding_has_its_id():
    ids, mask, loss_mask = make_batch(
        Args(), [([1, 5], [7, 2]), ([1], [2])], 2, torch.device("cpu")
    )
    assert ids.tolist() == [[1, 5, 7, 2], [1, 2, 2, 2]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert loss_mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_step_loss_is_the_token_mean_of_plain_cross_entropy(tmp_path, train_on_prompt):
    run_dir = run(tmp_path, batch_size=8, micro_batch_size=3, train_on_prompt=train_on_prompt)
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1])
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    text = Path("tiny/arithmetic/sft/train.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    total = count = 0
    for i in sft.batch_rows(0, 8, len(rows), seed=1):
        prompt = tokenizer(rows[i]["prompt"]).input_ids
        ids = tokenizer(rows[i]["prompt"] + rows[i]["completion"] + "<eos>").input_ids
        start = 1 if train_on_prompt else len(prompt)
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
        total += torch.nn.functional.cross_entropy(
            logits, torch.tensor(ids[start:]), reduction="sum"
        ).item()
        count += len(ids) - start
    assert first["objective/loss"] == pytest.approx(total / count, rel=1e-5)


def test_micro_batch_size_does_not_change_the_gradient(tmp_path, monkeypatch):
    gradients = []

    def capture(parameters, max_norm):
        gradients.append([p.grad.clone() for p in parameters])
        raise KeyboardInterrupt  # one step is enough

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", capture)
    for size in (16, 1, 2, 4, 8):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, micro_batch_size=size)
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_micro_batches_sort_by_length_and_keep_every_row():
    groups = list(sft.micro_batches([3, 9, 1, 7, 5], 2))
    assert groups == [[1, 3], [4, 0], [2]]


# --- rows to tokens -----------------------------------------------------------------------------


def test_plain_pair_ends_with_eos_and_has_one_bos(tokenizer):
    prompt, completion = encode_pair(tokenizer, "1+2=", "#3", [2], "row 0")
    assert tokenizer.convert_ids_to_tokens(prompt) == ["<bos>", "1", "+", "2", "="]
    assert tokenizer.convert_ids_to_tokens(completion) == ["#", "3", "<eos>"]


def test_chat_pair_ends_at_its_first_stop_id():
    tokenizer = chat_tokenizer()
    args = Args(chat=True)
    ((prompt, completion),) = to_pairs(args, {"prompt": "a b", "completion": "c"}, "row 0")
    stop_ids = [2, tokenizer.convert_tokens_to_ids("nl")]
    ids = encode_pair(tokenizer, prompt, completion, stop_ids, "row 0")
    words = [tokenizer.convert_ids_to_tokens(part) for part in ids]
    assert words[0] == ["<bos>", "user:", "a", "b", "<eos>", "nl", "assistant:"]
    assert words[1] == ["c", "<eos>"]


def test_what_a_template_writes_after_a_turn_is_a_stop_id(tmp_path):
    """As in a base model, whose EOS is not the end of a turn of its chat template."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos> nl", "<end> nl")
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert find_stop_ids(str(tmp_path), tokenizer) == sorted([2, end])
    assert find_stop_ids(str(tmp_path), chat_tokenizer()) == [2]


def test_saved_model_ends_at_its_stop_ids_and_brings_no_sampling_of_its_own(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(BASE)
    # Old versions of transformers refuse to save this, at the very end of a run.
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=False, top_k=3)
    sft.save_model(tmp_path, model, AutoTokenizer.from_pretrained(BASE), [2, 5])
    saved = GenerationConfig.from_pretrained(tmp_path / "model")
    assert saved.eos_token_id == [2, 5]
    assert saved.top_k is None
    assert saved.temperature is None


def test_every_assistant_turn_of_messages_is_a_completion():
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    pairs = to_pairs(Args(), {"messages": turns}, "row 0")
    assert pairs == [(turns[:1], turns[1:2]), (turns[:3], turns[3:])]
    _, completion = encode_pair(chat_tokenizer(), *pairs[1], [2], "row 0")
    assert chat_tokenizer().convert_ids_to_tokens(completion) == ["d", "<eos>"]


def test_a_merge_across_the_boundary_is_found():
    inner = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<eos>": 3}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    assert encode_pair(tokenizer, "b", "a", [3], "row 7") == ([1], [0, 3])
    assert encode_pair(tokenizer, "a", "b", [3], "row 7") is None


def test_two_bos_are_an_error_that_names_the_row(tokenizer):
    with pytest.raises(SystemExit, match="row 3: the prompt begins with <bos> twice"):
        encode_pair(tokenizer, "<bos>1+2=", "#3", [2], "row 3")


def test_unusable_rows_are_dropped_and_counted(tmp_path, capsys):
    rows = [
        {"prompt": "1+2=", "completion": "#3"},
        {"prompt": "1+2=", "completion": ""},
        {"prompt": None, "completion": "#3"},
        {"prompt": "1+2=", "completion": "#3" * 50},
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run(tmp_path, dataset=str(tmp_path), max_length=20, epochs=1)
    out = capsys.readouterr().out
    assert "train: 1 pairs of 4 rows; dropped 2 empty, 0 with a completion that changes" in out
    assert "and 1 longer than --max-length 20" in out


def test_from_scratch_takes_only_configuration_and_tokenizer(tmp_path):
    flags = dict(learning_rate=1e-30, batch_size=64)
    models = [
        AutoModelForCausalLM.from_pretrained(run(tmp_path, **flags, **other) / "model")
        for other in (
            dict(model="tiny/arithmetic/policy"),
            dict(model="tiny/arithmetic/policy", from_scratch=True),
            dict(model="tiny/arithmetic/policy", from_scratch=True, seed=2),
        )
    ]
    trained, new, other_seed = [model.model.layers[0].mlp.up_proj.weight for model in models]
    policy = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy", dtype=torch.float32)
    torch.testing.assert_close(trained, policy.model.layers[0].mlp.up_proj.weight)
    assert not torch.allclose(new, trained, atol=1e-2)
    assert not torch.allclose(new, other_seed, atol=1e-2)


def test_save_dtype(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(run(tmp_path, save_dtype="bfloat16") / "model")
    assert model.dtype == torch.bfloat16
