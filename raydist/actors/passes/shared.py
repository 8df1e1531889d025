"""A worker's result handed on to the replicas as it lies in the object store, where a piece of a batch is a part of it.

A batch that a worker made whole, or that is a run of the elements of one of its blocks, is a view of memory that every
process of the machine can map. To store the piece would only copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import ray

from raydist.actors.passes.piece import BatchPiece
from raydist.actors.workers.mapped_results import MappedResults, ResultView
from raydist.options import Timeouts

__all__ = ["SharedPiece", "share_piece"]


@final
class SharedPiece:
    """A piece of a batch that is a part of a worker's result: `BatchPiece` for who maps the result.

    Args:
        ref: The result's.
        views: Of the leaves.
        num_rows: Rows of the first leaf.
        zero_copy: As for `BatchPiece`.
    """

    def __init__(self, ref: Any, views: tuple[ResultView, ...], num_rows: int, zero_copy: bool) -> None:
        self._ref = ref
        self._views = views
        self._num_rows = num_rows
        self._zero_copy = zero_copy
        self._piece: BatchPiece | None = None
        self.absent = False

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPiece, (self._ref, self._views, self._num_rows, self._zero_copy)

    def fetch(self, limit_s: float) -> BatchPiece:
        """The piece, mapped. Waits up to `limit_s` seconds; raises what Ray raises."""
        if self._piece is None:
            result = ray.get(self._ref, timeout=limit_s)
            columns = tuple(view.of(result) for view in self._views)
            self._piece = BatchPiece(columns, self._num_rows, self._zero_copy)
        return self._piece

    def leaf(self, index: int, place: int = 0) -> Any:
        """See `BatchPiece.leaf`."""
        return self.fetch(Timeouts().input_s).leaf(index, place)


def share_piece(mapped: MappedResults, put: Callable[[BatchPiece], Any], piece: BatchPiece) -> Any:
    """A reference to `piece`: to the result that it is a part of, else `put(piece)`."""
    found = [mapped.find(column) if isinstance(column, np.ndarray) else None for column in piece.columns]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or len({ref for ref, _ in parts}) != 1:
        return put(piece)
    return SharedPiece(parts[0][0], tuple(view for _, view in parts), piece.num_rows, piece.zero_copy)
