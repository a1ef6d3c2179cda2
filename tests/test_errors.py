"""A user's mistake ends with one clear message that names the flag or the row, and no traceback."""

import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from scripts import SCRIPTS, short_flags
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import grpo

PAIRED = pytest.mark.parametrize("name", ["rm_bradley_terry", "dpo"])
EACH = pytest.mark.parametrize("name", SCRIPTS)
REWARDED = pytest.mark.parametrize("name", ["ppo_rlhf", "grpo"])
TINY = dict(epochs=0.5, batch_size=16, total_rollouts=2, prompts_per_rollout=4, group_size=2)
TINY |= dict(num_minibatches=1, eval_split="test[:4]", eval_samples=2, train_split="train[:64]")


def tiny_args(name, flags):
    """A short run; of the default data a few rows, because reading all would take most of it."""
    whole = dict(train_split="train", eval_split="test") if "dataset" in flags else {}
    return SCRIPTS[name].Args(**short_flags(name, **TINY | whole) | flags)


def fails(name, tmp_path, message, **flags):
    """Run a script in this process; it must end with the message, which must be short."""
    script = SCRIPTS[name]
    args = tiny_args(name, {"output_dir": str(tmp_path / "runs"), **flags})
    with pytest.raises(script.InputError) as end:
        script.main(args)
    text = f"error: {end.value}"  # as the command line shows it
    assert message in text, text
    assert len(text) < 1200
    return text


