"""Rooms and names that tell where things are: no folder holds too much, and a name stands for one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.conftest import LIBRARY_THREADS
from tests.import_graph import PACKAGE, modules

MOST_FILES = 30
ONE_FILE_AN_OPERATION = PACKAGE / "pipelines" / "ops"

FOLDERS = sorted({path.parent for path in modules().values()})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_can_be_looked_over(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.py"))
    assert folder == ONE_FILE_AN_OPERATION or len(files) <= MOST_FILES, "make folders of what belongs together"


def defined_names(source: str) -> list[str]:
    """Public classes, functions and constants that a module defines; not what an overload or a branch repeats."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign) and not _is_type_variable(node.value):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    return [name for name, _ in Counter(found).items() if not name.startswith("_")]


def _is_type_variable(value: ast.expr) -> bool:
    """`T = TypeVar("T")` says nothing, and is called so everywhere."""
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "ParamSpec")
    )


def homes(sources: dict[str, str]) -> dict[str, list[str]]:
    """The modules that define each name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in defined_names(source):
            found[name].append(module)
    return found


def test_a_name_stands_for_one_thing() -> None:
    everywhere = homes({name: path.read_text() for name, path in modules().items()})
    assert {name: places for name, places in everywhere.items() if len(places) > 1} == {}


def test_a_module_is_not_named_like_a_folder_beside_it() -> None:
    assert [path for path in modules().values() if path.with_suffix("").is_dir()] == []


def test_the_check_sees_names_that_are_used_twice() -> None:
    sources = {"a": "class Slot: ...\ndef f(): ...", "b": "Slot = int\n_f = 1", "c": "f: int = 1"}
    assert homes(sources) == {"Slot": ["a", "b"], "f": ["a", "c"]}


def test_threads_of_ours_are_told_from_those_of_libraries() -> None:
    assert not any(f"{ours}-anything".startswith(LIBRARY_THREADS) for ours in ("raydist", "MainThread", "Thread-1"))
