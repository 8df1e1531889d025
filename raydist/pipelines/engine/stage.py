"""A stage: fused kernels between an input and its consumer, run by an executor, delivered in order or as they end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError
from raydist.core.exception_utils import annotate
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block, concat_blocks, same_kind
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, StageResult, count_items
from raydist.pipelines.elements.saved_state import counts_in, texts_in
from raydist.pipelines.engine.arrival_order import ArrivalOrder
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.producers import read_item
from raydist.pipelines.engine.resume import Outbox, read_items
from raydist.pipelines.metering.meter import Meter


@final
@dataclass(frozen=True, slots=True)
class SentBlock:
    """One block in flight; `starts` is the assumed first index of each kernel."""

    block: Block
    work: Pending
    starts: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StageWorkers:
    """The executor of a stage and its limits.

    Attributes:
        executor: Runs the blocks.
        most: Largest number of blocks in flight; None for the executor's window, which may change at run time.
        owned: True if the stage closes the executor.
        together: Elements that the consumer takes at a time.
    """

    executor: Executor
    most: int | None = None
    owned: bool = False
    together: int = 1

    @property
    def window(self) -> int:
        """The largest number of blocks in flight, now."""
        return self.executor.window if self.most is None else min(self.most, self.executor.window)


@final
class StageDispatch:
    """Sender and receiver of the blocks of one stage, which counts the work and tracks the size of elements.

    Attributes:
        signatures: Signature of each kernel's first result, "" before any. Results with another signature are errors.
    """

    def __init__(self, spec: StageSpec, workers: StageWorkers, meter: Meter) -> None:
        self.signatures = ("",) * len(spec.kernels)
        self._spec = spec
        self._workers = workers
        self._meter = meter
        self._size = workers.executor.block_size(spec, workers.together)

    def rows(self, limit: int) -> int:
        """Return the number of elements of the next block, for a consumer that wants `limit`."""
        rows = self._size.rows(limit, self._workers.window, self._workers.executor.least_rows)
        self._meter.buffer_limit = rows * self._workers.window
        return rows

    def send(self, block: Block, starts: tuple[int, ...], made_in_s: float) -> SentBlock:
        """Start the work on a block, which the input made in `made_in_s` seconds."""
        self._size.learn_input(made_in_s)
        self._meter.buffered += block.num_rows
        return SentBlock(block, self._workers.executor.submit(self._spec, block, starts), starts)

    def receive(self, sent: SentBlock, starts: tuple[int, ...]) -> StageResult:
        """Return the result of a block whose first element has index `starts` for each kernel. Blocks."""
        meter, here = self._meter, self._workers.executor.place == "inline"
        meter.ask()
        begin = time.perf_counter()
        result = self._result(sent)
        if not here:
            meter.awaited_s += time.perf_counter() - begin
        meter.worked(result, here=here)
        meter.buffered -= sent.block.num_rows
        assumed = sent.starts
        if assumed != starts and result.is_numbered:  # after a filter, the indices were assumptions
            result, assumed = run_stage(self._spec, sent.block.in_memory(), starts, self.signatures), starts
        self._explain_errors(result.items, assumed, starts)
        self._size.learn(sent.block, result)
        return result

    def _result(self, sent: SentBlock) -> StageResult:
        """Return the result of a block. If the block fails as a whole, every element becomes an error."""
        try:
            return self._checked(sent, sent.work.result())
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # such as a function that a worker cannot load
            rows = sent.block.num_rows
            num_kernels = len(self._spec.kernels)
            return StageResult((ElementError(error),) * rows, (rows,) * num_kernels, ("",) * num_kernels)

    def _checked(self, sent: SentBlock, result: StageResult) -> StageResult:
        """Return the result; run the block again if its structure or dtype differs from earlier blocks."""
        if result.signatures == self.signatures:
            return result
        pairs = zip(self.signatures, result.signatures, strict=True)
        if any(mine and theirs and not same_kind(mine, theirs) for mine, theirs in pairs):
            result = run_stage(self._spec, sent.block.in_memory(), sent.starts, self.signatures)
        pairs = zip(self.signatures, result.signatures, strict=True)
        self.signatures = tuple(mine or theirs for mine, theirs in pairs)
        return result

    def _explain_errors(self, items: Sequence[Item], assumed: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Add the index of an element after a filter to its error: only the stage knows it."""
        for item in items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + starts[item.kernel]
                annotate(item.error, f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")

    def close(self) -> None:
        """Discard the blocks in flight; close the executor if the stage owns it."""
        self._meter.buffered = 0
        if self._workers.owned:
            self._workers.executor.close()


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """A block in flight or an error of the input, and the state of the input after it."""

    item: SentBlock | ElementError
    input_state: IteratorState


@final
class StageIterator(OpIterator):
    """An iterator that keeps a window of blocks in an executor and delivers results in order.

    The state consists of the input's state, the next index of each kernel, and the number of items handed out since.
    """

    def __init__(self, source: OpIterator, spec: StageSpec, workers: StageWorkers, meter: Meter) -> None:
        self._source = source
        self._workers = workers
        self._results = StageDispatch(spec, workers, meter)
        self._places: deque[_Place] = deque()
        self._next_starts = self._starts = (0,) * len(spec.kernels)
        self._ended = False
        self._outbox: Outbox | None = None

    def has_ready(self) -> bool:
        if self._outbox:
            return True
        first = self._places[0].item if self._places else None
        return self._workers.executor.place == "inline" if first is None else _is_done(first)

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            self._submit(limit)
            if not self._places:
                raise StopIteration
            self._receive(outbox, self._places[0])
            self._places.popleft()
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border(self._source.state_dict()))
        return self._outbox

    def _border(self, input_state: IteratorState) -> IteratorState:
        return {"input": input_state, "starts": list(self._starts), "signatures": list(self._results.signatures)}

    def _submit(self, limit: int) -> None:
        rows, window = self._results.rows(limit), self._workers.window
        while not self._ended and len(self._places) < window:
            begin = time.perf_counter()
            try:
                block = self._source.next_block(rows)
            except StopIteration:
                self._ended = True
            except MACHINERY_ERRORS:
                raise
            except Exception as error:  # of one element of the input: handed out in its place
                self._places.append(_Place(ElementError(error), self._source.state_dict()))
                self._shift(1)
            else:
                sent = self._results.send(block, self._next_starts, time.perf_counter() - begin)
                self._places.append(_Place(sent, self._source.state_dict()))
                self._shift(block.num_rows)

    def _shift(self, count: int) -> None:
        """Advance the next index: exact for kernels before a filter, an assumption for kernels after it."""
        self._next_starts = tuple(start + count for start in self._next_starts)

    def _receive(self, outbox: Outbox, place: _Place) -> None:
        items: Sequence[Item]
        if isinstance(place.item, ElementError):
            items, entered = (place.item,), (1,) * len(self._starts)
        else:
            result = self._results.receive(place.item, self._starts)
            items, entered = result.items, result.inputs
        self._starts = tuple(start + count for start, count in zip(self._starts, entered, strict=True))
        if len(self._places) == 1:  # nothing else is in flight, so the index is exact again
            self._next_starts = self._starts
        outbox.put(items, self._border(place.input_state))

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._source.load_state_dict(border["input"])
        self._starts = self._next_starts = counts_in(border["starts"], len(self._starts))
        self._results.signatures = texts_in(border["signatures"], len(self._results.signatures))

    def close(self) -> None:
        self._places.clear()
        self._results.close()
        self._source.close()


