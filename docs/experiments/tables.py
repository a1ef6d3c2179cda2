"""Tables of the pages, generated between two comment lines from docs/results/*.json."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- table ([\w ]+) -->\n(.*?)<!-- end table -->", re.DOTALL)


def load_tables() -> dict[str, dict]:
    """Every table of every experiment, by name."""
    found = {}
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
