from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.xla_world import chips_here


@pytest.fixture
def chips() -> Iterator[None]:
    """Three chips for the threads of this process."""
    with chips_here(3):
        yield
