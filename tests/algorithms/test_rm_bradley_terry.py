"""rm_bradley_terry.py: loss, calibration, the scores of pairs, the model it saves, and its data."""

import math
import re
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from gpu_types import take_gpu_types
from models import CHAT, tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import rm_bradley_terry as rm
from reviews import MERGED
from rm_bradley_terry import (
    Args,
    Comparison,
    bradley_terry_loss,
    calibration_error,
    load_classifier,
    load_comparisons,
    pair_scores,
    wins,
)
from runs import read

POLICY, REWARD_MODEL = "tiny/reviews/policy", "tiny/reviews/reward_model"
SMALL = dict(train_split="train[:64]", epochs=0.001, batch_size=16, micro_batch_size=16)
SMALL |= dict(eval_rows=4)


def run(tmp_path, **flags):
    """A real run, of one step unless told; returns its folder."""
    output_dir = f"{tmp_path}/runs/{time.time_ns()}"  # two runs may begin in one second
    return rm.main(Args(output_dir=output_dir, **{**SMALL, **flags}))


def held_out(count):
    return read("tiny/reviews/preferences/test.jsonl")[:count]


def dataset(tmp_path, train, test=None):
    (tmp_path / "data").mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", test or train)):
        # Parquet, because JSON has no NaN.
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    return str(tmp_path / "data")


