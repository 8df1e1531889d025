"""The driver's iterator: when it opens and closes an epoch, and how batches share objects."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

import raydist as rd
from raydist.actors.epochs.batch_group import BatchGroup, StepBatch
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.actors.readers.driver_epoch import make_again
from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.actors.readers.replica_iterator import FetchAhead
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from raydist.core.nest import LEAF
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, ReplicaCount, distribute
from raydist.options import InputOptions, Timeouts
from tests.actors.readers.fakes import fake_side
from tests.pipelines.threads import in_threads, quick_switches

__all__ = ["quick_switches"]


def start(side: InputSide, size: int = 8) -> Any:
    return iter(distribute(Dataset.range(size).batch(2), side, InputOptions(num_input_workers=0)))


def open_epochs(side: InputSide) -> int:
    host: Any = side.opener
    return len(host.pipeline.open_epochs())


def test_an_epoch_is_open_from_the_first_batch_until_its_iterator_ends_or_goes_away() -> None:
    with fake_side(2) as side:
        iterator = start(side)
        assert isinstance(iterator, DistributedIterator)
        assert (open_epochs(side), iterator.stats().stages) == (0, ())
        next(iterator)
        assert open_epochs(side) == 1
        assert [stage.name for stage in iterator.stats().stages] == ["range-0", "batch-1"]
        list(iterator)
        assert open_epochs(side) == 0
        assert iterator.stats().elements == 4
        iterator = start(side)
        next(iterator)
        iterator.close()
        assert open_epochs(side) == 0
        iterator = start(side)
        next(iterator)
        iterator.load_state_dict(iterator.state_dict())
        assert open_epochs(side) == 0
        assert [value.tolist() for value in next(iterator).values] == [[2], [3]]
        assert open_epochs(side) == 1
        del iterator
        gc.collect()
        assert open_epochs(side) == 0


def test_loading_waits_for_loops_under_way_unless_the_state_is_refused() -> None:
    waited = []
    with fake_side(1) as side:
        iterator = start(InputSide(side.opener, ReplicaCount(1), side.timeouts, drain=lambda: waited.append(1)))
        with pytest.raises(InvalidArgumentError, match=r"part \['at'\] must be .* got 0.5"):
            iterator.load_state_dict({"at": 0.5})
        state = iterator.state_dict()
        iterator.__reduce__()
        assert waited == []
        iterator.load_state_dict(state)
        assert waited == [1]


def test_steps_of_one_group_share_an_object_and_have_their_own_places_and_states() -> None:
    with fake_side(2) as side:
        iterator, resumed = start(side, 400), start(side, 400)
        leaves, states = [], []
        for _ in range(100):
            leaves.append(next(iterator))
            states.append(iterator.state_dict())
            part = leaves[-1].part_on(1)
            assert part.ref is leaves[-1].drawn.batch.group.refs[1]
            expected = [2 * leaves[-1].drawn.batch.step + 1]
            assert part.ref.leaf(part.leaf_index, part.place).tolist() == leaves[-1].values[1].tolist() == expected
        within = [
            leaf.drawn.batch.step
            for leaf in leaves
            if 0 < leaf.drawn.batch.place < len(leaf.drawn.batch.group.rows) - 1
        ]
        assert within, "the reader is quick, so steps go together"
        for step in (within[0], within[-1]):
            resumed.load_state_dict(states[step])
            assert [value.tolist() for value in next(resumed).values] == [[2 * step + 2], [2 * step + 3]]


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_share_an_iterator_get_each_batch_once() -> None:
    with fake_side(2) as side:
        iterator = start(side, 2000)
        found: list[int] = []

        def read() -> None:
            for leaf in iterator:
                found.append(int(leaf.values[0][0]))
                state = iterator.state_dict()
                assert state["step"] > leaf.drawn.batch.step

        in_threads(4, read)
        assert sorted(found) == list(range(0, 2000, 2))


@pytest.mark.usefixtures("quick_switches")
def test_closing_beside_other_threads_ends_their_iteration() -> None:
    for _ in range(5):
        with fake_side(2) as side:
            iterator = start(side, 20_000)
            found: list[int] = []

            def read() -> None:
                with contextlib.suppress(FailedPreconditionError, CancelledError):
                    for leaf in iterator:  # noqa: B023 - the threads end in this turn
                        found.append(leaf.drawn.batch.step)  # noqa: B023
                        if len(found) > 30:  # noqa: B023
                            iterator.close()  # noqa: B023

            in_threads(4, read)
            assert len(found) == len(set(found)) < 10_000
            assert open_epochs(side) == 0


# --- an input pipeline that is lost -----------------------------------------------------------------------------------


def batches_of(side: InputSide, dataset: Dataset) -> Any:
    return iter(distribute(dataset, side, InputOptions(num_input_workers=0)))


def rows(leaf: Any) -> list[int]:
    return [row for part in leaf._fetch() for row in part.tolist()]


DATA = Dataset.range(200).shuffle(50, seed=3).filter(lambda x: x % 7 > 0).batch(6)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_are_the_same_and_those_in_use_are_made_again(num_workers: int) -> None:
    draw = random.Random(0)
    data = DATA
    if num_workers == 2:
        options = rd.Options(auto_shard_policy=rd.AutoShardPolicy.OFF)
        data = DATA.with_options(options)
    with fake_side(4, num_workers=num_workers) as side:
        expected = [rows(leaf) for leaf in batches_of(side, data)]
    for _ in range(5):
        with fake_side(4, num_workers=num_workers) as side:
            host: Any = side.opener
            in_use: dict[int, Any] = {}
            for number, leaf in enumerate(batches_of(replace(side, restarts=3), data)):
                in_use[number] = leaf
                if draw.random() < 0.1:
                    host.lose_pipeline()
                    make_again([each.drawn for each in in_use.values() if each.drawn.link.is_lost()])
                if draw.random() < 0.1:
                    host.lose_pipeline()  # the driver reads what is lost, or the iterator goes on
                for done in draw.sample(sorted(in_use), k=draw.randrange(len(in_use) + 1)):
                    assert rows(in_use.pop(done)) == expected[done]
            assert number + 1 == len(expected)


def test_without_restarts_or_with_a_pipeline_that_always_dies_the_loss_is_an_error() -> None:
    for restarts in (0, 2):
        with fake_side(2) as side:
            host: Any = side.opener
            iterator = batches_of(replace(side, restarts=restarts), DATA)
            first = next(iterator)
            host.lose_pipeline()
            open_epoch = host.open

            def dies(job: Any, open_epoch: Any = open_epoch, host: Any = host) -> Any:
                link = open_epoch(job)
                host.lose_pipeline()
                return link

            host.open = dies
            with pytest.raises(rd.UnavailableError, match="is gone"):
                list(iterator)
            with pytest.raises(rd.UnavailableError):
                rows(first)


def test_another_batch_in_the_place_of_the_lost_one_is_an_error() -> None:
    with fake_side(1) as side:
        leaf = next(batches_of(side, DATA))
        other = next(batches_of(side, Dataset.range(20).batch(3))).drawn
        with pytest.raises(rd.UnavailableError, match="must make the same batch"):
            leaf.drawn.move_to(other.batch, other.link)


# --- prefetch of pieces -----------------------------------------------------------------------------------------------


class StepLink:
    """Answers with steps, up to the number that was made."""

    name = "steps"

    def __init__(self, made: int, input_s: float = 20.0, together: int = 1) -> None:
        self.together = together
        self.timeouts = Timeouts(poll_s=0.01, input_s=input_s)
        self.made = made
        self.broken = False

    def ask(self, poll: Poll) -> Poll:
        return poll

    def acknowledge(self, poll: Poll, rank: int | None, done: int) -> None:
        """Nothing here is made for want of news."""

    def is_answered(self, poll: Poll, stop: Future[None] | None = None, timeout_s: float | None = None) -> bool:
        while poll.start >= self.made:
            if timeout_s is not None or (stop is not None and stop.done()):
                return False
            threading.Event().wait(0.01)
        return True

    def receive(self, poll: Poll) -> tuple[QueueEntry, ...]:
        if self.broken:
            raise UnavailableError("the pipeline is gone")
        end = min(self.made, poll.start + self.together)
        if poll.start >= end:
            return ()
        group = BatchGroup(poll.start, (), ((),) * (end - poll.start), LEAF)
        entry = QueueEntry(poll.start, ({},) * (end - poll.start), group=group)
        return (entry, QueueEntry(end, ({},), last=True)) if end == 9 else (entry,)


class Fetch:
    """Notes which steps were fetched, and by which threads."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.fetched = threading.Semaphore(0)

    def __call__(self, batch: StepBatch) -> list[Any]:
        self.steps.append(batch.step)
        self.threads.add(threading.current_thread().name)
        self.fetched.release()
        return [batch.step * 10]


