"""A merged epoch over the epochs of several workers, whose answers the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from raydist.actors.epochs.batch_group import StepBatch
from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.actors.epochs.merged_epoch import MergedEpoch, MergedSteps
from raydist.actors.epochs.served_epoch import Poll, Position, QueueEntry
from raydist.core.errors import SpecError, UnavailableError
from raydist.core.nest import flatten
from raydist.options import InputOptions, Options, Timeouts
from raydist.pipelines.metering.stats import PipelineStats
from tests.actors.epochs.entries import end_entry, group_entry
from tests.waiting import wait_until


class Worker:
    """One worker's epoch, which sends `credit` places more than the reader has acknowledged."""

    def __init__(self, entries: list[QueueEntry], credit: int = 100) -> None:
        self.entries = entries
        self.credit = credit
        self.done = 0
        self.closed = False
        self.failure: Exception | None = None
        self.changed = threading.Condition()

    def call(self, method: str, *args: Any) -> Any:
        return {"position_of": Position(0, {"at": 0, "step": 0}), "stats": PipelineStats()}[method]

    def ask(self, poll: Poll) -> Poll:
        with self.changed:
            self.done = max(self.done, poll.done)
        return poll

    def receive(self, asked: Poll) -> tuple[QueueEntry, ...]:
        with self.changed:
            self.changed.wait_for(lambda: self._found(asked) or self.closed or self.failure, 20)
            if self.failure is not None:
                raise self.failure
            return tuple(self._found(asked))

    def _found(self, asked: Poll) -> list[QueueEntry]:
        return [each for each in self.entries if each.end > asked.start and each.end <= self.done + self.credit]

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        with self.changed:
            self.done = max(self.done, done)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = error
            self.changed.notify_all()


JOB = InputJob("epoch 0", b"", False, 1, 0, 0, Options(), InputOptions(), Timeouts(poll_s=20.0))


class Bench:
    def __init__(self) -> None:
        self.epochs: list[MergedEpoch] = []

    def start(self, *workers: Any) -> MergedEpoch:
        made = MergedEpoch(workers, MergedJob("epoch 0", (JOB,) * len(workers)))
        made.start()
        self.epochs.append(made)
        return made


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for made in bench.epochs:
        made.close()
        assert made.join(5.0)


def steps(count: int, first: int = 0) -> list[QueueEntry]:
    return [*(group_entry(number, [[[first + number]]]) for number in range(count)), end_entry(count)]


def read(made: MergedEpoch, start: int, done: int | None = None) -> tuple[QueueEntry, ...]:
    return made.poll(Poll(None, start, start if done is None else done, wait_s=10.0))


def test_news_reach_a_worker_while_its_answer_is_awaited(bench: Bench) -> None:
    """A poll waits for 20 s; a worker without credit must be told before that."""
    workers = Worker(steps(6), credit=2), Worker(steps(6, 10), credit=3)
    made = bench.start(*workers)
    began = time.monotonic()
    for number in range(6):
        assert read(made, number, done=number)[0].number == number
    assert time.monotonic() - began < 10
    assert min(worker.done for worker in workers) >= 3  # each was told, though the first alone held things up


def test_workers_learn_how_far_the_replicas_were_when_the_driver_takes_over(bench: Bench) -> None:
    workers = Worker(steps(6), credit=2), Worker(steps(6, 10), credit=2)
    made = bench.start(*workers)
    assert read(made, 0, done=0)
    made.lend(0)
    made.release(0, 1)
    made.release(1, 0)
    assert [worker.done for worker in workers] == [0, 0]
    assert made.reclaim().number == 1
    wait_until(lambda: min(worker.done for worker in workers) >= 1)


# --- merged steps; random ones are in `tests/distributed_dataset/test_sharding.py`, errors in `test_per_replica.py` ---


def merged(*feeds: Sequence[QueueEntry], replicas: int = 1) -> MergedSteps:
    steps = MergedSteps([{"at": 0, "step": 0}] * len(feeds), replicas)
    for worker, entries in enumerate(feeds):
        steps.add(worker, entries)
    return steps


def everything(steps: MergedSteps) -> list[QueueEntry]:
    found = []
    while (entry := steps.next_entry()) is not None:
        found.append(entry)
        if entry.last:
            break
    return found


def rows(entry: QueueEntry, *, padding: bool = False) -> list[list[Any]]:
    """Of each step, of each replica."""
    group = entry.group
    assert group is not None
    batches = [StepBatch(group, place) for place in range(len(group.rows))]
    return [
        [ref.leaf(0, batch.place_on(rank, padding=padding)).tolist() for rank, ref in enumerate(group.refs)]
        for batch in batches
    ]


def test_a_worker_without_data_borrows_the_rows_of_another() -> None:
    first = [end_entry(0)]
    second = [group_entry(0, [[[10, 11, 12], []], [[13], []], [[], [14]]]), end_entry(3)]
    one, two, end = everything(merged(first, second, replicas=2))
    assert rows(one) == [[[], [], [10, 11, 12], []], [[], [], [13], []]]
    assert rows(one, padding=True) == [[[10, 11], [10, 11], [10, 11, 12], [-1]], [[13], [13], [13], [-1]]]
    assert rows(two) == [[[], [], [], [14]]]  # who lends must have rows
    assert rows(two, padding=True) == [[[14], [14], [-1], [14]]]
    assert one.group is not None
    assert one.group.rows == ((0, 0, 3, 0), (0, 0, 1, 0))
    assert end.last


def test_workers_must_make_the_same_elements() -> None:
    named = flatten({"x": 1})[1]
    (entry,) = everything(merged([group_entry(0, [[[0]]])], [group_entry(0, [[[1]]], named)]))
    assert entry.last
    assert entry.error is not None
    with pytest.raises(SpecError, match=r"same structure, but their leaves are \[''\] and \['x'\]"):
        raise entry.error.restore()


def test_each_worker_learns_how_far_the_readers_are() -> None:
    first = [group_entry(0, [[[0]], [[]], [[2]], [[3]]]), end_entry(4)]
    second = [group_entry(0, [[[10]], [[]]]), end_entry(2)]
    steps = merged(first, second)
    assert steps.done_by(0) == (0, 0)
    everything(steps)  # places 0 | 1, 2 | the end; place 1 of the workers was passed over
    assert [steps.done_by(done) for done in range(4)] == [(0, 0), (2, 3), (3, 3), (5, 3)]
    empty = [group_entry(0, [[[]], [[]]])]
    steps = merged(empty, empty)
    assert steps.next_entry() is None
    assert steps.done_by(0) == (2, 2), "a worker that made steps without rows only can make more"


def test_a_lost_worker_ends_the_pass_and_is_named(bench: Bench) -> None:
    workers = Worker(steps(2)[:2]), Worker(steps(1, 10)[:1])
    made = bench.start(*workers)
    assert read(made, 0)
    workers[1].fail(UnavailableError("the input pipeline x is gone"))
    (entry,) = read(made, 1)
    assert entry.last
    assert entry.error is not None
    error = entry.error.restore()
    assert isinstance(error, UnavailableError)
    assert error.__notes__ == ["It made the batches of worker 1 of 2.", "In epoch 0."]
    assert made.join(5.0)
    assert all(worker.closed for worker in workers)
