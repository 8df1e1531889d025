"""What the examples in docstrings may use without saying so."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import raydist

pytest_plugins = ("tests.shared_scripts", "tests.shared_strategies")


@pytest.fixture(autouse=True)
def name_the_package(doctest_namespace: dict[str, Any]) -> None:
    """`rd`, as everywhere in the documentation."""
    doctest_namespace["rd"] = raydist


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Import a module of raydist by its name. By its path, pytest imports it again after its package has done so."""
    package = Path(raydist.__file__).parent
    if collector.path.suffix == ".py" and collector.path.is_relative_to(package):
        parts = collector.path.relative_to(package.parent).with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