def dataset(tmp_path, rows, test_rows=None):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for split, some in (("train", rows), ("test", test_rows or rows)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(folder)


def row_of(prompt, completion):
    """A row that every script can use."""
    row = {"prompt": prompt, "completion": completion, "label": True, "answer": "3"}
    return row | {"chosen": completion, "rejected": f"{completion}0"}


def model_with_template(tmp_path, template):
    """The tiny policy with a chat template, in a folder."""
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    tokenizer.chat_template = template
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def reward_file(tmp_path, body, signature="prompts, completions, **columns"):
    path = tmp_path / f"rules_{time.time_ns()}.py"  # Python imports one module of a name
    path.write_text(f"def rule({signature}):\n    {body}\n")
    return f"{path}:rule"


# --- from the shell -----------------------------------------------------------------------------


def test_exit_status_and_no_traceback():
    """One script: test_one_source.py sees to it that all end with the same lines."""
    words = [sys.executable, "sft.py", "--dataset", "no/such/folder"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --dataset no/such/folder, train: ")
    assert "Traceback" not in done.stderr


@EACH
def test_unknown_flag_and_bad_value(name, capsys):
    for argv in (["--lerning-rate", "1"], ["--seed", "x"], ["--lr-schedule", "zigzag"]):
        with pytest.raises(SystemExit) as end:
            SCRIPTS[name].parse_args(argv)
        assert end.value.code == 2


# --- flags, before anything is loaded -----------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("micro_batch_size", 0),
        ("eval_every", 0),
        ("save_every", 0),
        ("max_grad_norm", -1.0),
        ("warmup_ratio", -0.1),
        ("warmup_ratio", 100.0),  # steps were meant
        ("seed", -1),
        ("seed", 2**64),  # PyTorch takes 64 bits
        ("learning_rate", 1e30),
    ],
)
def test_numbers_out_of_range(name, flag, value, tmp_path):
    if not hasattr(SCRIPTS[name].Args, flag):
        pytest.skip("has no such flag")
    fails(name, tmp_path, f"--{flag.replace('_', '-')} must", **{flag: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(group_size=1), "--group-size must be at least 2"),
        (
            dict(kl_placement="reward", multi_objective_aggregation="normalize_then_sum"),
            "normalize_then_sum needs --kl-placement loss and --scale-rewards",
        ),
        (
            dict(scale_rewards=False, multi_objective_aggregation="normalize_then_sum"),
            "normalize_then_sum needs --kl-placement loss and --scale-rewards",
        ),
        (dict(beta=-0.1), "--beta must"),
        (dict(temperature=0.0), "--temperature must be a number above 0, not 0"),
        (dict(clip_coef_high=0.0), "--clip-coef-high must"),
        (dict(num_minibatches=9), "--num-minibatches: 8 at most"),
        (dict(reward_weights=[1.0, 2.0]), "--reward-weights: give one for each of the 1 rewards"),
        (dict(reward_weights=[math.nan]), "--reward-weights must not be [nan]"),
    ],
)
def test_grpo_flags(flags, message, tmp_path):
    fails("grpo", tmp_path, message, **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(reward_model=None), "without --reward-model give --reward-fn"),
        (
            dict(reward_model=None, reward_fn=[grpo.LAST_NUMBER]),
            "and --critic-init sft, scratch or policy",
        ),
        (dict(kl_target=3.0, beta=0.0), "--kl-target adapts --beta, which is 0"),
        (dict(gamma=1.1), "--gamma or --gae-lambda is more than 1"),
        (dict(gae_lambda=-0.1), "--gae-lambda must be a number of at least 0, not -0.1"),
        (dict(clip_coef=0.0), "--clip-coef must be a number above 0, not 0"),
        (
            dict(reward_weights=[1.0, 2.0]),
            "--reward-weights: give one for each of the 1 rewards",
        ),
        (dict(beta=-0.1), "--beta must be a number of at least 0, not -0.1"),
        (dict(ent_coef=-0.1), "--ent-coef must be a number of at least 0, not -0.1"),
        (
            dict(missing_eos_penalty=-1.0),
            "--missing-eos-penalty must be a number of at least 0, not -1",
        ),
        (dict(vf_clip_coef=0.0), "--vf-clip-coef must be a number above 0, not 0"),
        (dict(target_kl=-1.0), "--target-kl must be a number above 0, not -1"),
        (dict(kl_target=0.0), "--kl-target must be a number above 0, not 0"),
        (dict(kl_horizon=0.0), "--kl-horizon must be a number above 0, not 0"),
        (dict(kl_horizon=0.8, kl_target=1.0), "--kl-horizon is so short"),
        (dict(num_minibatches=5), "--num-minibatches: 4 at most"),
        (dict(critic_learning_rate=0.0), "--critic-learning-rate must be a number above 0, not 0"),
        (dict(temperature=0.0), "--temperature must be a number above 0, not 0"),
        (dict(max_new_tokens=-1), "--max-new-tokens must be a number above 0, not -1"),
    ],
)
def test_ppo_flags(flags, message, tmp_path):
    fails("ppo_rlhf", tmp_path, message, **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(center_coef=-0.1), "--center-coef must be a number of at least 0, not -0.1"),
    ],
)
def test_reward_model_flags(flags, message, tmp_path):
    fails("rm_bradley_terry", tmp_path, message, **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(beta=0.0), "--beta must be a number above 0, not 0"),
        (dict(beta=math.inf), "--beta must be below 2**63, not inf"),
        (dict(label_smoothing=0.5), "--label-smoothing must not be 0.5"),
        (dict(label_smoothing=-0.1), "--label-smoothing must be a number of at least 0, not -0.1"),
        (
            dict(label_smoothing=0.1, loss="ipo"),
            "--label-smoothing belongs to --loss sigmoid, not ipo",
        ),
        (dict(label_smoothing=0.1, loss="orpo"), "--label-smoothing belongs to --loss sigmoid"),
        (dict(gamma=-0.1, loss="simpo"), "--gamma must be a number of at least 0, not -0.1"),
        (dict(gamma=0.5), "--gamma belongs to --loss simpo, not sigmoid"),
        (dict(gamma=0.5, loss="ipo"), "--gamma belongs to --loss simpo, not ipo"),
        (dict(gamma=0.5, loss="orpo"), "--gamma belongs to --loss simpo, not orpo"),
        (
            dict(online_reference=True, loss="simpo"),
            "--online-reference belongs to --loss sigmoid or ipo, not simpo",
        ),
        (dict(online_reference=True, loss="orpo"), "--online-reference belongs to"),
        (
            dict(nll_coef=0.1, loss="orpo"),
            "--nll-coef belongs to --loss sigmoid or ipo or simpo, not orpo",
        ),
        (dict(nll_coef=-0.1), "--nll-coef must be a number of at least 0, not -0.1"),
        (dict(nll_coef=math.inf), "--nll-coef must be below 2**63, not inf"),
        (dict(temperature=0.0), "--temperature must be a number above 0, not 0"),
        (dict(max_new_tokens=0), "--max-new-tokens must be a number above 0, not 0"),
        (dict(epochs=0.0), "--epochs must be a number above 0, not 0"),
        (dict(max_new_tokens=124), "it has 128 positions, the --max flags need 131"),
    ],
)
def test_dpo_flags(flags, message, tmp_path):
    fails("dpo", tmp_path, message, **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(beta=0.0), "--beta must be a number above 0, not 0"),
        (dict(desirable_weight=0.0), "--desirable-weight must be a number above 0, not 0"),
        (dict(undesirable_weight=-1.0), "--undesirable-weight must be a number above 0, not -1"),
        (
            dict(undesirable_weight=math.inf),
            "--undesirable-weight must be below 2**63, not inf",
        ),
        (dict(temperature=0.0), "--temperature must be a number above 0, not 0"),
        (dict(epochs=0.0), "--epochs must be a number above 0, not 0"),
        (dict(max_new_tokens=124), "it has 128 positions, the --max flags need 131"),
    ],
)
def test_kto_flags(flags, message, tmp_path):
    fails("kto", tmp_path, message, **flags)


def test_a_number_that_became_a_text_in_args_json(tmp_path):
    fails("grpo", tmp_path, "flags: --seed must be a number of at least 0, not '1'", seed="1")


ONE_STEP = dict(num_minibatches=1, update_epochs=1)  # per rollout
TWO_STEPS = dict(num_minibatches=1, update_epochs=2)
CLIP = "--clip-coef and --clip-coef-high: with one optimiser"  # step per rollout
GSPO = dict(importance_sampling_level="sequence")
RULE = dict(reward_fn=[grpo.LAST_NUMBER], critic_init="sft")  # of ppo_rlhf, without a reward model


