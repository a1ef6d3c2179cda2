"""A user's mistake ends with one clear message that names the flag or the row, and no traceback."""

import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import sft

SCRIPTS = {"sft": sft, "grpo": grpo}
BOTH = pytest.mark.parametrize("name", ["sft", "grpo"])
TINY = {
    "sft": dict(epochs=0.01, batch_size=16, eval_rows=4, eval_samples=2),
    "grpo": dict(
        total_rollouts=2, prompts_per_rollout=2, group_size=2, num_minibatches=1, eval_rows=4
    ),
}


def fails(name, tmp_path, message, **flags):
    """Run a script in this process; it must end with the message, which must be short."""
    script = SCRIPTS[name]
    args = script.Args(**{**TINY[name], "output_dir": str(tmp_path / "runs"), **flags})
    with pytest.raises(SystemExit) as end:
        script.main(args)
    text = str(end.value)
    assert text.startswith("error: ")
    assert message in text, text
    assert len(text) < 1200
    return text


def dataset(tmp_path, rows, test_rows=None):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for split, some in (("train", rows), ("test", test_rows or rows)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(folder)


def model_with_template(tmp_path, template):
    """The tiny policy with a chat template, in a folder."""
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    tokenizer.chat_template = template
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def reward_file(tmp_path, body, signature="prompts, completions, **columns"):
    path = tmp_path / "rules.py"
    path.write_text(f"def rule({signature}):\n    {body}\n")
    return f"{path}:rule"


# --- from the shell -----------------------------------------------------------------------------


@BOTH
def test_exit_status_and_no_traceback(name):
    command = [sys.executable, f"{name}.py", "--dataset", "no/such/folder"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: --dataset no/such/folder: ")
    assert "Traceback" not in done.stderr


@BOTH
def test_unknown_flag_and_bad_value(name, capsys):
    for argv in (["--lerning-rate", "1"], ["--seed", "x"], ["--lr-schedule", "zigzag"]):
        with pytest.raises(SystemExit) as end:
            SCRIPTS[name].parse_args(argv)
        assert end.value.code == 2


# --- flags, before anything is loaded -----------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("micro_batch_size", 0),
        ("max_new_tokens", -1),
        ("eval_every", 0),
        ("save_every", 0),
        ("max_grad_norm", -1.0),
        ("warmup_ratio", -0.1),
        ("seed", -1),
    ],
)
def test_numbers_out_of_range(name, flag, value, tmp_path):
    fails(name, tmp_path, f"--{flag.replace('_', '-')} must", **{flag: value})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(group_size=1), "--group-size must be at least 2"),
        (dict(beta=-0.1), "--beta must not be negative"),
        (dict(temperature=0.0), "--temperature must be more than 0"),
        (dict(num_minibatches=5), "--num-minibatches 5 is more than the 4 completions"),
        (dict(clip_coef=1.5), "--clip-coef must"),
        (dict(clip_coef_high=0.0), "--clip-coef-high must"),
        (dict(reward_weights=(1.0, 2.0)), "--reward-weights: 2 weights for 1 rewards"),
    ],
)
def test_grpo_flags(flags, message, tmp_path):
    fails("grpo", tmp_path, message, **flags)


@BOTH
def test_several_processes_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    fails(name, tmp_path, "started as 2 processes")


# --- the model ----------------------------------------------------------------------------------


@BOTH
def test_model_folder(name, tmp_path):
    fails(name, tmp_path, "--model no/such/model: there is no such folder", model="no/such/model")
    (tmp_path / "empty").mkdir()
    fails(name, tmp_path, "--model", model=str(tmp_path / "empty"))


@BOTH
def test_model_without_weights(name, tmp_path):
    folder = tmp_path / "m"
    AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy").config.save_pretrained(folder)
    fails(name, tmp_path, f"--model {folder}: ", model=str(folder))


@BOTH
def test_weights_that_are_missing_are_not_made_up(name, tmp_path):
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path / "m", state_dict=state)
    AutoTokenizer.from_pretrained("tiny/arithmetic/policy").save_pretrained(tmp_path / "m")
    fails(name, tmp_path, "model.norm.weight", model=str(tmp_path / "m"))


@BOTH
def test_more_tokens_than_positions(name, tmp_path):
    flags = {"sft": dict(max_length=1000), "grpo": dict(max_new_tokens=1000)}[name]
    fails(name, tmp_path, "more than the 128 positions of --model", **flags)


