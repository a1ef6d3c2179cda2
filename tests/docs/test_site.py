"""The site (mkdocs.yml): it is built, and its links lead somewhere."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

zensical = pytest.importorskip("zensical.config", reason='pip install -e ".[docs]"')

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def config():
    return zensical.parse_config(os.path.abspath("mkdocs.yml"))


class Elements(HTMLParser):
    """Addresses, what is loaded, and ids."""

    def __init__(self, html):
        super().__init__()
        self.links, self.loaded, self.ids = set(), set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        addresses = {attributes[name] for name in ("href", "src") if attributes.get(name)}
        self.links |= addresses
        if tag in ("img", "script") or attributes.get("rel") in ("stylesheet", "icon"):
            self.loaded |= addresses
        self.ids |= {attributes.get("id")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built from a copy of the pages."""
    root = tmp_path_factory.mktemp("site")
    shutil.copy("mkdocs.yml", root)
    shutil.copytree("docs", root / "docs", ignore=shutil.ignore_patterns("libraries"))
    for name in ("katex/katex.min.css", "katex/katex.min.js", "katex/contrib/auto-render.js"):
        library = root / "docs" / "libraries" / name
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
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
