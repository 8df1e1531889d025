"""A stage: fused kernels between an input and its consumer, run by an executor, delivered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.blocks import Block
from raydist.pipelines.executor import Executor, Pending, StageResult, StageSpec
from raydist.pipelines.op import ElementError, Item, OpIterator, State
from raydist.pipelines.resume import Outbox

__all__ = ["StageIterator"]

_FIRST_ROWS = 64  # elements of a first block, before their size is known
_MAX_ROWS = 4096  # enough to make the cost of a block vanish beside that of its elements
_MAX_BYTES = 8 << 20


@final
@dataclass(frozen=True, slots=True)
class _Flight:
    """One submitted block (or one error of the input), and the input's state behind it."""

    work: Pending | ElementError
    assumed_starts: tuple[int, ...]
    input_state: State


@final
class StageIterator(OpIterator):
    """Keeps a window of blocks in an executor and delivers results in order.

    Its state is the input's, the index at which each kernel goes on, and the items handed out since.
    """

    def __init__(self, source: OpIterator, spec: StageSpec, executor: Executor, *, window: int, owned: bool) -> None:
        self._source = source
        self._spec = spec
        self._executor = executor
        self._window = window
        self._owned = owned
        self._flights: deque[_Flight] = deque()
        self._submit_starts = self._starts = (0,) * len(spec.kernels)
        self._rows = _FIRST_ROWS
        self._ended = False
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            self._submit(limit)
            if not self._flights:
                raise StopIteration
            self._receive(outbox, self._flights.popleft())
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border(self._source.state_dict()))
        return self._outbox

    def _border(self, input_state: State) -> State:
        return {"input": input_state, "starts": list(self._starts)}

    def _submit(self, limit: int) -> None:
        rows = max(1, min(-(-limit // self._window), self._rows))
        while not self._ended and len(self._flights) < self._window:
            try:
                block = self._source.next_block(rows)
            except StopIteration:
                self._ended = True
            except Exception as error:  # of one element of the input: it passes by, at its place
                self._enqueue(ElementError(error), 1)
            else:
                self._enqueue(self._executor.submit(self._spec, block, self._submit_starts), block.num_rows)

    def _enqueue(self, work: Pending | ElementError, size: int) -> None:
        self._flights.append(_Flight(work, self._submit_starts, self._source.state_dict()))
        self._submit_starts = tuple(start + size for start in self._submit_starts)

    def _receive(self, outbox: Outbox, flight: _Flight) -> None:
        if isinstance(flight.work, ElementError):
            items: Sequence[Item] = (flight.work,)
            self._starts = tuple(start + 1 for start in self._starts)
        else:
            result = flight.work.result()
            items = self._explain_errors(result, flight.assumed_starts)
            self._starts = tuple(s + n for s, n in zip(self._starts, result.inputs, strict=True))
            self._watch_size(result)
        outbox.put(items, self._border(flight.input_state))

    def _explain_errors(self, result: StageResult, assumed: tuple[int, ...]) -> Sequence[Item]:
        """Add what only the stage knows: the index of an element behind a filter."""
        for item in result.items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + self._starts[item.kernel]
                item.error.add_note(f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")
        return result.items

    def _watch_size(self, result: StageResult) -> None:
        sizes = [item.num_bytes // item.num_rows for item in result.items if isinstance(item, Block) and item.num_rows]
        if sizes:
            self._rows = max(1, min(_MAX_ROWS, _MAX_BYTES // max(1, *sizes)))

    def state_dict(self) -> State:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: State) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._source.load_state_dict(border["input"])
        self._starts = self._submit_starts = tuple(border["starts"])

    def close(self) -> None:
        self._flights.clear()
        if self._owned:
            self._executor.close()
        self._source.close()
