"""The reward functions of docs/rewards/: by hand, against completions that misbehave, in a run."""

import json
import math
import re
import shlex
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import ppo_rlhf
import reinforce
from tiny.arithmetic.reward import last_number

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "rewards"))
import formats
import judge
import programs
import trl_style

POLICY = "tiny/arithmetic/policy"
PAGE = Path("docs/rewards.md")
TESTS = json.dumps([[[2, 3], 5], [[-1, 1], 0]])
RIGHT = "def add(a, b):\n    return a + b\n"


def passed(*completions, tests=TESTS):
    """Rewards of completions that shall define `add`, by way of grpo.py."""
    columns = {"function": "add", "tests": tests}
    prompts = [grpo.Prompt("write add", [], columns) for _ in completions]
    return grpo.call_reward_fn("passes", programs.passes, prompts, [], [*completions]).tolist()


# --- the format ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>2 and 2</think><answer>4</answer>", 1),
        ("\n<think>2\nand 2</think>\n\n<answer>4</answer>\n", 1),
        ("<answer>4</answer>", 0),
        ("<think>2 and 2</think>4", 0),
        ("<think></think><answer>4</answer>", 0),  # no thought
        ("so: <think>2 and 2</think><answer>4</answer>", 0),
        ("<think>2 and 2</think><answer>4</answer> I am sure", 0),
        ("<think>2 <think>and 2</think><answer>4</answer>", 0),
        ("<think>2</think><think>2</think><answer>4</answer>", 0),
        ("<think>2</think><answer>4</answer><answer>5</answer>", 0),
        ("<answer>4</answer><think>2 and 2</think>", 0),
    ],
)
def test_thoughts_then_an_answer(text, reward):
    assert formats.think([""], [text]) == [reward]


def test_shown_working():
    texts = [
        "6,6,0,8,5#5",
        "9,9,9,9,9#1",
        "#5",
        "6,6,0,8#5",
        "6,6,0,8,5#5#",
        " 6,6,0,8,5#5",
        "",
        "٦,6,0,8,5#5",
    ]
    assert formats.shown([""] * 8, texts) == [1, 1, 0, 0, 0, 0, 0, 0]


# --- code ---------------------------------------------------------------------------------------

HONEST = {
    "plain": RIGHT,
    "in a block": f"Of course:\n```python\n{RIGHT}```\nIt adds.",
    "the last of two blocks": f"```\nadd = 1\n```\nOr rather:\n```py\n{RIGHT}```",
    "prints": "print('hello')\ndef add(a, b):\n    print(a, b)\n    return a + b",
    "imports": "import collections, functools, heapq, math, random, re\n" + RIGHT,
}
WRONG = {
    "another result": "def add(a, b):\n    return a - b",
    "another type": "def add(a, b):\n    return float(a + b)",
    "true for 1": "def add(a, b):\n    return True",
    "equal to all": "class All(int):\n    __eq__ = lambda *_: True\ndef add(*_):\n    return All()",
    "wrong signature": "def add(a):\n    return a",
    "another name": "def plus(a, b):\n    return a + b",
    "no function": "add = 5",
    "no code": "I cannot help with that.",
    "empty": "",
    "zero byte": "\0",
    "one test only": "def add(a, b):\n    return {2: 5}[a]",
    "results on stdout": "print('[5, 0]')\nimport sys\nsys.stdout.flush()",
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits in the function": "def add(a, b):\n    raise SystemExit(0)",
    "writes everywhere": "import os\nfor n in range(30):\n    try: os.write(n, b'[1, 1]')\n"
    "    except OSError: pass\nos._exit(0)",
    "numbers that JSON has not": "def add(a, b):\n    return a + b + 0j",
    "a flood": "def add(a, b):\n    return 'x' * 10**7",
    "deep": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "memory": "def add(a, b):\n    bytearray(2**30)\n    return a + b",
    # What these do would do no harm if it were let through; then the reward would be 1.
    "forks": "import os\nos.fork() or os._exit(0)\n" + RIGHT,
    "threads, then sleeps": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,)).start()\ntime.sleep(99)",
    "another program": "import subprocess\nsubprocess.run(['true'])\n" + RIGHT,
    "sends a signal": "import os\nos.kill(os.getpid(), 0)\n" + RIGHT,
    "opens a socket": "import socket\nsocket.socket()\n" + RIGHT,
    "reads a key": "import os\nos.environ['A_KEY']\n" + RIGHT,
    "reads standard input": "input()\n" + RIGHT,
    "site-packages": "import typing_extensions\n" + RIGHT,
    "loop": "def add(a, b):\n    while True: pass",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef add(*a):\n    return add(*a)",
}


