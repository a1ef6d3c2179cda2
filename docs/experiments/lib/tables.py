"""What is generated on the pages: tables, functions of the scripts, what one loop has and another
has not, and the lines of links.

A table is a dictionary of `columns`, a list of strings, and `rows`, lists of as many strings; a
list has `rows` of one string each.
"""

import ast
import re
from difflib import SequenceMatcher
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from textwrap import dedent

TABLE = re.compile(r"(<!-- table ([\w ]+) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
CODE = re.compile(r"(<!-- code (\S+) (\w+)((?: \w+)*) -->\n).*?(<!-- end code -->)", re.DOTALL)
DIFF = re.compile(r"(<!-- diff (\S+) (\S+) -->\n)(.*?)(<!-- end diff -->)", re.DOTALL)
LINES = re.compile(r"(<!-- lines (\S+) -->)[\d,]*(<!-- end lines -->)")
LINE_LINK = re.compile(r"(\[`(\w+)`\]\(([\w./]+\.py)#L)(\d+)\)")


# --- cells -------------------------------------------------------------------------------------
def spread(values: Sequence[float], digits: int) -> str:
    """The mean (lowest-highest), or one number where they are the same."""
    numbers = (mean(values), min(values), max(values))
    middle, lowest, highest = (f"{number:,.{digits}f}" for number in numbers)
    if middle == lowest == highest:
        return middle
    # Without spaces a cell does not wrap; "-1.0--0.5" could not be read.
    dash = " to " if min(values) < 0 else "-"
    return f"{middle} ({lowest}{dash}{highest})"


def fixed(number: float, digits: int = 4) -> str:
    """So many digits behind the point; no sign where the number is rounded to 0."""
    text = f"{number:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def rounded(value: object, digits: int = 6) -> object:
    """The same lists and dictionaries, with their numbers rounded to so many significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


# --- pages -------------------------------------------------------------------------------------
def pages() -> list[Path]:
    return [Path("README.md"), Path("tiny/README.md"), *sorted(Path("docs").glob("*.md"))]


def markdown(table: dict) -> str:
    """The lines of a table, without columns of a list."""
    if "columns" not in table:
        return "".join(f"* {line}\n" for (line,) in table["rows"])
    columns = table["columns"]
    lines = ["| " + " | ".join(cells) + " |\n" for cells in [columns, *table["rows"]]]
    lines.insert(1, "|" + "---|" * len(columns) + "\n")
    return "".join(lines)


def definition(path: Path, name: str) -> ast.stmt:
    """The function, class or constant of this name in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            names = [getattr(node, "name", None)]
        if name in names:
            return node
    raise ValueError(f"{path} does not define {name}")


def code(path: Path, name: str) -> str:
    """The source of a function without its docstring."""
    node = definition(path, name)
    lines = path.read_text().splitlines()
    docstring = node.body[0] if ast.get_docstring(node) else None
    source = []
    for number in range(node.lineno, node.end_lineno + 1):
        if docstring is None or not docstring.lineno <= number <= docstring.end_lineno:
            source.append(lines[number - 1])
    return "\n".join(source)


def parts_of(path: Path, name: str, variables: list[str]) -> str:
    """Of a function the first assignment of each variable, or for `return` its last return: what a
    page shows of a long one follows the code. Branches around them are left out."""
    found = {}
    kinds = (ast.Assign, ast.Return)
    statements = [part for part in ast.walk(definition(path, name)) if isinstance(part, kinds)]
    for statement in sorted(statements, key=lambda statement: statement.lineno):
        for target in getattr(statement, "targets", ()):
            found.setdefault(ast.unparse(target), statement)
        if isinstance(statement, ast.Return):
            found["return"] = statement
    lines, source = path.read_text().splitlines(), []
    for variable in variables:
        if variable not in found:
            raise ValueError(f"{path}: {name} does not assign {variable}")
        statement = found[variable]
        source.append(dedent("\n".join(lines[statement.lineno - 1 : statement.end_lineno])))
    return "\n".join(source)


def num_lines(path: Path) -> int:
    """Of the Python files of a folder, to the nearest 50; of the algorithm in a script, to 10."""
    if path.is_dir():
        count = sum(len(file.read_text().splitlines()) for file in path.glob("*.py"))
        return round(count / 50) * 50
    mathematics = path.read_text().partition("# --- the mathematics")[2].partition("\n# ---")[0]
    loop = definition(path, "main")
    return round((mathematics.count("\n") + loop.end_lineno - loop.lineno) / 10) * 10


def loop(path: Path) -> list[str]:
    """The lines of a script's training loop, down to where it logs."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    for step in progress:"))
    end = next(i for i, line in enumerate(lines) if line.startswith("        # 5. "))
    return lines[start + 1 : end]


def added(old: Path, new: Path) -> str:
    """What the loop of a script has and that of an older one has not, but for comments."""
    lines, older = loop(new), [line.strip() for line in loop(old)]
    matcher = SequenceMatcher(None, older, [line.strip() for line in lines], autojunk=False)
    shown = []
    for tag, _, _, start, end in matcher.get_opcodes():
        for line in lines[start:end]:
            if tag != "equal" and not line.strip().startswith("# "):
                shown.append(f"+{line[8:]}")
            elif re.match(r" +# \d\. ", line):
                shown.append(f" {line[8:]}")
    return "```diff\n" + "\n".join(shown) + "\n```\n"


def generated(page: Path, tables: dict[str, dict]) -> str:
    """The text of a page with these tables, its functions and line numbers made anew."""

    def with_table(block: re.Match) -> str:
        made = markdown(tables[block[2]]) if block[2] in tables else block[3]
        return f"{block[1]}{made}{block[4]}"

    def with_code(block: re.Match) -> str:
        path, name, variables = Path(block[2]), block[3], block[4].split()
        source = parts_of(path, name, variables) if variables else code(path, name)
        return f"{block[1]}```python\n{source}\n```\n{block[5]}"

    def with_line(link: re.Match) -> str:
        return f"{link[1]}{definition(page.parent / link[3], link[2]).lineno})"

    text = TABLE.sub(with_table, page.read_text())
    text = CODE.sub(with_code, text)
    text = LINES.sub(lambda found: f"{found[1]}{num_lines(Path(found[2])):,}{found[3]}", text)
    text = DIFF.sub(
        lambda block: f"{block[1]}{added(Path(block[2]), Path(block[3]))}{block[5]}", text
    )
    return LINE_LINK.sub(with_line, text)


def write_pages(tables: dict[str, dict]) -> None:
    for page in pages():
        text = generated(page, tables)
        if text != page.read_text():
            page.write_text(text)
