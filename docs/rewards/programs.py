"""A code reward: 1 where the completion's function gives the right result in every test, else 0.

    python grpo.py --reward-fn docs/rewards/programs.py:passes ...

Two columns of the dataset say what to test: `function`, the name that the completion must define,
and `tests`, a JSON text of [arguments, result] pairs, such as '[[[2, 3], 5], [[-1, 1], 0]]'.

Each completion runs in a Python process of its own, with the standard library alone. The process
gets the arguments; the results stay here and are compared here, so that nothing that the completion
prints, patches or exits with can look like a pass. It is no sandbox, least of all for root:
docs/rewards.md says what it does not protect against. For Linux.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from textwrap import dedent

SECONDS = 5.0  # wall-clock time of a completion, with all its tests
LIMITS = {  # of module resource
    "RLIMIT_CPU": 5,  # seconds; it ends a loop also where the trainer has been killed
    "RLIMIT_AS": 512 * 2**20,  # bytes of memory
    "RLIMIT_FSIZE": 2**20,  # bytes of a file, the results included
    "RLIMIT_NPROC": 0,  # further processes and threads; root is not held by it
    "RLIMIT_CORE": 0,
}
# Audit events that no function under test has a reason to cause, but for two that imports need.
REFUSED = {"ctypes", "fcntl", "os", "pty", "resource", "shutil", "signal", "socket", "subprocess"}
ALLOWED = {"os.listdir", "os.scandir"}
FENCE = re.compile(r"(`{3,}|~{3,})[^\n`]*\n")  # what opens a block of code, with its language


def passes(
    prompts: list, completions: list[str], function: list[str], tests: list[str], **columns: list
) -> list[float]:
    """All tests or nothing: a fraction of them would also pay for the special case of one."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads that wait for processes
        return list(pool.map(passes_tests, completions, function, tests))


def passes_tests(completion: str, function: str, tests: str) -> float:
    """1 where the results are those expected, as JSON texts: 1, 1.0 and true are three things."""
    pairs = json.loads(tests)
    if not pairs:
        raise ValueError(f"no tests for {function}: any completion would pass")
    job = {
        "completion": completion,
        "function": function,
        "arguments": [arguments for arguments, _ in pairs],
        "limits": LIMITS,
    }
    expected_results = [result for _, result in pairs]
    return float(execute(job) == json.dumps(expected_results, sort_keys=True))


@cache
def apart() -> list[str]:
    """A prefix that leaves a command no network and no other process; empty if not allowed."""
    flags = ["--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    prefix = [unshare, *flags]
    process = subprocess.run([*prefix, sys.executable, "-S", "-c", ""], capture_output=True)
    return prefix if process.returncode == 0 else []


def execute(job: dict) -> str:
    """What the function returned in each test, as a JSON text; where that fails another text."""
    python = [sys.executable, "-I", "-S", __file__]  # neither site-packages nor this folder
    with (
        tempfile.TemporaryFile() as out,  # no path: it cannot be replaced by a pipe that never ends
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        process = subprocess.Popen(
            [*apart(), *python],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},  # no keys and tokens
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.communicate(json.dumps(job).encode(), timeout=SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it may have started
        process.wait()
        out.seek(0)
        return out.read(LIMITS["RLIMIT_FSIZE"]).decode("ascii", "replace")


def refuse(event: str, details: tuple) -> None:
    """An audit hook: keeps honest code from forking, killing, deleting; a clever one gets past."""
    writes = event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or (event.partition(".")[0] in REFUSED and event not in ALLOWED):
        raise PermissionError(f"{event} is refused to a completion")


def find_code(completion: str, function: str) -> str:
    """The last fenced block that defines the function, else the last one; without fences all of it.

    A block ends at the first fence before which it is Python (a docstring may have fences), or with
    the text.
    """
    code, is_defined, start = completion, False, 0
    while opening := FENCE.search(completion, start):
        rest = completion[opening.end() :]
        ends = [fence.start() for fence in re.finditer(opening[1], rest)] + [len(rest)]
        names, end = next(
            ((names, end) for end in ends if (names := names_in(dedent(rest[:end]))) is not None),
            (set(), ends[0]),
        )
        if function in names or not is_defined:
            code, is_defined = dedent(rest[:end]), function in names
        start = opening.end() + end + len(opening[1])
    return code


def names_in(code: str) -> set[str] | None:
    """What a program defines or assigns, methods too. None if it is no program."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return names | {node.id for node in stored if isinstance(node, ast.Name)}


def child() -> None:
    """Run the job on standard input, and write the results to what was standard output."""
    import resource

    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the completion prints
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    sys.addaudithook(refuse)
    code, name = find_code(job["completion"], job["function"]), job["function"]
    names = {word: getattr(typing, word) for word in typing.__all__ if word != name}  # List[int]
    names["__name__"] = "completion"
    exec(code, names)
    function = names[name] if name in names else getattr(names["Solution"](), name)
    results = [function(*arguments) for arguments in job["arguments"]]
    text = json.dumps(results, sort_keys=True)
    out.write(text)
    out.flush()
    os._exit(0)  # without what the completion has registered for the end


if __name__ == "__main__":
    child()
