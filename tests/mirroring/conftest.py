"""Fixtures for mirrored variables in one process."""

from __future__ import annotations

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
