"""The form of the scripts: one name has one source, the loop is in sight, no bundles."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

docs = pytest.mark.docs
SCRIPTS = sorted(Path(__file__).parents[2].glob("*.py"))
COMMON = sorted(Path(__file__).parents[2].glob("common/*.py"))
RUNTIME = sorted(Path(__file__).parents[2].glob("runtime/*.py"))
EACH = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
# What a script has for itself under a name that all share.
OWN = {"Args", "main", "evaluate", "rollout_metrics"}
BANNER = "# --- the run: the same in every script; skip it on a first reading "


def definitions(path):
    """Source of each function, class and constant at the top level of a file, by name."""
    source = path.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)
            yield node.name, decorators + ast.get_source_segment(source, node)
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), ast.get_source_segment(source, node)
        elif isinstance(node, ast.If):
            yield ast.unparse(node.test), ast.get_source_segment(source, node)


def function(path, name):
    (node,) = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name]
    return node


def test_one_name_one_source():
    """So the tests of these functions need one script only."""
    sources = defaultdict(dict)
    for path in SCRIPTS:
        for name, source in definitions(path):
            sources[name][path.name] = source
    shared = {name: by_script for name, by_script in sources.items() if len(by_script) > 1}
    assert {"load_prompts", "parse_args", "__name__ == '__main__'"} <= {*shared}
    for name in {*shared} - OWN:
        (first, source), *others = shared[name].items()
        for script, other in others:
            assert other == source, f"{name} differs between {first} and {script}"


@docs
def test_three_floors_and_no_arrow_up():
    """Scripts, common/, runtime/: each imports libraries, itself and the floors below, scripts not
    even one another.
    """
    floors = [[path.stem for path in SCRIPTS], ["common"], ["runtime"]]
    above = {"tiny", "tests", "docs"}
    for floor, paths in zip(floors, (SCRIPTS, COMMON, RUNTIME), strict=True):
        forbidden = above | {*floor} if paths is SCRIPTS else above
        for path in paths:
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module]
                roots = {name.split(".")[0] for name in names}
                assert not roots & forbidden, f"{path} imports {names}"
        above |= {*floor}


@docs
@EACH
def test_every_flag_is_read_by_its_script(path):
    """As `args.flag`, and not only where it is checked."""
    source = path.read_text()
    read = {
        n.attr
        for n in ast.walk(ast.parse(source))
        if ast.unparse(n).startswith("args.") and isinstance(n, ast.Attribute)
    }
    flags = {n.target.id for n in function(path, "Args").body if isinstance(n, ast.AnnAssign)}
    assert flags <= read, f"{path}: {flags - read} are not read"


@docs
def test_the_algorithm_comes_first():
    for path in SCRIPTS:
        lines = path.read_text().splitlines()
        order = ["class Args", "# --- the mathematics", "def main(", BANNER.strip()]
        at = [next(i for i, line in enumerate(lines) if line.startswith(o)) for o in order]
        assert at == sorted(at), f"{path}: {order} is the order"
        assert at[2] < len(lines) / 2, f"{path}: main begins in the second half"


@docs
@EACH
def test_no_call_in_main_unpacks_a_bundle_of_arguments(path):
    for call in [n for n in ast.walk(function(path, "main")) if isinstance(n, ast.Call)]:
        if getattr(call.func, "id", "") == "zip":
            continue
        stars = [a.value for a in call.args if isinstance(a, ast.Starred)]
        stars += [k.value for k in call.keywords if k.arg is None]
        bundles = [ast.unparse(call) for star in stars if not isinstance(star, ast.List)]
        assert not bundles, f"{path}: {bundles}"


@docs
@EACH
def test_the_mathematics_take_tensors_and_numbers_by_name(path):
    source = path.read_text()
    start = source.index("# --- the mathematics")
    end = source.index("# --- the algorithm")
    for node in ast.parse(source[start:end]).body:
        assert isinstance(node, ast.FunctionDef), f"{path}: {ast.unparse(node)[:60]}"
        arguments = node.args
        assert arguments.vararg is None and arguments.kwarg is None, f"{path}: {node.name}"
        names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        assert "args" not in names, f"{path}: {node.name} takes Args"


@docs
@EACH
def test_the_loop_shows_the_backward_pass_and_the_step(path):
    (loop,) = [n for n in function(path, "main").body if isinstance(n, ast.For)][-1:]
    assert ast.unparse(loop.iter) == "progress"
    calls = [n.func for n in ast.walk(loop) if isinstance(n, ast.Call)]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    assert {"backward", "step", "zero_grad"} <= names
    assert "clip_grad_norm" in {getattr(call, "id", "") for call in calls}
