"""Iterators for operations that make several items at a time: a producer makes the items, an iterator here resumes.

An operation whose position is a few numbers is a :class:`ResumableProducer`, run by :class:`BorderIterator`. An
operation with a large state (a user's running value, every key seen) is a plain :class:`Producer`, run by
:class:`ReplayIterator`, whose state is a count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from raydist.core.errors import FailedPreconditionError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items
from raydist.pipelines.elements.key_order import KeyOrder
from raydist.pipelines.engine.kernel import reject_others
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.engine.resume import Outbox

_WHOLE = 1 << 62
_ROWS = 1024  # items made at a time while an iterator repeats what it handed out before


def read_item(source: OpIterator, limit: int) -> Item:
    """Return the next 1 .. `limit` elements of `source`, or the error at this place. Raises StopIteration."""
    try:
        return source.next_block(limit)
    except (StopIteration, *MACHINERY_ERRORS):
        raise
    except Exception as error:  # the error of one element: it takes that element's place
        return ElementError(error)


def read_watched(source: OpIterator, size: RequestSize) -> Item:
    """Return as many of the next elements as `size` chooses, or the error at this place.

    For producers that read an unknown number of elements to make one.
    """
    try:
        return size.read(source, _WHOLE)
    except (StopIteration, *MACHINERY_ERRORS):
        raise
    except Exception as error:  # as above
        return ElementError(error)


class Producer(ABC):
    """Interface of an object that makes the items of one pass."""

    @abstractmethod
    def make(self, limit: int) -> Sequence[Item]:
        """Return some items in order, as needed for `limit` elements of output. An empty result is not the end.

        Raises:
            StopIteration: No item is left.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the inputs. May be called twice."""


class ResumableProducer(Producer):
    """A producer whose position between two calls of `make` is small."""

    @abstractmethod
    def border(self) -> IteratorState:
        """Return the position of the next `make`: small and JSON-able."""

    @abstractmethod
    def restore(self, border: IteratorState) -> None:
        """Continue at `border`. Must be called on a fresh producer."""


@final
class BorderIterator(OpIterator):
    """An iterator whose state is the producer's last border and the number of items handed out since."""

    def __init__(self, producer: ResumableProducer) -> None:
        self._producer = producer
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            items = self._producer.make(limit)
            outbox.put(items, self._producer.border())
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._producer.border())
        return self._outbox

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        self._producer.restore(self._open_outbox().load_state_dict(state))

    def close(self) -> None:
        self._producer.close()


@final
class ReplayIterator(OpIterator):
    """An iterator whose state is the number of items handed out. Resuming makes and drops that many again."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._outbox = Outbox({})
        self._handed_out = 0
        self._to_pass = 0

    def next_block(self, limit: int) -> Block:
        while self._to_pass:
            self._pass_over()
        while not self._outbox:
            self._outbox.put(self._producer.make(limit), {})
        try:
            block = self._outbox.take(limit)
        except Exception:
            self._handed_out += 1
            raise
        self._handed_out += block.num_rows
        return block

    def _pass_over(self) -> None:
        try:
            items = self._producer.make(min(_ROWS, self._to_pass))
        except StopIteration:
            raise FailedPreconditionError(
                f"The input must be the same again to resume after {self._handed_out} elements, but it ended "
                f"{self._to_pass} earlier. Resume with the data that the state was saved with."
            ) from None
        passed = min(self._to_pass, count_items(items))
        self._to_pass -= passed
        self._outbox.load_state_dict({"at": {}, "skip": passed})
        self._outbox.put(items, {})

    def state_dict(self) -> IteratorState:
        return {"items": self._handed_out}

    def load_state_dict(self, state: IteratorState) -> None:
        self._handed_out = self._to_pass = int(state["items"])

    def close(self) -> None:
        self._producer.close()


@final
class SpecGuard:
    """A check that the elements of several inputs have the structure, order of keys and dtypes of the first element.

    Attributes:
        signature: Required signature of the elements, "" before the first.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self.signature = ""
        self._order = KeyOrder()

    def checked(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return `items`, with a SpecError in place of each element that differs."""
        if not self.signature:
            self.signature = next((item.signature for item in items if isinstance(item, Block)), "")
        kept = reject_others(items, self.signature, self._label)
        return [self._order.of(item) if isinstance(item, Block) else item for item in kept]

    def border(self) -> IteratorState:
        """Return the properties of the first element, for the state of the operation."""
        schema = self._order.schema()
        return {"signature": self.signature, **({} if schema is None else {"keys": schema})}

    def restore(self, border: IteratorState) -> None:
        """Continue with the result of `border`."""
        self.signature = str(border["signature"])
        self._order.restore(border.get("keys"))
