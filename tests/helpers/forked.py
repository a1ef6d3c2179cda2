"""Runs scripts as `python SCRIPT ...` does, in processes forked from one that has imported their
libraries already: that takes longer than a short run, and as long for each.

    python tests/helpers/forked.py '[["grpo.py", "--seed", "1"], ...]' FOLDER [--in-turn]

Standard output and error of number i go to FOLDER/i.out and FOLDER/i.err. Prints the process ids
and then the exit statuses (-9 if killed); with --in-turn, where one runs at a time, of each both.
"""

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(words: list[str], out: Path) -> int:
    """Fork; returns the child's id in the parent. The child ends within `runpy`."""
    if child := os.fork():
        return child
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{ending}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def tell(child: int) -> None:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    commands, folder, *in_turn = sys.argv[1:]
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    for path in ROOT.glob("*.py"):
        import_module(path.stem)
    children = []
    for number, words in enumerate(json.loads(commands)):
        children.append(start(words, Path(folder, str(number))))
        print(children[-1], flush=True)
        if in_turn:
            tell(children.pop())
    for child in children:
        tell(child)


if __name__ == "__main__":
    main()
