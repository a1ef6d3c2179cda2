"""Short runs of the scripts, in this process or in processes of their own, and what they leave."""

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import time
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import TCPStore
from torch.utils._pytree import keystr, tree_flatten_with_path

# A process is forked from one that has imported the libraries: that takes longer than a short run.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["grpo", "transformers.models.llama.modeling_llama"])


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as they are typed."""
    typed = []
    for flag, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        typed += [f"--{flag.replace('_', '-')}", *map(str, values)]
    return typed


def start(
    command: list[str], output: Path, environment: dict[str, str] | None = None, before: str = ""
) -> ForkServerProcess:
    """`python COMMAND`, with what it prints in the file `output`.

    `before` is a module:function that is called before the script is imported: it may patch common.
    """
    arguments = (command, output, environment or {}, before)
    process = FORK_SERVER.Process(target=run_as_main, args=arguments, daemon=True)
    process.start()
    return process


def run_as_main(command: list, output: Path, environment: dict, before: str) -> None:
    """What such a process does."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # A shell's job in the background ignores Ctrl-C, and with it what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    for module in [name for name in sys.modules if name.split(".")[0] in ("common", "runtime")]:
        del sys.modules[module]  # its RANK is that of the environment when it is imported
    sys.argv = list(map(str, command))
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    if before:
        module, _, function = before.partition(":")
        getattr(import_module(module), function)()
    runpy.run_path(command[0], run_name="__main__")


def torchrun(
    ranks: int, command: list[str], output: Path, before: str = "", **more: str
) -> list[int]:
    """`torchrun --nproc_per_node=RANKS COMMAND`; returns the exit statuses.

    What a rank prints goes to the file `output`.{rank}; `more` is added to its environment. If one
    fails, or after five minutes, the others are ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, WORLD_SIZE=ranks)
    environment |= dict(TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0) | more
    processes = []
    for rank in range(ranks):
        own = {key: str(value) for key, value in (environment | {"RANK": rank}).items()}
        processes.append(start(command, Path(f"{output}.{rank}"), own, before))
    deadline = time.monotonic() + 300  # ranks that have drifted apart wait for each other
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            for process in running:
                process.kill()
        wait([process.sentinel for process in running], timeout=10)
    return [process.exitcode for process in processes]


def read(path: Path | str) -> list[dict]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_splits(folder: Path, rows: list[dict]) -> str:
    """A data set whose splits train and test both have these rows; returns its name."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def metrics_of(run_dir: Path) -> list[dict]:
    return read(run_dir / "metrics.jsonl")


def read_log(path: Path) -> list[dict]:
    """The rows of a .jsonl file, without what is measured of the machine."""
    measured = ("seconds", "per_second", "memory_gb")
    return [{key: v for key, v in row.items() if not key.endswith(measured)} for row in read(path)]


def contents(run_dir: Path) -> dict[str, Any]:
    """All that a finished run leaves, but for what is measured of the machine, by file."""
    files = {}
    for path in sorted(path for path in run_dir.rglob("*") if path.is_file()):
        if path.suffix == ".jsonl":
            files[path.name] = read_log(path)
        elif path.suffix == ".pt":
            files[path.name] = torch.load(path, weights_only=True)
            del files[path.name]["logs"]  # the sizes of the logs
            del files[path.name]["functions"]  # of all runs of this process
        elif path.suffix != ".earlier" and path.name not in ("args.json", "adapter_config.json"):
            files[path.name] = path.read_bytes()
    return files


def leaves(files: dict[str, Any]) -> dict[str, Any]:
    """Numbers, tensors, texts and bytes by their places in dictionaries and lists."""
    return {keystr(place): leaf for place, leaf in tree_flatten_with_path(files)[0]}


def keep_earlier_checkpoints() -> Any:
    """A context: of each run in it the last checkpoint but one stays, as checkpoint.earlier."""
    replace = os.replace

    def replace_and_keep(source: Path, target: Path) -> None:
        if os.path.exists(target):
            shutil.copy(target, Path(target).with_suffix(".earlier"))
        replace(source, target)

    return patch.object(os, "replace", replace_and_keep)


def killed_earlier(run_dir: Path, folder: Path) -> Path:
    """A copy of a run as a kill would have left it before its last checkpoint, logs ahead."""
    copy = Path(shutil.copytree(run_dir, folder))
    shutil.copy(copy / "checkpoint.earlier", copy / "checkpoint.pt")
    return copy


def assert_same_run(run_dir: Path, other_dir: Path) -> None:
    """To the bit."""
    found, expected = leaves(contents(run_dir)), leaves(contents(other_dir))
    assert found.keys() == expected.keys()
    for place, a in found.items():
        b = expected[place]
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b, place


def assert_resumes(script: Any, run_dir: Path, folder: Path) -> None:
    """From its last checkpoint but one, in another folder, to the same bits."""
    copy = killed_earlier(run_dir, folder)
    assert script.main(script.parse_args(["--resume", str(copy)])) == copy
    assert_same_run(copy, run_dir)


def run_and_resume(script: Any, folder: Path, **flags: Any) -> Path:
    """A whole run that `assert_resumes`."""
    with keep_earlier_checkpoints():
        run_dir = script.main(script.Args(**flags, output_dir=str(folder / "runs")))
    assert_resumes(script, run_dir, folder / "copy")
    return run_dir
