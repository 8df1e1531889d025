"""A stage's way to its executor and back: how much is under way, and results made fit to be handed out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.block_size import BlockSize
from raydist.pipelines.engine.executor import Executor, Pending, StageResult, StageSpec, run_stage
from raydist.pipelines.engine.op import MACHINERY_ERRORS, ElementError, Item
from raydist.pipelines.metering.meters import Meter

__all__ = ["Crew", "Flight", "StageResults"]


@final
@dataclass(frozen=True, slots=True)
class Flight:
    """One block under way; `starts` is where each kernel is assumed to begin."""

    block: Block
    work: Pending
    starts: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Crew:
    """Who does the work of a stage.

    Attributes:
        executor: Runs the blocks.
        most: Blocks under way at most; None for the executor's window, which may change as it runs.
        owned: Whether the stage closes the executor.
        together: Elements that the consumer takes at a time.
    """

    executor: Executor
    most: int | None = None
    owned: bool = False
    together: int = 1

    @property
    def window(self) -> int:
        """Blocks under way at most, now."""
        return self.executor.window if self.most is None else min(self.most, self.executor.window)


@final
class StageResults:
    """Receives the results of one stage, counts its work, and watches the size of its elements.

    Attributes:
        signatures: What each kernel made first, "" for nothing yet: all else is an error.
    """

    def __init__(self, spec: StageSpec, crew: Crew, meter: Meter) -> None:
        self.signatures = ("",) * len(spec.kernels)
        self._spec = spec
        self._crew = crew
        self._meter = meter
        self._size = BlockSize(away=crew.executor.place == "actors", together=crew.together)

    def rows(self, limit: int) -> int:
        """Elements of the next block, for a consumer that wants `limit`."""
        rows = self._size.rows(limit, self._crew.window, self._crew.executor.least_rows)
        self._meter.buffer_limit = rows * self._crew.window
        return rows

    def send(self, block: Block, starts: tuple[int, ...], made_in_s: float) -> Flight:
        """Begin the work on a block, which the input made in `made_in_s` seconds."""
        self._size.learn_input(made_in_s)
        self._meter.buffered += block.num_rows
        return Flight(block, self._crew.executor.submit(self._spec, block, starts), starts)

    def receive(self, flight: Flight, starts: tuple[int, ...]) -> StageResult:
        """The result of a block whose first element is, for each kernel, element number `starts`. Waits for it."""
        meter, here = self._meter, self._crew.executor.place == "inline"
        meter.ask()
        begin = time.perf_counter()
        result = self._result(flight)
        if not here:
            meter.awaited_s += time.perf_counter() - begin
        meter.worked(result, here=here)
        meter.buffered -= flight.block.num_rows
        self._explain_errors(result.items, flight.starts, starts)
        self._size.learn(flight.block, result)
        return result

    def _result(self, flight: Flight) -> StageResult:
        """The result of a block; one that could not be worked on at all is as many errors as it has elements."""
        try:
            return self._checked(flight, flight.work.result())
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # a function that cannot be loaded by a worker, say
            rows = flight.block.num_rows
            num_kernels = len(self._spec.kernels)
            return StageResult((ElementError(error),) * rows, (rows,) * num_kernels, ("",) * num_kernels)

    def _checked(self, flight: Flight, result: StageResult) -> StageResult:
        """The result; made again where it begins with another structure or dtype than the blocks before it."""
        pairs = zip(self.signatures, result.signatures, strict=True)
        if any(mine and theirs and mine != theirs for mine, theirs in pairs):
            result = run_stage(self._spec, flight.block, flight.starts, self.signatures)
        pairs = zip(self.signatures, result.signatures, strict=True)
        self.signatures = tuple(mine or theirs for mine, theirs in pairs)
        return result

    def _explain_errors(self, items: Sequence[Item], assumed: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Add what only the stage knows: the index of an element behind a filter."""
        for item in items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + starts[item.kernel]
                item.error.add_note(f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")

    def close(self) -> None:
        """Forget what is under way; close the executor if it is the stage's own."""
        self._meter.buffered = 0
        if self._crew.owned:
            self._crew.executor.close()
