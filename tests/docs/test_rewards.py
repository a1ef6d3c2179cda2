"""The reward functions of docs/rewards/: by hand, against completions that misbehave, in a run."""

import io
import json
import math
import os
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from docs.rewards import (
    countdown,
    formats,
    judge,
    programs,
    rubrics,
    served_judge,
    short_answer,
    spell_backward,
    trl_style,
)

POLICY = "tiny/arithmetic/policy"
TESTS = json.dumps([[[2, 3], 5], [[-1, 1], 0]])
RIGHT = "def add(a, b):\n    return a + b\n"


def passed(*completions, tests=TESTS):
    """Rewards of completions that shall define `add`, by way of grpo.py."""
    columns = {"function": "add", "tests": tests}
    prompts = [grpo.Prompt("write add", [], columns) for _ in completions]
    tokenizer = SimpleNamespace(batch_decode=lambda texts, **_: texts)  # nothing is decoded here
    sequences = [([], completion) for completion in completions]
    return grpo.rule_rewards(programs.passes, tokenizer, prompts, sequences).tolist()


# --- texts by hand ------------------------------------------------------------------------------
THREE = dict(numbers=[3, 6, 8], target=30)
REWARDS = {  # a function, the columns of each of its rows, and the rewards of completions
    formats.think: (
        {},
        {
            "<think>2 and 2</think><answer>4</answer>": 1,
            "\n<think>2\nand 2</think>\n\n<answer>4</answer>\n": 1,
            "<answer>4</answer>": 0,
            "<think></think><answer>4</answer>": 0,  # no thought
            "2 and 2</think><answer>4</answer>": 1,  # the template has opened it
            "<think>2 and 2</think><answer>4</answer> I am sure": 0,
            "<think>2</think><think>2</think><answer>4</answer>": 0,
        },
    ),
    formats.shown: (
        {},
        {"6,6,0,8,5#5": 1}
        | dict.fromkeys(["6,6,0,8#5", "6,6,0,8,5#5#", " 6,6,0,8,5#5", "٦,6,0,8,5#5"], 0),
    ),
    countdown.solves: (
        THREE,
        {
            "(8 - 3) * 6": 1,
            "<answer>1</answer> no, <answer> (8-3)*6 </answer>": 1,
            "so <answer>-3*6 + 8*6</answer>": 0,  # 6 twice
            "<answer>8*3 + 6</answer> I think": 1,
            "(8 - 3) * 6 = 30": 0,
            "30": 0,
            "8 / (3 - 3) * 6": 0,
            "__import__('os').getcwd()": 0,
            "(8 - 3) * 6 * True": 0,
            "8 ** 3 * 6": 0,
            "-(3 - 8) * 6": 1,
            "(" * 9999: 0,
            "-" * 99999 + "8": 0,
        },
    ),
    spell_backward.letters: (
        dict(answer="Nus"),
        {"nus": 1, " NUS\n": 1, "nu": 2 / 3, "sunny": 1 / 3, "nuss": 0.8, "nun": 2 / 3, "": 0},
    ),
    short_answer.exact: (
        dict(answer=["The Nile", "Nile River"]),
        {"nile.": 1, "Nile river": 1, "a NILE": 1, "the Nile River in Egypt": 0, "": 0},
    ),
    short_answer.f1: (
        dict(answer=["The river Nile", "Nile"]),
        {"Nile": 1, "the Nile.": 1, "River Nile": 1, "the blue Nile river": 0.8, "Egypt": 0},
    ),
}


@pytest.mark.parametrize("function", REWARDS)
def test_rewards_by_hand(function):
    row, rewards = REWARDS[function]
    columns = {name: [value] * len(rewards) for name, value in row.items()}
    assert function([], [*rewards], **columns) == pytest.approx([*rewards.values()])


