from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from raydist.actors.background_actor import BackgroundActor


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_it_tells_what_comes_and_ends_when_it_is_told(ray_cluster: None) -> None:
    def count(stopped: Callable[[], bool], tell: Callable[[Any], None]) -> None:
        tell(1)
        while not stopped():
            time.sleep(0.01)

    actor = BackgroundActor(count, "The counter", {"CPU": 0.01})
    actor.start()
    try:
        end = time.monotonic() + 30
        while not (found := actor.news(0))[1] and time.monotonic() < end:
            time.sleep(0.05)
        assert found == (False, [1])
        assert actor.news(1) == (False, [])
    finally:
        actor.stop(10.0)
        actor.stop(10.0)
