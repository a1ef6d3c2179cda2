"""docs/exercises/blank.py: the tests that it prints fail without the function's body."""

import subprocess
import sys

import pytest

from docs.exercises.blank import FILES, find_tests, write_copy

QUICK = {"group_advantages"}  # the others: docs/contributing.md


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FILES]
)
def test_a_blank_fails(name, tmp_path):
    """That they pass with it is what the suite itself shows."""
    write_copy(name, tmp_path / "copy")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", "", *find_tests(name)]
    result = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
    assert result.returncode == 1 and "NotImplementedError: to be written" in result.stdout
