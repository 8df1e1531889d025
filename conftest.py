"""What the examples in docstrings may use without saying so."""

from __future__ import annotations

from typing import Any

import pytest

import raydist

pytest_plugins = ("tests.shared_scripts", "tests.shared_strategies")


@pytest.fixture(autouse=True)
def name_the_package(doctest_namespace: dict[str, Any]) -> None:
    """`rd`, as everywhere in the documentation."""
    doctest_namespace["rd"] = raydist
