from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.distributed_dataset import InputSide
from raydist.options import Timeouts
from tests.actors.readers.fakes import FakeHost


@pytest.mark.parametrize(("replicas", "workers", "each"), [(4, 2, 2), (3, 3, 1), (5, 1, 5)])
def test_replicas_of_each_worker(replicas: int, workers: int, each: int) -> None:
    assert InputSide(FakeHost(), replicas, Timeouts(), lambda: None, workers).replicas_per_worker == each


def test_workers_have_equally_many() -> None:
    with pytest.raises(InvalidArgumentError, match="got 3 replicas on 2 workers"):
        _ = InputSide(FakeHost(), 3, Timeouts(), lambda: None, 2).replicas_per_worker
