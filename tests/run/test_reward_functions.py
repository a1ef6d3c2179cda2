"""Reward functions: how they are loaded, and what they may not return."""

import os
import sys

import pytest
import torch
from runs import metrics_of, words
from scripts import SPECS, short_flags

import grpo
from runtime.functions import load_function
from tiny.arithmetic.reward import last_number

PROMPTS = [grpo.Prompt(text, [1], {"answer": "3"}) for text in ("1+2=", "0+3=")]
TEXTS = ["#3", "#4"]


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Loading a file adds its folder to the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("6,6,0,8,5#5", "5", 1),
        ("5#4", "5", 0),
        ("", "5", 0),
        ("so he has 1,234 apples.", "... <<2*617=1234>>1234\n#### 1,234", 1),
        ("3", "#### -3", 0),
        ("10-3", "3", 1),  # minus here is an operator
        ("x = -3", "-3", 1),
        ("about +7", "7", 1),
        ("0.5", ".5", 1),
        ("1,234,567.80", "1234567.8", 1),
        ("1,23", "23", 1),  # no thousands separator
        ("1,2345", "2345", 1),
        ("12,345 and 6", 6, 1),  # answers may be numbers
        ("-$5", "-5", 1),
        ("it is 1e-3", ".001", 1),
        ("2E3", 2000, 1),
        ("\u22125", "5", 0),  # a minus sign
        ("-5", "x = \u22125", 1),
        ("it is \u20135", "-5", 1),  # an en dash
        ("3\u20135", "5", 1),  # from 3 to 5
        ("2/3", "1/3", 0),
        ("\\frac{1}{3}", "1/3", 1),
        ("-\\frac{1}{3}", "-1/3", 1),
        ("2\\frac{1}{2}", "21/2", 0),
        ("so 10/2", "5", 1),
        ("5/0", "5", 0),
        (r"10,\!080", "10080", 1),
        ("10{,}080", "10080", 1),
        (r"\frac{20160}2", "10080", 1),
        (r"\frac12", ".5", 1),
        (r"\frac121", ".5", 0),
        ("\u0664\u0662 \uff14\uff12", "42", 1),  # Arabic and wide digits
        ("step 5: \u096a\u0968", "5", 0),
        ("\u0661\u066c\u0662\u0663\u0664\u066b\u0665", "1234.5", 1),
        (r"12\,500", "12500", 1),
        ("1\u2009234\u202f567", 1234567, 1),
        (r"12\,50", "50", 1),
        ("x\u2082", "2", 0),
    ],
)
def test_last_number(completion, answer, reward):
    """The default of grpo.py and reinforce.py."""
    assert last_number(["?"], [completion], [answer]) == [reward]


@pytest.mark.parametrize(
    "answer", ["five", "(3, 4)", "2\\sqrt{3}", "12:30", "2024-01-05", "2 + 3 = 5", None, ""]
)
def test_last_number_refuses_answers_that_are_not_one_number(answer):
    """It would pay for the last one, or never."""
    message = "last_number, the default --reward-fn, reads answers that are one number"
    with pytest.raises(ValueError, match=message):
        last_number(["?"], ["5"], [answer])


@pytest.fixture
def call(tokenizer):
    """The rewards of TEXTS by a function, or by path/to/file.py:function."""
    sequences = [([1], ids) for ids in tokenizer(TEXTS, add_special_tokens=False).input_ids]

    def call(rule):
        if isinstance(rule, str):
            return grpo.load_reward_fn(rule, tokenizer)(PROMPTS, sequences)
        return grpo.rule_rewards(rule, tokenizer, PROMPTS, sequences)

    return call


def test_a_function_gets_prompts_completions_and_columns(call, tokenizer):
    def rule(prompts, completions, answer, completion_ids):
        assert (prompts, completions, answer) == (["1+2=", "0+3="], TEXTS, ["3", "3"])
        assert [tokenizer.decode(ids) for ids in completion_ids] == TEXTS
        return [1.3, -2]

    assert torch.equal(call(rule), torch.tensor([1.3, -2.0], dtype=torch.float64))


