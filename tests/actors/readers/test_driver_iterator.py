"""The driver's iterator: when it opens and closes an epoch, and the leaves of its batches."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest

from raydist.actors.readers.driver_iterator import BatchLeaf, DistributedIterator
from raydist.core.errors import CancelledError, FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute, distribute_from_function
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side
from tests.pipelines.threads import in_threads, quick_switches

__all__ = ["quick_switches"]


def start(side: InputSide, size: int = 8) -> Any:
    return iter(distribute(Dataset.range(size).batch(2), side, InputOptions(num_input_workers=0)))


def open_epochs(side: InputSide) -> int:
    host: Any = side.opener
    return len(host.pipeline.open_epochs())


def test_nothing_runs_before_the_first_batch() -> None:
    with fake_side(2) as side:
        iterator = start(side)
        assert isinstance(iterator, DistributedIterator)
        assert open_epochs(side) == 0
        next(iterator)
        assert open_epochs(side) == 1


def test_a_pass_is_closed_at_the_end_by_close_and_when_it_is_dropped() -> None:
    with fake_side(2) as side:
        iterator = start(side)
        list(iterator)
        assert open_epochs(side) == 0
        iterator = start(side)
        next(iterator)
        iterator.close()
        assert open_epochs(side) == 0
        iterator = start(side)
        next(iterator)
        del iterator
        gc.collect()
        assert open_epochs(side) == 0


def test_loading_a_state_ends_the_pass_before() -> None:
    with fake_side(2) as side:
        iterator = start(side)
        next(iterator)
        iterator.load_state_dict(iterator.state_dict())
        assert open_epochs(side) == 0
        assert [value.tolist() for value in next(iterator).values] == [[2], [3]]
        assert open_epochs(side) == 1


def test_stats_tell_of_the_pipeline_while_it_runs_and_after_its_end() -> None:
    with fake_side(2) as side:
        iterator = start(side)
        assert iterator.stats().stages == ()
        next(iterator)
        assert [stage.name for stage in iterator.stats().stages] == ["range-0", "batch-1"]
        list(iterator)
        assert iterator.stats().elements == 4
        assert open_epochs(side) == 0


def test_loading_waits_for_loops_under_way() -> None:
    waited = []
    with fake_side(1) as side:
        iterator = start(InputSide(side.opener, 1, side.timeouts, drain=lambda: waited.append(1)))
        state = iterator.state_dict()
        iterator.__reduce__()
        iterator.load_state_dict(state)
        assert waited == [1]


def test_what_is_no_state_is_refused_before_anything_is_given_up() -> None:
    waited = []
    with fake_side(1) as side:
        iterator = start(InputSide(side.opener, 1, side.timeouts, drain=lambda: waited.append(1)))
        with pytest.raises(InvalidArgumentError, match=r"part \['at'\] must be .* got 0.5"):
            iterator.load_state_dict({"at": 0.5})
        assert waited == []


def test_a_state_within_a_group_resumes_at_the_next_step() -> None:
    with fake_side(2) as side:
        iterator, resumed = start(side, 400), start(side, 400)
        leaves, states = [], []
        for _ in range(100):
            leaves.append(next(iterator))
            states.append(iterator.state_dict())
        within = [leaf.batch.step for leaf in leaves if 0 < leaf.batch.place < len(leaf.batch.group.rows) - 1]
        assert within, "the reader is quick, so steps go together"
        for step in (within[0], within[-1]):
            resumed.load_state_dict(states[step])
            assert [value.tolist() for value in next(resumed).values] == [[2 * step + 2], [2 * step + 3]]


def test_leaves_of_one_group_share_their_object_and_know_their_places() -> None:
    with fake_side(2) as side:
        iterator = start(side, 400)
        leaves = [next(iterator) for _ in range(100)]
        for leaf in leaves:
            part = leaf.part_on(1)
            assert part.ref is leaf.batch.group.refs[1]
            assert part.ref.leaf(part.leaf_index, part.place).tolist() == [2 * leaf.batch.step + 1]
            assert leaf.values[1].tolist() == [2 * leaf.batch.step + 1]


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_share_an_iterator_get_each_batch_once() -> None:
    with fake_side(2) as side:
        iterator = start(side, 2000)
        found: list[int] = []

        def read() -> None:
            for leaf in iterator:
                found.append(int(leaf.values[0][0]))
                state = iterator.state_dict()
                assert state["step"] > leaf.batch.step

        in_threads(4, read)
        assert sorted(found) == list(range(0, 2000, 2))


@pytest.mark.usefixtures("quick_switches")
def test_closing_beside_other_threads_ends_their_iteration() -> None:
    for _ in range(10):
        with fake_side(2) as side:
            iterator = start(side, 20_000)
            found: list[int] = []

            def read() -> None:
                with contextlib.suppress(FailedPreconditionError, CancelledError):
                    for leaf in iterator:  # noqa: B023 - the threads end in this turn
                        found.append(leaf.batch.step)  # noqa: B023
                        if len(found) > 30:  # noqa: B023
                            iterator.close()  # noqa: B023

            in_threads(4, read)
            assert len(found) == len(set(found)) < 10_000
            assert open_epochs(side) == 0


# --- leaves of a batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_parts_say_where_they_are_and_where_they_go(on_host: bool) -> None:
    options = InputOptions(num_input_workers=0, experimental_fetch_to_device=not on_host)
    with fake_side(2) as side:
        leaf: Any = next(iter(distribute(Dataset.range(3).batch(3), side, options)))
        assert isinstance(leaf, BatchLeaf)
        parts = [leaf.part_on(rank) for rank in range(2)]
        assert (leaf.num_parts, leaf.rows) == (2, (2, 1))
        assert [part.ref for part in parts] == list(leaf.batch.group.refs)
        assert [part.on_host for part in parts] == [on_host] * 2


def test_a_replica_whose_worker_has_ended_works_on_rows_of_another() -> None:
    options = InputOptions(num_input_workers=0)
    with fake_side(2, num_workers=2) as side:
        dataset = distribute_from_function(
            lambda context: Dataset.range(3 + 2 * context.input_pipeline_id).batch(3), side, options
        )
        leaf: Any = list(dataset)[1]
        assert [value.tolist() for value in leaf.values] == [[], [3, 4]]
        part = leaf.part_on(0, padding=True)
        assert part.ref is leaf.part_on(1).ref
        assert part.ref.leaf(part.leaf_index, part.place).tolist() == [3, 4]
        none = leaf.part_on(0)
        assert none.ref.leaf(none.leaf_index, none.place).shape == (0,)
