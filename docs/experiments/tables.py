"""Tables of the pages, generated between two comment lines: from docs/results/*.json, and of the
flags from the scripts. `python docs/experiments/tables.py` writes them all anew.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- table ([\w ]+) -->\n(.*?)<!-- end table -->", re.DOTALL)


def flags_of(script: Path) -> dict:
    """A script's flags, their default values and their help, in its order."""
    rows = []
    source = script.read_text().partition("class Args:")[2].partition("\n\n\n")[0]
    for line in source.splitlines():
        if section := re.fullmatch(r"    # --- (.*) ---", line):
            rows.append([f"**{section[1]}**", "", ""])
        elif flag := re.fullmatch(r"    (\w+): .*? = (.*?)  # (.*)", line):
            name, default, told = flag.groups()
            default = {"field(default_factory=list)": "", "None": ""}.get(default, f"`{default}`")
            rows.append([f"`--{name.replace('_', '-')}`", default, told.replace("|", "\\|")])
    return dict(columns=["flag", "default", "what it is"], rows=rows)


def load_tables() -> dict[str, dict]:
    """Every table of every script and experiment, by name."""
    found = {f"flags {path.stem}": flags_of(path) for path in sorted(ROOT.glob("*.py"))}
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        found |= json.loads(path.read_text())["tables"]
    return found


def markdown(table: dict) -> str:
    """Lines of a table that has `columns`, a list of strings, and `rows`, lists of strings."""
    columns, rows = table["columns"], table["rows"]
    lines = [columns, *rows]
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    text.insert(1, "|" + "---|" * len(columns))
    return "".join(line + "\n" for line in text)


def insert_tables() -> None:
    """Write each table between its two comment lines, on whichever page these stand."""
    tables = load_tables()
    for page in PAGES:
        text = page.read_text()
        new = BLOCK.sub(
            lambda block: (
                f"<!-- table {block[1]} -->\n{markdown(tables[block[1]])}<!-- end table -->"
                if block[1] in tables
                else block[0]
            ),
            text,
        )
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    insert_tables()
