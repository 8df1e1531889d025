"""A stage: fused kernels between an input and its consumer, run by an executor, delivered in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.block_size import BlockSize
from raydist.pipelines.blocks import Block
from raydist.pipelines.executor import Executor, Pending, StageResult, StageSpec, run_stage
from raydist.pipelines.meters import Meter
from raydist.pipelines.op import MACHINERY_ERRORS, ElementError, Item, OpIterator, State
from raydist.pipelines.resume import Outbox

__all__ = ["StageIterator"]


@final
@dataclass(frozen=True, slots=True)
class _Flight:
    """One submitted block, and the input's state behind it."""

    block: Block
    work: Pending
    starts: tuple[int, ...]
    input_state: State


@final
@dataclass(frozen=True, slots=True)
class _Passing:
    """An error of the input, on its way between the blocks."""

    error: ElementError
    input_state: State


@final
class StageIterator(OpIterator):
    """Keeps a window of blocks in an executor and delivers results in order.

    Its state is the input's, the index at which each kernel goes on, and the items handed out since.

    Args:
        source: The input.
        spec: The work.
        executor: Who does it.
        most: Blocks under way at most; None for the executor's window, which may change as it runs.
        owned: Whether to close the executor.
        meter: Counts the work.
    """

    def __init__(
        self, source: OpIterator, spec: StageSpec, executor: Executor, *, most: int | None, owned: bool, meter: Meter
    ) -> None:
        self._source = source
        self._spec = spec
        self._executor = executor
        self._most = most
        self._owned = owned
        self._meter = meter
        self._flights: deque[_Flight | _Passing] = deque()
        self._next_starts = self._starts = (0,) * len(spec.kernels)
        self._signatures = ("",) * len(spec.kernels)  # what each kernel made first: all else is an error
        self._size = BlockSize(away=executor.place == "actors")
        self._ended = False
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            self._submit(limit)
            if not self._flights:
                raise StopIteration
            self._receive(outbox, self._flights[0])
            self._flights.popleft()
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border(self._source.state_dict()))
        return self._outbox

    def _border(self, input_state: State) -> State:
        return {"input": input_state, "starts": list(self._starts), "signatures": list(self._signatures)}

    def _submit(self, limit: int) -> None:
        window = self._executor.window if self._most is None else min(self._most, self._executor.window)
        rows = self._size.rows(limit, window, self._executor.least_rows)
        self._meter.buffer_limit = rows * window
        while not self._ended and len(self._flights) < window:
            begin = time.perf_counter()
            try:
                block = self._source.next_block(rows)
            except StopIteration:
                self._ended = True
            except MACHINERY_ERRORS:
                raise
            except Exception as error:  # of one element of the input: it passes by, at its place
                self._flights.append(_Passing(ElementError(error), self._source.state_dict()))
                self._shift(1)
            else:
                self._size.learn_input(time.perf_counter() - begin)
                self._meter.buffered += block.num_rows
                work = self._executor.submit(self._spec, block, self._next_starts)
                self._flights.append(_Flight(block, work, self._next_starts, self._source.state_dict()))
                self._shift(block.num_rows)

    def _shift(self, count: int) -> None:
        """The index of the next element is known for kernels before a filter, and assumed for those behind it."""
        self._next_starts = tuple(start + count for start in self._next_starts)

    def _receive(self, outbox: Outbox, flight: _Flight | _Passing) -> None:
        items: Sequence[Item]
        if isinstance(flight, _Passing):
            items, entered = (flight.error,), (1,) * len(self._starts)
        else:
            result = self._await(flight)
            self._explain_errors(result.items, flight.starts)
            self._size.learn(flight.block, result)
            items, entered = result.items, result.inputs
        self._starts = tuple(start + count for start, count in zip(self._starts, entered, strict=True))
        outbox.put(items, self._border(flight.input_state))

    def _await(self, flight: _Flight) -> StageResult:
        meter, here = self._meter, self._executor.place == "inline"
        meter.ask()
        begin = time.perf_counter()
        result = self._result(flight)
        if not here:
            meter.awaited_s += time.perf_counter() - begin
        meter.worked(result, here=here)
        meter.buffered -= flight.block.num_rows
        return result

    def _result(self, flight: _Flight) -> StageResult:
        """The result of a block; one that could not be worked on at all is as many errors as it has elements."""
        try:
            return self._checked(flight, flight.work.result())
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # a function that cannot be loaded by a worker, say
            rows = flight.block.num_rows
            num_kernels = len(self._starts)
            return StageResult((ElementError(error),) * rows, (rows,) * num_kernels, ("",) * num_kernels)

    def _checked(self, flight: _Flight, result: StageResult) -> StageResult:
        """The result; made again where it begins with another structure or dtype than the blocks before it."""
        pairs = zip(self._signatures, result.signatures, strict=True)
        if any(mine and theirs and mine != theirs for mine, theirs in pairs):
            result = run_stage(self._spec, flight.block, flight.starts, self._signatures)
        pairs = zip(self._signatures, result.signatures, strict=True)
        self._signatures = tuple(mine or theirs for mine, theirs in pairs)
        return result

    def _explain_errors(self, items: Sequence[Item], assumed: tuple[int, ...]) -> None:
        """Add what only the stage knows: the index of an element behind a filter."""
        for item in items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + self._starts[item.kernel]
                item.error.add_note(f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")

    def state_dict(self) -> State:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: State) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._source.load_state_dict(border["input"])
        self._starts = self._next_starts = tuple(border["starts"])
        self._signatures = tuple(border["signatures"])

    def close(self) -> None:
        self._flights.clear()
        self._meter.buffered = 0
        if self._owned:
            self._executor.close()
        self._source.close()