@pytest.mark.parametrize(
    ("name", "flags", "message", "mended"),
    [
        (
            "grpo",
            dict(kl_placement="reward", beta=0.0),
            "--kl-placement reward has no use with --beta 0",
            dict(beta=0.1),
        ),
        (
            "ppo_rlhf",
            dict(kl_placement="loss", beta=0.0),
            "--kl-placement loss has no use with --beta 0",
            dict(beta=0.1),
        ),
        ("grpo", ONE_STEP | dict(clip_coef=0.1), CLIP, TWO_STEPS),
        ("grpo", ONE_STEP | dict(clip_coef=0.1), CLIP, dict(num_minibatches=2)),
        ("grpo", ONE_STEP | dict(clip_coef=0.1), CLIP, dict(clip_coef=0.2)),
        ("grpo", ONE_STEP | dict(clip_coef_high=0.3), CLIP, TWO_STEPS),
        ("grpo", ONE_STEP | dict(clip_coef_high=0.3), CLIP, dict(clip_coef_high=None)),
        ("ppo_rlhf", ONE_STEP | dict(clip_coef=0.1), "--clip-coef: with one optimiser", TWO_STEPS),
        (
            "ppo_rlhf",
            ONE_STEP | dict(clip_coef=0.1),
            "--clip-coef: with one optimiser",
            dict(num_minibatches=2),
        ),
        (
            "ppo_rlhf",
            ONE_STEP | dict(clip_coef=0.1),
            "--clip-coef: with one optimiser",
            dict(clip_coef=0.2),
        ),
        (
            "ppo_rlhf",
            dict(kl_horizon=100.0),
            "--kl-horizon has no use without --kl-target",
            dict(kl_target=3.0),
        ),
        (
            "grpo",
            GSPO | dict(loss_norm="token"),
            "--importance-sampling-level sequence needs --loss-norm sequence",
            dict(loss_norm="sequence"),
        ),
        (
            "grpo",
            GSPO | dict(loss_norm="constant"),
            "--importance-sampling-level sequence needs --loss-norm sequence",
            dict(importance_sampling_level="token"),
        ),
        (
            "ppo_rlhf",
            ONE_STEP | dict(vf_clip_coef=0.3),
            "--vf-clip-coef: with one optimiser",
            dict(vf_clip_coef=None),
        ),
    ],
)
def test_a_flag_that_would_have_no_use_is_refused(name, flags, message, mended, tmp_path):
    fails(name, tmp_path, f"error: flags: {message}", **flags)
    SCRIPTS[name].check_args(tiny_args(name, flags | mended))  # and beside what it needs it is not


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf"])
def test_none_is_no_reward_model(name):
    script = SCRIPTS[name]
    args = script.Args(reward_model="none", **(RULE if name == "ppo_rlhf" else {}))
    assert script.check_args(args).reward_model is None


def test_a_label_column_has_no_use_beside_pairs(tmp_path):
    data = dataset(tmp_path, [dict(prompt="on monday", chosen=" it", rejected=" a film")])
    message = "row 0 of train: --label-column has no effect: the data has pairs"
    fails("kto", tmp_path, message, dataset=data, label_column="x")


def test_a_weight_is_that_of_a_single_reward_too(tmp_path):
    """It scales what is learned from, not what is logged under the reward's own name."""
    for name, flags, own in (
        ("grpo", dict(prompts_per_rollout=8), "last_number"),
        ("ppo_rlhf", dict(max_new_tokens=8), "reward_model"),
    ):
        rows = []
        for weights in ([], [0.5]):
            more = dict(total_rollouts=1, reward_weights=weights, output_dir=str(tmp_path))
            run_dir = SCRIPTS[name].main(tiny_args(name, flags | more))
            rows.append(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1]))
        assert rows[0]["reward/mean"] != 0
        assert rows[1]["reward/mean"] == pytest.approx(rows[0]["reward/mean"] / 2)
        assert rows[1][f"reward/{own}"] == rows[0][f"reward/{own}"]


def test_track_without_a_login(tmp_path):
    words = [sys.executable, "sft.py", "--track", "--output-dir", str(tmp_path / "runs")]
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    somebody_else = kept | {"HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, env=somebody_else, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --track: No API key configured.")


# --- the model ----------------------------------------------------------------------------------


@EACH
def test_model_folder(name, tmp_path):
    fails(name, tmp_path, "--model no/such/model: ", model="no/such/model")
    (tmp_path / "empty").mkdir()
    fails(name, tmp_path, "--model", model=str(tmp_path / "empty"))