def make(link: StepLink, fetch: Fetch) -> FetchAhead:
    return FetchAhead(StepReader(link, rank=0, start=0), fetch)  # type: ignore[arg-type]  # a link's double


def test_every_piece_is_fetched_once_and_ahead() -> None:
    fetch = Fetch()
    ahead = make(StepLink(9), fetch)
    assert ahead.next_place()[1] == [0]
    for _ in range(2):
        assert fetch.fetched.acquire(timeout=20)
    assert fetch.steps == [0, 1], "the second piece came without being asked for"
    assert [ahead.next_place()[1] for _ in range(8)] == [[step * 10] for step in range(1, 9)]
    place, leaves = ahead.next_place()
    assert (place.last, leaves) == (True, [])
    assert fetch.steps == list(range(9))
    assert any(name.startswith("raydist-piece") for name in fetch.threads)
    assert ahead.close().position == 9


def test_quick_pieces_of_a_group_in_hand_are_copied_where_they_are_asked_for() -> None:
    fetch = Fetch()
    reader: Any = StepReader(StepLink(9, together=3), rank=0, start=0)  # type: ignore[arg-type]  # a link's double
    ahead = FetchAhead(reader, fetch, lambda batch: batch.place > 0)
    assert [ahead.next_place()[1] for _ in range(2)] == [[0], [10]]
    assert fetch.threads == {threading.current_thread().name}
    assert [ahead.next_place()[1] for _ in range(7)] == [[step * 10] for step in range(2, 9)]
    assert fetch.steps == list(range(9))
    assert len(fetch.threads) == 2, "the first piece of the next group came ahead"
    ahead.close()


def test_a_step_that_does_not_come_is_late() -> None:
    link = StepLink(1, input_s=0.1)
    ahead = make(link, Fetch())
    ahead.next_place()
    with pytest.raises(DeadlineExceededError, match=r"pipeline steps must come within 0\.1 s \(Timeouts\.input_s\)"):
        ahead.next_place()
    link.made = 2
    assert ahead.next_place()[1] == [10]
    assert ahead.close().position == 2, "what was not handed out is not taken"


def test_what_fails_ahead_fails_again_where_it_is_asked_for() -> None:
    link = StepLink(9)
    ahead = make(link, Fetch())
    link.made = 1
    ahead.next_place()
    link.broken = True
    link.made = 9
    with pytest.raises(UnavailableError):
        ahead.next_place()
    ahead.close()
