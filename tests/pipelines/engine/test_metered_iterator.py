from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from raydist.core.errors import UnavailableError
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine import build as build_module
from raydist.pipelines.engine.build import MeteredIterator
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.metering.iteration_meters import IterationMeters


class Clock:
    """Stands for the module `time`: it is what the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Worker(OpIterator):
    """Works for a second, then asks `source`."""

    def __init__(self, clock: Clock, source: OpIterator | None = None, error: Callable[[], Exception] | None = None):
        self.clock, self.source, self.error = clock, source, error
        self.closed = False

    def next_block(self, limit: int) -> Block:
        self.clock.now += 1.0
        if self.error is not None:
            raise self.error()
        if self.source is not None:
            return self.source.next_block(limit)
        return Block(LEAF, (TensorSpec((), np.dtype(np.int64)),), (np.zeros(3, np.int64),), 3)

    def state_dict(self) -> IteratorState:
        return {"at": self.clock.now}

    def load_state_dict(self, state: IteratorState) -> None:
        self.clock.now = state["at"]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(build_module, "time", clock)
    return clock


def test_own_time_is_without_that_of_the_inputs(clock: Clock) -> None:
    meters = IterationMeters()
    inner, outer = meters.meter("range-0"), meters.meter("map-1")
    # Something that is not metered stands between them: its second is the outer one's.
    between = Worker(clock, MeteredIterator(Worker(clock), inner, meters))
    source = MeteredIterator(Worker(clock, between), outer, meters)
    source.next_block(3)
    source.next_block(3)
    assert (inner.own_s, inner.input_s) == (2.0, 0.0)
    assert (outer.own_s, outer.input_s) == (4.0, 2.0)
    assert (outer.blocks, outer.elements, outer.bytes) == (2, 6, 48)
    assert meters.clock.inner_s == 6.0


def test_blocks_that_come_together_are_counted_one_by_one(clock: Clock) -> None:
    meters = IterationMeters()
    meter = meters.meter("map-1")
    assert len(MeteredIterator(Worker(clock), meter, meters).next_blocks(3)) == 1
    assert (meter.own_s, meter.blocks, meter.elements, meter.bytes) == (1.0, 1, 3, 24)
    meter.handed_out_together([Worker(clock).next_block(3)] * 2)
    assert (meter.blocks, meter.elements, meter.bytes) == (3, 9, 72)


def test_an_error_costs_time_and_is_counted(clock: Clock) -> None:
    meters = IterationMeters()
    meter = meters.meter("map-1")
    with pytest.raises(ValueError, match="no"):
        MeteredIterator(Worker(clock, error=lambda: ValueError("no")), meter, meters).next_block(1)
    assert (meter.errors, meter.own_s, meter.elements) == (1, 1.0, 0)


@pytest.mark.parametrize("error", [StopIteration, lambda: UnavailableError("gone")])
def test_neither_the_end_nor_a_failed_machinery_is_an_elements_error(
    clock: Clock, error: Callable[[], Exception]
) -> None:
    meters = IterationMeters()
    meter = meters.meter("map-1")
    with pytest.raises((StopIteration, UnavailableError)):
        MeteredIterator(Worker(clock, error=error), meter, meters).next_block(1)
    assert (meter.errors, meter.own_s) == (0, 1.0)


def test_states_and_closing_pass_through(clock: Clock) -> None:
    meters = IterationMeters()
    worker = Worker(clock)
    source = MeteredIterator(worker, meters.meter("range-0"), meters)
    source.load_state_dict({"at": 5.0})
    assert source.state_dict() == {"at": 5.0}
    source.close()
    assert worker.closed
