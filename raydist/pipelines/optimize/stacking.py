"""Windows that are only batched: `window(...).flat_map(lambda w: w.batch(n))` without a dataset for each window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.plain_calls import only_plain_calls
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.interleave import InterleaveOp
from raydist.pipelines.ops.stacked_windows import StackedWindows
from raydist.pipelines.ops.window import WindowOp
from raydist.pipelines.ops.zip import ZipOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each
from raydist.pipelines.sources.memory import MemoryOp

__all__ = ["windows_stacked"]

_CALLS = {"batch", "zip", "Dataset"}
_NO_ROWS = Block(LEAF, (TensorSpec(()),), (np.empty(0, np.float32),), 0)


def windows_stacked(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with windows that are made as batches.

    The function of a `flat_map` over windows is called once, with datasets that stand for a window. If it provably does
    the same at each call, and made one batch of all elements of its window (or several, zipped), then batches can be
    cut from the input at once. Where they cannot (elements of several shapes, errors), windows are made as they were.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, InterleaveOp) or node.cycle_length != 1 or not isinstance(node.input, WindowOp):
            return node
        stacked = _stacked(node.fn, node.input)
        if stacked is None:
            return node
        windows = named_like(node.input, replace(node.input, stacked=stacked), names)
        return named_like(node, replace(node, input=windows, stacked=stacked), names)

    return rewrite_each(op, names, change)


def _stacked(fn: Callable[..., Any], op: WindowOp) -> StackedWindows | None:
    count = only_plain_calls(fn, _CALLS)
    if not count:
        return None
    leaves = [MemoryOp(_NO_ROWS, "window") for _ in range(count)]
    try:
        made = getattr(fn(*map(op.make_dataset, leaves)), "_op", None)
    except Exception:  # it will be raised for each window, at its place
        return None
    found = _batches(made)
    if found is None:
        return None
    structure, batches, read = found
    batch = batches[0]
    if any((other.batch_size, other.drop_remainder) != (batch.batch_size, batch.drop_remainder) for other in batches):
        return None
    if batch.batch_size < op.size or {*map(id, read)} != {*map(id, leaves)} or len(read) > len(leaves):
        return None
    windows = LEAF if count == 1 else Structure(tuple, tuple(range(count)), (LEAF,) * count)
    places = tuple(next(place for place, leaf in enumerate(leaves) if leaf is one) for one in read)
    least = batch.batch_size if batch.drop_remainder else 1
    return StackedWindows(windows, structure, places, least, op.make_dataset)


def _batches(made: Any) -> tuple[Structure, Sequence[BatchOp], Sequence[DatasetOp]] | None:
    """The nest of batches that a dataset gives one of, the operations that make them, and what each leaf is made of."""
    if isinstance(made, ZipOp):
        parts = [made.datasets[place] for place in made.places]
        batches = [part for part in parts if isinstance(part, BatchOp)]
        return (made.structure, batches, [one.input for one in batches]) if len(batches) == len(parts) else None
    if not isinstance(made, BatchOp):
        return None
    inner = made.input
    if isinstance(inner, ZipOp):
        return inner.structure, [made], [inner.datasets[place] for place in inner.places]
    return LEAF, [made], [inner]