@EACH
def test_what_is_no_model_folder(name, tmp_path):
    file = "tiny/arithmetic/policy/config.json"
    fails(name, tmp_path, f"--model {file}: it is a file, and must be a folder", model=file)
    adapter, gguf, no_tokenizer = (tmp_path / kind for kind in ("adapter", "gguf", "no_tokenizer"))
    # A PEFT adapter is saved with the tokenizer.
    AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    fails(name, tmp_path, f"--model {adapter}: it is a PEFT adapter: merge", model=str(adapter))
    gguf.mkdir()
    (gguf / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    fails(name, tmp_path, f"--model {gguf}: GGUF weights: ", model=str(gguf))
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").save_pretrained(no_tokenizer)
    message = f"--model {no_tokenizer}: Couldn't instantiate the backend tokenizer from one of: "
    text = fails(name, tmp_path, message, model=str(no_tokenizer))
    assert "slow tokenizer" in text and "\n" not in text, "the whole message, in one line"


@EACH
def test_a_path_that_is_seen_from_another_directory(name, tmp_path, monkeypatch):
    """It is said where was looked, as a path with two slashes cannot be a name on the hub."""
    message = f"--dataset tiny/no/data, train: there is no such folder in {Path.cwd()}"
    fails(name, tmp_path, message, dataset="tiny/no/data")
    monkeypatch.chdir(tmp_path)
    message = f"--model {SCRIPTS[name].Args.model}: there is no such folder in {tmp_path}"
    fails(name, tmp_path, message)


@EACH
def test_model_without_weights(name, tmp_path):
    folder = tmp_path / "m"
    AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").config.save_pretrained(folder)
    fails(name, tmp_path, f"--model {folder}: ", model=str(folder))


@EACH
def test_weights_that_are_missing_are_not_made_up(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path / "m", state_dict=state)
    AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(tmp_path / "m")
    fails(name, tmp_path, "model.norm.weight", model=str(tmp_path / "m"))


@pytest.mark.parametrize("name", ["sft", "reinforce", "ppo_rlhf", "grpo", "dpo", "kto"])
def test_weights_that_the_model_does_not_use(name, tmp_path):
    """--model and --reward-model swapped: the head of scores would be thrown away."""
    swapped = "tiny/reviews/reward_model"
    text = fails(name, tmp_path, "weights missing or unknown to LlamaForCausalLM", model=swapped)
    assert f"--model {swapped}: " in text and text.endswith("['score.weight']")


@EACH
def test_more_tokens_than_positions(name, tmp_path):
    flag = "max_new_tokens" if hasattr(SCRIPTS[name].Args, "total_rollouts") else "max_length"
    flags = {flag: 1000}
    text = fails(
        name,
        tmp_path,
        "128 positions",
        **flags,
    )
    assert f"--model {SCRIPTS[name].Args.model}: " in text


@EACH
def test_no_stop_id(name, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    tokenizer.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m")
    fails(name, tmp_path, "neither tokenizer nor generation config", model=str(tmp_path / "m"))


@REWARDED
def test_reward_model_must_have_a_trained_head_and_the_same_tokenizer(name, tmp_path):
    own = SCRIPTS[name].Args.model
    fails(name, tmp_path, f"--reward-model {own}: weights missing", reward_model=own)
    (other,) = {"tiny/arithmetic/policy", "tiny/reviews/policy"} - {own}
    fails(name, tmp_path, "its tokenizer differs from --model", reward_model=other)


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf"])
def test_a_reward_model_that_gives_no_number(name, tmp_path):
    folder = tmp_path / "reward_model"
    shutil.copytree("tiny/reviews/reward_model", folder)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], math.inf)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    flags = dict(reward_model=str(folder), model="tiny/reviews/policy")
    flags |= dict(dataset="tiny/reviews/prompts", reward_fn=[])
    if name == "ppo_rlhf":
        flags["critic_init"] = "sft"
    fails(name, tmp_path, "--reward-model: it gave a score that is not finite", **flags)


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(
        "tiny/reviews/policy", num_labels=2, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained("tiny/reviews/policy").save_pretrained(tmp_path / "m")
    flag = str(tmp_path / "m")
    reviews = dict(model="tiny/reviews/policy", dataset="tiny/reviews/prompts")
    for name in ("ppo_rlhf", "grpo"):
        message = f"--reward-model {flag}: it has more than one label"
        fails(name, tmp_path, message, reward_model=flag, **reviews)
    fails("rm_bradley_terry", tmp_path, f"--model {flag}: ", model=flag)


# --- the data -----------------------------------------------------------------------------------


@EACH
def test_dataset_folder_split_and_file(name, tmp_path):
    fails(name, tmp_path, "--dataset no/such/set, train: ", dataset="no/such/set")
    (tmp_path / "empty").mkdir()
    fails(name, tmp_path, "--dataset", dataset=str(tmp_path / "empty"))
    fails(name, tmp_path, "nonsense", eval_split="nonsense")
    broken = dataset(tmp_path, [row_of("1+2=", "#3")])
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+2=", "comple')
    fails(name, tmp_path, f"--dataset {broken}, train: ", dataset=broken)


@EACH
def test_what_is_no_dataset_folder(name, tmp_path):
    file = dataset(tmp_path, [row_of("1+2=", "#3")]) + "/train.jsonl"
    message = f"--dataset {file}, train: it is a file, and must be a folder"
    fails(name, tmp_path, message, dataset=file)
    saved = str(tmp_path / "saved")
    Dataset.from_list([row_of("1+2=", "#3")]).save_to_disk(saved)
    message = f"--dataset {saved}, train: it was made by save_to_disk; use to_json or to_parquet"
    fails(name, tmp_path, message, dataset=saved)


@EACH
def test_prompts_that_are_numbers(name, tmp_path):
    data = dataset(tmp_path, [row_of(12, "#3")])
    text = fails(name, tmp_path, "row 0 of train: ", dataset=data)
    if name in ("reinforce", "ppo_rlhf", "grpo"):
        assert text.endswith("a prompt is a string or a list of messages, not 12")
    else:
        assert "int" in text and "str" in text


@EACH
def test_columns(name, tmp_path):
    data = dataset(tmp_path, [{"question": "1+2=", "reply": "#3"}])
    text = fails(name, tmp_path, "row 0 of train: ", dataset=data)
    assert "['question', 'reply']" in text


@EACH
def test_chat_messages_without_a_template(name, tmp_path):
    user = [{"role": "user", "content": "1+2="}]
    reply = [{"role": "assistant", "content": "#3"}]
    data = dataset(tmp_path, [row_of(user, reply) | {"rejected": reply}])
    fails(name, tmp_path, "row 0 of train: Cannot use chat template functions", dataset=data)


@EACH
def test_chat_messages_without_a_role(name, tmp_path):
    turns = [{"content": "1+2="}]
    data = dataset(tmp_path, [row_of(turns, turns) | {"rejected": turns}])
    template = "{{ messages[0]['content'] }}"
    flags = dict(dataset=data, model=model_with_template(tmp_path, template))
    fails(name, tmp_path, "row 0 of train: every chat message needs a role", **flags)


@EACH
def test_output_dir_that_is_a_file(name, tmp_path):
    (tmp_path / "runs").touch()
    fails(name, tmp_path, f"--output-dir {tmp_path / 'runs'}: ")


@EACH
def test_output_dir_is_looked_at_before_anything_is_loaded(name, tmp_path):
    (tmp_path / "runs").touch()
    fails(name, tmp_path, "--output-dir", model="no/such/model", dataset="no/such/set")


@pytest.mark.parametrize("name", ["ppo_rlhf", "dpo", "kto"])
def test_the_default_rule_judges_the_default_dataset_alone(name, tmp_path):
    script, runs = SCRIPTS[name], {}
    row = row_of("on wednesday i saw jaws .", " it ran") | {"rejected": " it"}
    data = dataset(tmp_path, [row, row | {"label": False}] * 2)
    rule = "./tiny/reviews/gold.py:sentiment"  # typed, it judges any dataset
    for key, flags in {"own": {}, "typed": dict(eval_reward_fn=rule), "tiny": {}}.items():
        flags |= {"output_dir": str(tmp_path / key)} | ({} if key == "tiny" else {"dataset": data})
        run_dir = script.main(tiny_args(name, flags))
        runs[key] = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    if name in ("dpo", "kto"):
        assert ["eval/reward" in runs[key] for key in runs] == [False, True, True]
        assert "eval/loss" in runs["own"]
    else:  # by the reward model, then, which has no full marks
        assert ["eval/accuracy" in runs[key] for key in runs] == [False, True, True]


def test_samples_print_on_any_console(tmp_path):
    data = dataset(tmp_path, [row_of("1+\u00e9=", "#3")] * 4)
    words = "grpo.py --total-rollouts 1 --prompts-per-rollout 2 --num-minibatches 1 --dataset"
    words = [sys.executable, *words.split(), data, "--output-dir", str(tmp_path / "runs")]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, env=ascii_only, timeout=100)
    assert done.returncode == 0, done.stderr
    assert r"{'prompt': '1+\xe9='" in done.stdout


