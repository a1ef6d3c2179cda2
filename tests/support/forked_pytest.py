"""Runs pytest in several folders, each in a process forked from one that has imported the libraries
already: importing them takes longer than the tests.

    python tests/support/forked_pytest.py '[["FOLDER", "TEST", ...], ...]'

What pytest prints goes to FOLDER/pytest.out. Prints the exit statuses, in the same order.
"""

import json
import os
import sys
from pathlib import Path

import datasets  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401
import tyro  # noqa: F401
import wandb  # noqa: F401


def run_pytest(folder: str, tests: list[str]) -> int:
    """Exit status of pytest on these tests: 0 where all pass, 1 where one fails."""
    child = os.fork()
    if child == 0:
        output = os.open(Path(folder, "pytest.out"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path[0] = folder
        os._exit(int(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *tests])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for folder, *tests in json.loads(sys.argv[1]):
        print(run_pytest(folder, tests), flush=True)
