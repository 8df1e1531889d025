"""Columns that a pipeline never looks at are not read.

A map that provably looks at some entries of each element only (`lambda row: (row["x"], row["y"])`) hands nothing else
on. What lies between it and the source may pick and order elements, or ask the same of a predicate. Only sources leave
columns out for which that hides no error of a row: a null, or text that is no number, is one in any column.
"""

from __future__ import annotations

from collections import Counter

from raydist.pipelines.elements.columns_read import columns_read
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.filter import FilterOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.optimize.graph import Names, named_like, with_inputs

__all__ = ["without_dead_columns"]


def without_dead_columns(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with sources that read what is looked at; one that is read at several places stays."""
    readers: Counter[DatasetOp] = Counter()
    _count_readers(op, readers)
    if not any(type(node).with_columns is not DatasetOp.with_columns for node in readers):
        return op

    def visit(node: DatasetOp) -> DatasetOp:
        needed = columns_read(node.fn) if isinstance(node, MapOp) else None
        if needed:
            return with_inputs(node, names, lambda source: prune(source, needed))
        return with_inputs(node, names, visit)

    def prune(node: DatasetOp, needed: frozenset[str]) -> DatasetOp:
        if readers[node] > 1:
            return visit(node)
        fewer = node.with_columns(needed)
        if fewer is not None:
            return named_like(node, fewer, names)
        also = (
            columns_read(node.predicate) if isinstance(node, FilterOp) else frozenset() if node.content_blind else None
        )
        if also is None:
            return visit(node)
        return with_inputs(node, names, lambda source: prune(source, needed | also))

    return visit(op)


def _count_readers(op: DatasetOp, readers: Counter[DatasetOp]) -> None:
    for source in op.inputs:
        readers[source] += 1
        if readers[source] == 1:
            _count_readers(source, readers)
