"""Columns from the values that a function returned: the choice between taking arrays over and copying them.

Large blocks are stacked from small groups of results, because copying is faster while the results are in the
processor's cache. 2,560 images of 3 KB from a function took 3.4 us each when stacked at the end, as every byte went to
memory and back twice; groups of 128 to 256, each stacked at its place in the block, took 2.4 us.

Elements are the values that a function returned, even if it writes to its memory later (tf.data copies each result at
once). Few functions need copies, so the first two results decide (:class:`ReusedResults`). An array is taken over if
nothing else can reach it: Python counts references, and an array that only its result refers to has left the function
for good. All other arrays are copied, and small ones always.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from raydist.core.nest import LEAF, Structure, leaves_in, map_structure
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import RowCalls
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.rows import items_of_rows
from raydist.pipelines.elements.small_floats import is_number
from raydist.pipelines.elements.spec import TensorSpec

_LARGE_BYTES = 1 << 16  # a copy of fewer bytes costs no more than a separate block

_Array = np.ndarray


def large_blocks(values: list[Any]) -> list[Block] | None:
    """Return a block for each of `values`, which is emptied; None where the values are not large and dense.

    A value is an array, or a plain tuple or dict of arrays.
    """
    if not values or not _is_large(values[0]) or not all(map(_holds_numbers, values)):
        return None
    values.reverse()
    return [_taken_over(values) for _ in range(len(values))]


def _is_large(value: Any) -> bool:
    if type(value) is _Array:  # the common case, for every batch: each microsecond counts
        return bool(value.nbytes >= _LARGE_BYTES)
    return bool(sum(leaf.nbytes for leaf in _arrays(value)[0]) >= _LARGE_BYTES)


def _holds_numbers(value: Any) -> bool:
    if type(value) is _Array:
        return bool(is_number(value.dtype) and value.dtype.isnative)
    leaves, _ = _arrays(value)
    return bool(leaves) and all(is_number(leaf.dtype) and leaf.dtype.isnative for leaf in leaves)


def _arrays(value: Any) -> tuple[Sequence[Any], Structure]:
    """Return the leaves of a value and its nest; no leaves unless all of them are arrays at depth 0 or 1."""
    kind = type(value)
    if kind is _Array:
        return (value,), LEAF
    if kind is not tuple and kind is not dict:
        return (), LEAF
    leaves, structure = flatten_element(value)
    is_flat = all(child.kind is None for child in structure.children)
    return (leaves if is_flat and all(type(leaf) is _Array for leaf in leaves) else ()), structure


def _taken_over(values: list[Any]) -> Block:
    """Remove the last of `values` and return it as a block."""
    most = _OURS[type(values[-1])]
    leaves, structure, references = _popped(values)
    columns = tuple([_column(leaf, is_ours=count <= most) for leaf, count in zip(leaves, references, strict=True)])
    return Block(structure, tuple([_spec(leaf.shape, leaf.dtype) for leaf in leaves]), columns, 1)


@functools.lru_cache(maxsize=256)
def _spec(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _popped(values: list[Any]) -> tuple[Sequence[Any], Structure, list[int]]:
    """Remove the last value; return its arrays, its nest, and the counts of references to the value and each array."""
    value = values.pop()
    held = sys.getrefcount(value)
    leaves, structure = _arrays(value)
    return leaves, structure, [held + sys.getrefcount(leaf) for leaf in leaves]


def _column(leaf: np.ndarray[Any, Any], *, is_ours: bool) -> Column:
    if is_ours and leaf.base is None and leaf.flags.writeable:
        return leaf[None]
    return np.array([leaf])


def _fewest(make: Callable[[], Any]) -> int:
    """Return the reference count of a value that nothing else holds: measured, because it differs between Pythons."""
    return _popped([make()])[2][0]


_OURS = {
    np.ndarray: _fewest(lambda: np.empty(0)),
    tuple: _fewest(lambda: (np.empty(0),)),
    dict: _fewest(lambda: {"": np.empty(0)}),
}


@final
class ReusedResults:
    """A check for functions that return memory which they write to later, made in the first block of several rows."""

    def __init__(self) -> None:
        self._found: bool | None = None

    def begin(self, calls: RowCalls, num_rows: int) -> tuple[list[Any], list[int]]:
        """Return the first results of `calls`, of `num_rows`, and the rows with errors; nothing if already checked.

        If results share memory, `calls` copies all later results.
        """
        if self._found is not None or num_rows < 2:
            calls.make_own = _copied if self._found else None
            return [], []
        results, failed = calls.take(1)
        first = None if failed else _copied(results[0])
        more, more_failed = calls.take(1)
        if not failed and not more_failed:
            self._found = _share_memory(results[0], more[0])
        if self._found:
            calls.make_own = _copied
            return [first, _copied(more[0])], []
        return results + more, failed + [1 for _ in more_failed]


def _share_memory(first: Any, second: Any) -> bool:
    """Return True if two results are one mutable object, or contain one in the same place.

    >>> array = np.zeros(3)
    >>> _share_memory((array, 1), (array, 1)), _share_memory((1, "a"), (1, "a"))
    (True, False)
    """
    if first is second and isinstance(first, Mapping):
        return True
    pairs = zip(leaves_in(first), leaves_in(second), strict=False)
    return any(mine is other and not isinstance(mine, _UNCHANGING) for mine, other in pairs)


_UNCHANGING = (bool, int, float, complex, bytes, str, np.generic, type(None))


def _copied(value: Any) -> Any:
    return map_structure(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    """Return a copy; `leaf` itself if copying fails. Such a leaf is no tensor, and making elements of it raises."""
    with contextlib.suppress(Exception):
        if isinstance(leaf, np.ndarray | list):
            return copy.deepcopy(leaf)
        return leaf.clone()  # a torch tensor, without an import of torch
    return leaf


_PART_BYTES = 1 << 19  # bytes that fit, with the results that are stacked, into a core's cache of 1 MB


def rows_together(result: Any) -> int:
    """Return the number of results like this one in a group; no limit for results that are not dense numbers."""
    (item,) = items_of_rows([result])
    if not isinstance(item, Block) or not _is_dense(item):
        return sys.maxsize
    return max(1, _PART_BYTES // max(1, item.num_bytes))


@final
class BlockInParts:
    """Collector of the results of `num_rows` elements, in groups; dense results of one kind become one block.

    >>> from raydist.pipelines.elements.rows import block_of_rows
    >>> whole = BlockInParts(5)
    >>> whole.add([block_of_rows([1, 2])])
    >>> whole.add([block_of_rows([3, 4, 5])])
    >>> [block.columns[0].tolist() for block in whole.items()]
    [[1, 2, 3, 4, 5]]
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._items: list[Item] = []
        self._given = 0  # results added so far
        self._open: Block | None = None  # the block being filled, with room for all remaining results
        self._filled = 0  # rows of it that are filled

    def add(self, items: Sequence[Item]) -> None:
        """Add the next results. Dense columns are copied, so the caller may reuse their memory."""
        for item in items:
            if not isinstance(item, Block):
                self._keep(item, 1)
            elif self._open is not None and _are_alike(self._open, item):
                self._fill(self._open, item)
            elif len(items) == 1 and _is_dense(item):
                self._end_block()
                self._open = _room_for(item, self._num_rows - self._given)
                self._fill(self._open, item)
            else:
                self._keep(item, item.num_rows)

    def items(self) -> list[Item]:
        """Return all results. Must be called once, at the end."""
        self._end_block()
        return self._items

    def _keep(self, item: Item, num_rows: int) -> None:
        self._end_block()
        self._items.append(item)
        self._given += num_rows

    def _fill(self, block: Block, part: Block) -> None:
        end = self._filled + part.num_rows
        for column, made in zip(block.columns, part.columns, strict=True):
            column[self._filled : end] = made
        self._filled = end
        self._given += part.num_rows

    def _end_block(self) -> None:
        block, filled = self._open, self._filled
        self._open, self._filled = None, 0
        if block is not None:
            self._items.append(block if filled == block.num_rows else block.slice(0, filled))


def _is_dense(block: Block) -> bool:
    return not any(column.dtype.hasobject for column in block.columns)


def _are_alike(first: Block, second: Block) -> bool:
    return first.specs == second.specs and first.structure == second.structure and _is_dense(second)


def _room_for(block: Block, num_rows: int) -> Block:
    columns = tuple(np.empty((num_rows, *column.shape[1:]), column.dtype) for column in block.columns)
    return Block(block.structure, block.specs, columns, num_rows)
