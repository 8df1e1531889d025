"""Map functions run over whole blocks by `torch.func.vmap`."""

from __future__ import annotations

from dataclasses import replace

from raydist.pipelines.elements.functions import wants_rng
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each

__all__ = ["vectorised"]


def vectorised(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with maps that try vmap first; functions that draw random numbers or are called in order stay."""

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or wants_rng(node.fn) or node.parallelism == 1:
            return node
        return named_like(node, replace(node, is_vectorised=True), names)

    return rewrite_each(op, names, change)
