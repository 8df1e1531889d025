"""What the tests of killed programs share: a process that forks their lives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raydist.shared_segment import remove_leftovers
from raydist.testing.resuming import ForkedLives
from tests.shared_files import shared_files

_OLD_S = 75  # by when whoever makes a group removes what killed ranks left


@pytest.fixture(scope="session")
def lives() -> Iterator[ForkedLives]:
    """Started once: it imports for seconds."""
    with ForkedLives(("torchmetrics", "tensorboardX", "tests.chaos.programs.own_loop")) as forked:
        yield forked


@pytest.fixture
def cluster_address(ray_cluster: None) -> dict[str, str]:
    """What a process needs to know to join the session's cluster."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture
def leftovers_removed() -> Iterator[None]:
    """Ranks that were killed while they met have left a file, which the next group removes once it is old."""
    before = shared_files()
    yield
    deadline = time.monotonic() + _OLD_S
    while shared_files() - before and time.monotonic() < deadline:
        time.sleep(1)
        remove_leftovers()
