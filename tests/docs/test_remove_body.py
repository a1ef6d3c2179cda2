"""docs/exercises/remove_body.py: the tests that it prints fail without the function's body."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from docs.exercises.remove_body import FILES, find_tests, without_body, write_copy


@pytest.mark.parametrize("name", FILES)
def test_only_the_body_of_the_function_is_gone(name):
    before = ast.parse(Path(FILES[name]).read_text())
    (function,) = [node for node in before.body if getattr(node, "name", "") == name]
    function.body[1:] = ast.parse('raise NotImplementedError("to be written")').body
    assert ast.dump(ast.parse(without_body(Path(FILES[name]), name))) == ast.dump(before)


@pytest.mark.slow  # a quarter of a minute each
@pytest.mark.parametrize("name", FILES)
def test_the_printed_tests_fail_without_the_body(name, tmp_path):
    """That they pass with it is what the suite itself shows."""
    write_copy(name, tmp_path / "copy")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", "", *find_tests(name)]
    result = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
    assert result.returncode == 1 and "NotImplementedError: to be written" in result.stdout
