"""The last line of a page on GitHub: links to the page before it, the contents, the page after it.

The site draws its own, and docs/github_markdown.py leaves this one out there.
"""

import re
from pathlib import Path

import yaml

LAST_LINE = re.compile(r"\n\n(?:\[[^\]\n]+\]\(\w+\.md(?:#contents)?\)(?: · )?)+\n*\Z")


class Loader(yaml.SafeLoader):
    """Takes what mkdocs.yml leaves to zensical, such as environment variables, for None."""


Loader.add_multi_constructor("", lambda loader, tag, node: None)


def reading_order() -> list[tuple[str, str]]:
    """(title, file name) of each page after the contents, in the order of mkdocs.yml."""
    pages = []
    for group in yaml.load(Path("mkdocs.yml").read_text(), Loader)["nav"][1:]:
        for entries in group.values():
            pages += [page for entry in entries for page in entry.items()]
    return [(title, file) for title, file in pages if file.endswith(".md")]


def last_lines() -> dict[str, str]:
    """The last line of each page, by its file name."""
    lines = {}
    order = reading_order()
    for number, (_, file) in enumerate(order):
        links = [f"[← {title}]({page})" for title, page in order[max(number - 1, 0) : number]]
        links += ["[Contents](index.md#contents)"]
        links += [f"[{title} →]({page})" for title, page in order[number + 1 : number + 2]]
        lines[file] = " · ".join(links)
    return lines


def with_last_line(text: str, line: str) -> str:
    """The text of a page with this last line, in place of the one that it may have."""
    return LAST_LINE.sub("", text).rstrip("\n") + f"\n\n{line}\n"


def add_navigation() -> None:
    for file, line in last_lines().items():
        page = Path("docs", file)
        text = with_last_line(page.read_text(), line)
        if text != page.read_text():
            page.write_text(text)
