"""The pages as GitHub and as the site (mkdocs.yml) show them.

For the browser there is no network: KaTeX comes from Debian's package. Charts are drawn by a
script from the network, and are not looked at.
"""

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

from docs.experiments.lib.tables import pages

ABSENT = 'needs the extra of pip install -e ".[docs]"'
zensical = pytest.importorskip("zensical.config", reason=ABSENT)
markdown = pytest.importorskip("markdown", reason=ABSENT)
markdown_it = pytest.importorskip("markdown_it", reason=ABSENT)

pytestmark = pytest.mark.house
DOCS = [page for page in pages() if page.parent == Path("docs")]
WIDTHS, LOOKED_AT = (360, 838, 1280), ("start", "grpo", "explorer.html")  # others on a phone alone


@pytest.fixture(scope="module")
def config():
    return zensical.parse_config(os.path.abspath("mkdocs.yml"))


class Elements(HTMLParser):
    """How many there are of each kind, addresses, and ids."""

    def __init__(self, html):
        super().__init__()
        self.counts, self.links, self.images, self.ids = Counter(), set(), set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.counts[tag] += attributes.get("class") != "headerlink"
        self.links |= {attributes[name] for name in ("href", "src") if attributes.get(name)}
        self.images |= {attributes["src"]} if tag == "img" else set()
        self.counts["formula"] += attributes.get("class") == "arithmatex"
        self.ids |= {attributes["id"]} if "id" in attributes else set()


# --- one text for GitHub and the site ------------------------------------------------------------
def as_on_the_site(text, config):
    extensions, settings = config["markdown_extensions"], config["mdx_configs"]
    return markdown.Markdown(extensions=extensions, extension_configs=settings).convert(text)


@pytest.mark.parametrize("page", pages(), ids=str)
def test_the_site_sees_the_lists_and_tables_that_github_sees(page, config):
    """GitHub needs no empty line before a list, for example."""
    text = page.read_text()
    commonmark = markdown_it.MarkdownIt("commonmark").enable("table")
    code_and_formulas = re.compile(r"^```.*?^```|\$`.*?`\$", re.DOTALL | re.MULTILINE)
    github = Elements(commonmark.render(code_and_formulas.sub("", text)))
    site = Elements(as_on_the_site(code_and_formulas.sub("", text), config))
    for tag in "ul ol li table tr td h1 h2 h3 p a strong em img details".split():
        assert site.counts[tag] == github.counts[tag], tag


@pytest.mark.parametrize("page", pages(), ids=str)
def test_the_site_sees_the_formulas_that_github_sees(page, config):
    text = page.read_text()
    html = Elements(as_on_the_site(text, config))
    found = re.findall(r"^```math$|\$`[^`]+`\$", text, re.MULTILINE)
    for code in (r"^```.*?^```|^    .*?$", r"\$`[^`]+`\$|`[^`]+`"):
        text = re.sub(code, "", text, flags=re.DOTALL | re.MULTILINE)
    found += re.findall(r"\$[^$]+\$", text)
    assert html.counts["formula"] == len(found)


# --- GitHub's column ---------------------------------------------------------------------------
# Sizes and distances of GitHub's style; fonts as wide as Arial and Courier. Behind a line of code
# there is no padding, so that it may have the scripts' 100 characters.
GITHUB = f"""<!doctype html><meta charset="utf-8">
<link rel="stylesheet" href="{KATEX.as_uri()}/katex.min.css">
<script src="{KATEX.as_uri()}/katex.min.js"></script>
<script src="{KATEX.as_uri()}/contrib/auto-render.js"></script>
<style>
article {{ width: 838px; font: 16px/1.5 "Liberation Sans", Arial, sans-serif; }}
ul, ol {{ padding-left: 2em; }}
table, pre {{ display: block; max-width: 100%; overflow: auto; border-collapse: collapse; }}
th, td {{ padding: 6px 13px; border: 1px solid; }}
code, pre {{ font: 85%/1.45 "Liberation Mono", "Courier New", monospace; }}
code {{ padding: .2em .4em; white-space: break-spaces; }}
pre {{ padding: 16px 0 16px 16px; }}
pre code {{ padding: 0; font-size: 100%; white-space: pre; }}
.katex {{ font-size: 1em; }}
</style>"""
WIDER = """
renderMathInElement(document.body);
for (const x of document.querySelectorAll("details")) x.open = true;
return [...document.querySelectorAll("table, pre:not(.mermaid)")]
  .filter((x) => x.scrollWidth > x.clientWidth).map((x) => [x.scrollWidth, x.innerText]);
"""