def _is_done(item: SentBlock | ElementError) -> bool:
    return isinstance(item, ElementError) or item.work.done()


_FIRST_NAP_S = 0.0002  # between two checks for a finished block; doubled up to the last
_LAST_NAP_S = 0.005


@final
@dataclass(frozen=True, slots=True)
class _OpenPlace:
    """A block in flight or an error of the input, and the input's state and the indices before it."""

    item: SentBlock | ElementError
    input_state: IteratorState
    starts: tuple[int, ...]


@final
class UnorderedStageIterator(OpIterator):
    """An iterator that keeps a window of blocks in an executor and delivers results as they finish.

    The state consists of the input's state before the oldest block not handed out, the numbers of later blocks handed
    out, and the number of items handed out since. `order` notes the order of blocks; after resuming, the stage follows
    these notes.
    """

    def __init__(
        self, source: OpIterator, spec: StageSpec, workers: StageWorkers, meter: Meter, order: ArrivalOrder
    ) -> None:
        self._source = source
        self._spec = spec
        self._workers = workers
        self._order = order
        self._results = StageDispatch(spec, workers, meter)
        self._places: dict[int, _OpenPlace] = {}  # by number, oldest first
        self._next = 0  # number of the next block to be read
        self._next_starts = (0,) * len(spec.kernels)
        self._first = 0  # number of the oldest block not handed out
        self._ahead: set[int] = set()  # numbers of later blocks that were handed out
        self._given = 0
        self._ended = False
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            self._submit(limit)
            if not self._places:
                raise StopIteration
            self._give(outbox, self._choose())
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border())
        return self._outbox

    def _border(self) -> IteratorState:
        oldest = self._places.get(self._first)
        return {
            "input": self._source.state_dict() if oldest is None else oldest.input_state,
            "starts": list(self._next_starts if oldest is None else oldest.starts),
            "signatures": list(self._results.signatures),
            "order": self._spec.name,
            "first": self._first,
            "given": self._given,
            "ahead": sorted(self._ahead),
        }

    def _submit(self, limit: int) -> None:
        rows, window = self._results.rows(limit), self._workers.window
        noted = self._order.number_at(self._given)
        while not self._ended and (len(self._places) < window or (noted is not None and noted >= self._next)):
            before = self._source.state_dict()
            begin = time.perf_counter()
            try:
                item = self._read(rows)
            except StopIteration:
                self._ended = True
            else:
                self._begin(item, before, time.perf_counter() - begin)

    def _read(self, rows: int) -> Item:
        """Return the next block; a block that was read before keeps its size."""
        size = self._order.size_of(self._next)
        if size is None:
            return read_item(self._source, rows)
        items = read_items(self._source, size)
        if count_items(items) == size == 1:
            return items[0]
        blocks = [item for item in items if isinstance(item, Block)]
        if len(blocks) < len(items) or count_items(items) < size:
            raise FailedPreconditionError(
                f"The input of stage {self._spec.name} must be the same again to resume: block {self._next} had {size} "
                f"elements, got {items}. Resume with the data and functions that the state was saved with."
            )
        return concat_blocks(blocks)

    def _begin(self, item: Item, before: IteratorState, made_in_s: float) -> None:
        number, starts = self._next, self._next_starts
        count = count_items([item])
        self._next = number + 1
        self._next_starts = tuple(start + count for start in starts)
        self._order.was_read(number, count)
        if number in self._ahead:  # handed out before the state was saved
            self._pass_given()
            return
        sent = item if isinstance(item, ElementError) else self._results.send(item, starts, made_in_s)
        self._places[number] = _OpenPlace(sent, before, starts)

    def _choose(self) -> int:
        """Return the number of the next block: the noted one, else the oldest finished one. Blocks."""
        noted = self._order.number_at(self._given)
        if noted is not None:
            if noted not in self._places:
                raise FailedPreconditionError(
                    f"The input of stage {self._spec.name} must be the same again to resume, but it ended before block "
                    f"{noted}. Resume with the data that the state was saved with."
                )
            return noted
        nap_s, deadline = _FIRST_NAP_S, time.monotonic() + Timeouts().input_s
        while (number := self._finished()) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"A block of stage {self._spec.name} must be finished within {Timeouts().input_s:g} s, and none of "
                    f"{len(self._places)} is. Is its function waiting for something?"
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LAST_NAP_S)
        return number

    def _finished(self) -> int | None:
        for number, place in self._places.items():
            if isinstance(place.item, ElementError) or place.item.work.done():
                return number
        return None

    def _give(self, outbox: Outbox, number: int) -> None:
        place = self._places[number]
        items: Sequence[Item]
        if isinstance(place.item, ElementError):
            items = (place.item,)
        else:
            items = self._results.receive(place.item, place.starts).items
        del self._places[number]
        self._order.was_given(self._given, number)
        self._given += 1
        self._ahead.add(number)
        self._pass_given()
        outbox.put(items, self._border())

    def _pass_given(self) -> None:
        """Advance `_first` past the blocks that were handed out, up to the next one to be read."""
        while self._first in self._ahead and self._first < self._next:
            self._ahead.remove(self._first)
            self._first += 1

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._source.load_state_dict(border["input"])
        self._next_starts = counts_in(border["starts"], len(self._next_starts))
        self._results.signatures = texts_in(border["signatures"], len(self._results.signatures))
        self._first = self._next = int(border["first"])
        self._given = int(border["given"])
        self._ahead = set(counts_in(border["ahead"], len(border["ahead"])))

    def close(self) -> None:
        self._places.clear()
        self._results.close()
        self._source.close()
