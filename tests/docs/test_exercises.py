"""The exercises: each bug is caught by the test that its solution names and says nothing of itself,
and the program writes and runs copies."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import some_slow, some_wide
from scripts import SCRIPTS

from docs.exercises import add_bug
from docs.exercises.add_bug import EXERCISES, Edit, apply, write_copy
from docs.experiments.studies import exercises as experiment
from docs.experiments.lib.runs import Run, write_jsonl

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


@pytest.mark.parametrize("text", ["x = 2\n", "x = 1\nx = 1\n"])
def test_a_text_that_does_not_occur_exactly_once_is_an_error(text, tmp_path):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(ValueError, match="not once"):
        apply(Edit("script.py", "x = 1", "x = 3"), tmp_path)
    assert (tmp_path / "script.py").read_text() == text


# --- the program --------------------------------------------------------------------------------
def test_no_run_writes_a_copy_and_prints_its_command(tmp_path, capsys):
    add_bug.main(5, out=tmp_path / "copy", run=False)
    assert (tmp_path / "copy" / "grpo.py").read_text() != Path("grpo.py").read_text()
    assert not (tmp_path / "copy" / "runs").exists()
    assert f"python {EXERCISES[5].commands[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["runs/exercise", "tests"])
def test_a_copy_does_not_go_into_the_repository(folder):
    with pytest.raises(ValueError, match=r"^--out .* lies within the repository$"):
        add_bug.main(1, out=Path(folder), run=False)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "grpo.py").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        add_bug.main(1, out=tmp_path, run=False)
    assert (tmp_path / "grpo.py").read_text() == "mine"


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
        add_bug.main(3, out=tmp_path / way, healthy=way == "healthy")
        metrics_file = re.search(r"^metrics: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
        last = json.loads(Path(metrics_file).read_text().splitlines()[-1])
        assert (last["eval/truncated_fraction"] > 0.8) == (way == "planted")


def test_differences_of_two_runs(tmp_path):
    runs = []
    for loss in (2.0, 2.5):
        folder = tmp_path / str(loss)
        folder.mkdir()
        rows = [{"step": 0, "eval/loss": 1.0}, {"step": 1, "objective/loss": loss}]
        write_jsonl(folder / "metrics.jsonl", rows)
        runs.append(Run(folder))
    assert [*experiment.differences(*runs).values("difference/loss").items()] == [(1, 0.5)]


# --- the page -----------------------------------------------------------------------------------
@pytest.mark.docs
def test_the_page_has_a_row_for_each_bug_and_shows_no_number_before_the_last_one():
    page, _, numbers = Path("docs/exercises.md").read_text().partition("## What the runs show\n")
    for number in EXERCISES:
        assert f"\n| {number} | " in page
        assert f"\n| {number} | " in numbers
        assert f"figures/exercises_{number}.svg" in numbers
    assert "<!-- table" not in page and ".svg" not in page