def test_code_reward(monkeypatch):
    monkeypatch.setattr(programs, "SECONDS", 2.0)
    monkeypatch.setenv("A_KEY", "secret")
    started = time.monotonic()
    rewards = passed(*HONEST.values(), *WRONG.values())
    found = dict(zip([*HONEST, *WRONG], rewards, strict=True))
    assert found == dict.fromkeys(HONEST, 1.0) | dict.fromkeys(WRONG, 0.0)
    assert time.monotonic() - started < 20


def test_files_are_not_changed(tmp_path):
    """By code that does not try to get past the audit hook."""
    (tmp_path / "kept").write_text("as it was")
    path = str(tmp_path / "kept")
    acts = (
        f"open({path!r}, 'w')",
        f"open({path!r}, 'r+')",
        f"import os; os.remove({path!r})",
        f"import os; os.rename({path!r}, '/tmp/other')",
        f"import os; os.truncate({path!r}, 0)",
        f"import pathlib; pathlib.Path({path!r}).unlink()",
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


def test_it_is_the_limit_that_ends_a_memory_hog(monkeypatch):
    code = "def add(a, b):\n    bytearray(600 * 2**20)\n    return a + b"
    assert passed(code) == [0.0]
    monkeypatch.setitem(programs.LIMITS, "RLIMIT_AS", 4 * 2**30)
    monkeypatch.setattr(programs, "SECONDS", 60)  # a busy machine takes long for so much memory
    assert passed(code) == [1.0]


@pytest.mark.parametrize("leaves", ["", "setsid"])
def test_nothing_that_was_started_is_left(leaves):
    """Also by code that gets past the audit hook, and that leaves its session."""
    if leaves and not programs.apart():
        pytest.skip("this system allows no namespaces")
    path, words = shutil.which(leaves or "sleep"), [*leaves.split(), "sleep", "98765"]
    spawn = "from multiprocessing.util import spawnv_passfds as spawn\n"
    spawn += f"spawn({path.encode()!r}, {[word.encode() for word in words]!r}, [])\n"
    passed(spawn + RIGHT)

    def left():
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found.append(path.read_bytes())
        return [line for line in found if b"98765" in line]

    deadline = time.monotonic() + 5  # a killed process may take a moment to go
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left()


def test_a_row_without_tests_is_an_error():
    with pytest.raises(ValueError, match="no tests for add"):
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


def test_a_judge_needs_digits():
    with pytest.raises(ValueError, match="no token for each digit"):
        judge.load("tiny/reviews/policy")


# --- functions written for TRL ------------------------------------------------------------------


def test_a_function_of_trl_reads_chats_and_may_say_none():
    texts = [r"so \boxed{5}", r"\boxed{4}, no, \boxed{ 5 }", r"\boxed{5} or \boxed{6}", "5", "5"]
    solution = ["5", 5, "5", "5", None]
    found = trl_style.boxed(prompts=[""] * 5, completions=texts, solution=solution)
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_what_a_function_of_trl_needs_is_asked_for_at_the_start(tmp_path):
    with pytest.raises(grpo.InputError, match="missing a required argument: 'solution'"):
        grpo.load_reward_fns("--reward-fn", ["docs/rewards/trl_style.py:boxed"], {"answer": "5"})


# --- all together -------------------------------------------------------------------------------


def test_the_worked_example():
    """Of docs/rewards.md: right answers 1, 0, 0, 1, and working shown in the first two."""
    texts = ["1,3,6,0,5#5", "1,3,6,0,4#4", "#7", "#5"]
    right = last_number(prompts=[""] * 4, completions=texts, answer=["5"] * 4)
    form = formats.shown([""] * 4, texts)
    assert (right, form) == ([1, 0, 0, 1], [1, 1, 0, 0])
    sums = torch.tensor([a + 0.2 * b for a, b in zip(right, form, strict=True)])
    page = Path("docs/rewards.md").read_text()
    for advantages, printed in (
        (grpo.group_advantages(torch.tensor(right), 4), "0.87, -0.87, -0.87, 0.87"),
        (grpo.group_advantages(sums, 4), "1.02, -0.68, -1.02, 0.68"),
    ):
        assert ", ".join(f"{a:.2f}" for a in advantages.tolist()) == printed
        assert printed in page


def test_a_run_with_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", POLICY)
    data = tmp_path / "data"
    data.mkdir()
    lines = Path("tiny/arithmetic/prompts/test.jsonl").read_text().splitlines()[:2]
    more = {"solution": "5", "function": "add", "tests": TESTS}
    for split in ("train", "test"):
        rows = [json.dumps(json.loads(line) | more) + "\n" for line in lines]
        (data / f"{split}.jsonl").write_text("".join(rows))
    names = [
        "formats.py:shown",
        "programs.py:passes",
        "trl_style.py:boxed",
        "judge.py:grade",
    ]
    flags = f"--dataset {data} --total-rollouts 1 --prompts-per-rollout 2 --group-size 4 "
    flags += f"--num-minibatches 1 --output-dir {tmp_path} --reward-weights 1 0.5 3 3 0.25 "
    flags += f"--reward-fn {grpo.LAST_NUMBER} {' '.join(f'docs/rewards/{name}' for name in names)}"
    run_dir = grpo.main(grpo.parse_args(flags.split()))
    *_, last = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert last["reward/passes"] == last["reward/boxed"] == 0
    assert 0 < last["reward/grade"] < 1
    parts = last["reward/last_number"] + 0.5 * last["reward/shown"] + 0.25 * last["reward/grade"]
    assert last["reward/mean"] == pytest.approx(parts, abs=1e-6)
    samples = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    shown = [sample for sample in samples if re.fullmatch(r"(\d,){4}\d#\d", sample["completion"])]
    assert shown  # the policy shows its working in half of its completions
    assert all(sample["reward"] >= 0.5 for sample in shown)


def test_the_commands_of_the_page_parse_and_name_functions_that_are_there():
    text = Path("docs/rewards.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    (?:\w+=\S+ )*python (\w+)\.py (.*)$", text, re.MULTILINE)
    assert len(commands) > 3
    for script, flags in commands:
        module = {"grpo": grpo, "ppo_rlhf": ppo_rlhf, "reinforce": reinforce}[script]
        flags = shlex.split(flags.replace("$seed", "1"), comments=True)
        args = module.parse_args([flag for flag in flags if flag != "..."])
        for spec in args.reward_fn:
            path, _, name = spec.rpartition(":")
            assert f"\ndef {name}(" in Path(path).read_text()


# --- what the pages say of their results --------------------------------------------------------


def text_of(page):
    """A page on one line, so that a sentence can be found in it."""
    return " ".join(Path(f"docs/{page}.md").read_text().split())


def results_of(name):
    return json.loads(Path(f"docs/results/{name}.json").read_text())


def numbers_of(name):
    return results_of(name)["numbers"]


def means_by_step(name, metric):
    """The mean over the seeds of a metric of the default run, by step."""
    curves = results_of(name)["curves"]["(default)"][f"{metric} over step"]
    return {
        points[0][0]: mean(value for _, value in points) for points in zip(*curves, strict=True)
    }


def difference(values, others):
    """The difference of two means, and its size in standard errors (docs/grpo.md, What matters)."""
    d = mean(values) - mean(others)
    return d, abs(d) / math.sqrt((stdev(values) ** 2 + stdev(others) ** 2) / len(values))


def test_the_errors_in_working_that_is_rewarded_for_its_form():
    shown = means_by_step("format_reward", "reward/shown")
    accuracy = means_by_step("format_reward", "eval/accuracy")
    page = text_of("rewards")
    assert f"Before training, {shown[1]:.2f} of the samples show working" in page
    assert f"accuracy of the five seeds is {accuracy[0]:.2f}" in page
    guesses = (1 - shown[1]) * 0.10
    among_shown = (accuracy[0] - guesses) / shown[1]
    assert rf"$({accuracy[0]:.2f} - {1 - shown[1]:.2f} \times 0.10) / {shown[1]:.2f} = " in page
    assert f"= {among_shown:.2f}$" in page
    assert (
        f"After 20 rollouts {shown[20]:.2f} show it, and the accuracy is {accuracy[20]:.2f}" in page
    )
    assert f"to {accuracy[40]:.2f} after 40 rollouts and {accuracy[60]:.2f} after 60" in page
    # More errors than at the start, and fewer than at rollout 20.
    assert accuracy[20] < accuracy[40] < accuracy[60] < among_shown - 0.03


def test_the_steps_of_the_worked_example():
    prompt, answer = "1+2+3+4+5=", "5"
    digits = [int(digit) for digit in prompt[:-1].split("+")]
    rows = re.findall(r"^\| `([\d,#]+)` \| ([01]) \| ([01, ]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 2
    for completion, outcome, steps in rows:
        running_sum, right_steps = 0, []
        for digit, written in zip(digits, completion.partition("#")[0].split(","), strict=True):
            right_steps.append(str(int(int(written) == (running_sum + digit) % 10)))
            running_sum = int(written)
        assert ", ".join(right_steps) == steps
        assert last_number([prompt], [completion], [answer]) == [int(outcome)]


def test_length_and_entropy_of_grpo():
    length = means_by_step("grpo", "completions/length_mean")
    entropy = means_by_step("grpo", "policy/entropy")
    accuracy = means_by_step("grpo", "eval/accuracy")
    page = text_of("grpo")
    assert f"the mean length rises from {length[1]:.1f} to {length[5]:.1f} tokens" in page
    assert (
        f"from {entropy[1]:.2f} nats per token in the first to {entropy[6]:.2f} in the sixth"
        in page
    )
    assert f"to {length[60]:.1f} tokens and {entropy[60]:.2f} nats" in page
    assert entropy[1] - entropy[6] > 0.7 * (entropy[1] - entropy[60])  # most of the fall
    assert f"{accuracy[20]:.2f} after 20 rollouts and {accuracy[60]:.2f} after 60" in page
    # Working with the errors of the demonstrations, 12 tokens.
    wrong_digit = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 9)
    assert f"would have {5 * wrong_digit / 12:.2f} nats per token" in page
    assert entropy[6] < 5 * wrong_digit / 12


def test_one_rule_for_the_variants_of_grpo():
    numbers = numbers_of("grpo_variants")
    default = numbers.pop("(default)")["accuracy"]
    text = text_of("grpo").partition("One rule for every comparison")[2].partition("### Where")[0]
    differ, _, same = text.partition("The other eight do not:")
    assert len(numbers) == 12
    counted = 0
    for part in (differ, same):
        pattern = r"`(--[^`]+)`(?: \([\w. ]+\))?: ([+-]\d\.\d+), (\d\.\d)"
        for flags, d, standard_errors in re.findall(pattern, part):
            measured, size = difference(numbers[f"`{flags}`"]["accuracy"], default)
            assert (d, standard_errors) == (f"{measured:+.3f}", f"{size:.1f}"), flags
            assert (size > 3) == (part == differ), flags
            counted += 1
    assert counted == 12
    assert "Four rows differ" in differ


def test_the_rule_for_gdpo_and_for_the_place_of_the_kl():
    page = text_of("grpo")
    numbers = numbers_of("gdpo")
    third = "right in the third rollout"
    comparisons = {  # two labels, a quantity, and whether the page calls it a difference
        "0.72 and 0.63, {} standard errors": (
            "working 1 : 1, GDPO",
            "working 1 : 1, GRPO",
            third,
            1,
        ),
        "0.97 and 0.94, {}.": ("working 1 : 1, GDPO", "working 1 : 1, GRPO", "accuracy", 1),
        "0.97 and 0.95, {} standard errors": ("none , GDPO", "none , GRPO", "accuracy", 1),
        "neither in the third rollout ({})": ("working 1 : 1, GDPO", "none , GDPO", third, 0),
        "nor at the end ({})": ("working 1 : 1, GDPO", "none , GDPO", "accuracy", 0),
    }
    for sentence, (label, other, quantity, differs) in comparisons.items():
        values, others = numbers[label][quantity], numbers[other][quantity]
        _, size = difference(values, others)
        assert sentence.format(f"{size:.1f}") in page
        assert (size > 3) == differs
        if sentence.startswith("0"):
            assert sentence.startswith(f"{mean(values):.2f} and {mean(others):.2f}")
    frontier = numbers_of("frontier")
    reward, loss = (frontier[f"GRPO, KL in the {place}, beta 0.1"] for place in ("reward", "loss"))
    _, size = difference(reward["reward"], loss["reward"])
    means = f"{mean(reward['reward']):.2f} and {mean(loss['reward']):.2f}"
    assert f"the two do not differ: {means}, {size:.1f} standard errors" in page
    assert size < 3


def test_gdpo_of_one_reward_is_not_grpo():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    grpo_advantages = grpo.group_advantages(rewards, 4)
    gdpo_advantages = grpo.gdpo_advantages(rewards[None], torch.ones(1), 4)
    torch.testing.assert_close(gdpo_advantages.std(), torch.tensor(1.0), atol=1e-3, rtol=0)
    assert gdpo_advantages[3] > grpo_advantages[3] + 0.1


def test_what_the_page_of_sft_says_of_its_loss():
    page = text_of("sft")
    wrong_digit = -0.9 * math.log(0.9) - 0.1 * math.log(0.1 / 9)
    per_completion = math.log(2) + (math.log(10) + 5 * wrong_digit) / 2
    assert f"{wrong_digit:.2f} each, {5 * wrong_digit:.2f} together" in page
    assert f"= {per_completion:.2f}$ per completion of 7.5 tokens" in page
    assert f"about {per_completion / 7.5:.2f} nats per token" in page
    curves = results_of("sft")["curves"]["(default)"]["eval/loss over step"]
    at_400 = [dict(curve)[400] for curve in curves]
    second = at_400.pop(1)
    assert f"a loss of {min(at_400):.2f} to {max(at_400):.2f}, but seed 2 has {second:.2f}" in page
    assert f"still {dict(curves[1])[600]:.2f} at step 600" in page


def test_the_share_of_working_under_a_mean_over_completions():
    lengths = []
    for line in Path("tiny/arithmetic/sft/train.jsonl").read_text().splitlines():
        lengths.append(len(json.loads(line)["completion"]) + 1)  # characters, and the EOS
    assert {*lengths} == {3, 12}
    half = lengths.count(12) / len(lengths)
    assert half == pytest.approx(0.5, abs=0.01)
    best_share = (half / 12) / (half / 12 + (1 - half) / 3)
    assert best_share == pytest.approx(0.2, abs=0.005)
    assert "the share that minimises the loss is" in text_of("sft")
    numbers = numbers_of("shown_working")
    over_tokens = numbers["mean over tokens"]
    over_completions = numbers["mean over completions"]
    assert mean(over_tokens) == pytest.approx(half, abs=0.02)
    assert mean(over_completions) == pytest.approx(best_share, abs=0.02)
    assert min(over_tokens) > max(over_completions)


def test_working_that_was_never_shown_is_not_found():
    numbers = numbers_of("shown_working")
    assert "Not one of the 500 samples per seed shows working, before or after" in text_of("grpo")
    assert not any(numbers["never shown, before"] + numbers["never shown, after"])
    accuracies = numbers["never shown, accuracy before"], numbers["never shown, accuracy after"]
    _, size = difference(*accuracies)
    assert size < 3 and mean(accuracies[1]) == pytest.approx(0.10, abs=0.02)


def test_the_comparison_of_kto_with_dpo():
    dpo = numbers_of("frontier")["DPO, beta 0.3"]["reward"]
    kto = numbers_of("kto")
    labels, pairs = (difference(dpo, kto[label]["reward"])[1] for label in ("(default)", "pairs"))
    page = text_of("kto")
    assert f"by {labels:.1f} and {pairs:.1f} standard errors of the difference" in page
    assert max(labels, pairs) < 3


# --- how files are read and functions called ----------------------------------------------------


def test_a_file_that_was_edited_is_read_again(tmp_path):
    path = tmp_path / "edited.py"
    prompts = [grpo.Prompt("1+2=", [], {})]
    for value in (1.0, 2.0):
        path.write_text(f"def rule(prompts, completions):\n    return [{value}]\n")
        reward_fns = grpo.load_reward_fns("--reward-fn", [f"{path}:rule"], {})
        assert reward_fns["rule"](prompts, [], ["#3"]).tolist() == [value]


def test_a_function_that_changes_its_list_changes_nothing_else():
    def shout(prompts, completions):
        completions[0] = completions[0].upper()
        return [1.0]

    texts = ["abc"]
    grpo.call_reward_fn("shout", shout, [grpo.Prompt("?", [], {})], [], texts)
    assert texts == ["abc"]
