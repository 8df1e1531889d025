"""Windows that are made as batches at once, because all that is done with them is to batch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.batch_rows import row_spec
from raydist.pipelines.elements.blocks import Block, Column, object_column
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.sources.memory import MemoryOp

__all__ = ["StackedWindows", "is_stacked"]


@final
@dataclass(frozen=True, slots=True)
class StackedWindows:
    """What a function makes of windows, if that is a batch of each.

    Attributes:
        windows: The nest of a window: one dataset, or a tuple of them.
        structure: The nest of the function's batches.
        leaves: For each leaf of it, the leaf of the window that it is a batch of; every one once.
        least: Elements that a window must have to be a batch.
        make_dataset: Makes what users hold of the operation behind each window.
    """

    windows: Structure
    structure: Structure
    leaves: tuple[int, ...]
    least: int
    make_dataset: Callable[[DatasetOp], Any]

    def stacked(self, block: Block, starts: np.ndarray[Any, Any], window: np.ndarray[Any, Any]) -> Block | None:
        """The batches of windows of a block; None where they are not all of one shape.

        Args:
            block: The elements.
            starts: Where each window begins.
            window: Where its elements are, behind its beginning.
        """
        if block.structure != self.windows or len(window) < self.least or not all(map(_is_dense, block.columns)):
            return None
        places = starts[:, None] + window
        columns = tuple(block.columns[leaf][places] for leaf in self.leaves)
        dtypes = [block.specs[leaf].dtype for leaf in self.leaves]
        specs = tuple(TensorSpec(column.shape[1:], dtype) for column, dtype in zip(columns, dtypes, strict=True))
        return Block(self.structure, specs, columns, len(starts))

    def windows_of(self, block: Block) -> Block:
        """The windows that a block of batches was made of."""
        order = np.argsort(self.leaves).tolist()
        specs = [row_spec(block.specs[place]) for place in order]
        pairs = [(spec, block.columns[place]) for spec, place in zip(specs, order, strict=True)]
        columns = tuple(object_column([self._dataset(spec, rows) for rows in column]) for spec, column in pairs)
        return Block(self.windows, tuple(map(DatasetSpec, specs)), columns, block.num_rows)

    def _dataset(self, spec: TensorSpec, rows: Column) -> Any:
        return self.make_dataset(MemoryOp(Block(LEAF, (spec,), (rows,), len(rows)), "window"))


def is_stacked(block: Block) -> bool:
    """Whether a block is one of batches, not of windows."""
    return not isinstance(block.specs[0], DatasetSpec)


def _is_dense(column: Column) -> bool:
    """Whether all elements have one shape, as far as that is known without looking at each."""
    return column.dtype != object or column.ndim > 1