@EACH
def test_messages_that_the_template_refuses(name, tmp_path):
    template = "{% if '+' in messages[0]['content'] %}{{ raise_exception('no sums') }}{% endif %}"
    flags = dict(chat=True, model=model_with_template(tmp_path, template))
    flags["dataset"] = dataset(tmp_path, [row_of("1+2=", "#3")])
    fails(name, tmp_path, "row 0 of train: no sums", **flags)


@EACH
def test_two_bos(name, tmp_path):
    data = dataset(tmp_path, [row_of("<bos>1+2=", "#3")])
    fails(name, tmp_path, "row 0 of train: two BOS", dataset=data)


@EACH
def test_no_row_left(name, tmp_path):
    data = dataset(tmp_path, [row_of("", "#3")])
    fails(name, tmp_path, "nothing is left: 0 of 1 ", dataset=data)
    flag = "max_length" if hasattr(SCRIPTS[name].Args, "max_length") else "max_prompt_length"
    text = fails(name, tmp_path, "nothing is left: 0 of ", **{flag: 4})
    assert f"--{flag.replace('_', '-')} 4" in text


@pytest.mark.parametrize("turns", [["hello", "hi"], [{"role": "user", "content": "hello"}], []])
def test_messages_without_an_answer_are_counted(turns, tmp_path):
    fails(
        "sft", tmp_path, "dropped 1 with an empty", dataset=dataset(tmp_path, [{"messages": turns}])
    )


def test_prompt_and_completion_of_different_kinds(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "completion": [{"role": "a", "content": "b"}]}])
    fails("sft", tmp_path, "row 0 of train: the prompt is a str and the completion a", dataset=data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(prompt="1+2=", chosen="#3", rejected=["#4"]), "must all be strings or all lists"),
        (dict(prompt="1+2=", chosen=["#3"], rejected=["#4"]), "--prompt-column none"),
        (
            dict(prompt=["1+2="], chosen=["#3"], rejected=["#4"]),
            "every chat message needs a role",
        ),
        (dict(prompt="1+2=", chosen=3, rejected=4), "must all be strings or all lists"),
        (dict(chosen=[1, 2], rejected=[3, 2]), "must be equal up to their last message"),
        (dict(prompt="1+2=", chosen="#3", rejected=" "), "1 with an empty prompt or completion"),
        (dict(prompt="1+2=", chosen="#3", rejected=None), "1 with an empty prompt or completion"),
        (dict(prompt="1+2=", chosen="#3", rejected="#3"), "1 with chosen equal to rejected"),
        (dict(chosen="#3", rejected="+3"), "no column prompt in "),
    ],
)
@PAIRED
def test_pairs_that_cannot_be_compared(name, row, message, tmp_path):
    data = dataset(tmp_path, [row])
    text = fails(name, tmp_path, message, dataset=data, model="tiny/arithmetic/policy")
    assert "row 0 of train" in text or "train: nothing is left: 0 of 1 rows" in text


@PAIRED
def test_a_prompt_column_that_was_typed_must_be_there(name, tmp_path):
    """Not what the two conversations share instead."""
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    data = dataset(tmp_path, [{"question": "1+2=", "chosen": turns, "rejected": turns}])
    fails(name, tmp_path, "no column questoin in", dataset=data, prompt_column="questoin")


@PAIRED
def test_messages_in_another_format(name, tmp_path):
    turns = [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "#3"}]
    rows = [{"chosen": turns, "rejected": [turns[0], {"from": "gpt", "value": "#4"}]}]
    flags = dict(dataset=dataset(tmp_path, rows), model=model_with_template(tmp_path, "x"))
    fails(name, tmp_path, "row 0 of train: every chat message needs a role and a content", **flags)


