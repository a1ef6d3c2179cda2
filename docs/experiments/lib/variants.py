"""The changes of the pages of variants, made in copies of the scripts."""

import re
from pathlib import Path

from docs.exercises.add_bug import Edit, apply

PAGES = (Path("docs/variants.md"), Path("docs/distill_variants.md"))
BLOCK = re.compile(r"<!-- variant (\w+) (\w+)\.py (\w+) -->\n```diff\n(.*?)```", re.DOTALL)


def variants() -> dict[str, tuple[str, str, str]]:
    """By name the script, the function that is changed or added, and the diff."""
    text = "".join(page.read_text() for page in PAGES)
    return {name: rest for name, *rest in BLOCK.findall(text)}


def write_variant(name: str, folder: Path) -> Path:
    """A copy of the script with the change in it."""
    script, _, diff = variants()[name]
    path = folder / f"{script}.py"
    path.write_text(Path(path.name).read_text())
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old, new = ("".join(f"{x[1:]}\n" for x in lines if x[0] != sign) for sign in "+-")
        apply(Edit(path.name, old, new), folder)
    return path
