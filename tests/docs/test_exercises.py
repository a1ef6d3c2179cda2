"""The exercises: each bug is caught by the test that its solution names, and shows the symptom that
the page promises; the numbers of the questions are right."""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import SCRIPTS

import ppo_rlhf
from reinforce import baseline_advantages

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "experiments"))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "exercises"))
import exercises as experiment
import plant
from plant import EXERCISES, Edit, apply, write_copy

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/exercises.md")
RESULTS = Path("docs/results/exercises.json")


# --- the bugs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pytest_results(tmp_path_factory):
    """Exit status and output of pytest: by the bug's number, of the test that is said to catch it;
    under "healthy", of all of these tests in a copy without a bug.
    """
    folders, jobs = {}, []
    for number, exercise in EXERCISES.items():
        folders[number] = tmp_path_factory.mktemp("bug") / "copy"
        write_copy(exercise, folders[number])
        jobs.append([str(folders[number]), exercise.test])
    folders["healthy"] = tmp_path_factory.mktemp("healthy") / "copy"
    write_copy(EXERCISES[3], folders["healthy"], healthy=True)  # with padding that is the EOS
    jobs.append([str(folders["healthy"]), *(exercise.test for exercise in EXERCISES.values())])
    words = [sys.executable, ROOT / "tests/helpers/forked_pytest.py", json.dumps(jobs)]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    statuses = map(int, process.stdout.split())
    return {
        name: (status, (folder / "pytest.out").read_text())
        for (name, folder), status in zip(folders.items(), statuses, strict=True)
    }


@pytest.mark.parametrize("number", EXERCISES)
def test_the_suite_catches_the_bug(number, pytest_results):
    status, output = pytest_results[number]
    assert status == 1, output[-2000:]
    assert "error" not in output.splitlines()[-1]


def test_the_same_tests_pass_without_the_bugs(pytest_results):
    status, output = pytest_results["healthy"]
    assert status == 0, output[-2000:]


@pytest.mark.parametrize("number", EXERCISES)
def test_a_bug_changes_the_copy_and_says_nothing_of_itself(number, tmp_path):
    for way in ("healthy", "planted"):
        write_copy(EXERCISES[number], tmp_path / way, healthy=way == "healthy")
    changed = []
    for file in sorted((tmp_path / "healthy").rglob("*.*")):
        planted = tmp_path / "planted" / file.relative_to(tmp_path / "healthy")
        if file.is_file() and file.read_bytes() != planted.read_bytes():
            changed.append(str(file.relative_to(tmp_path / "healthy")))
    assert changed == sorted({edit.file for edit in EXERCISES[number].bug})
    for edit in EXERCISES[number].bug:
        assert "#" not in edit.new
        assert not re.search(r"bug|plant|wrong|exercise", edit.new)


@pytest.mark.parametrize("text", ["x = 2\n", "x = 1\nx = 1\n"])
def test_a_text_that_does_not_occur_exactly_once_is_an_error(text, tmp_path):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(ValueError, match="not once"):
        apply(Edit("script.py", "x = 1", "x = 3"), tmp_path)
    assert (tmp_path / "script.py").read_text() == text


# --- the program --------------------------------------------------------------------------------


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plant.py", *map(str, arguments)])
    plant.main()


def test_no_run_writes_a_copy_and_prints_its_command(tmp_path, monkeypatch, capsys):
    call(monkeypatch, 5, "--no-run", "--out", tmp_path / "copy")
    assert (tmp_path / "copy" / "grpo.py").read_text() != Path("grpo.py").read_text()
    assert not (tmp_path / "copy" / "runs").exists()
    assert f"python {EXERCISES[5].commands[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["runs/exercise", "tests"])
def test_a_copy_does_not_go_into_the_repository(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, 1, "--no-run", "--out", folder)
    assert "within the repository" in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "grpo.py").write_text("mine")
    with pytest.raises(SystemExit):
        call(monkeypatch, 1, "--no-run", "--out", tmp_path)
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "grpo.py").read_text() == "mine"


