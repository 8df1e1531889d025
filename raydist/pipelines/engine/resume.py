"""Resuming: a clean state, and how many items were handed out since.

An iterator that reads ahead cannot say where its input was when a given element was made; it knows the state of its
input between two groups of items. So its state is that of the last such border, and the number of items (elements and
errors) handed out since; resuming makes the items again and drops that many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, drop_items, size_of
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator

__all__ = ["Outbox", "read_items"]


def read_items(source: OpIterator, count: int) -> list[Item]:
    """The next `count` elements and errors of `source`; fewer only at its end."""
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
    """Items that were made but not asked for yet, and the state they can be made again from."""

    def __init__(self, border: IteratorState) -> None:
        self._border = border
        self._groups: deque[tuple[int, IteratorState]] = deque()  # (items in the group, state after it)
        self._items: deque[Item] = deque()
        self._handed_out = 0  # items since the border
        self._to_drop = 0  # of these, items that must be made again before new ones follow

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_clean(self) -> bool:
        """Whether all items were handed out, so that the border is where their maker is now."""
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
        """The next 1 .. `limit` elements. Raises the error that stands at this place."""
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

    def take_together(self, limit: int) -> list[Block]:
        """As `take`, and the blocks behind that one which still fit whole, up to an error."""
        blocks = [self.take(limit)]
        room = left = limit - blocks[0].num_rows
        while self._items and isinstance(item := self._items[0], Block) and item.num_rows <= left:
            left -= item.num_rows
            blocks.append(item)
            self._items.popleft()
        self._count(room - left)
        return blocks

    def _count(self, handed_out: int) -> None:
        self._handed_out += handed_out
        if self._groups and self._handed_out >= self._groups[0][0]:
            self._advance()

    def _advance(self) -> None:
        while self._groups and self._handed_out >= self._groups[0][0]:
            total, self._border = self._groups.popleft()
            self._handed_out -= total

    def state_dict(self) -> IteratorState:
        """The last border and the items handed out since."""
        return {"at": self._border, "skip": self._handed_out}

    def load_state_dict(self, state: IteratorState) -> IteratorState:
        """Forget everything and resume from `state`; returns the border that the owner must go back to."""
        self._items.clear()
        self._groups.clear()
        self._border = state["at"]
        self._handed_out = self._to_drop = int(state["skip"])
        return self._border
