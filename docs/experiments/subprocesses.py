"""Python programs in a process of their own, started in the root of the repository."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from paths import ROOT


def run_python(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """Run `python arguments` with these variables in its environment, and keep its output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def run_or_exit(arguments: Sequence[str], **environment: str) -> str:
    """What a program prints. Where it fails, this program ends with the end of its errors."""
    process = run_python(arguments, **environment)
    if process.returncode != 0:
        sys.exit(f"python {' '.join(arguments)} failed:\n{process.stderr[-3000:]}")
    return process.stdout


def run_for_json(arguments: Sequence[str], **environment: str) -> Any:
    """The JSON of the last line that a program prints."""
    return json.loads(run_or_exit(arguments, **environment).splitlines()[-1])
