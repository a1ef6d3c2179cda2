"""runtime/checks.py says what is wrong with people's inputs, and decides nothing."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from runs import start
from scripts import SPECS

ROOT = Path(__file__).parents[2]
GUARDS = {*re.findall(r"^def (check\w+)", (ROOT / "runtime/checks.py").read_text(), re.MULTILINE)}


class WithoutChecks(ast.NodeTransformer):
    def visit_ImportFrom(self, node):
        return None if node.module == "runtime.checks" else node

    def visit_Expr(self, node):
        return None if name_of(node.value) in GUARDS else node

    def visit_With(self, node):
        self.generic_visit(node)
        return node.body if name_of(node.items[0].context_expr) in GUARDS else node


def name_of(call):
    return getattr(getattr(call, "func", None), "id", None)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The scripts, common/ and runtime/ without the file and its calls."""
    folder = tmp_path_factory.mktemp("copy")
    for path in (*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), *ROOT.glob("runtime/*.py")):
        tree = WithoutChecks().visit(ast.parse(path.read_text()))
        code = ast.unparse(tree)
        assert path.stem == "checks" or not any(f"{name}(" in code for name in GUARDS), path
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        target.write_text(code)
    (folder / "runtime/checks.py").write_text("raise ImportError('deleted')")
    shutil.copytree(ROOT / "tiny", folder / "tiny")
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("name", SPECS)
def test_a_run_on_sound_data_is_the_same_without_them(name, copy, tmp_path):
    length = ["--epochs", "0.05"] if SPECS[name].kind == "rows" else ["--total-rollouts", "2"]
    weights = []
    for folder in (ROOT, copy):
        output = tmp_path / folder.name
        flags = [*length, "--eval-rows", "8", "--output-dir", str(output)]
        process = start([str(folder / f"{name}.py"), *flags], tmp_path / "printed")
        process.join()
        assert process.exitcode == 0, (tmp_path / "printed").read_text()
        (file,) = output.glob("*/model.safetensors")
        weights.append(file.read_bytes())
    assert weights[0] == weights[1]
