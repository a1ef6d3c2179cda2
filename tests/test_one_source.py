"""What stands in two scripts under one name has one source: duplication is meant, drift is not."""

import ast
from collections import defaultdict
from pathlib import Path

# What a script has for itself under a name that all share.
OWN = {"Args", "main", "check_args", "evaluate"}


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
    found = defaultdict(dict)
    for path in sorted(Path().glob("*.py")):
        for name, source in definitions(path):
            found[name][path.name] = source
    shared = {name: by_script for name, by_script in found.items() if len(by_script) > 1}
    assert {"load_model", "log", "parse_args", "__name__ == '__main__'"} <= set(shared)
    for name in set(shared) - OWN:
        (first, source), *others = shared[name].items()
        for script, other in others:
            assert other == source, f"{name} differs between {first} and {script}"


def test_scripts_import_no_script_and_nothing_but_common():
    scripts = {path.stem for path in Path().glob("*.py")}
    for path in [*Path().glob("*.py"), *Path("common").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                root = name.split(".")[0]
                assert root not in scripts | {"tiny", "tests"}, f"{path} imports {name}"


def test_every_flag_is_read_by_its_script():
    for path in Path().glob("*.py"):
        source = path.read_text()
        (args,) = [n for n in ast.parse(source).body if getattr(n, "name", "") == "Args"]
        for field in args.body:
            if isinstance(field, ast.AnnAssign):
                assert f"args.{field.target.id}" in source, f"{path}: {field.target.id} is not read"


# Lines at most.
BUDGETS = {
    "sft.py": 380,
    "reinforce.py": 350,
    "rm_bradley_terry.py": 450,
    "dpo.py": 520,
    "kto.py": 480,
    "grpo.py": 600,
    "ppo_rlhf.py": 720,
}


def test_line_budgets_and_the_algorithm_first():
    """A script is read in one sitting, and the loop is met in its first half."""
    for name, most in BUDGETS.items():
        lines = Path(name).read_text().splitlines()
        assert len(lines) <= most, f"{name} has {len(lines)} lines; its budget is {most}"
        (loop,) = [i for i, line in enumerate(lines) if line == "    for step in progress:"]
        assert loop < len(lines) / 2, f"{name}: the training loop begins in the second half"
        order = ["class Args", "# --- the mathematics", "def main(", "def start_run("]
        at = [next(i for i, line in enumerate(lines) if line.startswith(o)) for o in order]
        assert at == sorted(at), f"{name}: {order} is the order"
    common = sum(len(path.read_text().splitlines()) for path in Path("common").glob("*.py"))
    assert common <= 520 and len(list(Path("common").iterdir())) <= 3  # the cache is the third
