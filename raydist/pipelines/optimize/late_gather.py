"""Shuffles, takes and repeats over a source with random access move indices; the elements are read behind them.

A shuffle of images then moves 8 bytes an image, restoring it reads no image, and the reading joins the stage of the
next map.
"""

from __future__ import annotations

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.gather import GatherOp
from raydist.pipelines.optimize.graph import Names, named_like, with_inputs
from raydist.pipelines.sources.range import RangeOp

__all__ = ["gather_late"]


def gather_late(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with every run of operations that only pick and order working on indices."""
    if not op.content_blind:
        return with_inputs(op, names, lambda source: gather_late(source, names))
    source = op
    while source.content_blind:
        (source,) = source.inputs
    access = source.random_access()
    if access is None or access.cheap:
        return with_inputs(op, names, lambda inner: gather_late(inner, names))
    indices = named_like(source, RangeOp(0, len(access)), names)
    return named_like(source, GatherOp(_swap_source(op, source, indices, names), source), names)


def _swap_source(op: DatasetOp, old: DatasetOp, new: DatasetOp, names: Names) -> DatasetOp:
    if op is old:
        return new
    return with_inputs(op, names, lambda source: _swap_source(source, old, new, names))