@pytest.mark.parametrize("number", EXERCISES)
def test_a_solution_shows_the_lines_and_names_the_test(number, monkeypatch, capsys):
    call(monkeypatch, number, "--solution")
    told = capsys.readouterr().out
    added = {line.strip() for edit in EXERCISES[number].bug for line in edit.new.splitlines()}
    assert any(line[:2] == "+ " and any(new in line for new in added) for line in told.splitlines())
    assert EXERCISES[number].test in told
    file, _, line_number = re.search(r"^(\S+\.py)(, from line )(\d+):", told).groups()
    first_line = EXERCISES[number].bug[0].old.splitlines()[0]
    assert first_line in Path(file).read_text().splitlines()[int(line_number) - 1]


@pytest.mark.parametrize("number", EXERCISES)
def test_commands_parse_and_the_metrics_exist(number):
    for command in EXERCISES[number].commands:
        script, *flags = command.split()
        name = script.removesuffix(".py")
        SCRIPTS[name].check_args(SCRIPTS[name].parse_args(flags))
        page = Path(f"docs/{name}.md").read_text()
        for metric in EXERCISES[number].metrics:
            assert f"`{metric}`" in page


@pytest.mark.slow
def test_a_run_with_the_bug_shows_its_symptom(tmp_path, monkeypatch, capsys):
    for way, flags in (("healthy", ["--healthy"]), ("planted", [])):
        call(monkeypatch, 3, *flags, "--out", tmp_path / way)
        metrics_file = re.search(r"^metrics: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
        last = json.loads(Path(metrics_file).read_text().splitlines()[-1])
        assert (last["eval/truncated_fraction"] > 0.8) == (way == "planted")


# --- the symptoms -------------------------------------------------------------------------------


def values(number, name):
    """Of each seed, without the bug and with it."""
    of_symptom = json.loads(RESULTS.read_text())["numbers"][str(number)][name]
    assert all(len(of_symptom[way]) == len(experiment.SEEDS) for way in ("healthy", "planted"))
    return of_symptom["healthy"], of_symptom["planted"]


def test_symptom_1_no_kl_a_higher_reward_and_a_lower_gold_reward():
    healthy, planted = values(1, "highest `objective/kl`")
    assert not any(planted) and min(healthy) > 1
    healthy, planted = values(1, "`reward/mean`")
    assert all(y > x for x, y in zip(healthy, planted, strict=True))
    healthy, planted = values(1, "`eval/reward`")
    assert all(y < x for x, y in zip(healthy, planted, strict=True))


def test_symptom_2_the_ratio_does_not_return_to_1():
    healthy, planted = values(2, "`policy/approx_kl`")
    assert min(planted) > 0.001 > max(healthy)


def test_symptom_3_completions_do_not_end():
    healthy, planted = values(3, "`eval/truncated_fraction`")
    assert min(planted) > 0.8 and max(healthy) < 0.1


def test_symptom_4_the_loss_depends_on_the_micro_batch_size():
    healthy, planted = values(4, "largest difference of `objective/loss`")
    assert min(planted) > 0.1 and max(healthy) < 0.001
    healthy, planted = values(4, "last difference of `eval/loss`")
    assert min(planted) > 10 * max(healthy)


def test_symptom_5_kl_and_gradient_jump():
    healthy, planted = values(5, "highest `objective/kl`")
    grad_norms = values(5, "highest `policy/grad_norm`")
    assert max(healthy) < 3 and max(grad_norms[0]) < 3
    calm = [seed for seed, kl in zip(experiment.SEEDS, planted, strict=True) if kl < 50]
    assert calm == [3] and "On seed 3 there is no jump" in section(5)
    for seed, norm in zip(experiment.SEEDS, grad_norms[1], strict=True):
        assert norm > 9 or seed in calm


def test_symptom_6_a_better_critic_and_a_worse_policy():
    healthy, planted = values(6, "`value/loss`, all rollouts")
    is_lower = [loss < normal for loss, normal in zip(planted, healthy, strict=True)]
    assert sum(is_lower) == 4 and "lower on four of five" in section(6)
    healthy, planted = values(6, "`value/explained_variance`, all rollouts")
    assert min(planted) > max(healthy)
    healthy, planted = values(6, "`reward/mean`")
    assert max(planted) < min(healthy)


def test_the_results_are_those_of_the_exercises():
    made = json.loads(RESULTS.read_text())
    commands = {str(number): [*exercise.commands] for number, exercise in EXERCISES.items()}
    assert made["commands"] == commands
    names = [[str(symptom.number), symptom.name] for symptom in experiment.SYMPTOMS]
    assert [row[:2] for row in made["tables"]["exercises"]["rows"]] == names


def test_quantities_of_a_run():
    rows = [{"eval/loss": 9.0}, *({"x": float(i)} for i in range(7)), {"x": 0.0, "eval/loss": 2.0}]
    assert experiment.last("eval/loss")(rows) == 2
    assert experiment.highest("x")(rows) == 6
    assert experiment.last_five("x")(rows) == (3 + 4 + 5 + 6 + 0) / 5
    assert experiment.average("x")(rows) == 21 / 8
    runs = [{"step": 1, "objective/loss": 2.0}], [{"step": 1, "objective/loss": 2.5}]
    assert experiment.differences(*runs) == [{"step": 1, "difference": 0.5}]


# --- the page -----------------------------------------------------------------------------------


def section(number):
    """The text of an exercise on the page."""
    return re.split(r"^## \d\. ", PAGE.read_text(), flags=re.MULTILINE)[number]


def test_the_page_has_a_section_and_a_command_for_each_bug():
    for number in EXERCISES:
        assert f"    python docs/exercises/plant.py {number}\n" in section(number)
        assert "<summary>Hint</summary>" in section(number)
    assert re.findall(r"^## (\d)\.", PAGE.read_text(), re.MULTILINE) == [*"123456789"]


def numbers_in_bold(number):
    """The numbers of an answer."""
    bold = " ".join(re.findall(r"\*\*(.*?)\*\*", section(number)))
    return [float(text) for text in re.findall(r"-?\d+\.\d+", bold)]


def test_answer_7_the_factor_of_the_group_mean():
    """By enumeration of all groups of 4 draws from a policy of two completions."""
    k, p, rewards = 4, 0.3, (1.0, 0.0)
    score = (1 - p, -p)  # d log pi(i) / d logit of completion 0
    expected = {"all": 0.0, "others": 0.0}
    for drawn in itertools.product((0, 1), repeat=k):
        chance = math.prod((p, 1 - p)[i] for i in drawn)
        returns = torch.tensor([rewards[i] for i in drawn])
        means = {
            "all": returns - returns.mean(),
            "others": baseline_advantages(returns, k, "leave_one_out"),
        }
        for name, advantages in means.items():
            pairs = zip(drawn, advantages.tolist(), strict=True)
            expected[name] += chance * sum(score[i] * a for i, a in pairs) / k
    assert expected["others"] == pytest.approx(p * (1 - p))  # d p / d logit
    assert numbers_in_bold(7) == [pytest.approx(expected["all"] / expected["others"])]


def test_answer_8_gae_by_hand():
    scores, mask = torch.tensor([1.0]), torch.ones(1, 3, dtype=torch.bool)
    k1, old_values = torch.tensor([[0.5, -0.5, 1.0]]), torch.tensor([[0.5, 0.2, 0.4]])
    token_rewards = ppo_rlhf.shaped_rewards(scores, k1, mask, beta=0.2)
    advantages, returns = ppo_rlhf.gae(token_rewards, old_values, gamma=1.0, lam=0.5)
    assert numbers_in_bold(8) == pytest.approx([*advantages[0].tolist(), *returns[0].tolist()])
    assert "$r = (-0.1, 0.1, 0.8)$" in section(8)
    assert token_rewards[0].tolist() == pytest.approx([-0.1, 0.1, 0.8])


def test_answer_9_the_beta_of_a_given_kl():
    ref, rewards = (0.5, 0.3, 0.2), (0, 1, 2)

    def best_policy(beta):
        weights = [q * math.exp(r / beta) for q, r in zip(ref, rewards, strict=True)]
        return [weight / sum(weights) for weight in weights]

    low, high = 0.1, 100.0
    for _ in range(100):
        beta = (low + high) / 2
        pairs = zip(best_policy(beta), ref, strict=True)
        kl = sum(p * math.log(p / q) for p, q in pairs)
        low, high = (beta, high) if kl > 0.1 else (low, beta)
    pairs = zip(best_policy(beta), rewards, strict=True)
    expected_reward = sum(p * r for p, r in pairs)
    assert numbers_in_bold(9) == [round(beta, 2), round(expected_reward, 2)]
    shown = ", ".join(f"{p:.2f}" for p in best_policy(beta))
    assert f"({shown})" in section(9)