def test_a_short_answer_may_be_a_number_and_a_repeated_word_counts_once():
    assert short_answer.exact([], ["1984."], [1984]) == [1]
    assert short_answer.f1([], ["no no", "", "the"], ["no", "Nile", "a"]) == [2 / 3, 0, 1]


def test_rows_of_small_tasks():
    assert countdown.solves([], ["6 / (8 - 3) * 10"], [[10, 3, 8, 6]], [12]) == [1]  # no rounding
    row = countdown.make_row(random.Random(1))
    assert 10 <= row["target"] <= 100 and str(row["numbers"]) in row["prompt"]
    assert spell_backward.make_row("sun")["answer"] == "nus"


# --- code ---------------------------------------------------------------------------------------
DOCSTRING = "):\n    '''As in\n    ```\n    add(1, 2)\n    ```\n    '''"
NEXT = ":\n"
HONEST = {
    "plain": RIGHT,
    "in a block": f"Of course:\n```python\n{RIGHT}```\nIt adds.",
    "the last of two blocks": f"```\nadd = 1\n```\nOr rather:\n```py\n{RIGHT}```",
    "another language's name": f"```Python3\n{RIGHT}```",
    "Windows, a title": f'```python title="add.py"\n{RIGHT}```'.replace("\n", "\r\n"),
    "no end": f"~~~py\n{RIGHT}",
    "an example behind": f"```python\n{RIGHT}```\n```python\nprint(add(1, 2))\n```\n```\n3\n```",
    "a fence within": f"```\n{RIGHT.replace('):', DOCSTRING)}```",
    "in a list": f"1. It:\n\n   ```python\n   {RIGHT.replace(NEXT, NEXT + '   ')}\n   ```\n2. Done",
    "LeetCode's types": "def add(a: List[int], b: Optional[int] = None): return a + b",
    "LeetCode's class": "class Solution:\n  def add(self, a, b):\n    return a + b",
    "assigned": "```\nadd = lambda a, b: a + b\n```\n```\nx = 1\n```",
    "prints": "print('hello')\ndef add(a, b):\n    print(a, b)\n    return a + b",
    "imports": "import collections, functools, heapq, math, random, re\n" + RIGHT,
}
WRONG = {
    "another result": "def add(a, b):\n    return a - b",
    "equal to all": "class All(int):\n    __eq__ = lambda *_: True\ndef add(*_):\n    return All()",
    "one test only": "def add(a, b):\n    return {2: 5}[a]",
    "the last of two": f"```\n{RIGHT}```\n```\n{RIGHT.replace('+', '-')}```",
    "results on stdout": "print('[5, 0]')\nimport sys\nsys.stdout.flush()",
    "writes everywhere": "import os\nfor n in range(30):\n    try: os.write(n, b'[1, 1]')\n"
    "    except OSError: pass\nos._exit(0)",
    "memory": "def add(a, b):\n    bytearray(2**30)\n    return a + b",
    # What these do would do no harm if it were let through; then the reward would be 1.
    "forks": "import os\nos.fork() or os._exit(0)\n" + RIGHT,
    "another program": "import subprocess\nsubprocess.run(['true'])\n" + RIGHT,
    "opens a socket": "import socket\nsocket.socket()\n" + RIGHT,
    "reads a key": "import os\nos.environ['A_KEY']\n" + RIGHT,
    "site-packages": "import typing_extensions\n" + RIGHT,
    "loop": "def add(a, b):\n    while True: pass",
}


def test_code_reward(monkeypatch):
    monkeypatch.setattr(programs, "SECONDS", 2.0)
    monkeypatch.setenv("A_KEY", "secret")
    rewards = passed(*HONEST.values(), *WRONG.values())
    found = dict(zip([*HONEST, *WRONG], rewards, strict=True))
    assert found == dict.fromkeys(HONEST, 1.0) | dict.fromkeys(WRONG, 0.0)


