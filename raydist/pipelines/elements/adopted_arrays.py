"""Large results of a user's function as blocks of their own: a map of batches copies none of them.

An array is taken over where nobody else can reach it. Python counts the references to each object: an array that only
its result refers to, which only we do, has left the function for good. Any other is copied, as small ones always are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raydist.nest import Structure, flatten
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.spec import TensorSpec

__all__ = ["large_blocks"]

_LARGE_BYTES = 1 << 16  # copying less costs no more than a block of its own does

_Array = np.ndarray[Any, Any]


def large_blocks(values: list[Any]) -> list[Block] | None:
    """A block for each of `values`, which are taken out of the list; None where they are not large and dense.

    A value is an array, or a plain tuple or dict of arrays.
    """
    if not values or _num_bytes(values[0]) < _LARGE_BYTES or not all(map(_is_dense, values)):
        return None
    values.reverse()
    return [_taken_over(values) for _ in range(len(values))]


def _num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in _arrays(value)[0])


def _is_dense(value: Any) -> bool:
    leaves, _ = _arrays(value)
    return bool(leaves) and all(leaf.dtype.kind in "biufc" and leaf.dtype.isnative for leaf in leaves)


def _arrays(value: Any) -> tuple[Sequence[_Array], Structure]:
    """The leaves of a value and its nest; no leaves where it is anything but arrays, or has deeper parts."""
    if type(value) not in (np.ndarray, tuple, dict):
        return (), Structure()
    leaves, structure = flatten(value)
    is_flat = all(child.kind is None for child in structure.children)
    return (leaves if is_flat and all(type(leaf) is np.ndarray for leaf in leaves) else ()), structure


def _taken_over(values: list[Any]) -> Block:
    """The last of `values`."""
    kind = type(values[-1])
    leaves, structure, references = _popped(values)
    pairs = zip(leaves, references, strict=True)
    columns = tuple(_column(leaf, is_ours=count <= _OURS[kind]) for leaf, count in pairs)
    return Block(structure, tuple(TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves), columns, 1)


def _popped(values: list[Any]) -> tuple[Sequence[_Array], Structure, list[int]]:
    """The arrays of the last value, taken out of the list; and how many references there are to it and to each."""
    value = values.pop()
    held = sys.getrefcount(value)
    leaves, structure = _arrays(value)
    return leaves, structure, [held + sys.getrefcount(leaf) for leaf in leaves]


def _column(leaf: _Array, *, is_ours: bool) -> Column:
    if is_ours and leaf.base is None and leaf.flags.writeable:
        return leaf[None]
    return np.array([leaf])


def _fewest(make: Callable[[], Any]) -> int:
    """The references that there are where nobody but us holds a value: found out, for they differ between Pythons."""
    return _popped([make()])[2][0]


_OURS = {
    np.ndarray: _fewest(lambda: np.empty(0)),
    tuple: _fewest(lambda: (np.empty(0),)),
    dict: _fewest(lambda: {"": np.empty(0)}),
}
