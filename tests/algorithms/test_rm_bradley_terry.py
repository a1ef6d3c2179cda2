"""rm_bradley_terry.py: loss, calibration, the scores of pairs, and the model it saves."""

import math
from functools import partial

import algorithms
import pytest
import torch
from algorithms import assert_same_gradient
from gpu_types import take_gpu_types
from models import save_model, tiny_classifier
from safetensors.torch import load_file
from spies import watch_steps
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer

from common.prompts import shares_prompts
from runtime.model import transformer_layers
from grpo import model_rewards
from reviews import dataset, plain_model
from rm_bradley_terry import Args, bradley_terry_loss, calibration_error
from rm_bradley_terry import load_classifier, pair_scores, wins
from runs import read

run = partial(algorithms.run, "rm_bradley_terry")
POLICY, REWARD_MODEL = "tiny/reviews/policy", "tiny/reviews/reward_model"
plain_classifier = partial(plain_model, kind=AutoModelForSequenceClassification)


def held_out(count):
    return read("tiny/reviews/preferences/test.jsonl")[:count]


def plain_scores(model, rows):
    """Scores of chosen and rejected, with nothing but transformers: text in, logits out."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    assert tokenizer.padding_side == "right"
    scores = []
    for side in ("chosen", "rejected"):
        texts = [row["prompt"] + row[side] + "<eos>" for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        assert not batch.attention_mask.all()
        scores.append(model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0])
    return scores


def policy_that_pads_with(pad, folder):
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = pad
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    assert AutoTokenizer.from_pretrained(save_model(folder, model, tokenizer)).pad_token == pad
    return str(folder)


def load(folder, **flags):
    args = Args(model=str(folder), max_length=64, **flags)
    return load_classifier(args, AutoTokenizer.from_pretrained(POLICY), [2], torch.device("cpu"))


def scores_of(model, rows):
    """Scores of lists of token ids."""
    sequences = [side for row in rows for side in ((row[:1], row[1:]), (row[:1], [3]))]
    return pair_scores(model, sequences, torch.arange(len(rows)))[0]


def rewards_of(model, rows):
    """The same by grpo.py and ppo_rlhf.py, two at a time; float32 numbers, summed in float64."""
    return model_rewards(model, 2, [], [(row[:1], row[1:]) for row in rows]).float()


SCORES = pytest.mark.parametrize("scores_by", [scores_of, rewards_of])


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


# --- the score of a row -------------------------------------------------------------------------
@SCORES
@pytest.mark.parametrize(
    ("architecture", "pad_token_id"), [("llama", 0), ("llama", 2), ("gpt2", None)]
)
def test_score_is_the_heads_output_at_the_last_token_however_long_the_others_are(
    architecture, pad_token_id, scores_by
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
            scores = scores_by(model, rows + more)[: len(rows)]
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
            scores = scores_by(model, more + rows[::-1])[len(more) :]
            torch.testing.assert_close(scores.flip(0), expected, atol=1e-4, rtol=1e-4)


@SCORES
def test_scores_are_float32_under_autocast(scores_by, monkeypatch):
    """Also on several GPUs, where FSDP casts the layers. In bfloat16 near scores would be equal."""
    take_gpu_types(monkeypatch)
    model = tiny_classifier("llama")
    model.model.bfloat16()
    assert shares_prompts(model)
    hidden, types = [], []
    model.score.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    up = model.model.layers[0].mlp.up_proj
    up.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    with torch.no_grad():
        score = scores_by(model, [[1, 7, 9, 2]])
    assert types == [torch.bfloat16]
    # A rounded product would differ from this sum by about a part in 2^8.
    expected = (hidden[0][0].double() * model.score.weight.double()).sum()
    assert score.dtype == torch.float32
    assert score.item() == pytest.approx(expected.item(), rel=1e-5)


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
    args = Args(model=save_model(tmp_path, model, tokenizer), max_length=64)
    model = load_classifier(args, tokenizer, stop_ids, torch.device("cpu"))
    assert tokenizer.pad_token_id == model.config.pad_token_id == pad_id
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows
    assert torch.equal(model.get_input_embeddings().weight[: len(before)], before)
    assert tokenizer("on wednesday<eos>").input_ids == [1, 84, 130, 2]


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_plain_transformers_give_the_saved_model_the_same_scores(tmp_path, pad):
    source = policy_that_pads_with(pad, tmp_path / "policy")
    flags = dict(train_split="train[:64]", batch_size=16, micro_batch_size=16, epochs=2)
    run_dir = run(tmp_path, model=source, eval_split="test[:40]", **flags)
    chosen, rejected = plain_scores(plain_classifier(run_dir), held_out(40))
    config = AutoConfig.from_pretrained(run_dir)
    assert config.num_labels == 1
    assert config.score_mean == pytest.approx(chosen.mean().item(), abs=1e-4)
    first, *_, last = read(run_dir / "metrics.jsonl")
    assert last["eval/score_chosen"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert last["eval/score_rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    assert last["eval/margin"] > first["eval/margin"] + 1e-2, "nothing was trained"


# --- a run --------------------------------------------------------------------------------------
def test_losses_and_metrics_against_scores_of_plain_transformers(tmp_path, monkeypatch):
    steps = watch_steps(monkeypatch)
    rows = held_out(19)
    for i, row in enumerate(rows):
        row["m"] = i / 4 - 2
        if i % 3 == 0:  # or the model would be right about nearly all
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    # A learning rate of nearly 0, so that every evaluation is of the model that we have.
    flags = dict(batch_size=8, micro_batch_size=3, eval_rows=10, center_coef=0.01)
    flags |= dict(model=REWARD_MODEL, margin_column="m", learning_rate=1e-30, epochs=2)
    flags |= dict(train_split="train", eval_split="test")
    run_dir = run(tmp_path, dataset=dataset(tmp_path, rows[11:], rows[:11]), **flags)
    evaluation, *_, step = read(run_dir / "metrics.jsonl")
    assert step["step"] == 2

    model = plain_classifier(REWARD_MODEL)
    for name, metrics, some in (("eval", evaluation, rows[:10]), ("reward", step, rows[11:])):
        chosen, rejected = (scores.tolist() for scores in plain_scores(model, some))
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

    # The gradient of each of the two steps is that of the mean of the pairs' losses.
    r_w, r_l = plain_scores(model, rows[11:])
    gaps = r_w - r_l - torch.tensor([row["m"] for row in rows[11:]])
    (torch.log1p(torch.exp(-gaps)) + 0.01 * (r_w + r_l) ** 2).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert step["reward/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for _, gradient, _ in steps:
        assert_same_gradient(gradient, [p.grad for p in model.parameters()])

    error = calibration_error(torch.tensor(evaluated))
    assert evaluation["eval/calibration_error"] == pytest.approx(error, rel=1e-5) and error > 0.1
    assert all(step[key] == value for key, value in evaluation.items() if key.startswith("eval/"))


# --- the head and the last layers, the rest frozen ----------------------------------------------
@pytest.mark.parametrize("num_layers", [0, 1, None])
def test_only_the_head_and_the_last_layers_move_and_have_moments(tmp_path, num_layers, capsys):
    run_dir = run(tmp_path, epochs=0.5, train_layers=num_layers)
    start = load(POLICY, train_layers=num_layers)
    end = load_file(run_dir / "model.safetensors")
    trained = {name for name, _ in start.named_parameters()}
    if num_layers is not None:
        count = len(transformer_layers(start))
        last = [f".layers.{i}." for i in range(count - num_layers, count)]
        trained = {name for name in trained if any(layer in name for layer in last)}
        trained.add("score.weight")
    moved = {name for name, p in start.named_parameters() if not torch.equal(p, end[name])}
    assert moved == trained
    _, moments = torch.load(run_dir / "checkpoint.pt", weights_only=True)["model"]
    assert moments["state"].keys() == trained
    count = sum(p.numel() for name, p in start.named_parameters() if name in trained)
    assert f"trained: {count:,} parameters" in capsys.readouterr().out
