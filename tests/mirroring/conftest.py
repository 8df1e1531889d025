"""Fixtures for mirrored variables in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch import nn

from tests.mirroring.in_process import Mirror, linear


@pytest.fixture
def mirror() -> Mirror:
    """A driver with two replicas."""
    return Mirror()


@pytest.fixture
def layer(mirror: Mirror) -> nn.Linear:
    """A layer that `mirror` mirrors."""
    return linear(mirror)


@pytest.fixture
def quick_gc() -> Iterator[None]:
    """`gc.collect` looks at what the test makes alone: at all of torch it takes 0.3 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
