"""Elements in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from raydist.dataset.base import DatasetBase
from raydist.pipelines.arguments import whole_number
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.padded_batch import PaddedBatchOp
from raydist.pipelines.ops.padding import Padding
from raydist.pipelines.ops.rebatch import RebatchOp
from raydist.pipelines.ops.unbatch import UnbatchOp
from raydist.pipelines.ops.window import WindowOp

__all__ = ["Batching"]


class Batching(DatasetBase):
    """Elements in groups."""

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Stack consecutive elements along a new first dimension: (...) -> (batch_size, ...).

        The last batch is short unless `drop_remainder`. A batch with a bad element is lost whole: the error is raised
        in its place.

        Args:
            batch_size: Elements per batch, >= 1; of the global batch where a strategy distributes the dataset.
            drop_remainder: Leave out a short last batch; the first dimension is then static.

        Raises:
            InvalidArgumentError: `batch_size` < 1.
            SpecError: The elements of one batch differ in shape or dtype (at iteration).

        >>> [b.tolist() for b in rd.Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        """
        return type(self)(BatchOp(self._op, whole_number("batch_size", batch_size), drop_remainder))

    def unbatch(self) -> Self:
        """The entries of the first dimension of every element, one by one.

        >>> [int(x) for x in rd.Dataset.range(4).batch(3).unbatch()]
        [0, 1, 2, 3]
        """
        return type(self)(UnbatchOp(self._op))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Batches of elements whose leaves differ in shape (not in rank), filled up at their ends.

        Args:
            batch_size: Elements per batch, >= 1.
            padded_shapes: Nest like the element with the shape of each padded leaf; None in a shape, for a leaf or for
                all of them: as long as the longest of each batch.
            padding_values: Nest like the element with one scalar for each leaf; None: 0, or empty text.
            drop_remainder: Leave out a short last batch.

        Raises:
            InvalidArgumentError: `batch_size` < 1; shapes or values that do not fit the element (at iteration).
            DataLossError: An element is longer than its padded shape (at iteration).
            SpecError: A padding value has another type than its leaf (at iteration).

        >>> import numpy as np
        >>> ds = rd.Dataset.range(1, 4).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in ds.padded_batch(2)]
        [[[1, 0], [2, 2]], [[3, 3, 3]]]
        """
        padding = Padding(padded_shapes, padding_values)
        return type(self)(PaddedBatchOp(self._op, whole_number("batch_size", batch_size), padding, drop_remainder))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Self:
        """The rows of batches in batches of other sizes, across the borders of the batches that come in.

        Args:
            batch_size: Rows per batch, or a list of sizes to be used in turn, again and again; a 0 in the list gives
                an empty batch.
            drop_remainder: Leave out a short last batch.

        Raises:
            InvalidArgumentError: A size < 0, or no size > 0. Rows that do not share a first dimension (at iteration).

        >>> [batch.tolist() for batch in rd.Dataset.range(8).batch(4).rebatch([2, 1, 1])]
        [[0, 1], [2], [3], [4, 5], [6], [7]]
        """
        sizes = batch_size if isinstance(batch_size, Sequence) else (batch_size,)
        return type(self)(
            RebatchOp(UnbatchOp(self._op), tuple(whole_number("batch_size", size) for size in sizes), drop_remainder)
        )

    def window(self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False) -> Self:
        """Datasets of `size` elements that lie `stride` apart, one beginning every `shift` elements.

        Every leaf of an element becomes a dataset of that leaf: windows of (x, y) are pairs of datasets. Use them in
        `flat_map` (`lambda w: w.batch(3)`), or iterate over them. Windows at the end are shorter unless
        `drop_remainder`. A window with a bad element is lost whole: the error is raised in its place.

        The state of an iterator is that of the input near the window's beginning; restoring reads a window again.

        Args:
            size: Elements per window, >= 1.
            shift: Elements from the beginning of one window to that of the next, >= 1; None for `size`.
            stride: Distance of a window's elements, >= 1.
            drop_remainder: Leave out windows with fewer than `size` elements.

        Raises:
            InvalidArgumentError: A number is below 1.

        >>> [[int(x) for x in window] for window in rd.Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        >>> [x.tolist() for x in rd.Dataset.range(4).window(2, 1, drop_remainder=True).flat_map(lambda w: w.batch(2))]
        [[0, 1], [1, 2], [2, 3]]
        """
        size, stride = whole_number("size", size), whole_number("stride", stride)
        shift = size if shift is None else whole_number("shift", shift)
        return type(self)(WindowOp(self._op, size, shift, stride, drop_remainder, type(self)))
