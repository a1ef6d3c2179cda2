"""The pages as GitHub and as the site (mkdocs.yml) show them, without charts."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from browser import KATEX, needs_browser, needs_katex, serve

from docs.experiments.lib.navigation import LAST_LINE, last_lines, with_last_line
from docs.experiments.lib.tables import pages

ABSENT = 'needs the extra of pip install -e ".[docs]"'
zensical = pytest.importorskip("zensical.config", reason=ABSENT)
markdown = pytest.importorskip("markdown", reason=ABSENT)
markdown_it = pytest.importorskip("markdown_it", reason=ABSENT)

pytestmark = [pytest.mark.docs, needs_katex]


@pytest.fixture(scope="module")
def config():
    return zensical.parse_config(os.path.abspath("mkdocs.yml"))


class Elements(HTMLParser):
    """How many there are of each kind, addresses, what is loaded, and ids."""

    def __init__(self, html):
        super().__init__()
        self.counts, self.links, self.loaded, self.ids = Counter(), set(), set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.counts[tag] += attributes.get("class") != "headerlink"
        self.counts["formula"] += attributes.get("class") == "arithmatex"
        addresses = {attributes[name] for name in ("href", "src") if attributes.get(name)}
        self.links |= addresses
        if tag in ("img", "script") or attributes.get("rel") in ("stylesheet", "icon"):
            self.loaded |= addresses
        self.ids |= {attributes.get("id")}


# --- one text for GitHub and the site ------------------------------------------------------------
def as_on_the_site(text, config):
    extensions, settings = config["markdown_extensions"], config["mdx_configs"]
    return markdown.Markdown(extensions=extensions, extension_configs=settings).convert(text)


@pytest.mark.parametrize("page", pages(), ids=str)
def test_the_site_sees_the_lists_tables_and_formulas_that_github_sees(page, config):
    """GitHub needs no empty line before a list, for example."""
    text = LAST_LINE.sub("\n", page.read_text())
    formulas = Elements(as_on_the_site(text, config)).counts["formula"]
    found = re.findall(r"(?m)^```math$|\$`[^`]+`\$", text)
    text = re.sub(r"(?ms)^```.*?^```|\$`.*?`\$", "", text)
    commonmark = markdown_it.MarkdownIt("commonmark").enable("table")
    github, site = Elements(commonmark.render(text)), Elements(as_on_the_site(text, config))
    for tag in "ul ol li table tr td h1 h2 h3 p a strong em img details".split():
        assert site.counts[tag] == github.counts[tag], tag
    text = re.sub(r"`[^`]+`", "", re.sub(r"(?m)^    .*?$", "", text))
    assert formulas == len(found) + len(re.findall(r"\$[^$]+\$", text))


def test_a_page_ends_with_links_to_the_pages_before_and_after_it(config):
    for file, line in last_lines().items():
        text = Path("docs", file).read_text()
        assert with_last_line(text, line) == text, f"{file}: python -m docs.experiments --redraw"
        assert "→" not in as_on_the_site(f"A page.\n\n{line}\n", config)


# --- GitHub's column ---------------------------------------------------------------------------
# Of a file in a window of 838 pixels; fonts as wide as Arial and Courier; no padding behind code.
GITHUB = f"""<!doctype html><meta charset="utf-8">
<link rel="stylesheet" href="{KATEX.as_uri()}/katex.min.css">
<script src="{KATEX.as_uri()}/katex.min.js"></script>
<script src="{KATEX.as_uri()}/contrib/auto-render.js"></script>
<style>
article {{ width: 774px; font: 16px/1.5 "Liberation Sans", Arial, sans-serif; }}
table, pre {{ display: block; max-width: 100%; overflow: auto; border-collapse: collapse; }}
th, td {{ padding: 6px 13px; border: 1px solid; }}
code, pre {{ font: 85%/1.45 "Liberation Mono", "Courier New", monospace; }}
code {{ padding: .2em .4em; white-space: break-spaces; }}
pre {{ padding: 16px 0 16px 16px; }}
.language-python pre {{ width: 822px; max-width: none; }} /* the scripts have 100 columns */
pre code {{ padding: 0; font-size: 100%; white-space: pre; }}
.katex {{ font-size: 1em; }}
</style>"""
# What has to be scrolled, with all that is folded in.
CUT = """
for (const x of document.querySelectorAll("details")) x.open = true;
return [...document.querySelectorAll("article *")].filter((x) =>
  getComputedStyle(x).overflowX !== "visible" && !x.closest(".katex, .mermaid")
  && x.scrollWidth > x.clientWidth + 1).map((x) => [x.scrollWidth, x.innerText]);
