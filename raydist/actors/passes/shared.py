"""Pieces of batches that are parts of an input worker's result: replicas map the result in the object store.

A batch that a worker made as a whole, or that consists of consecutive elements of one block, is a view of memory that
every process of the machine can map. Storing the piece again would only copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import ray

from raydist.actors.passes.piece import (
    FIRST_ROWS,
    INLINE_BYTES,
    GroupPiece,
    few_rows,
    hand_out,
    num_bytes_of,
    pack_piece,
)
from raydist.actors.workers.mapped_results import MappedResults, ResultView
from raydist.options import Timeouts

if TYPE_CHECKING:
    from raydist.pipelines.run.split import Columns, Cut

__all__ = ["OnePiece", "SharedPiece", "SharedPieces", "share_step"]

_Array = np.ndarray[Any, np.dtype[Any]]


@final
class SharedPiece:
    """A replica's piece of one step that is a part of a worker's result.

    Args:
        ref: Reference to the result.
        views: Positions of the leaves in the result.
        zero_copy: See `GroupPiece`.
    """

    def __init__(self, ref: Any, views: tuple[ResultView, ...], zero_copy: bool) -> None:
        self._ref = ref
        self._views = views
        self.zero_copy = zero_copy
        self._result: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPiece, (self._ref, self._views, self.zero_copy)

    def fetch(self, limit_s: float) -> None:
        """Map the result. Blocks for at most `limit_s` seconds; raises Ray's errors."""
        if self._result is None:
            self._result = ray.get(self._ref, timeout=limit_s)

    def array(self, index: int, place: int = 0) -> _Array:
        """Return leaf `index` as a read-only view."""
        self.fetch(Timeouts().input_s)
        return self._views[index].of(self._result)

    def leaf(self, index: int, place: int = 0) -> Any:
        """Return leaf `index` as `GroupPiece.leaf` does."""
        return hand_out(self.array(index), zero_copy=self.zero_copy)


OnePiece = SharedPiece | GroupPiece
"""A replica's piece of one step; a `GroupPiece` if it is too small to be shared."""


@final
class SharedPieces:
    """A replica's pieces of consecutive steps as parts of workers' results, with the interface of `GroupPiece`.

    Args:
        pieces: One piece per step.
    """

    def __init__(self, pieces: tuple[OnePiece, ...]) -> None:
        self.pieces = pieces
        self.absent = False

    def fetch(self, place: int, limit_s: float) -> None:
        """Map the result with the piece at `place`. Blocks for at most `limit_s` seconds; raises Ray's errors."""
        piece = self.pieces[place % FIRST_ROWS % len(self.pieces)]
        if isinstance(piece, SharedPiece):
            piece.fetch(limit_s)

    def leaf(self, index: int, place: int = 0) -> Any:
        """Return leaf `index` of the piece at `place` as `GroupPiece.leaf` does."""
        if place >= FIRST_ROWS:
            zero_copy = self.pieces[place % FIRST_ROWS % len(self.pieces)].zero_copy
            return hand_out(few_rows(lambda inner: self._array(index, inner), place), zero_copy=zero_copy)
        of_stand_in, step = divmod(place, len(self.pieces))
        return self.pieces[step].leaf(index, of_stand_in)

    def _array(self, index: int, place: int) -> _Array:
        of_stand_in, step = divmod(place, len(self.pieces))
        return self.pieces[step].array(index, of_stand_in)


def share_step(
    mapped: MappedResults, cuts: Sequence[Cut], names: Sequence[str], *, zero_copy: bool
) -> tuple[OnePiece, ...] | None:
    """Return each replica's piece of one step as a part of a worker's result; None if this saves no copy."""
    pieces: list[OnePiece] = []
    for cut in cuts:
        shared = None if cut.stand_in is not None else _share(mapped, cut.columns, zero_copy)
        if shared is None:
            if num_bytes_of(cut.columns) + num_bytes_of(cut.stand_in or ()) > INLINE_BYTES:
                return None
            stand_ins = {} if cut.stand_in is None else {0: cut.stand_in}
            shared = pack_piece([cut.columns], names, stand_ins=stand_ins, zero_copy=zero_copy)
        pieces.append(shared)
    return tuple(pieces) if any(isinstance(piece, SharedPiece) for piece in pieces) else None


def _share(mapped: MappedResults, columns: Columns, zero_copy: bool) -> OnePiece | None:
    if num_bytes_of(columns) <= INLINE_BYTES:
        return None
    found = [mapped.find(column) for column in columns]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found) or len({ref for ref, _ in parts}) != 1:
        return None
    return SharedPiece(parts[0][0], tuple(view for _, view in parts), zero_copy)
