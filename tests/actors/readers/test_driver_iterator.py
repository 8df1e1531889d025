"""The driver's iterator: when it opens and closes an epoch, and how batches share objects."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest

from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.core.errors import CancelledError, FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import InputOptions
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
        iterator = start(InputSide(side.opener, 1, side.timeouts, drain=lambda: waited.append(1)))
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
