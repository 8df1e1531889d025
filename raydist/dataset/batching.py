"""Batches, windows and buckets of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from raydist.dataset.base import DatasetBase, named
from raydist.pipelines.elements.arguments import require_choice, whole_number
from raydist.pipelines.ops.batch import BatchOp, RebatchOp, UnbatchOp
from raydist.pipelines.ops.bucket import Buckets, bucket_op
from raydist.pipelines.ops.group_by_window import GroupByWindowOp, KeyedWindowsOp
from raydist.pipelines.ops.grouped import BatchMaker, Collate, GroupedBatchOp, Ragged
from raydist.pipelines.ops.map import parse_parallelism
from raydist.pipelines.ops.padded_batch import PaddedBatchOp, Padding, RowGroupsOp
from raydist.pipelines.ops.window import WindowOp


class Batching(DatasetBase):
    """The methods that group elements."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Stack consecutive elements along a new first dimension: (...) -> (batch_size, ...).

        The last batch is short unless `drop_remainder`. If an element fails, its whole batch is lost: the error is
        raised in the batch's place.

        Args:
            batch_size: Elements per batch, >= 1; of the global batch if a strategy distributes the dataset.
            drop_remainder: Drop a short last batch; the first dimension is then static.
            num_parallel_calls: No effect: earlier stages produce blocks, of which batches are slices, and have
                parallelism settings of their own.
            deterministic: No effect: a batch waits for its own elements only. Their order is that of the earlier
                stages, see :meth:`map`.
            name: Name of the operation in `explain` and `stats`.
            collate: A function of a list of elements with tensors instead of arrays, like torch's `collate_fn`. Its
                result is the batch: any nest of tensors, lists and other objects; mappings become dicts. Replicas share
                the
                elements: the function is called for each replica's part when the part is handed out, so that a graph is
                never cut. A replica's weight is its number of elements. No other operation may read such batches
                (`map`, `unbatch`, `rebatch`, `save`): do that before, or in the function.

        Raises:
            InvalidArgumentError: `batch_size` < 1; `num_parallel_calls` is 0 or below AUTOTUNE; `collate` is not a
                function.
            TypeError: `deterministic` is not a bool.
            SpecError: The elements of one batch differ in shape or dtype (at iteration).

        Source: tf.data.Dataset.batch.

        >>> [b.tolist() for b in rd.Dataset.range(5).batch(2)]
        [[0, 1], [2, 3], [4]]
        >>> list(rd.Dataset.range(3).batch(2, collate=lambda elements: {"all": elements, "first": elements[0]}))
        [{'all': [tensor(0), tensor(1)], 'first': tensor(0)}, {'all': [tensor(2)], 'first': tensor(2)}]
        """
        parse_parallelism(num_parallel_calls)
        require_choice(deterministic)
        if collate is not None:
            return self._grouped("batch", batch_size, Collate(collate, batch_size), drop_remainder, name)
        return type(self)(named(BatchOp(self._op, whole_number("batch_size", batch_size), drop_remainder), name))

    def unbatch(self, name: str | None = None) -> Self:
        """Split every element into the entries of its first dimension: (n, ...) -> n times (...).

        Cardinality is unknown. Undoes `batch` and `ragged_batch`, and splits arrays that a function returned.

        Args:
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: A leaf has no first dimension, or the leaves of an element do not share it (at
                iteration, in the element's place; also by `element_spec`).

        Source: tf.data.Dataset.unbatch.

        >>> [int(x) for x in rd.Dataset.range(4).batch(3).unbatch()]
        [0, 1, 2, 3]
        """
        return type(self)(named(UnbatchOp(self._op), name))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
        """Batch elements whose leaves differ in shape (not in rank), padded at their ends.

        (d, ...) -> (batch_size, longest d, ...), each dimension separately. If an element fails, its batch is lost.

        Args:
            batch_size: Elements per batch, >= 1.
            padded_shapes: Nest like the element with the shape of each padded leaf. None, for a dimension, a leaf or
                all
                leaves: the longest of each batch.
            padding_values: Nest like the element with one scalar for each leaf; None: 0, or empty text.
            drop_remainder: Drop a short last batch.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `batch_size` < 1; shapes or values that do not fit the element (at iteration).
            DataLossError: An element is longer than its padded shape (at iteration).
            SpecError: A padding value has another type than its leaf (at iteration).

        Source: tf.data.Dataset.padded_batch.

        >>> import numpy as np
        >>> ds = rd.Dataset.range(1, 4).map(lambda n: np.full(n, n))
        >>> [batch.tolist() for batch in ds.padded_batch(2)]
        [[[1, 0], [2, 2]], [[3, 3, 3]]]
        """
        groups = RowGroupsOp(self._op, whole_number("batch_size", batch_size), drop_remainder)
        return type(self)(named(PaddedBatchOp(groups, Padding(padded_shapes, padding_values)), name))

    def ragged_batch(self, batch_size: int, drop_remainder: bool = False, name: str | None = None) -> Self:
        """Batch elements whose leaves differ in shape, without padding: such a leaf becomes a list of tensors.

        (...) -> a list of `batch_size` tensors, each of its own shape; a leaf of fixed shape -> (batch_size, ...). The
        declared shape decides, not the values, so that a leaf is a list in every batch or in none: scalars are stacked,
        and leaves of a fixed shape that a source or `output_spec=` declares. An undeclared result of a function may
        change its shape, and becomes a list. Replicas share a list by its entries.

        Functions of later operations receive and may return such a list; `unbatch` restores the elements. If an element
        fails, its batch is lost.

        Args:
            batch_size: Elements per batch, >= 1.
            drop_remainder: Drop a short last batch.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `batch_size` < 1.
            SpecError: The elements of one batch differ in structure or dtype, or contain datasets (at iteration).

        Source: tf.data.Dataset.ragged_batch.

        >>> import numpy as np
        >>> ds = rd.Dataset.range(1, 4).map(lambda n: (np.full(n, n), n))
        >>> for values, labels in ds.ragged_batch(2):
        ...     print([value.tolist() for value in values], labels.tolist())
        [[1], [2, 2]] [1, 2]
        [[3, 3, 3]] [3]
        """
        return self._grouped("ragged_batch", batch_size, Ragged(), drop_remainder, name)

    def _grouped(self, method: str, batch_size: int, maker: BatchMaker, drop_remainder: bool, name: str | None) -> Self:
        size = whole_number("batch_size", batch_size)
        return type(self)(named(GroupedBatchOp(self._op, size, maker, drop_remainder, method), name))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None) -> Self:
        """Regroup the rows of batches into batches of other sizes, across the borders of incoming batches.

        Args:
            batch_size: Rows per batch, or a list of sizes to use in turn, cyclically; a 0 in the list produces an empty
                batch.
            drop_remainder: Drop a short last batch.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: A size < 0, or no size > 0. Rows without a common first dimension (at iteration).

        Source: tf.data.Dataset.rebatch.

        >>> [batch.tolist() for batch in rd.Dataset.range(8).batch(4).rebatch([2, 1, 1])]
        [[0, 1], [2], [3], [4, 5], [6], [7]]
        """
        sizes = batch_size if isinstance(batch_size, Sequence) else (batch_size,)
        return type(self)(
            named(
                RebatchOp(
                    UnbatchOp(self._op, takes_lists=False),
                    tuple(whole_number("batch_size", size) for size in sizes),
                    drop_remainder,
                ),
                name,
            )
        )

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
        """Return datasets of `size` elements that are `stride` apart; a new window starts every `shift` elements.

        Every leaf of an element becomes a dataset of that leaf: windows of (x, y) are pairs of datasets. Use them in
        `flat_map` (`lambda w: w.batch(3)`), or iterate over them. Windows at the end are shorter unless
        `drop_remainder`. If an element fails, its window is lost: the error is raised in the window's place.

        The state of an iterator is that of the input near the window's start; restoring reads a window again.

        Args:
            size: Elements per window, >= 1.
            shift: Elements between the starts of consecutive windows, >= 1; None for `size`.
            stride: Distance between the elements of a window, >= 1.
            drop_remainder: Drop windows with fewer than `size` elements.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: A number is below 1.

        Source: tf.data.Dataset.window.

        >>> [[int(x) for x in window] for window in rd.Dataset.range(5).window(3, shift=2)]
        [[0, 1, 2], [2, 3, 4], [4]]
        >>> [x.tolist() for x in rd.Dataset.range(4).window(2, 1, drop_remainder=True).flat_map(lambda w: w.batch(2))]
        [[0, 1], [1, 2], [2, 3]]
        """
        size, stride = whole_number("size", size), whole_number("stride", stride)
        shift = size if shift is None else whole_number("shift", shift)
        return type(self)(named(WindowOp(self._op, size, shift, stride, drop_remainder, type(self)), name))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Any], Any],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Self:
        """Apply `reduce_func` to windows: groups of elements with one key, up to a number of elements.

        A window is reduced when it is full; incomplete windows follow at the end, by ascending key. The elements of all
        open windows are kept in memory. The state of an iterator is a number of windows and the state in the open one;
        restoring reads and groups the input again.

        Args:
            key_func: Receives the arguments of a map function and returns one int64.
            reduce_func: Receives the key and a dataset of the window's elements; returns a Dataset.
            window_size: Elements of a window, >= 1.
            window_size_func: Alternative: returns the size for a key, as one int64.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: Both or neither of the sizes; a size below 1 (of a function: in the element's place).
            SpecError: A key is not an int64 (in the element's place), `reduce_func` returns no dataset (in the
                window's).

        Source: tf.data.Dataset.group_by_window.

        >>> ds = rd.Dataset.range(9).group_by_window(lambda x: x % 2, lambda key, ds: ds.batch(9), window_size=3)
        >>> [x.tolist() for x in ds]
        [[0, 2, 4], [1, 3, 5], [6, 8], [7]]
        """
        size = None if window_size is None else whole_number("window_size", window_size)
        windows = KeyedWindowsOp(self._op, key_func, size, window_size_func, type(self))
        return type(self)(named(GroupByWindowOp(windows, reduce_func), name))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Self:
        """Batch elements of similar length, with padding.

        Bucket i contains the lengths from boundary i - 1 up to, but not including, boundary i; the last bucket all
        other lengths. A batch is produced when its bucket is full; incomplete batches follow at the end, shortest
        lengths first. State and restoring are those of :meth:`group_by_window`.

        Args:
            element_length_func: Receives the arguments of a map function and returns the length as a whole number.
            bucket_boundaries: Ascending lengths.
            bucket_batch_sizes: Elements per batch of each bucket: one more than boundaries.
            padded_shapes: As for :meth:`padded_batch`.
            padding_values: As for :meth:`padded_batch`.
            pad_to_bucket_boundary: Pad unknown dimensions to the bucket's boundary minus 1 instead of the longest of
                each batch. Unknown dimensions are those of `padded_shapes`, or else of `element_spec` (declared by the
                `output_spec=` of a map). An element as long as the last boundary is then an error in its place.
            no_padding: Batch without padding: elements of a bucket must have one shape.
            drop_remainder: Drop batches that are not full.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: The number of batch sizes is not one more than that of boundaries; boundaries do not
                ascend; a size < 1; no boundary to pad to; an element is too long (at iteration, in its place).
            SpecError: A length is not a whole number (at iteration, in the element's place).

        Source: tf.data.Dataset.bucket_by_sequence_length.

        >>> import numpy as np
        >>> ds = rd.Dataset.from_tensor_slices([1, 4, 2, 5]).map(lambda n: np.full(n, n))
        >>> [x.tolist() for x in ds.bucket_by_sequence_length(len, [3], [2, 2])]
        [[[1, 0], [2, 2]], [[4, 4, 4, 4, 0], [5, 5, 5, 5, 5]]]
        """
        boundaries = tuple(whole_number("Each of bucket_boundaries", number) for number in bucket_boundaries)
        sizes = tuple(whole_number("Each of bucket_batch_sizes", number) for number in bucket_batch_sizes)
        padding = None if no_padding else Padding(padded_shapes, padding_values)
        buckets = Buckets(boundaries, sizes, pad_to_bucket_boundary)
        return type(self)(named(bucket_op(self._op, element_length_func, buckets, padding, drop_remainder), name))