@pytest.mark.parametrize("label", ["yes", None, 2, 0.5, "true", [True]])
def test_labels_that_are_neither_true_nor_false(label, tmp_path):
    rows = [row_of("1+2=", "#3"), row_of("1+4=", "#5") | {"label": label}]
    if isinstance(label, str | list):
        rows[0]["label"] = label  # one type in a column
    row = 1 if rows[0]["label"] is True else 0
    message = f"row {row} of train: label must be true or false, not {label!r}"
    fails("kto", tmp_path, message, dataset=dataset(tmp_path, rows))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            dict(prompt="1+2=", completion="#3"),
            "needs the columns ['prompt', 'completion', 'label']",
        ),
        (dict(prompt="1+2=", label=True), "found ['label', 'prompt']"),
        (dict(completion="1+2=#3", label=True), "found ['completion', 'label']"),
        (dict(prompt="1+2=", completion=["#3"], label=True), "found ['list', 'str']"),
        (dict(prompt=3, completion=4, label=True), "found ['int']"),
        (dict(prompt="1+2=", chosen="#3"), "found ['chosen', 'prompt']"),
        (
            dict(chosen="1+2=#3", rejected="1+2=#4"),
            "no column prompt in ['chosen', 'rejected'] (is it --prompt-column none?)",
        ),
        (dict(prompt="1+2=", chosen="#3", rejected=["#4"]), "found ['list', 'str']"),
        (dict(prompt="1+2=", completion=" ", label=True), "1 with an empty prompt or completion"),
        (dict(prompt="1+2=", chosen=None, rejected=None), "2 with an empty prompt or completion"),
    ],
)
def test_rows_that_have_no_label_or_no_completion(row, message, tmp_path):
    flags = dict(dataset=dataset(tmp_path, [row]), model="tiny/arithmetic/policy")
    text = fails("kto", tmp_path, message, **flags)
    assert "row 0 of train" in text or "train: nothing is left: 0 of " in text


@pytest.mark.parametrize("flag", ["prompt", "completion", "label"])
def test_a_column_of_labels_that_was_typed_must_be_there(flag, tmp_path):
    """Pairs are not taken apart instead, nor is a conversation's beginning the prompt."""
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    row = {"chosen": turns, "rejected": turns}
    if flag != "completion":
        row = {"completion": turns, "label" if flag == "prompt" else "other": True}
    flags = {"dataset": dataset(tmp_path, [row]), f"{flag}_column": "typo"}
    fails("kto", tmp_path, "'typo'", **flags)


@EACH
def test_empty_file(name, tmp_path):
    data = dataset(tmp_path, [])
    text = fails(name, tmp_path, f"--dataset {data}, train: ", dataset=data)
    assert text.endswith(("train.jsonl is empty", "test.jsonl is empty"))


def test_margin_that_is_no_number(tmp_path):
    data = dataset(tmp_path, [row_of("1+2=", "#3") | {"margin": "much"}])
    message = "row 0 of train: --margin-column margin"
    fails("rm_bradley_terry", tmp_path, message, dataset=data)


# --- the reward ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("first_number", "give path/to/file.py:function"),
        ("no/such.py:f", "give path/to/file.py:function"),
        ("tiny/reviews/gold.py:missing", "has no attribute 'missing'"),
    ],
)
@REWARDED
def test_reward_function_that_is_not_there(name, spec, message, tmp_path):
    text = fails(name, tmp_path, message, reward_fn=[spec])
    assert text.startswith(f"error: --reward-fn {spec}")
    text = fails(name, tmp_path, message, eval_reward_fn=spec)
    assert text.startswith(f"error: --eval-reward-fn {spec}")


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_judge_of_samples(name, tmp_path):
    spec = "no/such.py:f"
    fails(name, tmp_path, f"--eval-reward-fn {spec}: no file", eval_reward_fn=spec)
    text = fails(name, tmp_path, "give path/to/file.py:function", eval_reward_fn="last_number")
    assert text.startswith("error: --eval-reward-fn last_number")
    spec = reward_file(tmp_path, "return [None for _ in completions]")
    text = fails(name, tmp_path, "it returned None for", eval_reward_fn=spec)
    assert " after '" in text
    data = dataset(tmp_path, [{"prompt": "1+2=", "chosen": "#3", "rejected": "#4", "right": "3"}])
    flags = dict(
        dataset=data,
        model="tiny/arithmetic/policy",
        eval_reward_fn="tiny/arithmetic/reward.py:last_number",
    )
    text = fails(name, tmp_path, "missing a required argument: 'answer'", **flags)
    assert "called with prompts, completions, ['right']" in text


@REWARDED
def test_two_reward_functions_of_one_name(name, tmp_path):
    flags = dict(reward_fn=["tiny/reviews/gold.py:sentiment"] * 2, reward_weights=[1.0])
    flags["reward_weights"] = [1.0] * (2 + (name == "ppo_rlhf"))
    fails(name, tmp_path, "another reward, or a metric, has this name", **flags)


