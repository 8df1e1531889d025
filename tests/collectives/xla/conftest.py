from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.xla_world import IS_REAL, chips_here

if IS_REAL:
    # Autograd counts the devices once, at the first backward of a process: the tests of other folders may come first.
    importlib.import_module("torch_xla").device()


@pytest.fixture
def chips() -> Iterator[None]:
    """Three chips for the threads of this process."""
    with chips_here(3):
        yield
