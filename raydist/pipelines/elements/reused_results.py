"""Functions that return the same array again and again, written anew at each call.

Elements are the values that a function returned, whatever it does to its memory later (tf.data copies each result at
once). To copy every result would cost all functions what few need, so the first two tell.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from raydist.nest import leaves_in, map_structure
from raydist.pipelines.elements.functions import RowCalls

__all__ = ["ReusedResults"]


@final
class ReusedResults:
    """Whether a function returns memory that it goes on writing to: found out in its first block of several rows."""

    def __init__(self) -> None:
        self._found: bool | None = None

    def begin(self, calls: RowCalls, num_rows: int) -> tuple[list[Any], list[int]]:
        """The first results of `calls`, of `num_rows`, and which are errors; none where nothing need be found out.

        What the function returns after these is copied where it shares memory.
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
    """Whether two results are, or have in the same place, one object that can be written to.

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
    """A copy; `leaf` itself where it cannot be copied: it is no tensor, which is told where elements are made of it."""
    with contextlib.suppress(Exception):
        if isinstance(leaf, np.ndarray | list):
            return copy.deepcopy(leaf)
        return leaf.clone()  # a tensor of torch's: this layer does without
    return leaf
