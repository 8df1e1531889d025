"""Closing a pipeline in this process whose function does not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import final

import pytest

from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.engine import prefetch_thread
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.prefetch_thread import CLOSE_S, join_threads
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.contracts.op import iterate


@final
class Stuck:
    """A function that returns from element 5 when the test is over."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def __call__(self, x: int) -> int:
        if x == 5:
            self.reached.set()
            self.release.wait(50)
        return x


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.release.set()


def use_threads(options: Options) -> Executor:
    return ThreadExecutor(2, Timeouts(close_s=0.2))


def test_threads_that_end_are_waited_for() -> None:
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    assert join_threads([thread], str)
    assert not thread.is_alive()


def test_a_map_thread_is_left_behind_by_name(stuck: Stuck) -> None:
    iterator = iterate(Dataset.range(20).map(stuck).prefetch(20), use_threads)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    assert stuck.reached.wait(20)
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"Thread raydist-map-\d .* stage map-1@0: map-1 \("):
        iterator.close()
    assert time.monotonic() - begin < 5.0


def test_a_prefetching_thread_is_left_behind_by_name(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_thread, "join_threads", lambda threads, work_of: join_threads(threads, work_of, 0.2))
    iterator = iterate(Dataset.range(20).map(stuck).prefetch(20))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    assert stuck.reached.wait(20)
    with pytest.warns(RuntimeWarning, match=r"Thread raydist-prefetch-2 .* making the input of prefetch-2"):
        iterator.close()
    assert CLOSE_S < 5.0


def test_a_consumer_that_stops_lets_no_memory_grow() -> None:
    made: list[int] = []
    pause = threading.Event()

    def notes(x: int) -> int:
        made.append(x)
        return x

    dataset = Dataset.range(100_000).map(notes, num_parallel_calls=2).batch(10).prefetch(4)
    iterator = iterate(dataset)
    assert next(iterator).tolist() == list(range(10))
    _wait_until_quiet(made, pause)
    quiet = len(made)
    pause.wait(0.2)
    assert len(made) == quiet
    assert quiet <= 10 * (1 + 4 + 4) + 2 * 64, "the batch in use, the buffer, the batches and blocks under way"
    iterator.close()


def _wait_until_quiet(made: list[int], pause: threading.Event) -> None:
    before = -1
    while len(made) != before:
        before = len(made)
        pause.wait(0.3)
