"""The producer of an epoch in a thread of this process: credits, long polls, errors, the end, and `close`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.actors.epochs.batch_group import StepBatch
from raydist.actors.epochs.epoch_producer import Credits, EpochProducer
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.core.errors import CancelledError
from raydist.core.nest import LEAF
from raydist.dataset import Dataset
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import Cut, cut_batch
from raydist.pipelines.run.steps import GlobalBatches, element_views
from tests.waiting import wait_until


class Bench:
    """Start producers over datasets, and close them when the test ends."""

    def __init__(self) -> None:
        self.productions: list[EpochProducer] = []
        self.stored: list[Any] = []

    def start(self, dataset: Dataset, *, capacity: int = 3, replicas: int = 2, spare_bytes: int = 0) -> EpochProducer:
        iterator = DatasetIterator(dataset._op, options=dataset.options(), seed=0, epoch=0, convert=element_views)
        producer = EpochProducer(
            GlobalBatches(iterator, replicas, "per_batch"),
            self.put,
            num_replicas=replicas,
            credit=Credits(capacity, spare_bytes),
            zero_copy=False,
            label="epoch 0",
        )
        producer.start()
        self.productions.append(producer)
        return producer

    def put(self, piece: Any) -> Any:
        self.stored.append(piece)
        return piece


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for producer in bench.productions:
        producer.close()
        assert producer.join(5.0)


def read(producer: EpochProducer, start: int, *, rank: int | None = None) -> tuple[QueueEntry, ...]:
    return producer.poll(Poll(rank, start, start, wait_s=10.0))


def test_a_reader_that_stops_stops_the_producer(bench: Bench) -> None:
    calls = []

    def count(x: Any) -> Any:
        calls.append(x)
        return x

    large = Dataset.range(1000).map(count).map(lambda x: np.zeros(10_000)).batch(2)
    producer = bench.start(large, capacity=3)
    wait_until(lambda: producer.num_kept() == 3)
    assert len(bench.stored) == 6  # two pieces a step
    assert read(producer, 0)  # nothing is acknowledged by reading at 0
    producer.lend(1)
    wait_until(lambda: len(bench.stored) == 8)
    assert producer.num_kept() == 3
    assert len(calls) < 300  # the engine reads ahead in blocks, but it does not run away


def test_a_group_that_cannot_grow_waits_while_its_reader_has_others(bench: Bench) -> None:
    producer = bench.start(Dataset.range(40).batch(2), capacity=5)
    wait_until(lambda: producer.num_kept() == 4)
    time.sleep(0.05)
    assert producer.num_kept() == 4  # two groups of two; the fifth step is in the open group
    producer.acknowledge(None, 1)
    wait_until(lambda: producer.num_kept() == 6)
    entries = read(producer, 4)
    assert [len(entry.states) for entry in entries] == [2]
    (alone,) = producer.poll(Poll(None, 6, 4, wait_s=10.0))
    assert alone.number == 6  # who waits is given what there is


def last_error(entries: tuple[QueueEntry, ...]) -> BaseException:
    """The error that an epoch ends with."""
    (entry,) = entries
    assert entry.last
    assert entry.error is not None
    return entry.error.restore()


def test_failures_outside_of_elements_reach_the_reader(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.start(Dataset.range(100).batch(1), capacity=1)
    wait_until(lambda: producer.num_kept() == 1)
    monkeypatch.setattr(GlobalBatches, "state_dict", Mock(side_effect=OSError("no state today")))
    assert isinstance(last_error(read(producer, 1)), OSError)
    monkeypatch.undo()
    monkeypatch.setattr(Bench, "put", Mock(side_effect=MemoryError("the store is full")))
    large = Dataset.from_tensor_slices(np.zeros((4, 10_000))).batch(2)
    error = last_error(read(bench.start(large), 0))
    assert isinstance(error, MemoryError)
    assert error.__notes__[-1] == (
        "Storing 1 steps (160000 bytes) of epoch 0: the object store must have room. Use smaller batches, a "
        "smaller prefetch_batches, or start Ray with more object_store_memory."
    )


def test_closing_wakes_a_waiting_reader_and_ends_the_thread(bench: Bench) -> None:
    gate = threading.Event()
    producer = bench.start(Dataset.range(5).map(lambda x: (gate.wait(10), x)[1]).batch(1))
    threading.Timer(0.1, producer.close).start()
    with pytest.raises(CancelledError):
        read(producer, 0)
    assert not producer.join(0.05)  # the user's function is still at it
    gate.set()
    assert producer.join(5.0)


class Script:
    """A step source that follows a list: rows and row width of a step, or None for an error in its place."""

    structure = LEAF

    def __init__(self, places: list[tuple[int, int] | None], replicas: int) -> None:
        self.step = 0
        self._places = places
        self._replicas = replicas

    def has_ready(self) -> bool:
        return False

    def next_step(self) -> tuple[Cut, ...]:
        step = self.step
        if step == len(self._places):
            raise StopIteration
        self.step += 1
        place = self._places[step]
        if place is None:
            raise ValueError(f"step {step}")
        rows, width = place
        batch = np.full((rows, width), step, np.int32)
        return cut_batch([batch], num_replicas=self._replicas, rule="per_batch", step=step)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"after": self.step}

    def stats(self) -> PipelineStats:
        return PipelineStats()

    def close(self) -> None:
        pass


def produce(places: list[tuple[int, int] | None], credit: Credits, replicas: int = 1) -> EpochProducer:
    source: Any = Script(places, replicas)
    producer = EpochProducer(
        source, lambda piece: piece, num_replicas=replicas, credit=credit, zero_copy=False, label="script"
    )
    producer.start()
    return producer


class Taker:
    """One replica that checks what it is given: each place once, in order, with its rows and its state."""

    def __init__(self, producer: EpochProducer, rank: int, places: list[tuple[int, int] | None]) -> None:
        self._production = producer
        self.rank = rank
        self._places = places
        self.next = 0
        self.ended = False

    def take(self, keep: int, pace_s: float | None) -> None:
        """All that is there; the last `keep` places are not done with."""
        poll = Poll(self.rank, self.next, max(0, self.next - keep), wait_s=20.0, pace_s=pace_s)
        entries = self._production.poll(poll)
        assert entries, "a reader that waits is given what there is"
        for entry in entries:
            for at in range(self.next - entry.number, len(entry.states)):
                self._check(entry, at)

    def _check(self, entry: QueueEntry, at: int) -> None:
        self.ended = entry.last
        if entry.last:
            assert self.next == len(self._places)
            return
        assert entry.states[at] == {"after": self.next + 1}
        expected = self._places[self.next]
        if expected is None:
            error = entry.error and entry.error.restore()
            assert str(error) == f"step {self.next}"
            assert error is not None
            assert error.__notes__[-1] == f"In script, step {self.next}."
        else:
            assert entry.group is not None
            batch = StepBatch(entry.group, at)
            piece = entry.group.refs[self.rank].array(0, batch.place_on(self.rank, padding=True))
            assert (batch.step, sum(batch.rows)) == (self.next, expected[0])
            assert (len(piece) > 0, piece.shape[1]) == (expected[0] > 0, expected[1])
            assert (piece == self.next).all()
        self.next += 1


@settings(deadline=None, max_examples=60)
@given(
    places=st.lists(st.none() | st.tuples(st.integers(0, 5), st.sampled_from([1, 1, 1, 7, 3000])), max_size=25),
    replicas=st.integers(1, 3),
    capacity=st.integers(2, 7),
    spare_bytes=st.sampled_from([0, 40_000, 1 << 20]),
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.sampled_from([None, 0.0, 1e-3, 1.0])), min_size=1
    ),
)
def test_every_place_reaches_every_replica_once_and_in_order(
    places: list[tuple[int, int] | None],
    replicas: int,
    capacity: int,
    spare_bytes: int,
    turns: list[tuple[int, int, float | None]],
) -> None:
    credit = Credits(capacity, spare_bytes)
    producer = produce(places, credit, replicas)
    takers = [Taker(producer, rank, places) for rank in range(replicas)]
    largest = max((4 * rows * width for rows, width in filter(None, places)), default=0)
    turn = 0
    while not all(taker.ended for taker in takers):
        which, keep, pace_s = turns[turn % len(turns)]
        turn += 1
        slowest = min((taker for taker in takers if not taker.ended), key=lambda taker: taker.next)
        fast = takers[which % replicas]
        # One that is ahead of the others may have to wait for them: it asks only when there must be something.
        taker = fast if not fast.ended and fast.next == slowest.next else slowest
        for other in takers:
            producer.release(other.rank, other.next - (other is taker and keep))
        taker.take(keep, pace_s)
        with producer._changed:
            queues = producer._queues
            assert queues.num_ahead <= max(capacity, 3 * 64 if spare_bytes else 0) + 1
            assert queues.num_bytes <= max(capacity * (largest + 8), spare_bytes) + capacity * 48
    producer.close()
    assert producer.join(10.0)


def test_a_reader_that_has_work_is_given_larger_groups_and_loses_nothing_where_it_stops_within_one() -> None:
    places: list[tuple[int, int] | None] = [(4, 1)] * 300
    producer = produce(places, Credits(capacity=2, spare_bytes=1 << 20))
    taker = Taker(producer, 0, places)
    answers = 0
    while not taker.ended:
        taker.take(1, 0.001)
        answers += 1
        if answers == 20:
            producer.release(0, taker.next - 1)
            position = producer.reclaim()
            assert (position.number, position.state) == (taker.next - 1, {"after": taker.next - 1})
            taker.next -= 1
            producer.lend(taker.next)
    assert answers < 100
    producer.release(0, 300)
    assert producer.num_kept() == 1  # the end
    assert producer.join(10.0)
