"""Resuming: a clean state, and how many items were handed out since.

An iterator that reads ahead cannot say where its input was when a given element was made; it knows the state of its
input between two groups of items. So its state is that of the last such border, and the number of items (elements and
errors) handed out since; resuming makes the items again and drops that many.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from raydist.nest import Structure
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import MACHINERY_ERRORS, ElementError, Item, OpIterator, State

__all__ = ["Outbox", "count_items", "drop_items", "join_items", "keep_items", "read_items"]

_SMALL_BYTES = 1 << 16  # a block of more costs more to copy than to hand on by itself


def count_items(items: Iterable[Item]) -> int:
    """Elements and errors in `items`."""
    return sum(_size(item) for item in items)


def drop_items(items: Sequence[Item], count: int) -> list[Item]:
    """`items` without their first `count` elements or errors."""
    kept: list[Item] = []
    for item in items:
        size = _size(item)
        if count < size:
            kept.append(item.slice(count, size) if isinstance(item, Block) else item)
        count = max(0, count - size)
    return kept


def keep_items(items: Sequence[Item], count: int) -> list[Item]:
    """The first `count` elements or errors of `items`."""
    kept: list[Item] = []
    for item in items:
        if count <= 0:
            break
        kept.append(item.slice(0, count) if isinstance(item, Block) else item)
        count -= _size(item)
    return kept


def join_items(items: Iterable[Item]) -> list[Item]:
    """`items` with neighbouring small blocks of one kind as one block."""
    joined: list[Item] = []
    for kind, run in itertools.groupby(items, _small_kind):
        if kind is None:
            joined += run
        else:
            joined.append(concat_blocks([item for item in run if isinstance(item, Block)]))
    return joined


def _small_kind(item: Item) -> tuple[Structure, tuple[TensorSpec, ...]] | None:
    """What blocks that are worth joining share; None for all else."""
    if isinstance(item, ElementError) or item.num_bytes > _SMALL_BYTES:
        return None
    return item.structure, item.specs


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

    def __init__(self, border: State) -> None:
        self._border = border
        self._groups: deque[tuple[int, State]] = deque()  # (items in the group, state after it)
        self._items: deque[Item] = deque()
        self._handed_out = 0  # items since the border
        self._to_drop = 0  # of these, items that must be made again before new ones follow

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_clean(self) -> bool:
        """Whether all items were handed out, so that the border is where their maker is now."""
        return not self._items and not self._groups and not self._handed_out

    def put(self, items: Sequence[Item], after: State) -> None:
        """Add one group of items; `after` is the state from which the next group can be made."""
        total = count_items(items)
        dropped = min(total, self._to_drop)
        self._to_drop -= dropped
        self._items.extend(drop_items(items, dropped) if dropped else (i for i in items if _size(i)))
        self._groups.append((total, after))
        self._advance()

    def take(self, limit: int) -> Block:
        """The next 1 .. `limit` elements. Raises the error that stands at this place."""
        item = self._items.popleft()
        if isinstance(item, ElementError):
            self._count(1)
            raise item.error
        if item.num_rows > limit:
            self._items.appendleft(item.slice(limit, item.num_rows))
            item = item.slice(0, limit)
        self._count(item.num_rows)
        return item

    def _count(self, handed_out: int) -> None:
        self._handed_out += handed_out
        self._advance()

    def _advance(self) -> None:
        while self._groups and self._handed_out >= self._groups[0][0]:
            total, self._border = self._groups.popleft()
            self._handed_out -= total

    def state_dict(self) -> State:
        """The last border and the items handed out since."""
        return {"at": self._border, "skip": self._handed_out}

    def load_state_dict(self, state: State) -> State:
        """Forget everything and resume from `state`; returns the border that the owner must go back to."""
        self._items.clear()
        self._groups.clear()
        self._border = state["at"]
        self._handed_out = self._to_drop = int(state["skip"])
        return self._border


def _size(item: Item) -> int:
    return item.num_rows if isinstance(item, Block) else 1