def test_reward_file_that_does_not_import(tmp_path):
    spec = reward_file(tmp_path, "return (")
    fails("grpo", tmp_path, "was never closed (rules_", reward_fn=[spec])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "reward function rule must return a list of 4 numbers: it returned 1"),
        ("return None", "rule must return a list of 4 numbers: it returned a NoneType"),
        ("return '1111'", "it returned a str"),
        ("return {text: 1.0 for text in completions}", "it returned a dict"),
        ("return (1.0 for text in completions)", "it returned a generator"),
        ("return 1.0", "rule must return a list of 4 numbers: it returned a float"),
        ("return [1.0, None, 1.0, 1.0]", "it returned None for"),
        ("return [1.0, float('nan'), 1.0, 1.0]", "it returned nan for"),
        ("return [1.0, float('inf'), 1.0, 1.0]", "it returned inf for"),
        ("return [1.0, 1e39, 1.0, 1.0]", "it returned 1e+39 for"),  # inf in float32
        ("return ['good', 1.0, 1.0, 1.0]", "it returned 'good' for"),
    ],
)
@REWARDED
def test_bad_rewards_name_the_function_and_the_row(name, body, message, tmp_path):
    spec = reward_file(tmp_path, body)
    text = fails(name, tmp_path, message, reward_fn=[spec], eval_reward_fn=None)
    if " for '" in text:
        assert " after '" in text  # the completion and its prompt


RULES = """\
from __future__ import annotations
import dataclasses, multiprocessing
from beside_{number} import right

@dataclasses.dataclass
class Verdict:
    reward: float | None = None

def judge(text: str) -> Verdict:
    return Verdict(reward=right(text))

def rule(prompts, completions, **columns):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [verdict.reward for verdict in pool.map(judge, completions)]
"""


@pytest.mark.parametrize("name", ["grpo", "ppo_rlhf", "dpo", "kto"])
def test_a_rule_may_use_dataclasses_processes_and_modules_beside_it(name, tmp_path, monkeypatch):
    number = time.time_ns()  # Python imports one module of a name
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"beside_{number}.py").write_text("def right(text):\n    return 0.25\n")
    (tmp_path / f"rules_{number}.py").write_text(RULES.replace("{number}", str(number)))
    spec, script = f"{tmp_path / f'rules_{number}.py'}:rule", SCRIPTS[name]
    flags = dict(output_dir=str(tmp_path / "runs"), eval_reward_fn=spec)
    run_dir = script.main(tiny_args(name, flags))
    (*_, last) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert last["eval/reward"] == 0.25


@REWARDED
def test_two_rules_in_files_of_one_name(name, tmp_path):
    """Python's import would give the first file's functions for the second."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rule = f"def {folder}(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
        (tmp_path / folder / f"twice_{name}.py").write_text(rule)
    specs = [f"{tmp_path / folder / f'twice_{name}.py'}:{folder}" for folder in ("a", "b")]
    reward_fns = SCRIPTS[name].load_reward_fns("--reward-fn", specs, {})
    assert [*reward_fns] == ["a", "b"]


def test_reward_function_needs_a_column_that_is_not_there(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "solution": "3"}])
    message = "missing a required argument: 'answer'"
    text = fails("grpo", tmp_path, message, dataset=data)
    assert "called with prompts, completions, ['solution']" in text
    flags = dict(dataset=data, answer_column="solution", output_dir=str(tmp_path / "runs"))
    grpo.main(tiny_args("grpo", flags))  # and the flag mends it


def test_answer_without_a_number(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "answer": "three"}])
    text = fails("grpo", tmp_path, "reward function last_number must return", dataset=data)
    assert "it returned None for" in text


# --- while training -----------------------------------------------------------------------------


@EACH
def test_a_run_that_diverges_is_stopped(name, tmp_path):
    flags = (
        dict(prompts_per_rollout=8, group_size=8)
        if hasattr(SCRIPTS[name].Args, "group_size")
        else dict(warmup_ratio=0.0)
    )
    text = fails(name, tmp_path, "is the learning rate too high?", learning_rate=1e18, **flags)
    assert " stopped in step " in text and text.endswith(
        "checkpoint.previous.pt, if any, may be from before"
    )


@EACH
def test_nothing_is_trained_on_nan(name, tmp_path, monkeypatch):
    models, loader = [], "load_classifier" if name == "rm_bradley_terry" else "load_model"
    load = getattr(SCRIPTS[name], loader)
    monkeypatch.setattr(
        SCRIPTS[name], loader, lambda *a, **k: models.append(load(*a, **k)) or models[-1]
    )
    nan = torch.tensor(math.nan)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: nan)
    text = fails(name, tmp_path, "is the learning rate too high?")
    assert "nan" in text
    assert " stopped in step 1: " in text
    start = AutoModelForCausalLM.from_pretrained(SCRIPTS[name].Args.model, dtype=torch.float32)
    pairs = zip(models[0].base_model.parameters(), start.base_model.parameters(), strict=True)
    for tensor, before in pairs:
        assert torch.equal(tensor, before)


# --- resume -------------------------------------------------------------------------------------


@EACH
def test_resume_from_what_is_not_a_run(name, tmp_path):
    parse = SCRIPTS[name].parse_args
    with pytest.raises(SCRIPTS[name].InputError, match=r"not a run of this script: .*args\.json"):
        parse(["--resume", str(tmp_path)])
    (tmp_path / "args.json").write_text('{"seed": 1, "wings": 2}')
    with pytest.raises(SCRIPTS[name].InputError, match=r"not a run of this script: .*wings"):
        parse(["--resume", str(tmp_path)])


@EACH
def test_resume_without_a_checkpoint(name, tmp_path):
    run_dir, *_ = SCRIPTS[name].start_run(SCRIPTS[name].Args(output_dir=str(tmp_path)))
    fails(name, tmp_path, "no whole checkpoint of this script", resume=str(run_dir))


def stopped_run(name, tmp_path, **flags):
    """A run that ended after its first checkpoint."""
    script = SCRIPTS[name]
    one = dict(total_rollouts=1) if hasattr(SCRIPTS[name].Args, "total_rollouts") else {}
    return script.main(tiny_args(name, one | dict(output_dir=str(tmp_path)) | flags))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A copy of a stopped run of a script; each is made once."""
    os.chdir(Path(__file__).parent.parent)
    folder = tmp_path_factory.mktemp("stopped")
    made = cache(lambda name: stopped_run(name, folder))
    return lambda name, path: Path(shutil.copytree(made(name), path))