@needs_browser
@needs_katex
@pytest.mark.parametrize("page", pages(), ids=str)
def test_tables_and_code_fit_the_column_of_github(browser, page, config, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(f"{GITHUB}<article>{as_on_the_site(page.read_text(), config)}</article>")
    browser.open(page=file.as_uri())
    assert browser.run(WIDER) == []


# --- the site ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built from a copy of the pages."""
    root = tmp_path_factory.mktemp("site")
    shutil.copy("mkdocs.yml", root)
    shutil.copytree("docs", root / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    build = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    done = subprocess.run(build, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "site"


def test_links_of_the_site_lead_somewhere(site, config):
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    assert {"explorer.html", "index.html", "grpo/index.html"} <= pages.keys()
    elements = {name: Elements(html) for name, html in pages.items()}
    repository = config["repo_url"]
    for name, found in elements.items():
        assert not any("://" in image for image in found.images)
        for link in found.links:
            url = urlsplit(urljoin(f"https://site/{name}", link))
            if link.startswith(repository) and link != repository:
                assert Path(link.partition("/blob/main/")[2].partition("#")[0]).exists(), link
            if url.netloc != "site":
                continue
            target = url.path.lstrip("/")
            target += "index.html" if target.endswith("/") or not target else ""
            assert (site / target).is_file(), f"{name}: {link}"
            if url.fragment and not target.endswith("explorer.html"):
                assert url.fragment in elements[target].ids, f"{name}: {link}"


def test_the_reading_order_is_that_of_the_contents(config):
    contents = Path("docs/index.md").read_text()
    contents = dict.fromkeys(re.findall(r"\]\((\w+\.(?:md|html))", contents))
    order = [page["url"] for group in config["nav"][1:] for page in group["children"]]
    # The glossary is named beside the first page.
    assert [page for page in contents if page != "glossary.md"] == [
        page for page in order if page != "glossary.md"
    ]
    assert sorted([*order, "index.md", "README.md", "README.md"]) == sorted(
        [*(page.name for page in pages()), "explorer.html", "viewer.html"]
    )


def test_charts_and_formulas_are_left_to_their_scripts(site):
    start = (site / "start" / "index.html").read_text()
    assert start.count('class="mermaid"') == 1 and start.count('class="arithmatex"') > 5
    assert "```" not in start and "katex.min.js" in start


LOOK = """
const width = arguments[0], formulas = [...document.querySelectorAll(".arithmatex")];
const overflow = (x) => getComputedStyle(x).overflowX;
const scrolls = (x) => x && (overflow(x) !== "visible" || scrolls(x.parentElement));
const wide = (x) => x.getBoundingClientRect().right > width + 1 && !scrolls(x.parentElement);
return {
  formulas: formulas.length,
  plain: formulas.filter((x) => !x.querySelector(".katex-html")).map((x) => x.textContent),
  scroll: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("main *")].filter(wide).map((x) => x.outerHTML),
};
"""


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served, with the formulas' script beside it."""
    shutil.copytree(KATEX, site / "katex", dirs_exist_ok=True)
    with (site / "katex" / "katex.min.css").open("a") as style:
        style.write(".katex { position: relative; }")  # as in newer versions than Debian's
    for page in site.rglob("*.html"):
        remote = r"https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist/"
        page.write_text(re.sub(remote, "/katex/", page.read_text()))
    with serve(site) as started:
        yield started


@needs_browser
@needs_katex
@pytest.mark.parametrize("name", [*(page.stem for page in DOCS), "explorer.html"])
def test_formulas_are_set_and_nothing_is_wider_than_the_page(browser, address, name):
    path = {"index": "", "explorer.html": name}.get(name, f"{name}/")
    for width in WIDTHS if name in LOOKED_AT else WIDTHS[:1]:
        browser.open(width, page=address + path)
        look = browser.run(LOOK, width)
        assert look["plain"] == look["wide"] == [] and look["scroll"] <= width
        assert look["formulas"] > 5 or name not in ("start", "grpo")