def plain_scores(folder, rows):
    """Scores of chosen and rejected, with nothing but transformers: text in, logits out."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.padding_side == "right"
    scores = []
    for side in ("chosen", "rejected"):
        texts = [row["prompt"] + row[side] + "<eos>" for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        assert not batch.attention_mask.all()
        with torch.no_grad():
            scores.append(model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0])
    return scores


def policy_that_pads_with(pad, folder):
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = pad
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token == pad
    return str(folder)


def tiny_classifier(architecture, **overrides):
    torch.manual_seed(0)
    config = tiny_config(architecture, num_labels=1, **overrides)
    return AutoModelForSequenceClassification.from_config(config).eval()


def load(folder, seed=1, **flags):
    args = Args(model=str(folder), seed=seed, **{"max_length": 64, **flags})
    return load_classifier(args, AutoTokenizer.from_pretrained(POLICY), [2], torch.device("cpu"))


def scores_of(model, rows):
    """Scores of lists of token ids."""
    return pair_scores(model, [Comparison(row, row, 0.0) for row in rows])[0]


def message(role, content):
    return {"role": role, "content": content}


# --- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "c", "loss", "to_chosen", "to_rejected"),
    [
        # sigmoid(0) = 1/2: a coin's loss, and slopes -1/2 and 1/2
        (0.7, 0.7, 0, 0, math.log(2), -1 / 2, 1 / 2),
        # sigmoid(ln 3) = 1 / (1 + 1/3) = 3/4, sigmoid(-ln 3) = 1/4
        (1 + math.log(3), 1, 0, 0, -math.log(3 / 4), -1 / 4, 1 / 4),
        (1, 1 + math.log(3), 0, 0, -math.log(1 / 4), -3 / 4, 3 / 4),
        # the margin is taken off the difference: ln 3 - ln 3 = 0, and ln 3 + ln 5 = ln 15, whose
        # sigmoid is 15/16
        (math.log(3), 0, math.log(3), 0, math.log(2), -1 / 2, 1 / 2),
        (math.log(3), 0, -math.log(5), 0, -math.log(15 / 16), -1 / 16, 1 / 16),
        # c (r_w + r_l)^2 = 0.1 x 3^2, with the slope 2 x 0.1 x 3 = 0.6 in both scores
        (2, 1, 1, 0.1, math.log(2) + 0.9, -1 / 2 + 0.6, 1 / 2 + 0.6),
        (-2, 2, -4, 0.1, math.log(2), -1 / 2, 1 / 2),  # a sum of 0 is centred already
    ],
)
def test_loss_and_gradient_by_hand(chosen, rejected, margin, c, loss, to_chosen, to_rejected):
    scores = torch.tensor([[chosen, 0.0], [rejected, 0.0]], requires_grad=True)
    losses = bradley_terry_loss(scores[0], scores[1], torch.tensor([margin, 0.0]), c)
    assert losses.tolist() == pytest.approx([loss, math.log(2)])  # each pair for itself
    losses[0].backward()
    assert scores.grad[:, 0].tolist() == pytest.approx([to_chosen, to_rejected])
    assert scores.grad[:, 1].tolist() == [0, 0]


def test_extreme_differences_are_finite_and_exact():
    scores = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    losses = bradley_terry_loss(scores[0], scores[1], torch.zeros(2), 0.0)
    # -log sigmoid(2e4) = log(1 + e^-20000) = 0 and -log sigmoid(-2e4) = 20000 + 0
    assert losses.tolist() == [0, 2e4]
    losses.sum().backward()
    assert scores.grad.tolist() == [[0, -1], [0, 1]]


# --- calibration --------------------------------------------------------------------------------


def gap(probability):
    """r_w - r_l of which sigmoid is this probability; below 1/2 the prediction is wrong."""
    return math.log(probability / (1 - probability))


def test_a_tie_is_half_a_win():
    assert wins(torch.tensor([0.1, 0.0, -3.0])).tolist() == [1, 0.5, 0]


def test_calibration_by_hand():
    # In bins 0.5 to 0.6, 0.6 to 0.7, 0.7 to 0.8, none from 0.8, and 0.9 to 1; wins and losses.
    won = [5 / 9, 2 / 3, 3 / 4, 3 / 4, 19 / 20]
    lost = [1 - 5 / 9, 1 - 2 / 3, 1 - 3 / 4, 1 - 19 / 20]
    gaps = [0.0, *map(gap, won + lost), 100.0, -1e4]  # a tie; and p = 1, once right, once wrong
    # Predicted and observed: 29/54 and 1.5/3; 2/3 and 1/2; 3/4 and 2/3; 3.9/4 and 2/4.
    # 3 |29/54 - 27/54| + 2 |4/6 - 3/6| + 3 |9/12 - 8/12| + 4 |3.9/4 - 2/4|
    expected = (1 / 9 + 1 / 3 + 1 / 4 + 1.9) / 12
    assert calibration_error(torch.tensor(gaps)) == pytest.approx(expected)
    # In float64 also where the scores are not: sigmoid(17) is 1 in float32.
    assert calibration_error(torch.tensor([17.0])) == pytest.approx(1 / (1 + math.exp(17)))


@pytest.mark.parametrize(
    ("right", "wrong", "bins", "one_bin"),
    [
        (0.6 + 1e-9, 0.7 - 1e-9, 5, True),
        (0.9 - 1e-9, 0.9 + 1e-9, 5, False),
        (0.75 - 1e-9, 0.75, 2, False),  # an edge belongs to the bin above
    ],
)
def test_bins_have_equal_width(right, wrong, bins, one_bin):
    """A right and a wrong prediction cancel where they share a bin, and only there."""
    gaps = torch.tensor([gap(right), -gap(wrong)], dtype=torch.float64)
    errors = [right - 1, wrong - 0]  # predicted - observed
    expected = abs(sum(errors)) if one_bin else sum(map(abs, errors))
    assert calibration_error(gaps, bins) == pytest.approx(expected / 2)


def test_calibration_error_tells_right_from_overconfident_and_timid():
    torch.manual_seed(0)
    gaps = 2 * torch.randn(20_000)
    gaps = torch.where(torch.rand(20_000) < gaps.sigmoid(), gaps, -gaps)
    assert calibration_error(gaps) < 0.01
    assert calibration_error(3 * gaps) > 0.1 and calibration_error(gaps / 3) > 0.1


# --- the score of a row -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "pad_token_id"), [("llama", 0), ("llama", 2), ("gpt2", None)]
)
def test_score_is_the_heads_output_at_the_last_token_however_long_the_others_are(
    architecture, pad_token_id
):
    eos = 2
    model = tiny_classifier(architecture, pad_token_id=pad_token_id, eos_token_id=eos)
    # Ended, cut off, with the EOS's id inside, longest, a single token, and ending as if padded.
    rows = [[1, 7, 9, 5, eos], [1, 7, 9], [1, eos, 8, eos], [1, 3, 3, 9, 8, 7, eos], [6], [1, 7, 0]]
    with torch.no_grad():
        base = model.transformer if architecture == "gpt2" else model.model
        alone = [base(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        expected = torch.stack(alone) @ model.score.weight[0]
        assert expected.unique().numel() == len(rows)
        for more in ([], [[4] * 12]):  # which makes all others be padded to 12
            scores = scores_of(model, rows + more)[: len(rows)]
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
            scores = scores_of(model, more + rows[::-1])[len(more) :]
            torch.testing.assert_close(scores.flip(0), expected, atol=1e-4, rtol=1e-4)


def test_no_rows_still_run_both_passes_and_add_nothing():
    model = tiny_classifier("llama")
    passes = []
    model.base_model.register_forward_pre_hook(lambda *args: passes.append(1))
    scores = pair_scores(model, [])
    assert scores.shape == (2, 0) and passes == [1]
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, name


def test_scores_are_float32_under_autocast(monkeypatch):
    """Also on several GPUs, where FSDP casts the layers."""
    take_gpu_types(monkeypatch)
    model = tiny_classifier("llama")
    model.model.bfloat16()
    hidden, types = [], []
    model.score.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    up = model.model.layers[0].mlp.up_proj
    up.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    with torch.no_grad():
        score = scores_of(model, [[1, 7, 9, 2]])
    assert types == [torch.bfloat16]
    # A rounded product would differ from this sum by about a part in 2^8.
    expected = (hidden[0][0].double() * model.score.weight.double()).sum()
    assert score.dtype == torch.float32
    assert score.item() == pytest.approx(expected.item(), rel=1e-5)


# --- the head and the transformer ---------------------------------------------------------------


def test_new_head_is_drawn_with_variance_one_over_d_plus_one(tmp_path):
    # d = 2, where sqrt(1/3) = 0.577 and sqrt(1/2) = 0.707 are far apart.
    sizes = dict(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, vocab_size=135)
    tiny_model("llama", **sizes).save_pretrained(tmp_path)
    models = [load(tmp_path, seed) for seed in range(100)]
    assert all(model.score.bias is None for model in models)
    draws = torch.cat([model.score.weight.detach() for model in models])
    assert draws.shape == (100, 2)
    # 200 draws: the standard error of their deviation is 5 % of it.
    assert draws.square().mean().sqrt().item() == pytest.approx(3**-0.5, rel=0.1)
    assert draws.mean().abs() < 0.1
    assert (draws[:, 0] * draws[:, 1]).mean().abs() < 0.1


def test_transformer_is_the_policys_and_the_head_depends_on_the_seed_alone():
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).state_dict()
    first = load(POLICY)
    assert not first.training
    assert {p.dtype for p in first.parameters()} == {torch.float32}
    for name, tensor in first.state_dict().items():
        assert name == "score.weight" or torch.equal(tensor, policy[name])
    torch.randn(3)  # the state of the generator does not matter
    same, other = (load(POLICY, seed) for seed in (1, 2))
    assert torch.equal(same.score.weight, first.score.weight)
    assert not torch.allclose(other.score.weight, first.score.weight)


def test_a_trained_head_is_kept():
    model = load(REWARD_MODEL)
    saved = load_file(f"{REWARD_MODEL}/model.safetensors")
    assert torch.equal(model.score.weight, saved["score.weight"].float())


def test_the_input_embedding_of_an_eos_that_is_the_padding_is_trained(tmp_path):
    source = policy_that_pads_with("<eos>", tmp_path)
    assert AutoConfig.from_pretrained(source).pad_token_id == 2  # transformers blocks its gradient
    model = load(source)
    scores_of(model, [[1, 84, 45, 2]]).sum().backward()
    assert model.get_input_embeddings().weight.grad[2].abs().max() > 0


def test_what_transformers_would_pass_over(tmp_path):
    with pytest.raises(ValueError, match="fewer positions than --max-length 129"):
        load(POLICY, max_length=129)
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the tokenizer has more tokens than the embedding"):
        load(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    weights = model.state_dict()
    del weights["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"has no weights for \['model.norm.weight'\]"):
        load(tmp_path)


# --- padding, saving and loading ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pad", "stop_ids", "vocabulary", "pad_id", "rows"),
    [
        ("<pad>", [2], 135, 0, 135),  # one of its own: unchanged
        (None, [2], 135, 135, 136),
        ("<eos>", [2], 135, 135, 136),
        ("<pad>", [0, 2], 135, 135, 136),  # it ends completions, though it is not the EOS
        ("<eos>", [2], 140, 135, 140),  # the model has rows to spare, as many on the hub do
    ],
)
def test_padding_gets_an_id_that_ends_no_completion(
    tmp_path, pad, stop_ids, vocabulary, pad_id, rows
):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = pad
    model = tiny_classifier("llama", vocab_size=vocabulary)  # its config has no padding id
    before = model.get_input_embeddings().weight.detach().clone()
    model.save_pretrained(tmp_path)
    args = Args(model=str(tmp_path), max_length=64)
    model = load_classifier(args, tokenizer, stop_ids, torch.device("cpu"))
    assert tokenizer.pad_token_id == model.config.pad_token_id == pad_id
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows
    assert torch.equal(model.get_input_embeddings().weight[: len(before)], before)
    assert tokenizer("on wednesday<eos>").input_ids == [1, 84, 130, 2]


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_plain_transformers_give_the_saved_model_the_same_scores(tmp_path, pad):
    source = policy_that_pads_with(pad, tmp_path / "policy")
    run_dir = run(tmp_path, model=source, epochs=2, eval_rows=40)
    chosen, rejected = plain_scores(run_dir, held_out(40))
    config = AutoConfig.from_pretrained(run_dir)
    assert config.num_labels == 1
    assert config.score_mean == pytest.approx(chosen.mean().item(), abs=1e-4)
    first, *_, last = read(run_dir / "metrics.jsonl")
    assert last["eval/score_chosen"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert last["eval/score_rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    assert last["eval/margin"] > first["eval/margin"] + 1e-2, "nothing was trained"


def test_the_reward_model_that_ships_agrees_with_held_out_preferences():
    chosen, rejected = plain_scores(REWARD_MODEL, held_out(500))
    assert len(chosen) == 500
    assert (chosen > rejected).float().mean() >= 0.82
    # As the algorithms that subtract it read it; the file's bfloat16 moves it a little.
    mean = AutoConfig.from_pretrained(REWARD_MODEL).score_mean
    assert mean == pytest.approx(chosen.mean().item(), abs=0.02)


def test_the_code_for_other_programs_on_the_page():
    page = Path("docs/rm_bradley_terry.md").read_text()
    *_, loading, function = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(loading, names)
    for end, expected in (("<eos>", 0.838), ("", 0.580)):
        sides = [(row, side) for side in ("chosen", "rejected") for row in held_out(500)]
        texts = [row["prompt"] + row[side] + end for row, side in sides]
        batch = names["tokenizer"](texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            chosen, rejected = names["model"](**batch).logits.view(2, -1)
        found = (chosen > rejected).float().mean().item()
        assert found == pytest.approx(expected, abs=0.005) and f"{expected:.3f}" in page
    # The function for TRL scores the tokens that were sampled, the EOS among them.
    exec(function, names)
    rows, encode = held_out(5), names["tokenizer"]
    prompts = [row["prompt"] for row in rows]
    sampled = [encode(row["chosen"] + "<eos>").input_ids[1:] for row in rows]  # without the BOS
    found = names["score"](prompts=prompts, completion_ids=sampled, completions=None)
    whole = [encode(row["prompt"] + row["chosen"] + "<eos>").input_ids for row in rows]
    expected = scores_of(names["model"], whole).tolist()
    assert found == pytest.approx(expected, abs=1e-4)


# --- a run --------------------------------------------------------------------------------------


def test_losses_and_metrics_against_scores_of_plain_transformers(tmp_path):
    rows = held_out(19)
    for i, row in enumerate(rows):
        row["m"] = i / 4 - 2
        if i % 3 == 0:  # or the model would be right about nearly all
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    # A learning rate of nearly 0, so that every evaluation is of the model that we have.
    flags = dict(batch_size=8, micro_batch_size=3, eval_rows=10, center_coef=0.01)
    flags |= dict(model=REWARD_MODEL, margin_column="m", learning_rate=1e-30, epochs=1)
    flags |= dict(train_split="train")
    run_dir = run(tmp_path, dataset=dataset(tmp_path, rows[11:], rows[:11]), **flags)
    evaluation, step = read(run_dir / "metrics.jsonl")
    assert step["step"] == 1

    for name, metrics, some in (("eval", evaluation, rows[:10]), ("reward", step, rows[11:])):
        chosen, rejected = (scores.tolist() for scores in plain_scores(REWARD_MODEL, some))
        margins = [r_w - r_l for r_w, r_l in zip(chosen, rejected, strict=True)]
        losses = [
            math.log1p(math.exp(-(r_w - r_l - row["m"]))) + 0.01 * (r_w + r_l) ** 2
            for r_w, r_l, row in zip(chosen, rejected, some, strict=True)
        ]
        mean = {
            "loss": sum(losses) / len(some),
            "pair_accuracy": sum(margin > 0 for margin in margins) / len(some),
            "margin": sum(margins) / len(some),
            "score_chosen": sum(chosen) / len(some),
            "score_rejected": sum(rejected) / len(some),
        }
        assert 0 < mean["pair_accuracy"] < 1
        if name == "eval":
            evaluated = margins
            names = [f"eval/{key}" for key in mean]
        else:
            names = "objective/loss reward/accuracy reward/margin reward/chosen reward/rejected"
            names = names.split()
        assert [metrics[name] for name in names] == pytest.approx(list(mean.values()), rel=1e-4)

    # Each pair into its bin by comparing with the limits.
    predicted = [1 / (1 + math.exp(-abs(margin))) for margin in evaluated]
    error = 0
    for low in (0.5, 0.6, 0.7, 0.8, 0.9):
        inside = [i for i, p in enumerate(predicted) if low <= p < low + 0.1]
        error += abs(sum(predicted[i] - (evaluated[i] > 0) for i in inside)) / 10
    assert evaluation["eval/calibration_error"] == pytest.approx(error, rel=1e-6)
    assert all(step[key] == value for key, value in evaluation.items() if key.startswith("eval/"))


def test_a_model_that_scores_all_alike_is_right_about_half_the_pairs_and_calibrated(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(REWARD_MODEL)
    model.score.weight.data.zero_()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(REWARD_MODEL).save_pretrained(tmp_path)
    evaluation, step = read(run(tmp_path, model=str(tmp_path)) / "metrics.jsonl")
    names = ("loss", "pair_accuracy", "margin", "calibration_error")
    found = [evaluation[f"eval/{name}"] for name in names]
    assert found == pytest.approx([math.log(2), 0.5, 0, 0], abs=1e-6)
    assert step["reward/accuracy"] == 0.5 and step["objective/loss"] == pytest.approx(math.log(2))


def test_chosen_and_rejected_share_one_forward_pass(tmp_path, monkeypatch):
    rows, original = [], rm.load_classifier

    def spy(*args):
        model = original(*args)
        model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        return model

    monkeypatch.setattr(rm, "load_classifier", spy)
    run(tmp_path, micro_batch_size=5, eval_rows=8)
    # 8 held-out pairs, 16 of a step, and 8 held-out ones again: twice as many rows as pairs
    assert rows == [10, 6, 10, 10, 10, 2, 10, 6]


def test_micro_batch_size_does_not_change_the_gradient(tmp_path, monkeypatch):
    gradients, masks, pad_rows = [], [], rm.pad_rows

    def capture(parameters, max_norm):
        assert max_norm == 0.5
        gradients.append([p.grad.clone() for p in parameters])
        raise KeyboardInterrupt  # one step is enough

    def spy(*args):
        masks.append(pad_rows(*args)[1])
        return pad_rows(*args)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", capture)
    monkeypatch.setattr(rm, "pad_rows", spy)
    for size in (16, 3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, micro_batch_size=size, center_coef=0.01, max_grad_norm=0.5)
    assert len(masks[1].sum(dim=1).unique()) > 5, "the test needs ragged lengths"
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert max(g.abs().max() for g in gradients[0]) > 1e-3


# --- rows to pairs ------------------------------------------------------------------------------


def preferences(tmp_path, rows, stop_ids=(2,), chat_template=None, **flags):
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = chat_template
    args = Args(dataset=dataset(tmp_path, rows), **flags)
    return load_comparisons(args, "train", tokenizer, list(stop_ids))


def ids(words):
    return AutoTokenizer.from_pretrained(POLICY).convert_tokens_to_ids(words.split())


def test_sides_end_with_exactly_one_stop_id(tmp_path):
    rows = held_out(100)
    rows[1]["chosen"] += " <eos> the film"  # it ended before
    pairs = preferences(tmp_path, rows)
    assert len(pairs) == 100
    for row, pair in zip(rows, pairs, strict=True):
        prompt = ids("<bos> " + row["prompt"])
        chosen = prompt + ids(row["chosen"].split("<eos>")[0] + " <eos>")
        assert [pair.chosen_ids, pair.rejected_ids] == [
            chosen,
            prompt + ids(row["rejected"] + " <eos>"),
        ]
        assert pair.margin == 0
    # Any stop id ends a side.
    (pair,) = preferences(tmp_path, rows[:1], stop_ids=[2, ids(".")[0]])
    prompt = ids("<bos> " + rows[0]["prompt"])
    sides = ("we watched it at home .", "the script was simply bland .")
    assert [pair.chosen_ids, pair.rejected_ids] == [prompt + ids(side) for side in sides]


PROMPT = message("user", "on wednesday")
GOOD, BAD = message("assistant", "a film"), message("assistant", "it")


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ({"chat": True}, {"prompt": "on wednesday", "chosen": "a film", "rejected": "it"}),
        ({"chat": True}, {"prompt": [PROMPT], "chosen": [GOOD], "rejected": [BAD]}),
        ({}, {"chosen": [PROMPT, GOOD], "rejected": [PROMPT, BAD]}),  # whole conversations
        (
            {"prompt_column": "x", "chosen_column": "y", "rejected_column": "z"},
            {"x": [PROMPT], "y": [GOOD], "z": [BAD], "prompt": "", "chosen": "", "rejected": ""},
        ),
    ],
)
def test_chat_pairs_in_tokens(tmp_path, flags, row):
    (pair,) = preferences(tmp_path, [row], chat_template=CHAT, **flags)
    prompt = ids("<bos> on wednesday <eos> . the :")
    assert [pair.chosen_ids, pair.rejected_ids] == [
        prompt + ids("a film <eos>"),
        prompt + ids("it <eos>"),
    ]


def test_no_prompt_and_none_that_is_shared(tmp_path, capsys):
    rows = [{"chosen": [PROMPT, GOOD], "rejected": turns} for turns in ([BAD, BAD], [PROMPT, BAD])]
    assert len(preferences(tmp_path, rows, chat_template=CHAT)) == 1
    dropped = "dropped {'whose conversations begin differently': 1}"
    assert dropped in capsys.readouterr().out
    with pytest.raises(ValueError, match="'with an empty prompt, or without --prompt-column': 1"):
        preferences(tmp_path, [{"chosen": "q good", "rejected": "q bad"}])


@pytest.mark.parametrize("chat", [False, True])
def test_unusable_pairs_are_dropped_and_counted(tmp_path, capsys, chat):
    good, at_limit, long = " a film", " the plot was dull", " the plot was really dull"
    sides = [
        (good, " it"),
        (good, at_limit),
        (at_limit, good),
        (good, long),
        (long, good),
        (good, good),
        (good, "  a film "),  # other text, but the same tokens
        ("", good),
        (good, " \n"),
        (good, None),
    ]
    rows = [{"prompt": "on wednesday", "chosen": a, "rejected": b} for a, b in sides]
    flags = dict(max_length=8)  # <bos> on wednesday, four words and <eos>
    if chat:
        for row in rows:
            row["prompt"] = [message("user", row["prompt"])]
            for side in ("chosen", "rejected"):
                row[side] = [message("assistant", row[side])]
        flags = dict(max_length=12, chat_template=CHAT)  # also <eos>, the full stop, `the` and `:`
    else:
        rows.append({"prompt": None, "chosen": good, "rejected": " it"})
        # One word of two: the prompt would end with another token than when it stands alone.
        rows.append({"prompt": "on wednesday", "chosen": good, "rejected": "s it"})
    pairs = preferences(tmp_path, rows, **flags)
    prompt = 7 if chat else 3  # tokens
    lengths = [
        [len(ids) - prompt for ids in [pair.chosen_ids, pair.rejected_ids]] for pair in pairs
    ]
    assert lengths == [[3, 2], [3, 5], [5, 3]]
    printed = capsys.readouterr().out
    assert printed.startswith("train: 3 rows, dropped {'longer than --max-length': 2, ")
    assert "'with chosen equal to rejected': 2" in printed
    assert "'with an empty prompt or completion': 3" in printed
    assert ("'with an empty prompt, or without --prompt-column': 1" in printed) == (not chat)
    assert (f'{MERGED}": 1' in printed) == (not chat)
    assert f"; longest {13 if chat else 9} tokens" in printed


@pytest.mark.parametrize("column", ["margin", "m"])
def test_margins_come_from_their_column(tmp_path, column):
    rows = [row | {column: value} for row, value in zip(held_out(3), (0.5, -2, 3), strict=True)]
    pairs = preferences(tmp_path, rows, margin_column=column)
    assert [pair.margin for pair in pairs] == [0.5, -2, 3]
    assert all(pair.margin == 0 for pair in preferences(tmp_path, rows, margin_column=None))
    with pytest.raises(ValueError, match="no column gaps in --dataset"):  # asked for, not there
        preferences(tmp_path, rows, margin_column="gaps")


def test_margins_that_are_not_finite(tmp_path):
    bad = math.nan
    rows = [row | {"m": value} for row, value in zip(held_out(2), (0.5, bad), strict=True)]
    with pytest.raises(ValueError, match=f"--margin-column m: {bad} is no finite number"):
        preferences(tmp_path, rows, margin_column="m")