def test_it_may_change_what_it_gets_and_a_column_may_have_an_arguments_name(tokenizer):
    def rule(prompts, completions, completion_ids, answer):
        assert completions == TEXTS  # not the column
        prompts[0][0]["content"] = answer[0]["value"] = completion_ids[0][0] = None
        for values in (prompts, completions, completion_ids, answer, completion_ids[0]):
            values.pop()
        return [1.0, 2.0]

    columns = {"answer": {"value": 3}, "completions": ["4"]}
    prompts = [grpo.Prompt([{"role": "user", "content": "1+2="}], [1], columns)] * 2
    sequences = [([1], ids) for ids in tokenizer(TEXTS, add_special_tokens=False).input_ids]
    before = repr((prompts, sequences))
    assert grpo.rule_rewards(rule, tokenizer, prompts, sequences).tolist() == [1, 2]
    assert repr((prompts, sequences)) == before


LEAVING = """\
import os
def rule(prompts, completions, **columns):
    os.chdir(os.path.dirname(__file__))
    return [len(text) % 2 for text in completions]
"""


def test_it_may_leave_the_directory_that_output_dir_is_seen_from(tmp_path):
    """As those do that run a program in a folder of its own."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    flags = SPECS["grpo"].short_flags | dict(reward_fn=[f"{tmp_path}/leaving.py:rule"])
    run_dir = grpo.main(grpo.Args(**flags, output_dir=os.path.relpath(tmp_path / "runs")))
    assert (tmp_path / "runs" / run_dir.name / "model.safetensors").exists()


def test_a_function_that_exits_ends_the_run_with_an_error(call):
    """Python would take it for the end of a run without an error."""

    def rule(completions, **columns):
        exec("import sys; sys.exit()", {})

    with pytest.raises(RuntimeError, match=r"reward rule of .*test_reward_functions: SystemExit"):
        call(rule)


def test_the_default_rule_without_answers(tokenizer):
    prompts = [grpo.Prompt("1+2=", [1], {})]
    with pytest.raises(RuntimeError, match=r"reward last_number of .*--answer-column"):
        grpo.rule_rewards(last_number, tokenizer, prompts, [([1], [5])])


async def coroutine():
    return [1.0, 1.0]


@pytest.mark.parametrize(
    "rewards",
    [
        {0: 1.0, 1: 1.0},
        (1.0 for _ in range(2)),
        coroutine(),
        [1.0],
        None,
        [1.0, None],
        [1.0, 1e309],
        [[1.0], [2.0]],
        ["good", 1.0],
        [{"score": 1}, 1.0],
        torch.ones(2, requires_grad=True),
        ([1.0, 1.0], {}),
        [1j, 1.0],
    ],
)
def test_it_must_return_a_finite_number_for_each_completion(rewards, call):
    def rule(prompts, completions, **columns):
        return rewards

    message = r"reward rule of .*test_reward_functions: (2 finite numbers expected: |\w+Error: )"
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(rule)


@pytest.mark.parametrize("spec", ["rules.py", "rules:rule", ":rule", "rule"])
def test_a_spec_that_is_none(spec):
    with pytest.raises(ValueError, match=r"reward-fn .*: expected path/to/file\.py:"):
        grpo.load_reward_fn(spec, None)


def test_two_functions_in_files_of_one_name(tmp_path, call):
    """Python's import would give the first file's functions for the second."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        rule = f"def {folder}(prompts, completions, **columns): return [{ord(folder)}] * 2\n"
        (tmp_path / folder / "twice.py").write_text(rule)
    specs = [f"{tmp_path}/{folder}/twice.py:{folder}" for folder in ("a", "b")]
    assert [call(spec)[0].item() for spec in specs] == [97, 98]


HELPED = """\
def rule(prompts, completions, **columns):
    from {name} import score
    return [score(text) for text in completions]
"""


