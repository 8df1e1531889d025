"""The options of a whole pipeline."""

from __future__ import annotations

from raydist.options import Options
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["merged_options"]


def merged_options(op: DatasetOp) -> Options:
    """The options set anywhere in the graph of `op`: operations win over their inputs, later inputs over earlier."""
    merged = Options()
    for source in op.inputs:
        merged = merged.merge(merged_options(source))
    return merged if op.options is None else merged.merge(op.options)
