"""Tables of the pages, generated between two comment lines: from docs/results/*.json, and of the
flags from the scripts. `python docs/experiments/tables.py` writes them all anew.

A table is a dictionary of `columns`, a list of strings, and `rows`, lists of as many strings.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from paths import DOCS, RESULTS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"<!-- table ([\w ]+) -->\n(.*?)<!-- end table -->", re.DOTALL)


def spread(values: Sequence[float], digits: int, average: Callable = mean) -> str:
    """The average (lowest to highest), or one number where they are the same."""
    numbers = (average(values), min(values), max(values))
    middle, lowest, highest = (f"{number:,.{digits}f}" for number in numbers)
    if middle == lowest == highest:
        return middle
    return f"{middle} ({lowest} to {highest})"


def flags_of(script: Path) -> dict:
    """A script's flags, their default values and their help, in its order.

    The help of a flag is the comment behind its field in `Args`, or that on the line above.
    """
    source = script.read_text()
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (args_class,) = [node for node in classes if node.name == "Args"]
    rows = []
    for field in args_class.body:
        start = field.lineno - 1
        while lines[start - 1].startswith("    # "):
            start -= 1
        help_lines = []
        for line in lines[start : field.end_lineno]:
            _, _, comment = line.partition("  # ")
            section = re.fullmatch(r"--- (.*) ---", comment)
            if section:
                rows.append([f"**{section[1]}**", "", ""])
            elif comment:
                help_lines.append(comment)
        default = ast.get_source_segment(source, field.value)
        default_cell = f"`{default}`"
        if default in ("None", "field(default_factory=list)"):
            default_cell = ""
        flag = f"`--{field.target.id.replace('_', '-')}`"
        rows.append([flag, default_cell, " ".join(help_lines).replace("|", "\\|")])
    return {"columns": ["flag", "default", "what it is"], "rows": rows}


def load_tables() -> dict[str, dict]:
    """Every table of every script and experiment, by name."""
    tables = {}
    for script in sorted(ROOT.glob("*.py")):
        tables[f"flags {script.stem}"] = flags_of(script)
    for results in sorted(RESULTS.glob("*.json")):
        tables |= json.loads(results.read_text())["tables"]
    return tables


def markdown(table: dict) -> str:
    """The lines of a table."""
    columns = table["columns"]
    lines = ["| " + " | ".join(cells) + " |\n" for cells in [columns, *table["rows"]]]
    lines.insert(1, "|" + "---|" * len(columns) + "\n")
    return "".join(lines)


def insert_tables() -> None:
    """Write each table between its two comment lines, on whichever page these stand."""
    tables = load_tables()

    def filled(block: re.Match) -> str:
        name = block[1]
        if name not in tables:
            return block[0]
        return f"<!-- table {name} -->\n{markdown(tables[name])}<!-- end table -->"

    for page in PAGES:
        text = page.read_text()
        new_text = BLOCK.sub(filled, text)
        if new_text != text:
            page.write_text(new_text)


if __name__ == "__main__":
    insert_tables()
