"""Groups of consecutive steps that are sent together: one stored object per replica, one entry of the queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from raydist.actors.epochs.piece import (
    FIRST_ROWS,
    NO_ROWS,
    BeginAssembly,
    GroupPiece,
    Ref,
    is_regular,
    num_bytes_of,
    pack_piece,
)
from raydist.pipelines.elements.columns import RemoteColumn

if TYPE_CHECKING:
    from raydist.core.nest import Structure
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.run.split import Cut


@final
@dataclass(frozen=True, slots=True, eq=False)
class BatchGroup:
    """Consecutive global batches, as references to the replicas' pieces.

    Attributes:
        step: Index of the first batch in its epoch.
        refs: Reference to the object with each replica's pieces, or small pieces themselves; None for other replicas in
            the view of one replica.
        rows: For each step, the number of rows of each replica's piece.
        structure: The nest of a batch.
        spans: Position of the first step in each replica's object, and the number of steps in the object; None if each
            object holds exactly the steps of this group.
        borrowed: Replicas whose worker has no more data; they refer to another replica's object.
    """

    step: int
    refs: tuple[Ref, ...]
    rows: tuple[tuple[int, ...], ...]
    structure: Structure
    spans: tuple[tuple[int, int], ...] | None = None
    borrowed: frozenset[int] = frozenset()

    def span(self, rank: int) -> tuple[int, int]:
        """Return the span of one replica, see `spans`."""
        return (0, len(self.rows)) if self.spans is None else self.spans[rank]

    def only(self, rank: int) -> BatchGroup:
        """Return the group with the pieces of one replica only, so that others' references are not counted there."""
        return replace(self, refs=tuple(ref if index == rank else None for index, ref in enumerate(self.refs)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One global batch of a group, at position `place`."""

    group: BatchGroup
    place: int

    @property
    def step(self) -> int:
        """The index of the batch in its epoch."""
        return self.group.step + self.place

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of each replica's piece."""
        return self.group.rows[self.place]

    def place_on(self, rank: int, *, padding: bool) -> int:
        """Return the position of replica `rank`'s piece in its object; of its padding rows if `padding` and empty."""
        first, num_steps = self.group.span(rank)
        place = first + self.place
        if rank in self.group.borrowed:
            return place + (FIRST_ROWS if padding else NO_ROWS)
        return place + num_steps if padding and self.rows[rank] == 0 else place


@final
@dataclass(frozen=True, slots=True, eq=False)
class MadeStep:
    """One step before it is stored.

    Attributes:
        step: Index of the step in its epoch.
        cuts: The part of each replica.
        structure: The nest of a batch.
        state: State of the pipeline after the step.
    """

    step: int
    cuts: tuple[Cut, ...]
    structure: Structure
    state: IteratorState

    def sizes(self) -> tuple[int, ...]:
        """Return the approximate number of bytes of each replica's piece."""
        return tuple(num_bytes_of(cut.columns) + num_bytes_of(cut.padding or ()) for cut in self.cuts)

    def kind(self) -> Any:
        """Return a key that is equal for steps that fit into one group; None for a step that needs its own group."""
        pieces = [columns for cut in self.cuts for columns in (cut.columns, cut.padding) if columns is not None]
        kinds = {tuple((column.dtype, column.shape[1:], _entry(column)) for column in piece) for piece in pieces}
        return (self.structure, *kinds) if len(kinds) == 1 and all(map(is_regular, pieces)) else None


def _entry(column: np.ndarray[Any, Any]) -> type | None:
    """Return the type of the first entry of an object column (text or bytes), or of row ids; None for numbers."""
    if isinstance(column, RemoteColumn):
        return RemoteColumn
    return type(column.flat[0]) if column.dtype == object and column.size else None


@final
class OpenGroup:
    """The group that steps are being added to.

    Args:
        most_bytes: Limit for one replica's pieces in the group; a larger step gets its own group.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._steps: list[MadeStep] = []
        self._kind: Any = None
        self._sizes: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all replicas' pieces."""
        return sum(self._sizes)

    @property
    def is_full(self) -> bool:
        """Return True if no step of any size fits."""
        return bool(self._steps) and (self._kind is None or max(self._sizes) >= self._most_bytes)

    def accepts(self, kind: Any, sizes: tuple[int, ...]) -> bool:
        """Return True if a step of `kind` and `sizes` can be added."""
        if not self._steps:
            return True
        fits = max(map(sum, zip(self._sizes, sizes, strict=True))) <= self._most_bytes
        return kind is not None and kind == self._kind and fits

    def add(self, step: MadeStep, kind: Any, sizes: tuple[int, ...]) -> None:
        """Add a step for which `accepts` is True."""
        self._sizes = tuple(map(sum, zip(self._sizes, sizes, strict=True))) if self._steps else sizes
        self._kind = kind
        self._steps.append(step)

    @property
    def states(self) -> tuple[IteratorState, ...]:
        """The state after each step."""
        return tuple(step.state for step in self._steps)

    def store(
        self, put: Callable[[GroupPiece], Any], *, zero_copy: bool, begin_assembly: BeginAssembly | None = None
    ) -> BatchGroup:
        """Store each replica's pieces with `put` and return the group of references.

        Small pieces stay inline, and pieces with row ids: so the group refers to their blocks until it is acknowledged.
        With `begin_assembly`, workers copy the rows of stored blocks first. Blocks until they have.
        """
        first = self._steps[0]
        pieces = [self._piece(rank, zero_copy) for rank in range(len(first.cuts))]
        if begin_assembly is not None:
            for finish in [piece.begin_assembly(begin_assembly) for piece in pieces]:
                finish()
        refs = tuple(put(piece) if piece.is_worth_a_put else piece for piece in pieces)
        rows = tuple(tuple(cut.num_rows for cut in step.cuts) for step in self._steps)
        return BatchGroup(first.step, refs, rows, first.structure)

    def _piece(self, rank: int, zero_copy: bool) -> GroupPiece:
        cuts = [step.cuts[rank] for step in self._steps]
        paddings = {place: cut.padding for place, cut in enumerate(cuts) if cut.padding is not None}
        names = self._steps[0].structure.paths()
        return pack_piece([cut.columns for cut in cuts], names, paddings=paddings, zero_copy=zero_copy)
