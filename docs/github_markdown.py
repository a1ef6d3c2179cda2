"""What GitHub understands on the pages and the site's Markdown does not (see mkdocs.yml)."""

import os
import re

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from pymdownx.arithmatex import arithmatex_fenced_format

from docs.experiments.lib.navigation import LAST_LINE

formula = arithmatex_fenced_format(mode="generic")  # of a fence of ```math


class AsOnGitHub(Preprocessor):
    def __init__(self, md, repository):
        super().__init__(md)
        self.repository = repository

    def run(self, lines):
        text = LAST_LINE.sub("\n", "\n".join(lines))
        text = re.sub(r"\$`([^`]+)`\$", r"\\(\1\\)", text)
        text = text.replace("<details>", "<details markdown>")
        return re.sub(r"\]\(([^)\s]+)\)", self.link, text).split("\n")

    def link(self, found):
        """As it is to a page or a figure, to the repository for any other file."""
        path, hash_sign, place = found[1].partition("#")
        if "://" in path or re.fullmatch(r"|\w+\.(md|html)|figures/\w+\.svg", path):
            return found[0]
        path = os.path.normpath(f"docs/{path}")
        return f"]({self.repository}/blob/main/{path}{hash_sign}{place})"


class GitHubMarkdown(Extension):
    def __init__(self, repository):
        super().__init__()
        self.repository = repository

    def extendMarkdown(self, md):
        # After fenced code has been put aside (25), before HTML is (20).
        md.preprocessors.register(AsOnGitHub(md, self.repository), "github", 22)


def makeExtension(**settings):
    return GitHubMarkdown(**settings)
