"""The options of a whole pipeline."""

from __future__ import annotations

from raydist.options import Options
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["merged_options"]


def merged_options(op: DatasetOp) -> Options:
    """Return the options set in the graph of `op`. Operations win over their inputs, later inputs over earlier ones."""
    merged = Options()
    for source in op.inputs:
        merged = merged.merge(merged_options(source))
    return merged if op.options is None else merged.merge(op.options)
