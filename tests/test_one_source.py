"""The form of the scripts: one name has one source, the loop is in sight, no bundles."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SCRIPTS = sorted(Path().glob("*.py"))
EACH = pytest.mark.parametrize("path", SCRIPTS, ids=str)
# What a script has for itself under a name that all share.
OWN = {"Args", "main", "check_args", "evaluate"}
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


def test_one_name_one_source():
    sources = defaultdict(dict)
    for path in SCRIPTS:
        for name, source in definitions(path):
            sources[name][path.name] = source
    shared = {name: by_script for name, by_script in sources.items() if len(by_script) > 1}
    assert {"load_model", "log", "parse_args", "__name__ == '__main__'"} <= set(shared)
    for name in set(shared) - OWN:
        (first, source), *others = shared[name].items()
        for script, other in others:
            assert other == source, f"{name} differs between {first} and {script}"


def test_what_the_banner_says_is_the_same_in_every_script():
    tails = {path.name: path.read_text().partition(BANNER)[2] for path in SCRIPTS}
    assert all(tails.values())
    first, *others = tails.values()
    assert all(tail == first for tail in others)


def test_scripts_import_no_script_and_nothing_but_common():
    scripts = {path.stem for path in SCRIPTS}
    for path in [*SCRIPTS, *Path("common").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                root = name.split(".")[0]
                assert root not in scripts | {"tiny", "tests"}, f"{path} imports {name}"


@EACH
def test_every_flag_is_read_by_its_script(path):
    """As `args.flag`, and not only where it is checked."""
    source = path.read_text()
    (args,) = [n for n in ast.parse(source).body if getattr(n, "name", "") == "Args"]
    for field in args.body:
        if isinstance(field, ast.AnnAssign):
            assert f"args.{field.target.id}" in source, f"{path}: {field.target.id} is not read"


# Lines at most.
CEILINGS = {
    "sft.py": 530,
    "reinforce.py": 570,
    "rm_bradley_terry.py": 660,
    "dpo.py": 850,
    "kto.py": 840,
    "grpo.py": 850,
    "ppo_rlhf.py": 980,
}


def test_ceilings_and_the_algorithm_first():
    """A script is read in one sitting, and the loop is met in its first half."""
    assert set(CEILINGS) == {path.name for path in SCRIPTS}
    for name, most in CEILINGS.items():
        lines = Path(name).read_text().splitlines()
        assert len(lines) <= most, f"{name} has {len(lines)} lines; its ceiling is {most}"
        (loop,) = [
            i for i, line in enumerate(lines) if line.startswith("    for step in progress:")
        ]
        assert loop < len(lines) / 2, f"{name}: the training loop begins in the second half"
        order = ["class Args", "# --- the mathematics", "def main(", BANNER.strip()]
        at = [next(i for i, line in enumerate(lines) if line.startswith(o)) for o in order]
        assert at == sorted(at), f"{name}: {order} is the order"
    common = sum(len(path.read_text().splitlines()) for path in Path("common").glob("*.py"))
    assert common <= 700 and len(list(Path("common").iterdir())) <= 3  # the cache is the third


def function(path, name):
    (node,) = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name]
    return node


@EACH
def test_the_loop_shows_the_backward_pass_and_the_step(path):
    (loop,) = [n for n in function(path, "main").body if isinstance(n, ast.For)][-1:]
    assert ast.unparse(loop.iter) == "progress"
    calls = [n.func for n in ast.walk(loop) if isinstance(n, ast.Call)]
    names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    assert {"backward", "step", "zero_grad"} <= names
    assert "clip_grad_norm" in {getattr(call, "id", "") for call in calls}


@EACH
def test_no_call_in_main_unpacks_a_bundle_of_arguments(path):
    for call in [n for n in ast.walk(function(path, "main")) if isinstance(n, ast.Call)]:
        if getattr(call.func, "id", "") == "zip":
            continue
        stars = [a.value for a in call.args if isinstance(a, ast.Starred)]
        stars += [k.value for k in call.keywords if k.arg is None]
        bundles = [ast.unparse(call) for star in stars if not isinstance(star, ast.List)]
        assert not bundles, f"{path}: {bundles}"


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
