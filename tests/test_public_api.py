from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import raydist as rd
from raydist.core import errors


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_import_loads_neither_torch_nor_ray_nor_numpy() -> None:
    code = "import sys, raydist; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(run_python(code).split())
    assert "raydist" in loaded
    assert not loaded & {"torch", "ray", "numpy", "pyarrow", "torchmetrics", "rich"}


def test_every_public_name_exists() -> None:
    assert [name for name in rd.__all__ if getattr(rd, name) is None or name not in dir(rd)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Datset'"):
        _ = rd.Datset  # type: ignore[attr-defined]  # the point of this test


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rd.__file__).read_text())
    nodes = [node for block in tree.body if is_for_type_checkers(block) for node in ast.walk(block)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname: node.module for node in imports for alias in node.names}
    assert declared == rd._MODULE_OF


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_every_error_is_public() -> None:
    assert set(errors.__all__) <= set(rd.__all__)


def test_metadata_says_the_same_version() -> None:
    assert rd.__version__ == metadata.version("raydist")