@EACH
def test_a_checkpoint_that_is_broken_or_of_another_script(name, tmp_path, stopped):
    path = stopped(name, tmp_path / "a") / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    message = f"--resume {path.parent}: no whole checkpoint of this script"
    assert "\n" not in fails(name, tmp_path, message, resume=str(path.parent))
    other = "rm_bradley_terry" if name != "rm_bradley_terry" else "sft"
    theirs = torch.load(stopped(other, tmp_path / "b") / "checkpoint.pt", weights_only=True)
    torch.save(theirs | {"data": torch.load(io.BytesIO(whole))["data"]}, path)
    assert "\n" not in fails(name, tmp_path, message, resume=str(path.parent))
    path.write_bytes(b"not a checkpoint at all")
    assert "\n" not in fails(name, tmp_path, message, resume=str(path.parent))


@EACH
def test_resume_on_other_rows(name, tmp_path):
    rows = [row_of("1+2=", f"#{i}") | {"label": i == 3} for i in (3, 5)] * 2
    flags = dict(model="tiny/arithmetic/policy", dataset=dataset(tmp_path, rows))
    if name == "ppo_rlhf":
        flags |= dict(reward_model=None, reward_fn=[grpo.LAST_NUMBER], critic_init="sft")
    run_dir = stopped_run(name, tmp_path / "runs", **flags)
    dataset(tmp_path, [*rows[:3], row_of("1+3=", "#4")])
    flags |= dict(resume=str(run_dir))
    fails(name, tmp_path, "the training rows of --dataset have changed", **flags)


@EACH
def test_a_broken_args_json(name, tmp_path):
    (tmp_path / "args.json").write_text('{"seed": 1, ')
    with pytest.raises(
        SCRIPTS[name].InputError, match=r"not a run of this script: .*line 1"
    ) as end:
        SCRIPTS[name].parse_args(["--resume", str(tmp_path)])
    assert "\n" not in str(end.value)


@EACH
def test_a_full_disk_leaves_the_last_checkpoint(name, tmp_path, stopped):
    run_dir = stopped(name, tmp_path / "a")
    before, limits = (
        (run_dir / "checkpoint.pt").read_bytes(),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            SCRIPTS[name].InputError,
            match=r"no checkpoint could be written \(is the disk full\?\): ",
        ) as end:
            SCRIPTS[name].save_checkpoint(run_dir, {}, {"step": 9, "x": torch.ones(10**6)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(end.value)
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    assert not (run_dir / "checkpoint.tmp").exists()


def test_ctrl_c_ends_a_run_that_can_be_resumed(tmp_path):
    words = "grpo.py --total-rollouts 4000 --prompts-per-rollout 2 --num-minibatches 1"
    words += " --save-every 1 --eval-every 4000"
    words += f" --eval-rows 4 --output-dir {tmp_path}"
    process = subprocess.Popen(
        [sys.executable, *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's job in the background ignores Ctrl-C, and with it what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(tmp_path.glob("*/checkpoint.pt")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    (run_dir,) = tmp_path.iterdir()
    assert process.returncode == 1 and "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("stopped; resume with --resume")
    assert f"{run_dir}: " in printed
    saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"]
    args = grpo.parse_args(["--resume", str(run_dir), "--total-rollouts", str(saved + 1)])
    assert grpo.main(args) == run_dir and (run_dir / "model").exists()


# --- main as a function -------------------------------------------------------------------------


def test_main_in_a_thread_leaves_ctrl_c_alone(tmp_path):
    """As a notebook or a server may call it."""
    handler = signal.getsignal(signal.SIGINT)
    run_dirs = []
    args = tiny_args("grpo", dict(output_dir=str(tmp_path)))
    thread = threading.Thread(target=lambda: run_dirs.append(grpo.main(args)))
    thread.start()
    thread.join()
    assert (run_dirs[0] / "model").is_dir()
    assert signal.getsignal(signal.SIGINT) is handler


def test_dev_mode_shows_where_an_error_comes_from():
    words = [sys.executable, "-X", "dev", "sft.py", "--dataset", "no/such/folder"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert process.returncode == 1
    assert (
        "Traceback" in process.stderr and "InputError: --dataset no/such/folder" in process.stderr
    )


@EACH
def test_a_tokenizer_larger_than_the_embedding(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    tokenizer.add_tokens([f"word{i}" for i in range(50)])
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    fails(
        name, tmp_path, "its tokenizer has 68 tokens, its embedding only", model=str(tmp_path / "m")
    )


@REWARDED
def test_an_answer_that_is_null_is_said_at_loading(name, tmp_path):
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+3=", "answer": None}]
    data = dataset(tmp_path, rows)
    fails(name, tmp_path, "row 1 of train: --answer-column answer is null", dataset=data)
