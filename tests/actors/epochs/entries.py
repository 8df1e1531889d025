"""Queue entries made by hand: numbers stand for rows, lists of arrays for pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydist.actors.epochs.batch_group import BatchGroup
from raydist.actors.epochs.piece import GroupPiece, pack_piece
from raydist.actors.epochs.served_epoch import QueueEntry
from raydist.core.nest import LEAF, Structure

Rows = Sequence[Sequence[int]]
"""Of each replica."""


def group_entry(number: int, steps: Sequence[Rows], structure: Structure = LEAF) -> QueueEntry:
    """A group of steps. The padding of a step without rows is the row -1."""
    refs = tuple(_piece([step[rank] for step in steps]) for rank in range(len(steps[0])))
    rows = tuple(tuple(map(len, step)) for step in steps)
    states = tuple({"at": number + place + 1, "step": number + place + 1} for place in range(len(steps)))
    return QueueEntry(number, states, group=BatchGroup(number, refs, rows, structure))


def _piece(parts: Rows) -> GroupPiece:
    columns = [(np.array(part, dtype=np.int64),) for part in parts]
    paddings = {place: (np.array([-1]),) for place, part in enumerate(parts) if not part}
    return pack_piece(columns, [""], paddings=paddings)


def end_entry(number: int) -> QueueEntry:
    """The end of the data."""
    return QueueEntry(number, ({"at": "end", "step": number},), last=True)
