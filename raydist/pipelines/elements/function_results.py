"""Blocks of the values that a function returned: arrays are taken over where that is safe, and copied elsewhere.

An element keeps the value that the function returned, even if the function writes to the memory later. (tf.data copies
each result at once.) Few functions reuse memory: the first two results decide (:class:`ReusedResults`).

Results are stacked, which copies them. A large array is not copied if nothing else can reach it: Python counts
references, and an array that only its result refers to has left the function for good. Not copying batches of 3 MB made
`batch(256).map(fn)` five times as fast; below 1 MB stacking is faster.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from raydist.core.nest import LEAF, Structure, leaves_in, map_structure
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import RowCalls
from raydist.pipelines.elements.small_floats import is_number
from raydist.pipelines.elements.spec import TensorSpec

_LARGE_BYTES = 1 << 20  # a copy of fewer bytes costs no more than a separate block


def large_blocks(values: list[Any]) -> list[Block] | None:
    """Return a block for each of `values`, which is emptied; None unless all values are large and dense.

    A value is an array, or a plain tuple or dict of arrays.
    """
    if not values or not all(map(_is_large, values)):
        return None
    values.reverse()
    return [_taken_over(values) for _ in range(len(values))]


def _is_large(value: Any) -> bool:
    leaves, _ = _arrays(value)
    are_numbers = all(is_number(leaf.dtype) and leaf.dtype.isnative for leaf in leaves)
    return are_numbers and sum(leaf.nbytes for leaf in leaves) >= _LARGE_BYTES


def _arrays(value: Any) -> tuple[Sequence[Any], Structure]:
    """Return the leaves of a value and its nest; no leaves unless all of them are arrays at depth 0 or 1."""
    kind = type(value)
    if kind is np.ndarray:  # the common case
        return (value,), LEAF
    if kind is not tuple and kind is not dict:
        return (), LEAF
    leaves, structure = flatten_element(value)
    is_flat = all(child.kind is None for child in structure.children)
    return (leaves if is_flat and all(type(leaf) is np.ndarray for leaf in leaves) else ()), structure


def _taken_over(values: list[Any]) -> Block:
    """Remove the last of `values` and return it as a block."""
    most = _OURS[type(values[-1])]
    leaves, structure, references = _popped(values)
    columns = tuple([_column(leaf, is_ours=count <= most) for leaf, count in zip(leaves, references, strict=True)])
    return Block(structure, tuple([TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]), columns, 1)


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
    """Return True if two results are one mutable object, or contain one, or views of one array, in the same place.

    >>> array = np.zeros((2, 3))
    >>> _share_memory((array, 1), (array, 1)), _share_memory(array[0], array[0]), _share_memory((1, "a"), (1, "a"))
    (True, True, False)
    """
    if first is second and isinstance(first, Mapping):
        return True
    pairs = zip(leaves_in(first), leaves_in(second), strict=False)
    return any(_is_one(mine, other) for mine, other in pairs)


def _is_one(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(mine, other)
    if mine is other:
        return not isinstance(mine, _UNCHANGING)
    address = getattr(mine, "data_ptr", None)  # of a torch tensor, without an import of torch
    return address is not None and mine.numel() > 0 and type(mine) is type(other) and address() == other.data_ptr()


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
