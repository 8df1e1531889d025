"""A pass in a thread of this process: credits, long polls, errors, the end, closing at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raydist.actors.passes.batch_queues import QueueEntry
from raydist.actors.passes.credits import Credits
from raydist.actors.passes.production import Poll, Production
from raydist.dataset import Dataset
from raydist.errors import CancelledError, UnavailableError
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.steps import GlobalBatches, element_views


class Bench:
    """Starts productions over datasets, and closes them when the test ends."""

    def __init__(self) -> None:
        self.productions: list[Production] = []
        self.stored: list[Any] = []

    def start(self, dataset: Dataset, *, capacity: int = 3, replicas: int = 2, spare_bytes: int = 0) -> Production:
        iterator = DatasetIterator(dataset._op, options=dataset.options(), seed=0, epoch=0, convert=element_views)
        production = Production(
            GlobalBatches(iterator, replicas, "per_batch"),
            self.put,
            num_replicas=replicas,
            credit=Credits(capacity, replicas, spare_bytes),
            zero_copy=False,
            label="epoch 0",
        )
        production.start()
        self.productions.append(production)
        return production

    def put(self, piece: Any) -> Any:
        self.stored.append(piece)
        return piece


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for production in bench.productions:
        production.close()
        assert production.join(5.0)


def read(production: Production, start: int, *, rank: int | None = None) -> tuple[QueueEntry, ...]:
    return production.poll(Poll(rank, start, start, wait_s=10.0))


def wait_until(condition: Any, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def test_places_come_in_order_with_the_state_after_them(bench: Bench) -> None:
    production = bench.start(Dataset.range(4).batch(2))
    first, second, end = (read(production, number)[0] for number in range(3))
    assert first.group is not None
    assert [piece.leaf(0).tolist() for piece in first.group.refs] == [[0], [1]]
    assert [state["step"] for state in second.states] == [2]
    assert (end.last, end.error) == (True, None)


def test_a_reader_that_stops_stops_the_producer(bench: Bench) -> None:
    calls = []

    def count(x: Any) -> Any:
        calls.append(x)
        return x

    large = Dataset.range(1000).map(count).map(lambda x: np.zeros(10_000)).batch(2)
    production = bench.start(large, capacity=3)
    wait_until(lambda: production.num_kept() == 3)
    assert len(bench.stored) == 6  # two pieces a step
    assert read(production, 0)  # nothing is acknowledged by reading at 0
    production.lend(1)
    wait_until(lambda: len(bench.stored) == 8)
    assert production.num_kept() == 3
    assert len(calls) < 300  # the engine reads ahead in blocks, but it does not run away


def test_the_slowest_replica_sets_the_pace(bench: Bench) -> None:
    production = bench.start(Dataset.range(20).batch(2), capacity=2)
    wait_until(lambda: production.num_kept() == 2)
    production.release(0, 2)
    assert production.poll(Poll(0, 2, 2, wait_s=0.05)) == ()
    production.release(1, 1)
    (entry,) = read(production, 2, rank=0)
    assert entry.group is not None
    assert entry.group.refs[1] is None


def test_an_error_stands_in_its_place(bench: Bench) -> None:
    production = bench.start(Dataset.range(3).map(lambda x: 1 // (int(x) - 1)).batch(1))
    entries = [read(production, number)[0] for number in range(4)]
    assert [entry.error is not None for entry in entries] == [False, True, False, False]
    assert entries[1].error is not None
    error = entries[1].error.restore()
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__[-1] == "In epoch 0, step 1."


def test_a_lost_worker_ends_the_pass(bench: Bench) -> None:
    def lose(x: Any) -> Any:
        raise UnavailableError("worker 3 is gone")

    production = bench.start(Dataset.range(3).map(lose).batch(1))
    for number in (0, 0):
        (entry,) = read(production, number)
        assert entry.last
        assert entry.error is not None
        assert isinstance(entry.error.restore(), UnavailableError)


def test_a_failure_outside_of_elements_reaches_the_reader(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise OSError("no state today")

    production = bench.start(Dataset.range(100).batch(1), capacity=1)
    wait_until(lambda: production.num_kept() == 1)
    monkeypatch.setattr(GlobalBatches, "state_dict", fail)
    (entry,) = read(production, 1)
    assert entry.last
    assert entry.error is not None
    assert isinstance(entry.error.restore(), OSError)


def test_a_batch_that_cannot_be_stored_is_not_passed_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Bench, piece: Any) -> Any:
        raise MemoryError("the store is full")

    monkeypatch.setattr(Bench, "put", full)
    large = Dataset.from_tensor_slices(np.zeros((4, 10_000))).batch(2)
    (entry,) = read(bench.start(large), 0)
    assert entry.last
    assert entry.error is not None
    assert isinstance(entry.error.restore(), MemoryError)


def test_a_pass_is_in_use_while_replicas_read_or_are_to_begin(bench: Bench) -> None:
    production = bench.start(Dataset.range(4).batch(2))
    assert not production.in_use
    wait_until(lambda: production.num_kept() == 3)
    production.lend(0)
    production.release(0, 1)
    assert production.in_use
    production.release(1, 1)
    assert not production.in_use
    production.lend(1)
    assert production.reclaim().number == 1
    assert not production.in_use


def test_a_poll_ends_with_its_limit(bench: Bench) -> None:
    gate = threading.Event()
    production = bench.start(Dataset.range(1).map(lambda x: (gate.wait(10), x)[1]).batch(1))
    assert production.poll(Poll(None, 0, 0, wait_s=0.05)) == ()
    gate.set()
    assert read(production, 0)


def test_closing_wakes_a_waiting_reader_and_ends_the_thread(bench: Bench) -> None:
    gate = threading.Event()
    production = bench.start(Dataset.range(5).map(lambda x: (gate.wait(10), x)[1]).batch(1))
    errors: list[Exception] = []

    def wait() -> None:
        try:
            read(production, 0)
        except CancelledError as error:
            errors.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    production.close()
    reader.join(5.0)
    assert len(errors) == 1
    assert not production.join(0.05)  # the user's function is still at it
    gate.set()
    assert production.join(5.0)
