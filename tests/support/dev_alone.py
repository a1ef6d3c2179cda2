"""Imports each module of docs/ and tests/ as if `pip install -e ".[dev]"` alone had been called."""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOADED_BY_ZENSICAL = Path("docs/github_markdown.py")  # which brings what it imports


def brought_by(project: str, extra: str) -> set[str]:
    """The distributions that `pip install project[extra]` installs."""
    found, waiting = set(), [(project, ""), (project, extra)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        with suppress(PackageNotFoundError):  # one for another system
            for needed in map(Requirement, requires(name) or []):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting += [(needed.name, of_it) for of_it in ("", *needed.extras)]
    return {canonicalize_name(name) for name, _ in found}


def hide_all_but(kept: set[str]) -> None:
    """From now on no module of another distribution is found."""
    hidden = set()
    for module, names in packages_distributions().items():
        if not kept & {canonicalize_name(name) for name in names}:
            hidden.add(module)
    find_spec = PathFinder.find_spec

    def find_kept(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else find_spec(name, path, target)

    PathFinder.find_spec = staticmethod(find_kept)


def load(path: Path) -> None:
    if path.parent.name == "support":  # under the name by which tests import it
        import_module(path.stem)
    elif path.parts[0] == "docs":
        import_module(".".join(path.with_suffix("").parts))
    else:
        spec = spec_from_file_location(str(path), path)
        spec.loader.exec_module(module_from_spec(spec))


def main() -> None:
    sys.path[:0] = ["", "tests/support"]
    hide_all_but(brought_by("plainrlhf", "dev"))
    load(Path("docs/experiments/__main__.py"))
    assert "docs.experiments.registry" not in sys.modules, "programs do without matplotlib"
    import_module("docs.experiments.registry").load("sft")
    assert not [name for name in sys.modules if ".studies." in name], "not asked for"
    for path in sorted({*Path("docs").rglob("*.py"), *Path("tests").rglob("*.py")}):
        try:
            if path != LOADED_BY_ZENSICAL:
                load(path)
        except pytest.skip.Exception as skipped:
            assert "pip install" in str(skipped), f"{path} does not name the extra that it needs"


if __name__ == "__main__":
    main()
