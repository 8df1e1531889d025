"""Operations that change nothing are left out: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`, `prefetch(0)` ..."""

from __future__ import annotations

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.optimize.graph import Names, rewrite_each

__all__ = ["without_noops"]


def without_noops(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph without operations for which their only input can stand."""
    return rewrite_each(op, names, lambda node: node.inputs[0] if node.is_noop else node)
