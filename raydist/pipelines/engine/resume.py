"""Resuming from a border state and the number of items handed out since.

An iterator that reads ahead knows the state of its input only between two groups of items, not at each element. So its
state is the state at the last such border, and the number of items (elements and errors) handed out since. Resuming
makes these items again and drops them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, drop_items, size_of
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator


def read_items(source: OpIterator, count: int) -> list[Item]:
    """Return the next `count` elements and errors of `source`; fewer only at the end."""
    items: list[Item] = []
    while count > 0:
        try:
            block = source.next_block(count)
        except StopIteration:
            break
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # the error of one element: it takes that element's place
            items.append(ElementError(error))
            count -= 1
        else:
            items.append(block)
            count -= block.num_rows
    return items


@final
class Outbox:
    """A queue of items that the consumer has not taken, and the state from which they can be made again."""

    def __init__(self, border: IteratorState) -> None:
        self._border = border
        self._groups: deque[tuple[int, IteratorState]] = deque()  # (items in the group, state after it)
        self._items: deque[Item] = deque()
        self._handed_out = 0  # items since the border
        self._to_drop = 0  # items still to be made again and dropped before new ones follow

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_clean(self) -> bool:
        """Return True if all items were handed out: the border is then the current state of the source."""
        return not self._items and not self._groups and not self._handed_out

    def put(self, items: Sequence[Item], after: IteratorState) -> None:
        """Add one group of items; `after` is the state from which the next group can be made."""
        total = count_items(items)
        if self._to_drop:
            dropped = min(total, self._to_drop)
            self._to_drop -= dropped
            items = drop_items(items, dropped)
        self._items.extend([item for item in items if size_of(item)])
        self._groups.append((total, after))
        self._advance()

    def take(self, limit: int) -> Block:
        """Return the next 1 .. `limit` elements. Raises the error at this place."""
        item = self._items.popleft()
        if isinstance(item, ElementError):
            self._count(1)
            raise item.error
        rows = item.num_rows
        if rows > limit:
            self._items.appendleft(item.slice(limit, rows))
            item, rows = item.slice(0, limit), limit
        self._count(rows)
        return item

    def _count(self, handed_out: int) -> None:
        self._handed_out += handed_out
        if self._groups and self._handed_out >= self._groups[0][0]:
            self._advance()

    def _advance(self) -> None:
        while self._groups and self._handed_out >= self._groups[0][0]:
            total, self._border = self._groups.popleft()
            self._handed_out -= total

    def state_dict(self) -> IteratorState:
        """Return the last border and the number of items handed out since."""
        return {"at": self._border, "skip": self._handed_out}

    def load_state_dict(self, state: IteratorState) -> IteratorState:
        """Discard all items and resume from `state`; returns the border to which the owner must go back."""
        self._items.clear()
        self._groups.clear()
        self._border = state["at"]
        self._handed_out = self._to_drop = int(state["skip"])
        return self._border
