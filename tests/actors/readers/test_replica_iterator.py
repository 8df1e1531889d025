"""Loops inside the replicas: each replica draws its own pieces, and the driver continues where the replicas stopped."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.core.errors import FailedPreconditionError, OutOfRangeError
from raydist.core.values import InputContext
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute, distribute_from_function
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side
from tests.pipelines.threads import in_threads, quick_switches
from tests.waiting import wait_until

__all__ = ["quick_switches"]


def start(side: InputSide, dataset: Dataset) -> Any:
    return iter(distribute(dataset, side, InputOptions(num_input_workers=0)))


def send(iterator: Any) -> ReplicaIterator:
    """What arrives where `iterator` was pickled to."""
    make, args = iterator.__reduce__()
    replica: ReplicaIterator = make(*args)
    return replica


def draw(replica: ReplicaIterator, rank: int, count: int | None = None) -> list[Any]:
    """So many batches, or all."""
    replica.bind(rank)
    try:
        return [batch.tolist() for batch in itertools.islice(replica, count)]
    finally:
        replica.release()


@pytest.mark.parametrize("on_host", [False, True])
def test_a_large_piece_is_on_its_way_to_the_device_before_it_is_asked_for(on_host: bool) -> None:
    events: list[str] = []

    def begin(leaf: Any) -> Any:
        events.append(f"begin {int(leaf[0, 0])}")
        return leaf

    def place(leaf: Any) -> Any:
        events.append(f"place {int(leaf[0, 0])}")
        return leaf

    rows = Dataset.range(4).map(lambda x: np.full(100_000, x)).batch(1)
    options = InputOptions(num_input_workers=0, experimental_fetch_to_device=not on_host)
    with fake_side(1) as side:
        replica = send(iter(distribute(rows, side, options)))
        replica.bind(0, begin=begin, place=place)
        next(replica)
        wait_until(lambda: len(events) >= 3 or on_host)
        ahead = sorted(events)
        next(replica)
        replica.release()
    assert ahead == ([] if on_host else ["begin 0", "begin 1", "place 0"])
    assert ("place 1" in events) is not on_host


def test_replicas_of_several_workers_loop_until_all_have_ended() -> None:
    """Each sees as many steps; one whose worker has ended works on rows of another, or on none."""
    with fake_side(4, num_workers=2) as side:

        def make(context: InputContext) -> Dataset:
            return Dataset.range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 6).take(
                2 + 4 * context.input_pipeline_id
            )

        view = distribute_from_function(lambda context: make(context).batch(1), side, InputOptions(num_input_workers=0))
        iterator = iter(view)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(draw, [send(iterator) for _ in range(4)], range(4)))
        assert found == [[[0], [10 + 2], [14]], [[1], [12], [14]], [[10], [12], [14]], [[11], [13], [15]]]
        rows: list[tuple[int, ...]] = []
        replica = send(iter(view))
        replica.bind(0, empty_batch="zero_rows", on_batch=lambda batch: rows.append(batch.rows))
        assert [batch.tolist() for batch in replica] == [[0], [], []]
        replica.release()
        assert rows == [(1, 1, 1, 1), (0, 0, 1, 1), (0, 0, 1, 1)]


def test_the_driver_goes_on_where_the_replicas_stopped() -> None:
    with fake_side(2) as side:
        iterator = start(side, Dataset.range(12).batch(2))
        assert [value.tolist() for value in next(iterator).values] == [[0], [1]]
        for first in (2, 4):  # a second loop goes on before the driver looks
            assert [draw(send(iterator), rank, 1) for rank in range(2)] == [[[first]], [[first + 1]]]
        state = iterator.state_dict()
        assert [value.tolist() for value in next(iterator).values] == [[6], [7]]
        assert [draw(send(iterator), rank, 1) for rank in range(2)] == [[[8]], [[9]]]
        assert [value.tolist() for value in next(iterator).values] == [[10], [11]]
        iterator.load_state_dict(state)
        assert [value.tolist() for value in next(iterator).values] == [[6], [7]]


def test_a_bound_replica_knows_the_state_after_what_it_was_handed_and_its_rows() -> None:
    with fake_side(1) as side:
        iterator = start(side, Dataset.range(6).batch(1))
        replica = send(iterator)
        with pytest.raises(FailedPreconditionError, match="while it is read"):
            replica.state_dict()
        with pytest.raises(FailedPreconditionError, match=r"strategy\.run"):
            next(replica)
        rows: list[Any] = []
        replica.bind(0, place=lambda leaf: leaf.to(torch.float64), on_batch=lambda batch: rows.append(batch.rows))
        before = replica.state_dict()
        assert next(replica).dtype == torch.float64
        after = replica.state_dict()
        next(replica)
        assert rows == [(1,), (1,)]
        replica.release()
        for state, expected in ((before, 0), (after, 1)):
            iterator.load_state_dict(state)
            assert next(iterator).values[0].tolist() == [expected]


def test_an_abandoned_pass_lives_until_the_replicas_have_read_it() -> None:
    with fake_side(2) as side:
        replicas = [send(iterator) for iterator in [start(side, Dataset.range(8).batch(2))] for _ in range(2)]
        host: Any = side.opener
        assert draw(replicas[0], 0, 2) == [[0], [2]]
        assert draw(replicas[1], 1, 1) == [[1]]
        assert len(host.pipeline.open_epochs()) == 1  # each replica was sent it twice
        draw(replicas[0], 0, 0)
        draw(replicas[1], 1, 0)
        assert host.pipeline.open_epochs() == []


def test_the_end_is_the_end_for_everybody() -> None:
    with fake_side(2) as side:
        iterator = start(side, Dataset.range(2).batch(2))
        for rank in range(2):
            replica = send(iterator)
            replica.bind(rank)
            assert len(list(replica)) == 1
            with pytest.raises(OutOfRangeError):
                replica.get_next()
            replica.release()
        with pytest.raises(StopIteration):
            next(iterator)
        ended = send(iterator)
        ended.bind(0)
        assert list(ended) == []


def test_an_error_comes_out_on_every_replica_and_the_loop_goes_on() -> None:
    def divide(x: Any) -> Any:
        return 6 // int(x - 1)

    with fake_side(2) as side:
        iterator = start(side, Dataset.range(3).map(divide).batch(1))
        for rank in range(2):
            replica = send(iterator)
            replica.bind(rank)
            next(replica)
            with pytest.raises(ZeroDivisionError):
                next(replica)
            assert next(replica).tolist() == [6]
            replica.release()


@pytest.mark.usefixtures("quick_switches")
def test_threads_of_a_step_may_share_the_iterator() -> None:
    with fake_side(1) as side:
        replica = send(start(side, Dataset.range(500).batch(1)))
        replica.bind(0)
        found: list[int] = []
        in_threads(4, lambda: found.extend(int(batch) for batch in replica))
        replica.release()
        assert sorted(found) == list(range(500))
