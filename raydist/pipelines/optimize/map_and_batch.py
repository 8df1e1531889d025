"""A map in front of a batch works on whole batches, so that a batch is a view of what the map made, and no copy."""

from __future__ import annotations

from dataclasses import replace

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each

__all__ = ["batch_in_stage"]


def batch_in_stage(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with maps that know the size of the batches behind them."""

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, BatchOp) or not isinstance(node.input, MapOp):
            return node
        mapped = named_like(node.input, replace(node.input, rows_together=node.batch_size), names)
        return named_like(node, replace(node, input=mapped), names)

    return rewrite_each(op, names, change)