@BOTH
def test_no_stop_id(name, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained("tiny/arithmetic/policy")
    model = AutoModelForCausalLM.from_pretrained("tiny/arithmetic/policy")
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    tokenizer.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m")
    fails(name, tmp_path, "neither tokenizer nor generation config", model=str(tmp_path / "m"))


def test_reward_model_must_have_a_trained_head_and_the_same_tokenizer(tmp_path):
    path = "tiny/arithmetic/policy"
    fails("grpo", tmp_path, "--reward-model tiny/arithmetic/policy: weights", reward_model=path)
    path = "tiny/reviews/policy"
    fails("grpo", tmp_path, "its tokenizer is not that of --model", reward_model=path)


# --- the data -----------------------------------------------------------------------------------


@BOTH
def test_dataset_folder_split_and_file(name, tmp_path):
    fails(name, tmp_path, "--dataset no/such/set: there is no such folder", dataset="no/such/set")
    (tmp_path / "empty").mkdir()
    fails(name, tmp_path, "--dataset", dataset=str(tmp_path / "empty"))
    fails(name, tmp_path, "nonsense", eval_split="nonsense")
    broken = dataset(tmp_path, [{"prompt": "1+2=", "completion": "#3", "answer": "3"}])
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "1+2=", "comple')
    fails(name, tmp_path, f"--dataset {broken}: ", dataset=broken)


@BOTH
def test_columns(name, tmp_path):
    data = dataset(tmp_path, [{"question": "1+2=", "reply": "#3"}])
    fails(name, tmp_path, "row 0 of train: no --prompt-column prompt, only", dataset=data)


@BOTH
def test_chat_messages_without_a_template(name, tmp_path):
    user = [{"role": "user", "content": "1+2="}]
    reply = [{"role": "assistant", "content": "#3"}]
    data = dataset(tmp_path, [{"prompt": user, "completion": reply, "answer": "3"}])
    fails(name, tmp_path, "row 0 of train: chat messages, but the tokenizer", dataset=data)


@BOTH
def test_chat_messages_without_a_role(name, tmp_path):
    turns = [{"content": "1+2="}]
    data = dataset(tmp_path, [{"prompt": turns, "completion": turns, "answer": "3"}])
    template = "{{ messages[0]['content'] }}"
    flags = dict(dataset=data, model=model_with_template(tmp_path, template))
    fails(name, tmp_path, "row 0 of train: every chat message needs a role", **flags)


@BOTH
def test_warmup_as_long_as_the_run(name, tmp_path):
    fails(name, tmp_path, "--warmup-ratio must be less than 1", warmup_ratio=1.0)


@BOTH
def test_output_dir_that_is_a_file(name, tmp_path):
    (tmp_path / "runs").touch()
    fails(name, tmp_path, "is a file, not a folder")


@BOTH
def test_resume_with_a_log_that_was_cut(name, tmp_path):
    script = SCRIPTS[name]
    run_dir = script.main(script.Args(**{**TINY[name], "output_dir": str(tmp_path)}))
    (run_dir / "metrics.jsonl").write_text("")
    text = "metrics.jsonl is shorter than the checkpoint says"
    fails(name, tmp_path, text, resume=str(run_dir))


@BOTH
def test_messages_that_the_template_refuses(name, tmp_path):
    template = "{% if '+' in messages[0]['content'] %}{{ raise_exception('no sums') }}{% endif %}"
    flags = dict(chat=True, model=model_with_template(tmp_path, template))
    fails(name, tmp_path, "row 0 of train: the chat template refuses it: no sums", **flags)


@BOTH
def test_two_bos(name, tmp_path):
    data = dataset(tmp_path, [{"prompt": "<bos>1+2=", "completion": "#3", "answer": "3"}])
    fails(name, tmp_path, "row 0 of train: the prompt begins with <bos> twice", dataset=data)


@BOTH
def test_no_row_left(name, tmp_path):
    data = dataset(tmp_path, [{"prompt": "", "completion": "#3", "answer": "3"}])
    fails(name, tmp_path, "nothing is left of train: 0", dataset=data)
    flag = {"sft": "max_length", "grpo": "max_prompt_length"}[name]
    fails(name, tmp_path, "6400 longer" if name == "sft" else "4000 longer", **{flag: 4})


@pytest.mark.parametrize("turns", [["hello", "hi"], [{"role": "user", "content": "hello"}], []])
def test_messages_without_an_answer_are_counted(turns, tmp_path):
    fails("sft", tmp_path, "dropped 1 empty", dataset=dataset(tmp_path, [{"messages": turns}]))


def test_prompt_and_completion_of_different_kinds(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "completion": [{"role": "a", "content": "b"}]}])
    fails("sft", tmp_path, "row 0 of train: the prompt is a str and the completion a", dataset=data)