def test_files_are_not_changed(tmp_path):
    """By code that does not try to get past the audit hook."""
    (tmp_path / "kept").write_text("as it was")
    path = str(tmp_path / "kept")
    acts = (
        f"open({path!r}, 'w')",
        f"import os; os.remove({path!r})",
        f"import os; os.truncate({path!r}, 0)",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    )
    assert passed(*(f"{act}\n{RIGHT}" for act in acts)) == [0.0] * len(acts)
    assert (tmp_path / "kept").read_text() == "as it was"


def test_the_time_on_the_processor_is_limited_by_itself(monkeypatch):
    """Also where nobody is left to look at the clock."""
    monkeypatch.setattr(programs, "SECONDS", 60.0)
    monkeypatch.setitem(programs.LIMITS, "RLIMIT_CPU", 1)
    started = time.monotonic()
    assert passed(WRONG["loop"]) == [0.0]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("leaves", ["", "setsid"])
def test_nothing_that_was_started_is_left(leaves):
    """Also by code that gets past the audit hook, and that leaves its session."""
    if leaves and not programs.apart():
        pytest.skip("this system allows no namespaces")
    seconds = str(10**6 + os.getpid())  # no other process sleeps so long
    path, words = shutil.which(leaves or "sleep"), [*leaves.split(), "sleep", seconds]
    spawn = "from multiprocessing.util import spawnv_passfds as spawn\n"
    spawn += f"spawn({path.encode()!r}, {[word.encode() for word in words]!r}, [])\n"
    passed(spawn + RIGHT)

    def left():
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found.append(path.read_bytes())
        return [line for line in found if seconds.encode() in line]

    deadline = time.monotonic() + 5  # a killed process may take a moment to go
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_a_row_without_tests_is_an_error():
    with pytest.raises(RuntimeError, match="no tests for add"):
        passed(RIGHT, tests="[]")


def test_results_are_compared_as_json():
    tests = json.dumps([[[[3, 1]], {"sorted": [1, 3], "mean": 2.0}]])
    code = "def add(x):\n    return {'mean': sum(x) / len(x), 'sorted': tuple(sorted(x))}"
    assert passed(code, code.replace("/ len", "// len"), tests=tests) == [1.0, 0.0]


# --- the judge ----------------------------------------------------------------------------------
@pytest.mark.parametrize("chat", [False, True])
def test_the_grade_is_the_expectation_under_the_models_next_token(chat, monkeypatch):
    monkeypatch.setattr(judge, "MODEL", POLICY)
    monkeypatch.setattr(judge, "BATCH", 2)
    monkeypatch.setattr(judge, "QUESTION", "{prompt}{completion}#")
    judge.load.cache_clear()
    _, tokenizer, _ = judge.load(POLICY)
    if chat:  # a template of the model's own writes what stands around a message
        template = "{% for m in messages %}{{ m.content }}{% endfor %}++"
        monkeypatch.setattr(tokenizer, "chat_template", template)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float64).eval()
    prompts = ["1+2+3+4+5=", "9=", [{"role": "user", "content": "6+7+8="}]]
    completions = ["1,3,6,0,5", "", "6,3,1"]
    expected = []
    for text in ("1+2+3+4+5=1,3,6,0,5#", "9=#", "6+7+8=6,3,1#"):
        ids = AutoTokenizer.from_pretrained(POLICY)(text + "++" * chat, add_special_tokens=not chat)
        logits = model(torch.tensor([ids["input_ids"]])).logits[0, -1].tolist()
        each = [math.exp(logits[tokenizer.get_vocab()[digit]]) for digit in "0123456789"]
        expected.append(sum(k * p for k, p in enumerate(each)) / sum(each) / 9)
    assert judge.grade(prompts, completions, answer=["5"] * 3) == pytest.approx(expected, abs=1e-5)
    assert len({*expected}) == 3
    judge.load.cache_clear()


