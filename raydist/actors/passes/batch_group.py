"""Consecutive steps that travel together: one object of the store for each replica, one entry of the queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from raydist.actors.passes.piece import (
    FIRST_ROWS,
    INLINE_BYTES,
    NO_ROWS,
    GroupPiece,
    Ref,
    is_regular,
    num_bytes_of,
    pack_piece,
)
from raydist.actors.passes.shared import SharedPieces

if TYPE_CHECKING:
    from raydist.actors.passes.shared import OnePiece
    from raydist.nest import Structure
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.run.split import Cut

__all__ = ["MadeStep", "OpenGroup", "StepBatch", "BatchGroup"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class BatchGroup:
    """Consecutive global batches, as references to the replicas' pieces of them.

    Attributes:
        step: Index of the first batch in its epoch.
        refs: The object with each replica's pieces, or these themselves where they are small; None in another
            replica's view.
        rows: Of each step: the rows of each replica's piece.
        structure: The nest of a batch.
        spans: The place of the first step in each replica's object, and the steps in there; None where they are those
            of this group.
        borrowed: Replicas that no worker has data for any more: theirs is another replica's object.
    """

    step: int
    refs: tuple[Ref, ...]
    rows: tuple[tuple[int, ...], ...]
    structure: Structure
    spans: tuple[tuple[int, int], ...] | None = None
    borrowed: frozenset[int] = frozenset()

    def span(self, rank: int) -> tuple[int, int]:
        """See `spans`."""
        return (0, len(self.rows)) if self.spans is None else self.spans[rank]

    def only(self, rank: int) -> BatchGroup:
        """These steps with the pieces of one replica: a process that holds a reference takes part in counting it."""
        return replace(self, refs=tuple(ref if index == rank else None for index, ref in enumerate(self.refs)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One global batch of a group."""

    group: BatchGroup
    place: int

    @property
    def step(self) -> int:
        """Index of the batch in its epoch."""
        return self.group.step + self.place

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each replica's piece."""
        return self.group.rows[self.place]

    def place_on(self, rank: int, *, stand_in: bool) -> int:
        """Where in its object replica `rank` finds its piece, or without rows its stand-in, if it wants one."""
        first, num_steps = self.group.span(rank)
        place = first + self.place
        if rank in self.group.borrowed:
            return place + (FIRST_ROWS if stand_in else NO_ROWS)
        return place + num_steps if stand_in and self.rows[rank] == 0 else place


@final
@dataclass(frozen=True, slots=True, eq=False)
class MadeStep:
    """One step before it travels.

    Attributes:
        step: Its index in its epoch.
        cuts: One a replica.
        structure: The nest of a batch.
        state: Of the pipeline, after it.
        shared: One a replica, of a step that goes by reference to what input workers made: see `share_step`.
    """

    step: int
    cuts: tuple[Cut, ...]
    structure: Structure
    state: IteratorState
    shared: tuple[OnePiece, ...] | None = None

    def sizes(self) -> tuple[int, ...]:
        """Bytes of each replica's piece, about."""
        return tuple(num_bytes_of(cut.columns) + num_bytes_of(cut.stand_in or ()) for cut in self.cuts)

    def kind(self) -> Any:
        """What steps of one group share; None for a step that goes alone."""
        if self.shared is not None:
            return self.structure, "shared"
        pieces = [columns for cut in self.cuts for columns in (cut.columns, cut.stand_in) if columns is not None]
        kinds = {tuple((column.dtype, column.shape[1:], _entry(column)) for column in piece) for piece in pieces}
        return (self.structure, *kinds) if len(kinds) == 1 and all(map(is_regular, pieces)) else None


def _entry(column: np.ndarray[Any, Any]) -> type | None:
    """Of which type what is no number is: a column of the group is text or bytes, as its first entry is."""
    return type(column.flat[0]) if column.dtype == object and column.size else None


@final
class OpenGroup:
    """The group that steps are being added to.

    Args:
        most_bytes: Of one replica's pieces; a larger step goes alone.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._steps: list[MadeStep] = []
        self._kind: Any = None
        self._sizes: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps in it."""
        return len(self._steps)

    @property
    def num_bytes(self) -> int:
        """Bytes of all replicas' pieces."""
        return sum(self._sizes)

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits in, whatever its size."""
        return bool(self._steps) and (self._kind is None or max(self._sizes) >= self._most_bytes)

    def accepts(self, kind: Any, sizes: tuple[int, ...]) -> bool:
        """Whether a step of `kind` and `sizes` can be added."""
        if not self._steps:
            return True
        fits = max(map(sum, zip(self._sizes, sizes, strict=True))) <= self._most_bytes
        return kind is not None and kind == self._kind and fits

    def add(self, step: MadeStep, kind: Any, sizes: tuple[int, ...]) -> None:
        """Add a step that it accepts."""
        self._sizes = tuple(map(sum, zip(self._sizes, sizes, strict=True))) if self._steps else sizes
        self._kind = kind
        self._steps.append(step)

    @property
    def states(self) -> tuple[IteratorState, ...]:
        """The state after each step."""
        return tuple(step.state for step in self._steps)

    def store(self, put: Callable[[GroupPiece], Any], *, zero_copy: bool) -> BatchGroup:
        """Write each replica's pieces with `put` (small ones not at all) and give the group that names them."""
        first = self._steps[0]
        refs = tuple(self._store(rank, put, zero_copy) for rank in range(len(first.cuts)))
        rows = tuple(tuple(cut.num_rows for cut in step.cuts) for step in self._steps)
        return BatchGroup(first.step, refs, rows, first.structure)

    def _store(self, rank: int, put: Callable[[GroupPiece], Any], zero_copy: bool) -> Ref:
        first = self._steps[0]
        if first.shared is not None:
            return SharedPieces(tuple(step.shared[rank] for step in self._steps if step.shared is not None))
        cuts = [step.cuts[rank] for step in self._steps]
        stand_ins = {place: cut.stand_in for place, cut in enumerate(cuts) if cut.stand_in is not None}
        piece = pack_piece(
            [cut.columns for cut in cuts], first.structure.paths(), stand_ins=stand_ins, zero_copy=zero_copy
        )
        return put(piece) if piece.num_bytes > INLINE_BYTES else piece
