"""The exercises: each bug is caught by the test that its solution names, and does not show."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import some_slow, some_wide
from scripts import SCRIPTS

from docs.exercises import add_bug, vote
from docs.exercises.add_bug import EXERCISES, write_copy

# --- the bugs -----------------------------------------------------------------------------------
# All: python -m pytest -m "slow or wide" tests/docs/test_{exercises,remove_body}.py
QUICK = 5
OTHERS = [number for number in EXERCISES if number != QUICK]


@pytest.mark.parametrize("number", [*some_wide([QUICK], fast=[]), *some_slow(OTHERS, fast=[])])
def test_the_suite_catches_the_bug(number, tmp_path):
    """By the test that is named. In the copy without the bug it passes; that of QUICK is this
    repository."""
    exercise, status = EXERCISES[number], {}
    for way in ("planted",) if number == QUICK else ("healthy", "planted"):
        write_copy(exercise, tmp_path / way, healthy=way == "healthy")
        command = [sys.executable, "-m", "pytest", "-q", "-n0", add_bug.path_of_test(exercise)]
        done = subprocess.run(command, cwd=tmp_path / way, capture_output=True, text=True)
        assert "error" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
        status[way] = done.returncode
    assert status.pop("planted") == 1 and not any(status.values()), done.stdout[-2000:]
    assert "AssertionError" in done.stdout, done.stdout[-2000:]


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
        assert not re.search(r"bug|planted|wrong|exercise", edit.new)


# --- the program --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", EXERCISES)
def test_commands_parse_and_a_solution_shows_the_lines_and_names_the_test(number):
    for command in EXERCISES[number].commands:
        script, *flags = command.split()
        SCRIPTS[script.removesuffix(".py")].parse_args(flags)
    told = add_bug.solution_text(number)
    added = {line.strip() for edit in EXERCISES[number].bug for line in edit.new.splitlines()}
    assert any(line[:2] == "+ " and any(new in line for new in added) for line in told.splitlines())
    path, _, function = add_bug.path_of_test(EXERCISES[number]).partition("::")
    assert f"{path}::{function}" in told and f"def {function}(" in Path(path).read_text()
    file, _, line_number = re.search(r"^(\S+\.py)(, from line )(\d+):", told).groups()
    first_line = EXERCISES[number].bug[0].old.splitlines()[0]
    assert first_line in Path(file).read_text().splitlines()[int(line_number) - 1]


@pytest.mark.slow
def test_a_run_with_the_bug_shows_its_symptom(tmp_path, capsys):
    for way in ("healthy", "planted"):
        add_bug.main(1, out=tmp_path / way, healthy=way == "healthy")
        metrics_file = re.search(r"^metrics: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
        last = json.loads(Path(metrics_file).read_text().splitlines()[-1])
        assert (last["eval/truncated_fraction"] > 0.8) == (way == "planted")


# --- a vote -------------------------------------------------------------------------------------
def test_a_vote_is_correct_where_the_answer_is_the_most_frequent_of_its_group():
    answers = ["7", "3", "7", "5", "3", "3", "9", "7"]
    assert vote.voted_and_found(answers, "7", 1) == (3 / 8, 3 / 8)
    assert vote.voted_and_found(answers, "7", 4) == (1 / 2, 1)  # 7 3 7 5 and 3 3 9 7
    assert vote.voted_and_found(answers, "7", 8) == (1, 1)  # three of each, and 7 came first
    assert vote.voted_and_found(answers, "4", 4) == (0, 0)
