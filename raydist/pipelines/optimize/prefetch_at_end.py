"""A pipeline that does work on elements is read ahead while that pays, unless it ends in a `prefetch` already."""

from __future__ import annotations

from raydist.pipelines.engine.op import DatasetOp, ElementwiseOp
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.ops.prefetch_where_it_pays import PrefetchWhereItPaysOp
from raydist.pipelines.optimize.graph import Names

__all__ = ["prefetched"]


def prefetched(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with a prefetch at its end."""
    if isinstance(op, PrefetchOp) or not _works_on_elements(op):
        return op
    prefetch = PrefetchWhereItPaysOp(op)
    names[id(prefetch)] = f"{names[id(op)]}-prefetch"
    return prefetch


def _works_on_elements(op: DatasetOp) -> bool:
    return isinstance(op, ElementwiseOp) or any(map(_works_on_elements, op.inputs))
