"""Imports point down: errors, values ... < pipelines < dataset < ... < training. Ray and torch stay in their places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "raydist"

# From the bottom up. A module may import its own layer and those before it.
LAYERS = (
    {"errors", "nest", "values", "settings", "options", "metrics"},
    {"pipelines"},
    {"image", "text"},
    {"dataset", "readers", "torch_dataset"},
    {"collectives", "job_environment", "cluster"},
    {"actors"},
    {"distributed_dataset"},
    {"strategies"},
    {"training"},
    {"__init__"},
)
RAY_ALLOWED = ("actors", "cluster", "collectives.ray_backend")
BELOW_DATASETS = ("errors", "nest", "values", "settings", "options", "pipelines", "image", "text")
TORCH_FORBIDDEN = (*BELOW_DATASETS, "dataset", "readers", "__init__")

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`pipelines.ops.map`; `__init__` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def layer_of(module: str) -> int:
    """The layer of a module or of a name in one; what the package itself exports is the top layer."""
    top = module.split(".")[0]
    return next((i for i, layer in enumerate(LAYERS) if top in layer), len(LAYERS) - 1)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, inside_functions: bool = True) -> Iterator[str]:
    """Modules that run-time code imports. Names needed by type checkers alone are no dependency."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}"
            yield from [f"raydist.{alias.name}" for alias in node.names] if origin == "raydist" else [origin]
        elif is_type_checking(node):
            continue
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, inside_functions=inside_functions)


def belongs(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def problem(module: str, imported: str) -> str | None:
    top, _, rest = imported.partition(".")
    if top == "":
        return "relative"
    if top == "raydist" and layer_of(rest) > layer_of(module):
        return "upward"
    if top == "ray" and not belongs(module, RAY_ALLOWED):
        return "Ray"
    return None


def violations(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    found = {name: problem(module, name) for name in imports(tree)}
    if belongs(module, TORCH_FORBIDDEN):
        at_import = imports(tree, inside_functions=False)
        found |= {name: "torch at import time" for name in at_import if name.split(".")[0] == "torch"}
    return [f"{name}: {what}" for name, what in found.items() if what]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    assert violations(name_of(path), path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_has_a_layer(path: Path) -> None:
    known = {name for layer in LAYERS for name in layer}
    assert name_of(path).split(".")[0] in known, "add the module to LAYERS"


@pytest.mark.parametrize(
    ("module", "source", "kind"),
    [
        ("pipelines.ops.map", "from raydist.dataset import Dataset", "upward"),
        ("pipelines.ops.map", "def f():\n    import raydist.context.strategy", "upward"),
        ("values", "from raydist import pipelines", "upward"),
        ("strategies.base", "import ray", "Ray"),
        ("collectives.base", "def f():\n    from ray.util import collective", "Ray"),
        ("pipelines.op", "import torch", "torch"),
        ("options", "from torch import nn", "torch"),
        ("training.model", "from .callbacks import Callback", "relative"),
    ],
)
def test_the_check_sees(module: str, source: str, kind: str) -> None:
    assert any(kind in found for found in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("values", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    import ray"),
        ("dataset", "def iterate():\n    import torch"),
        ("actors.pool", "import ray\nfrom raydist.pipelines.engine.op import DatasetOp"),
        ("training.model", "from raydist.context.strategy import Strategy\nimport torch"),
    ],
)
def test_the_check_allows(module: str, source: str) -> None:
    assert violations(module, source) == []
