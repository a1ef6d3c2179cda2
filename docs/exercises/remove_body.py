"""Write it yourself: a copy of the repository in which the body of one function is gone.

    python docs/exercises/remove_body.py grpo_loss

Its signature and its docstring, with formula and shapes, stay. It prints the tests that must pass.
"""

import ast
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
FILES = {  # of each function, in the order of the course
    "sample_tokens": "common/generation.py",
    "baseline_advantages": "reinforce.py",
    "k3_kl": "grpo.py",
    "group_advantages": "grpo.py",
    "grpo_loss": "grpo.py",
    "bradley_terry_loss": "rm_bradley_terry.py",
    "gae": "ppo_rlhf.py",
    "shaped_rewards": "ppo_rlhf.py",
    "value_loss": "ppo_rlhf.py",
    "dpo_loss": "dpo.py",
    "ipo_loss": "dpo.py",
    "kto_loss": "kto.py",
}


def without_body(path: Path, name: str) -> str:
    """The text of a file whose function raises NotImplementedError behind its docstring."""
    text = path.read_text()
    (function,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
    lines = text.splitlines(keepends=True)
    docstring = function.body[0]
    body = ['    raise NotImplementedError("to be written")\n']
    return "".join(lines[: docstring.end_lineno] + body + lines[function.end_lineno :])


def find_tests(name: str) -> list[str]:
    """The tests that name the function, or all of its file, as pytest wants them."""
    (path,) = ROOT.glob(f"tests/*/test_{Path(FILES[name]).stem}.py")
    found = []
    for node in ast.parse(path.read_text()).body:
        names = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(node)}
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and name in names:
            found.append(f"{path.relative_to(ROOT)}::{node.name}")
    return found or [str(path.relative_to(ROOT))]


def write_copy(name: str, folder: Path) -> None:
    """The repository in a new folder, without the function's body."""
    ignored = shutil.ignore_patterns(".git", "runs", "site", "__pycache__", ".*cache")
    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / FILES[name]).write_text(without_body(ROOT / FILES[name], name))


def main(name: tyro.conf.Positional[Literal[tuple(FILES)]], out: Path | None = None) -> None:
    """Copy the repository without the body of a function, which you then write.

    Args:
        name: the function
        out: a new folder for the copy, outside the repository; default: a temporary one
    """
    folder = (out or Path(tempfile.mkdtemp(prefix="write_"), name)).resolve()
    if folder.is_relative_to(ROOT):  # it would be copied into itself
        raise ValueError(f"--out {folder} lies within the repository")
    write_copy(name, folder)
    print(f"Write {name} in {folder / FILES[name]}, until this passes:\n")
    print(f"    cd {folder} && python -m pytest -n 0 -m '' {' '.join(find_tests(name))}")


if __name__ == "__main__":
    tyro.cli(main)
