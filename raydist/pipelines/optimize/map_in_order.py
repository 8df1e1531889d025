"""With `map_parallelization` off, a map whose parallelism was not given runs in order, in one thread, as in tf.data."""

from __future__ import annotations

from dataclasses import replace

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each

__all__ = ["maps_in_order"]


def maps_in_order(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with `num_parallel_calls=1` where it is None; AUTOTUNE stays."""

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or node.num_parallel_calls is not None:
            return node
        return named_like(node, replace(node, num_parallel_calls=1), names)

    return rewrite_each(op, names, change)
