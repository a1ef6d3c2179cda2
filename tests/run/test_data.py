"""What no library would notice: weights, tokenizers and rows that are not what was asked for."""

import json
import re

import pytest
import torch
from scripts import SPECS, WITH_ROLLOUTS, with_flag
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import grpo
import ppo_rlhf
import rm_bradley_terry

EACH = pytest.mark.parametrize("name", SPECS)
# The loader of prompts is one, and those of rows are four.
EACH_LOADER = pytest.mark.parametrize("name", "grpo sft rm_bradley_terry dpo kto".split())
POLICY = "tiny/arithmetic/policy"
CPU = torch.device("cpu")


def write_dataset(folder, rows):
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def row_of(prompt, completion, **columns):
    """A row that every script can use."""
    row = dict(prompt=prompt, completion=completion, label=True, answer="3")
    return row | dict(chosen=completion, rejected=f"{completion}0") | columns


def fails(name, tmp_path, error, message, **flags):
    """Run a script; it must end with this error, and leave no folder."""
    script, output_dir = SPECS[name].module, tmp_path / "runs"
    args = script.Args(**SPECS[name].short_flags | flags | {"output_dir": str(output_dir)})
    with pytest.raises(error, match=message):
        script.main(args)
    assert not output_dir.exists()


def save(folder, tokenizer, kind=AutoModelForCausalLM, without=None):
    """The tiny policy in a folder, with another tokenizer, or without one of its weights."""
    model = kind.from_pretrained(POLICY)
    weights = model.state_dict()
    if without:
        del weights[without]
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


# --- models -------------------------------------------------------------------------------------
def test_weights_that_are_missing_are_not_made_up(tokenizer, tmp_path):
    folder = save(tmp_path / "model", tokenizer, without="model.norm.weight")
    with pytest.raises(ValueError, match=r"has no weights for \['model.norm.weight'\]"):
        grpo.load_model(AutoModelForCausalLM, folder, tokenizer, 10, CPU)
    with pytest.raises(ValueError, match=r"has no weights for \['score.weight'\]"):
        grpo.load_model(AutoModelForSequenceClassification, POLICY, tokenizer, 10, CPU)
    args = rm_bradley_terry.Args(model=folder)  # it may add a head, and nothing else
    with pytest.raises(ValueError, match=r"has no weights for .*'model.norm.weight'"):
        rm_bradley_terry.load_classifier(args, tokenizer, [2], CPU)
    args = ppo_rlhf.Args(model=folder, critic_init="sft")
    with pytest.raises(ValueError, match=r"has no weights for .*model.norm.weight"):
        ppo_rlhf.load_critic(args, tokenizer, 10, CPU)


def test_a_tokenizer_that_is_not_the_policys(tokenizer):
    kind, source = AutoModelForSequenceClassification, "tiny/reviews/reward_model"
    with pytest.raises(ValueError, match=f"the tokenizer of {source} is not that of --model"):
        grpo.load_model(kind, source, tokenizer, 10, CPU)


def test_a_tokenizer_larger_than_the_embedding(tokenizer, tmp_path):
    tokenizer.add_tokens([f"word{i}" for i in range(50)])
    folder = save(tmp_path / "model", tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has more tokens than the embedding"):
        grpo.load_model(AutoModelForCausalLM, folder, tokenizer, 10, CPU)
    args = rm_bradley_terry.Args(model=folder)
    with pytest.raises(ValueError, match="the tokenizer has more tokens than the embedding"):
        rm_bradley_terry.load_classifier(args, tokenizer, [2], CPU)


@EACH
def test_more_tokens_than_positions(name, tmp_path):
    flags = dict(max_length=129)
    if SPECS[name].kind == "rollouts":
        flags = dict(max_prompt_length=64, max_new_tokens=65)
    fails(name, tmp_path, ValueError, "has fewer positions than", **flags)


@pytest.mark.parametrize("name", sorted({*with_flag("max_new_tokens")} - {*WITH_ROLLOUTS}))
def test_more_sampled_tokens_than_positions(name, tmp_path):
    fails(name, tmp_path, ValueError, "has fewer positions than", max_new_tokens=126)


# --- rows ---------------------------------------------------------------------------------------
@EACH_LOADER
def test_a_column_that_is_not_there(name, tmp_path):
    data = write_dataset(tmp_path / "data", [{"question": "1+2=", "reply": "#3"}])
    message = r"no column \w+ in --dataset: it has \['question', 'reply'\]"
    fails(name, tmp_path, ValueError, message, dataset=data)


@pytest.mark.parametrize("column", ["prompt", "completion", "label", "chosen", "margin", "answer"])
def test_a_column_that_was_typed_must_be_there(column, tmp_path):
    """Another one, or the beginning of two conversations, is not taken instead."""
    name = {"chosen": "dpo", "margin": "rm_bradley_terry", "answer": "grpo"}.get(column, "kto")
    data = write_dataset(tmp_path / "data", [row_of("1+2=", "#3")])
    flags = {"dataset": data, f"{column}_column": "typo"}
    fails(name, tmp_path, ValueError, "no column typo", **flags)


def test_a_split_that_is_not_there_names_the_flag(tmp_path):
    message = "--dataset tiny/arithmetic/prompts, split validation: .*--eval-split train.95%:"
    fails("grpo", tmp_path, ValueError, message, eval_split="validation")


@EACH_LOADER
def test_no_row_is_left(name, tmp_path):
    data = write_dataset(tmp_path / "data", [row_of("", "#3")])
    fails(name, tmp_path, ValueError, f"--dataset {data}, train.*: no .* is left", dataset=data)


@EACH_LOADER
def test_rows_that_do_not_fit_are_dropped_and_counted(name, tokenizer, tmp_path, capsys):
    spec = SPECS[name]
    rows = [row_of("1+2=", "#3"), row_of("", "#3"), row_of("1+2+3+4+5=", "#15")]
    if spec.kind == "rollouts":
        flags, arguments, longest = dict(max_prompt_length=5), ["train", tokenizer], 11  # with BOS
        rows += [row_of("2+2=", ""), row_of(None, "#4")]
    else:
        flags, arguments, longest = dict(max_length=9, model=POLICY), ["train", tokenizer, [2]], 15
        rows += [row_of("2+2=", "#4"), row_of("2+3=", "")]
    data = write_dataset(tmp_path / "data", rows)
    loaded = getattr(spec.module, spec.loader)(spec.module.Args(dataset=data, **flags), *arguments)
    assert len(loaded) == 2
    (printed,) = capsys.readouterr().out.splitlines()
    assert re.match(r"train: 2 .*dropped \{", printed)
    assert re.search(r"'longer than --max-[a-z-]+': 1[,}]", printed)
    assert re.search(r"empty[a-z ]*': 2[,}]", printed)
    longest += name in with_flag("rejected_column")  # the rejected one has a digit more
    assert printed.endswith(f"; longest {longest} tokens")


# --- nothing is trained on NaN ------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ppo_rlhf", "sft"])
def test_a_run_that_diverges_is_stopped(name, tmp_path):
    script = SPECS[name].module
    flags = SPECS[name].short_flags | dict(learning_rate=1e18, output_dir=str(tmp_path))
    with pytest.raises(FloatingPointError, match="nan: is --learning-rate too high"):
        script.main(script.Args(**flags))
