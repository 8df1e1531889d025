"""User functions that end or fill the process of an input worker."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.pool import ActorExecutor
from raydist.core.errors import RaydistError, UnavailableError
from raydist.core.exception_utils import message_of
from raydist.dataset import Dataset
from raydist.options import Timeouts
from tests.conftest import live_actors
from tests.contracts.op import iterate
from tests.odd_errors import Departure, Mute

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

MEMORY = 300 * 2**20


@pytest.fixture(scope="module")
def pool(ray_cluster: None, shared_actors: set[str]) -> Iterator[ActorExecutor]:
    pool = ActorExecutor(2, name="hostile", timeouts=Timeouts(element_s=30.0), memory_bytes=MEMORY)
    pool.start()
    shared_actors |= live_actors()
    yield pool
    pool.close()


def exits(x: Any) -> Any:
    sys.exit(3)


def crashes(x: Any) -> Any:
    return ctypes.string_at(0)


def swells(x: Any) -> Any:
    return np.ones(10 << 30, np.uint8)


GUILTY = 5
ENDED = r"must not end its process: map-1 .* ended that of .*worker-\d+ on element 5 of its input, "


def departs(x: Any) -> Any:
    raise Departure("left")


def fails_oddly(x: Any) -> Any:
    raise Mute(1, 2)


HOSTILE = [
    (exits, RaydistError, r"must not leave its process: map-1 .* raised SystemExit: 3"),
    (crashes, RaydistError, ENDED + r"2 times \(Fatal Python error: Segmentation fault\)"),
    (swells, MemoryError, r"10\.0 GiB"),
    (departs, Departure, "left"),
    (fails_oddly, Mute, ""),
]


def test_one_element_fails_and_all_others_arrive(pool: ActorExecutor, shared_actors: set[str]) -> None:
    for hostile, kind, message in HOSTILE:
        dataset = Dataset.range(40).map(lambda x, hostile=hostile: hostile(x) if x == GUILTY else x)
        iterator = iterate(dataset, lambda options: SharedExecutor(pool))
        assert [int(next(iterator)) for _ in range(GUILTY)] == list(range(GUILTY))
        with pytest.raises(kind) as caught:
            next(iterator)
        assert re.search(message, message_of(caught.value))
        assert type(caught.value) is kind or kind is MemoryError  # numpy has a MemoryError of its own
        notes = "\n".join(caught.value.__notes__)
        assert "In map-1 (test_hostile_functions.py:" in notes
        assert "element 5 of its input." in notes
        assert "In hostile-" in notes or kind is RaydistError  # the worker
        if kind is MemoryError:
            assert f"{MEMORY:,} bytes (Options.input_worker_memory" in notes
        assert [int(x) for x in iterator] == list(range(GUILTY + 1, 40)), hostile
        assert len(pool.worker_names) == 2
    shared_actors |= live_actors()  # the workers that took the place of dead ones


@pytest.mark.long  # on workers of this process: test_epoch_pools.py
def test_a_function_that_always_crashes_ends_the_iteration(pool: ActorExecutor, shared_actors: set[str]) -> None:
    iterator = iterate(Dataset.range(40).map(crashes), lambda options: SharedExecutor(pool))
    for _ in range(2):
        with pytest.raises(RaydistError, match="must not end its process"):
            next(iterator)
    with pytest.raises(UnavailableError, match=r"map-1 .*on element 2 .*So did the 2 elements before it"):
        next(iterator)
    iterator.close()
    shared_actors |= live_actors()


def test_closing_does_not_wait_for_a_function_that_sleeps(pool: ActorExecutor, shared_actors: set[str]) -> None:
    sleepy = Dataset.range(40).map(lambda x: time.sleep(600) if x == GUILTY else x)
    iterator = iterate(sleepy.prefetch(20), lambda options: SharedExecutor(pool))
    assert next(iterator) == 0
    time.sleep(0.3)  # the prefetching thread waits for the worker now
    begin = time.monotonic()
    iterator.close()
    assert time.monotonic() - begin < 5.0
    assert not pool.is_idle(0.0), "its workers are busy: who owns the pool kills it"
    assert len(pool.worker_names) == 2
    shared_actors |= live_actors()  # a worker that took the place of one that died in the test before