"""


@needs_browser
@pytest.mark.parametrize("page", pages(), ids=str)
def test_tables_and_code_fit_the_column_of_github(browser, page, config, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(f"{GITHUB}<article>{as_on_the_site(page.read_text(), config)}</article>")
    browser.open(page=file.as_uri())
    assert browser.run(f"renderMathInElement(document.body); {CUT}") == []


# --- the site ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built from a copy of the pages."""
    root = tmp_path_factory.mktemp("site")
    shutil.copy("mkdocs.yml", root)
    shutil.copytree("docs", root / "docs", ignore=shutil.ignore_patterns("libraries"))
    katex = shutil.copytree(KATEX, root / "docs" / "libraries" / "katex")
    with (katex / "katex.min.css").open("a") as style:
        style.write(".katex { position: relative; }")  # as in newer versions than Debian's
    (root / "docs" / "libraries" / "mermaid.min.js").touch()
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    env = os.environ | {"SITE_URL": "https://site/"}
    done = subprocess.run(build, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "site"


def test_links_of_the_site_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site, config):
    files = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    elements = {name: Elements(html) for name, html in files.items()}
    repository = config["repo_url"]
    for name, found in elements.items():
        assert not [address for address in found.loaded if "://" in address]
        if name.endswith("index.html"):
            assert ("libraries/mermaid" in files[name]) == ('class="mermaid"' in files[name])
        for link in found.links:
            url = urlsplit(urljoin(f"https://site/{name}", link))
            if link.startswith(repository) and link != repository:
                assert Path(re.split("/(?:blob|edit|raw)/main/|#", link)[1]).exists(), link
            target = re.sub("(^|/)$", r"\1index.html", url.path.lstrip("/"))
            assert url.netloc != "site" or (site / target).is_file(), f"{name}: {link}"
            if url.netloc == "site" and url.fragment and target.endswith("index.html"):
                assert url.fragment in elements[target].ids, f"{name}: {link}"
    assert len(files) > 25
    assert 'for="__search"' in files["404.html"].partition("<article")[2]


def test_the_reading_order_is_that_of_the_contents(config):
    contents = Path("docs/index.md").read_text().partition("## Contents")[2]
    contents = dict.fromkeys(re.findall(r"\]\((\w+\.(?:md|html))", contents))
    order = [page["url"] for group in config["nav"][1:] for page in group["children"]]
    files = {file.name for file in Path("docs").iterdir() if file.suffix in (".md", ".html")}
    assert {*order} == {*contents} == files - {"index.md"}
    order.remove("glossary.md")  # named beside the first page
    assert [page for page in contents if page != "glossary.md"] == order


FORMULAS = """
const formulas = [...document.querySelectorAll(".arithmatex")];
const plain = formulas.filter((x) => !x.querySelector(".katex-html")).map((x) => x.textContent);
return [formulas.length, plain, document.documentElement.scrollWidth];
"""


@needs_browser
@pytest.mark.parametrize("page", [*pages()[2:], Path("docs/explorer.html")], ids=str)
def test_formulas_are_set_and_nothing_is_cut(browser, site, page):
    path = page.name.removesuffix("index.md").replace(".md", "/")
    with serve(site) as address:
        browser.open(1280, page=address + path)
        assert browser.run(CUT) == []  # on a phone, code, tables and formulas scroll
        for width in (1280, 360):
            browser.resize(width)
            formulas, plain, page_width = browser.run(FORMULAS)
            assert plain == [] and page_width <= width
        assert formulas > 5 or page.stem not in ("start", "grpo")


def test_the_search_finds_the_tools(site):
    found = json.loads((site / "search.json").read_text())["items"]
    (text,) = [item["text"] for item in found if item["title"] == "Tools in the browser"]
    for word in ("explorer", "memory", "play", "advantages", "viewer"):
        assert re.search(rf"\b{word}\b", text, re.IGNORECASE)


def test_the_workflow_installs_the_declared_version():
    (pin,) = re.findall(r'"(zensical[^";]+)', Path(".github/workflows/pages.yml").read_text())
    assert f'"{pin};' in Path("pyproject.toml").read_text()