# --- the reward ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("first_number", "--reward-fn first_number: neither last_number nor path"),
        ("no/such.py:f", "--reward-fn no/such.py:f: neither last_number nor path"),
        ("tiny/reviews/gold.py:missing", "there is no function missing in tiny/reviews/gold.py"),
    ],
)
def test_reward_function_that_is_not_there(spec, message, tmp_path):
    fails("grpo", tmp_path, message, reward_fn=(spec,))
    message = message.replace("--reward-fn", "--eval-reward-fn")
    fails("grpo", tmp_path, message, eval_reward_fn=spec)


def test_two_reward_functions_of_one_name(tmp_path):
    flags = dict(reward_fn=("last_number", "last_number"))
    fails("grpo", tmp_path, "reward/last_number is the name of another metric", **flags)


def test_reward_file_that_does_not_import(tmp_path):
    spec = reward_file(tmp_path, "return (")
    fails("grpo", tmp_path, f"--reward-fn {spec}: SyntaxError", reward_fn=(spec,))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "rule must return a list of 4 numbers, one for each completion"),
        ("return None", "it returned None"),
        ("return '1111'", "it returned '1111'"),
        ("return 1.0", "it returned 1.0"),
        ("return [1.0, None, 1.0, 1.0]", "reward function rule returned None for the completion"),
        ("return [1.0, float('nan'), 1.0, 1.0]", "reward function rule returned nan"),
        ("return [1.0, float('inf'), 1.0, 1.0]", "reward function rule returned inf"),
        ("return ['good', 1.0, 1.0, 1.0]", "reward function rule returned 'good'"),
    ],
)
def test_bad_rewards_name_the_function_and_the_row(body, message, tmp_path):
    spec = reward_file(tmp_path, body)
    text = fails("grpo", tmp_path, message, reward_fn=(spec,))
    if "for the completion" in text:
        assert "of the prompt '" in text


def test_reward_function_needs_a_column_that_is_not_there(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "solution": "3"}])
    message = "missing a required argument: 'answer'"
    text = fails("grpo", tmp_path, message, dataset=data)
    assert "['solution'] (see --answer-column)" in text
    flags = dict(dataset=data, answer_column="solution", output_dir=str(tmp_path / "runs"))
    grpo.main(grpo.Args(**{**TINY["grpo"], **flags}))  # and the flag mends it


def test_answer_without_a_number(tmp_path):
    data = dataset(tmp_path, [{"prompt": "1+2=", "answer": "three"}])
    text = fails("grpo", tmp_path, "reward function last_number returned None", dataset=data)
    assert "three" in text


# --- while training -----------------------------------------------------------------------------


@BOTH
def test_a_run_that_diverges_is_stopped(name, tmp_path):
    flags = {"sft": dict(warmup_ratio=0.0), "grpo": dict(prompts_per_rollout=8, group_size=8)}[name]
    text = fails(name, tmp_path, "no step was taken", learning_rate=1e30, **flags)
    assert "--learning-rate too high" in text


@BOTH
def test_nothing_is_trained_on_nan(name, tmp_path, monkeypatch):
    models = []
    load_model = SCRIPTS[name].load_model
    monkeypatch.setattr(
        SCRIPTS[name], "load_model", lambda *a: models.append(load_model(*a)) or models[-1]
    )
    nan = torch.tensor(math.nan)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a, **k: nan)
    text = fails(name, tmp_path, "gradient norm nan; no step was taken")
    assert "checkpoint" in text
    start = AutoModelForCausalLM.from_pretrained(SCRIPTS[name].Args.model, dtype=torch.float32)
    for tensor, before in zip(models[0].parameters(), start.parameters(), strict=True):
        assert torch.equal(tensor, before)


# --- resume -------------------------------------------------------------------------------------


@BOTH
def test_resume_from_what_is_not_a_run(name, tmp_path):
    parse = SCRIPTS[name].parse_args
    with pytest.raises(SystemExit, match=r"not the folder of a run: no args\.json"):
        parse(["--resume", str(tmp_path)])
    (tmp_path / "args.json").write_text('{"seed": 1}')
    with pytest.raises(SystemExit, match="of another script or version"):
        parse(["--resume", str(tmp_path)])


@BOTH
def test_resume_without_a_checkpoint(name, tmp_path):
    run_dir = SCRIPTS[name].make_run_dir(SCRIPTS[name].Args(output_dir=str(tmp_path)))
    fails(name, tmp_path, "no checkpoint was saved yet", resume=str(run_dir))
