from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from raydist.actors.waiting import wait_for
from raydist.errors import CancelledError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def never(ray_cluster: None) -> Any:
    """A reference to what will not come."""
    return ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()


def test_what_is_there_is_found_at_once_and_what_is_not_after_the_limit(never: Any) -> None:
    assert wait_for(ray.put(1), 0.0, lambda: False)
    begin = time.monotonic()
    assert not wait_for(never, 0.3, lambda: False)
    assert 0.3 <= time.monotonic() - begin < 5.0


def test_who_is_not_wanted_any_more_stops_waiting(never: Any) -> None:
    answers = iter([False, True])
    with pytest.raises(CancelledError, match="closed"):
        wait_for(never, 60.0, lambda: next(answers))