@pytest.mark.parametrize("helper", ["scoring.py", "scoring/__init__.py", "scoring/inner.py"])
def test_two_folders_with_a_helper_of_one_name(helper, tmp_path, call):
    """The first would be used for both."""
    module = helper.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for folder, score in (("a", "len"), ("b", "int")):
        path = tmp_path / folder / helper
        path.parent.mkdir(parents=True)
        path.write_text(f"score = {score}\n")
        (tmp_path / folder / "reward.py").write_text(HELPED.replace("{name}", module))
    assert call(f"{tmp_path}/a/reward.py:rule").tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"b/reward.py: scoring is .*/b/scoring.*/a/scoring"):
        call(f"{tmp_path}/b/reward.py:rule")
    for name in [name for name in sys.modules if name.split(".")[0] == "scoring"]:
        del sys.modules[name]


def test_a_helper_with_the_name_of_a_folder_of_this_repository(tmp_path, call):
    (tmp_path / "common.py").write_text("score = len\n")
    (tmp_path / "reward.py").write_text(HELPED.replace("{name}", "common"))
    with pytest.raises(ValueError, match=r"reward.py: common is .*/common.py, and also .*: rename"):
        call(f"{tmp_path}/reward.py:rule")


STEPS = """\
checked = []

def rule(prompts, completions, step, **columns):
    return [float(step if checked else -1)] * len(completions)

def check_columns(**columns):
    assert {len(column) for column in columns.values()} <= {19}
    checked.append(columns)
"""


@pytest.mark.parametrize("name", ["grpo", "grpo_variants", "grpo_tools", "reinforce", "ppo_rlhf"])
def test_step_and_check_columns(name, tmp_path):
    """`step` is the rollout's number, in evaluations too. All training rows are checked before."""
    (tmp_path / "rules.py").write_text(STEPS)
    script, flags = SPECS[name].module, dict(total_rollouts=2, eval_every=1, output_dir=tmp_path)
    rule = f"{tmp_path}/rules.py:rule"
    flags |= short_flags(name, reward_fn=rule, eval_reward_fn=rule, critic_init="policy")
    for _ in range(2):  # in one process: the second run begins at 0 again
        typed = words(SPECS[name].short_flags | flags)
        metrics = metrics_of(script.main(script.parse_args(typed)))
        assert [row["eval/reward"] for row in metrics] == [0, 1, 2]
        assert [row["reward/mean"] for row in metrics[1:]] == [1, 2]


def test_a_column_named_step_comes_first(tmp_path, tokenizer):
    (tmp_path / "rules.py").write_text(STEPS.replace("float(step if checked else -1)", "step[0]"))
    rule = grpo.load_reward_fn(f"{tmp_path}/rules.py:rule", tokenizer)
    assert rule([grpo.Prompt("1+2=", [1], {"step": 7})], [([1], [5])]).tolist() == [7]


RULES = """\
from __future__ import annotations
import dataclasses
import pickle
from concurrent.futures import ProcessPoolExecutor
from beside_{name} import right

@dataclasses.dataclass
class Verdict:
    reward: float | None = None

calls = []

def rule(prompts, completions, **columns):
    calls.append(pickle.loads(pickle.dumps(Verdict())))
    with ProcessPoolExecutor(1) as pool:
        return [*pool.map(right, completions)]

def count(**columns):
    return [0.0 + len(calls)] * 2
"""


def test_a_file_is_a_module_loaded_once_until_it_changes(tmp_path, call, monkeypatch):
    """It may use dataclasses, pickle, and modules beside it. The change is in the same second, and
    leaves its size.
    """
    (tmp_path / f"beside_{tmp_path.name}.py").write_text("def right(text): return len(text) / 2\n")
    file = tmp_path / "rules.v2.py"
    rules = RULES.replace("{name}", tmp_path.name)
    file.write_text(rules)
    assert call(f"{file}:rule").tolist() == [1.0, 1.0]
    monkeypatch.chdir(tmp_path)
    assert call("rules.v2.py:count").tolist() == [1.0, 1.0]  # the same module
    file.write_text(rules.replace("0.0 +", "2.0 +"))
    assert call(f"{file}:count").tolist() == [2.0, 2.0]
    monkeypatch.setattr("runtime.functions.RANK", 1)
    assert load_function("--reward-fn", "nowhere.py:none") is None  # rank 0 calls it for all
