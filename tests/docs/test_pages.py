"""What the pages name exists, links lead somewhere, and what the scripts log is explained."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import algorithms
import pytest
from runs import metrics_of
from scripts import SCRIPTS, short_flags

from docs.exercises import add_bug
from docs.experiments import __main__ as experiments
from docs.experiments.lib.tables import pages
from docs.real import pairs

pytestmark = pytest.mark.docs

GROUPS = "reward|rewards|objective|policy|value|completions|prompts|eval|time"
SOURCES = {
    path: path.read_text()
    for pattern in ("*.py", "*/*.py", "*/*/*.py", "*/*/*/*.py")
    for path in Path().glob(pattern)
    if path.parts[0] in ("common", "docs", "runtime", "tests", "tiny") or len(path.parts) == 1
}


def identifiers(source):
    """Names in a program, and its texts that are one name: a column, a metric, a file."""
    for node in ast.walk(ast.parse(source)):
        for field in ("name", "id", "attr", "arg", "value"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name.isidentifier():
                yield name


IDENTIFIERS = {name for source in SOURCES.values() for name in identifiers(source)}
IDENTIFIERS |= {part for path in SOURCES for part in (path.stem, *path.parts)}
PROGRAM = "".join(text for path, text in SOURCES.items() if path.parts[0] != "tests")
TORCHRUN = {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id"}
LM_EVAL = {"--model_args", "--tasks", "--apply_chat_template"}
OTHERS = TORCHRUN | LM_EVAL | {"--exclude", "--help"}  # of `hf upload`; of all
# Metrics whose names a script puts together.
BUILT = {"reward_model"}


# Those of the scripts, of the programs for the pages, and of other programs.
NAMES = {name for script in SCRIPTS.values() for name in vars(script.Args())}
for program in (add_bug, pairs, experiments):
    NAMES |= inspect.signature(program.main).parameters.keys()
FLAGS = {f"--{prefix}{name.replace('_', '-')}" for name in NAMES for prefix in ("", "no-")} | OTHERS
# A script's pages, if they are not one of its name.
PAGES = {"grpo_variants": ["recipes", "grpo"]}


@cache
def anchors(page):
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", pages(), ids=str)
def test_flags_functions_tests_and_files_on_a_page_exist(page):
    text = page.read_text()
    outside_pip = re.sub(r"(python -m (pip|pytest|http)|vllm serve)(.*\\\n)*.*", "", text)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", outside_pip):
        assert flag in FLAGS, f"there is no flag {flag}"
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"test_\w+", quoted):
            assert quoted in IDENTIFIERS, f"there is no test {quoted}"
        elif re.fullmatch(r"[a-z]\w*_\w+", quoted):
            assert quoted in IDENTIFIERS, f"there is no {quoted}"
        elif re.fullmatch(rf"({GROUPS})/[a-z]\w*", quoted):
            name = quoted.split("/")[1]
            logged = re.sub(r"_\d+$", "_{k}", quoted)  # pass_at_2
            assert f'"{logged}"' in PROGRAM or name in IDENTIFIERS | BUILT, quoted
        elif re.fullmatch(r"(tests|common|docs|tiny)/[\w/.]+", quoted):
            assert Path(quoted).exists(), f"there is no {quoted}"


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page.resolve()
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_metric_is_on_the_page(name, tmp_path):
    run_dir = algorithms.run(name, tmp_path, **short_flags(name, eval_samples=2))
    logged = {metric for row in metrics_of(run_dir) for metric in row} - {"step"}
    explained, shared = (
        {
            metric
            for page in names
            for metric in re.findall(rf"`((?:{GROUPS})/\w+)`", Path(f"docs/{page}.md").read_text())
        }
        for names in (PAGES.get(name, [name]), ["details"])
    )
    # Single rewards have the names of their functions.
    assert {metric for metric in logged if not metric.startswith("rewards/")} <= explained | shared
    explained -= shared
    assert {metric for metric in explained if not metric.startswith("rewards/")} <= logged


@pytest.mark.parametrize("name", SCRIPTS)
def test_module_docstring_names_only_flags_that_exist(name):
    doc = SCRIPTS[name].__doc__
    assert f"python {name}.py" in doc
    own = {f"--{flag.replace('_', '-')}" for flag in vars(SCRIPTS[name].Args())}
    own |= {f"--no-{flag[2:]}" for flag in own}
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", doc))
    assert found <= own | {"--nproc_per_node"}
