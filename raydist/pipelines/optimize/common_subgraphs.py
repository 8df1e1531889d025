"""What a `zip` reads twice is computed once.

Operations that do the same with the same inputs become one, as long as their elements follow from these alone: no
random choice, no function that may remember something from call to call. Then a `zip` reads each of its inputs once,
and hands out copies. A `concatenate` of a dataset with itself is left alone: it would have to hold all of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.zip import ZipOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each, settings_of

__all__ = ["computed_once"]


def computed_once(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with equal operations as one, and zips that read nothing twice."""
    known: dict[Hashable, DatasetOp] = {}

    def change(node: DatasetOp) -> DatasetOp:
        if isinstance(node, ZipOp):
            node = _reading_once(node, names)
        if not node.is_pure:
            return node
        try:
            return known.setdefault((type(node), settings_of(node), node.inputs), node)
        except TypeError:  # a setting that cannot be compared
            return node

    return rewrite_each(op, names, change)


def _reading_once(op: ZipOp, names: Names) -> DatasetOp:
    kept: list[DatasetOp] = []
    places: list[int] = []
    for dataset in op.datasets:
        if dataset not in kept or not _repeats_itself(dataset):
            kept.append(dataset)
        places.append(len(kept) - 1 if kept[-1] is dataset else kept.index(dataset))
    if len(kept) == len(op.datasets):
        return op
    spread = tuple(places[place] for place in op.places)
    return named_like(op, replace(op, datasets=tuple(kept), places=spread), names)


def _repeats_itself(op: DatasetOp) -> bool:
    """Whether two iterators of one epoch give the same elements."""
    return (op.is_pure or op.content_blind) and all(map(_repeats_itself, op.inputs))
