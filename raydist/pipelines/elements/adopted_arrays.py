"""Large results of a user's function as blocks of their own: a map of batches copies none of them.

An array is taken over where nobody else can reach it. Python counts the references to each object: an array that only
its result refers to, which only we do, has left the function for good. Any other is copied, as small ones always are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.small_floats import is_number
from raydist.pipelines.elements.spec import TensorSpec

__all__ = ["large_blocks"]

_LARGE_BYTES = 1 << 16  # copying less costs no more than a block of its own does

_Array = np.ndarray


def large_blocks(values: list[Any]) -> list[Block] | None:
    """A block for each of `values`, which are taken out of the list; None where they are not large and dense.

    A value is an array, or a plain tuple or dict of arrays.
    """
    if not values or not _is_large(values[0]) or not all(map(_is_dense, values)):
        return None
    values.reverse()
    return [_taken_over(values) for _ in range(len(values))]


def _is_large(value: Any) -> bool:
    if type(value) is _Array:  # the common case, and each microsecond counts: it is paid for every batch
        return bool(value.nbytes >= _LARGE_BYTES)
    return bool(sum(leaf.nbytes for leaf in _arrays(value)[0]) >= _LARGE_BYTES)


def _is_dense(value: Any) -> bool:
    if type(value) is _Array:
        return bool(is_number(value.dtype) and value.dtype.isnative)
    leaves, _ = _arrays(value)
    return bool(leaves) and all(is_number(leaf.dtype) and leaf.dtype.isnative for leaf in leaves)


def _arrays(value: Any) -> tuple[Sequence[Any], Structure]:
    """The leaves of a value and its nest; no leaves where it is anything but arrays, or has deeper parts."""
    kind = type(value)
    if kind is _Array:
        return (value,), LEAF
    if kind is not tuple and kind is not dict:
        return (), LEAF
    leaves, structure = flatten_element(value)
    is_flat = all(child.kind is None for child in structure.children)
    return (leaves if is_flat and all(type(leaf) is _Array for leaf in leaves) else ()), structure


def _taken_over(values: list[Any]) -> Block:
    """The last of `values`."""
    most = _OURS[type(values[-1])]
    leaves, structure, references = _popped(values)
    columns = tuple([_column(leaf, is_ours=count <= most) for leaf, count in zip(leaves, references, strict=True)])
    return Block(structure, tuple([_spec(leaf.shape, leaf.dtype) for leaf in leaves]), columns, 1)


@functools.lru_cache(maxsize=256)
def _spec(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _popped(values: list[Any]) -> tuple[Sequence[Any], Structure, list[int]]:
    """The arrays of the last value, taken out of the list; and how many references there are to it and to each."""
    value = values.pop()
    held = sys.getrefcount(value)
    leaves, structure = _arrays(value)
    return leaves, structure, [held + sys.getrefcount(leaf) for leaf in leaves]


def _column(leaf: np.ndarray[Any, Any], *, is_ours: bool) -> Column:
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
