"""What the tests of killed programs share: a process that forks their lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.resuming.lives import ForkedLives


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