def test_a_rubric_is_the_weighted_share_of_what_the_judge_says(monkeypatch):
    """Two questions for one row and one for the other, each asked by itself."""
    monkeypatch.setattr(judge, "MODEL", POLICY)
    monkeypatch.setattr(judge, "QUESTION", "{prompt}{completion}#")
    judge.load.cache_clear()
    chat = [{"role": "user", "content": "6+7+8="}]
    rows = ["9=", "5", "1+2+3="], ["9=", "5", "4+"], ["6+7+8=", "6,3,1", "5"]
    alone = "\n\nGrade the answer by one question alone, 9 for yes and 0 for no: "
    a, b, c = (judge.grade([x + alone + question], [y])[0] for x, y, question in rows)
    columns = ['[[3, "1+2+3="], [1, "4+"]]', '[[0.5, "5"]]']
    found = rubrics.share(prompts=["9=", chat], completions=["5", "6,3,1"], rubric=columns)
    assert found == pytest.approx([(3 * a + b) / 4, c], abs=1e-5)
    assert min(abs(a - b), abs(a - c), abs(b - c)) > 1e-3
    judge.load.cache_clear()


def test_a_judge_needs_digits():
    with pytest.raises(ValueError, match="no token for each digit"):
        judge.load("tiny/reviews/policy")


def test_a_served_judge_gives_the_mean_of_the_digits_of_its_first_token(monkeypatch):
    """The reply's most likely tokens, by what the question asks about."""
    replies = {
        "yes": {"9": 0.5, " 8": 0.2, "8": 0.1, "The": 0.2},  # (4.5 + 1.6 + 0.8) / 0.8 / 9
        "no": {"0": 0.6, "1": 0.2, "10": 0.1},
        "what?": {"I": 0.9},
    }

    def reply(request, timeout):
        (message,) = json.loads(request.data)["messages"]
        answer = message["content"].partition("Answer:\n")[2].splitlines()[0]
        tokens = [{"token": token, "logprob": math.log(p)} for token, p in replies[answer].items()]
        first = {"content": [{"top_logprobs": tokens}]}
        return io.BytesIO(json.dumps({"choices": [{"logprobs": first}]}).encode())

    monkeypatch.setattr(served_judge, "urlopen", reply)
    prompts = [[{"role": "user", "content": "Is it?"}]] * 2
    found = served_judge.grade(prompts=prompts, completions=["yes", "no"], answer=["yes"] * 2)
    assert found == pytest.approx([6.9 / 0.8 / 9, 0.2 / 0.8 / 9])
    with pytest.raises(ValueError, match="not reply with a digit, but with 'I'"):
        served_judge.grade(["Is it?"], ["what?"])


@pytest.mark.parametrize("failures", [3, 4])
def test_a_served_judge_is_asked_four_times(failures, monkeypatch):
    first = {"content": [{"top_logprobs": [{"token": "9", "logprob": 0.0}]}]}
    replies = [TimeoutError("timed out")] * failures
    replies += [io.BytesIO(json.dumps({"choices": [{"logprobs": first}]}).encode())]
    monkeypatch.setattr(served_judge, "urlopen", asked := Mock(side_effect=replies))
    monkeypatch.setattr(served_judge, "sleep", slept := Mock())
    if failures == 3:
        assert served_judge.grade(["Is it?"], ["yes"]) == [1.0]
    else:
        with pytest.raises(ConnectionError, match="http://localhost:8000 has failed 4 times: tim"):
            served_judge.grade(["Is it?"], ["yes"])
    assert [call.args[0] for call in slept.call_args_list] == [1, 10, 60]
    assert {call.kwargs["timeout"] for call in asked.call_args_list} == {300}


# --- functions written for TRL ------------------------------------------------------------------
def test_a_function_of_trl_reads_chats_and_may_say_none():
    texts = [r"so \boxed{5}", r"\boxed{4}, no, \boxed{ 5 }", r"\boxed{5} or \boxed{6}", "5", "5"]
    solution = ["5", 5, "5", "5", None]
    found = trl_style.boxed(prompts=[""] * 5, completions=texts, solution=solution)
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]
