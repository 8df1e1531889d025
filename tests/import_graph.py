"""The imports of the package: at run time, inside functions, for type checkers alone, or by a name in a string."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["PACKAGE", "Import", "circles", "home_of", "imports_of", "modules", "name_of"]

PACKAGE = Path(__file__).parent.parent / "raydist"
ROOT = "raydist"

Kind = Literal["run time", "in a function", "for types", "in a string"]

_MODULE_NAME = re.compile(rf"{ROOT}(\.\w+)+(:\w+)?")


@dataclass(frozen=True, order=True)
class Import:
    """One import."""

    name: str  # absolute: "raydist.core.nest.flatten", "numpy"; begins with a dot where it is relative
    kind: Kind


def name_of(path: Path) -> str:
    """`raydist.pipelines.ops.map`; a package goes by its own name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports_of(source: str) -> frozenset[Import]:
    """Return the imports in the code of a module."""
    return frozenset(_walk(ast.parse(source), "run time"))


def _walk(tree: ast.AST, kind: Kind) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(f"{'.' * node.level}{node.module or ''}.{alias.name}", kind) for alias in node.names)
        elif isinstance(node, ast.Constant):
            yield from _named(node.value)
        elif not _is_docstring(node):
            yield from _walk(node, _kind_inside(node, kind))


def _kind_inside(node: ast.AST, kind: Kind) -> Kind:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return "for types"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "run time":
        return "in a function"
    return kind


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _named(value: object) -> Iterator[Import]:
    if isinstance(value, str) and _MODULE_NAME.fullmatch(value) and _is_there(value.replace(":", ".")):
        yield Import(value.replace(":", "."), "in a string")


def _is_there(name: str) -> bool:
    """Return True if a text names a module, or an object in one: other texts look like that too."""
    home, _, defined = name.rpartition(".")
    if name in modules():
        return True
    return home in modules() and home != ROOT and re.search(rf"\b{defined}\b", modules()[home].read_text()) is not None


def home_of(name: str) -> str | None:
    """The module of the package that holds what an import names; None for other packages."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Every way from a module back to itself, one for each group of modules that reach each other."""
    found: list[list[str]] = []
    done: set[str] = set()
    for start in arrows:
        if start not in done and (way := _way_back(start, arrows)):
            found.append(way)
            done.update(way)
    return found


def _way_back(start: str, arrows: dict[str, set[str]]) -> list[str]:
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for following in sorted(arrows.get(way[-1], ())):
            if following == start:
                return [*way, start]
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []
