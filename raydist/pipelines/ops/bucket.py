"""Dataset.bucket_by_sequence_length: batches of elements of similar length."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from raydist.errors import InvalidArgumentError, SpecError
from raydist.nest import Structure, unflatten

# This name is used in code that fingerprints of existing snapshots cover.
from raydist.pipelines.elements.element_nests import flatten_element as flatten
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.group_by_window import GroupByWindowOp, KeyedWindowsOp
from raydist.pipelines.ops.grouped import GroupedBatchOp, Padding
from raydist.pipelines.ops.nested import graph_of

__all__ = ["Buckets", "bucket_op"]


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of `bucket_by_sequence_length`.

    Attributes:
        boundaries: Bucket i ends before boundary i.
        batch_sizes: Batch size of each bucket: one more than boundaries.
        bounded: True to refuse lengths from the last boundary on.
    """

    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    bounded: bool = False

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != len(self.boundaries) + 1:
            raise InvalidArgumentError(
                "bucket_batch_sizes must have one entry more than bucket_boundaries, got "
                f"{len(self.batch_sizes)} sizes for {len(self.boundaries)} boundaries."
            )
        if any(low >= high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise InvalidArgumentError(f"bucket_boundaries must ascend, got {list(self.boundaries)}.")
        if min(self.batch_sizes) < 1:
            raise InvalidArgumentError(f"Each of bucket_batch_sizes must be >= 1, got {list(self.batch_sizes)}.")

    def index(self, length: int) -> int:
        """Return the bucket of a length.

        >>> buckets = Buckets((3, 5), (8, 4, 2))
        >>> [buckets.index(length) for length in (2, 3, 4, 5)]
        [0, 1, 1, 2]
        """
        if self.bounded and length >= self.boundaries[-1]:
            raise InvalidArgumentError(
                f"With pad_to_bucket_boundary elements must be shorter than the last boundary, {self.boundaries[-1]}, "
                f"got length {length}. Filter it out, or add a boundary."
            )
        return bisect.bisect_right(self.boundaries, length)

    def batch_size(self, bucket: Any) -> int:
        """Elements per batch of a bucket."""
        return self.batch_sizes[int(bucket)]


def bucket_op(
    source: DatasetOp,
    length_func: Callable[..., Any],
    buckets: Buckets,
    padding: Padding | None,
    drop_remainder: bool,
    make_dataset: Callable[[DatasetOp], Any],
) -> GroupByWindowOp:
    """Return the operation. Without `padding`, elements of a bucket must have one shape."""
    if not callable(length_func):
        raise InvalidArgumentError(f"element_length_func must be a function, got {length_func!r:.100}.")
    if buckets.bounded and not buckets.boundaries:
        raise InvalidArgumentError("pad_to_bucket_boundary needs at least one boundary, got none.")
    windows = KeyedWindowsOp(source, _BucketOf(length_func, buckets), None, buckets.batch_size, make_dataset)
    batches = _Batches(source, buckets, padding, drop_remainder, make_dataset)
    return GroupByWindowOp(windows, batches, "bucket_by_sequence_length", batches.element_spec)


@final
@dataclass(frozen=True)
class _BucketOf:
    """The key function: returns the bucket of an element."""

    length_func: Callable[..., Any]
    buckets: Buckets

    def __call__(self, *element: Any) -> int:
        length = as_leaf(self.length_func(*element))
        if getattr(length, "ndim", -1) != 0 or length.dtype.kind not in "iu":
            raise SpecError(f"element_length_func must return one whole number, got {length!r:.100}.")
        return self.buckets.index(int(length))


@final
@dataclass(frozen=True, eq=False)
class _Batches:
    """The reduce function: makes batches of a window."""

    source: DatasetOp
    buckets: Buckets
    padding: Padding | None
    drop_remainder: bool
    make_dataset: Callable[[DatasetOp], Any]

    def __call__(self, bucket: Any, window: Any) -> Any:
        op = graph_of(window, "bucket_by_sequence_length")
        size = self.buckets.batch_size(bucket)
        if self.padding is None:
            return self.make_dataset(BatchOp(op, size, self.drop_remainder))
        padding = self._bounded_padding(op, int(bucket)) if self.buckets.bounded else self.padding
        return self.make_dataset(GroupedBatchOp(op, size, padding, self.drop_remainder, "padded_batch"))

    def element_spec(self) -> Any:
        """Nest of TensorSpec of the batches of all buckets."""
        sizes = set(self.buckets.batch_sizes)
        size = sizes.pop() if self.drop_remainder and len(sizes) == 1 else None
        specs, structure = flatten(self.source.element_spec()) if self.padding is None else self._padded_specs
        return unflatten(structure, [spec.batched(size) for spec in specs])

    def _bounded_padding(self, window: DatasetOp, bucket: int) -> Padding:
        """Return padding in which unknown dimensions are the bucket's boundary minus 1."""
        if self.padding is None or self.padding.shapes is None:
            self._check_declared(window)
        longest = self.buckets.boundaries[bucket] - 1
        specs, structure = self._padded_specs
        shapes = [tuple(longest if dim is None else dim for dim in spec.shape or ()) for spec in specs]
        return replace(self.padding or Padding(), shapes=unflatten(structure, shapes))

    @cached_property
    def _padded_specs(self) -> tuple[list[TensorSpec], Structure]:
        specs, structure = flatten(self.source.element_spec())
        return (self.padding or Padding()).padded_specs(structure, specs), structure

    def _check_declared(self, window: DatasetOp) -> None:
        """Check an inferred element_spec, which takes the length of a first element for the length of all."""
        for declared, found in self._pairs(window):
            if not declared.accepts(found):
                raise SpecError(
                    "pad_to_bucket_boundary reads off the element_spec which dimensions to pad, and it says "
                    f"{declared} where elements are {found}. Declare output_spec= on the map that makes them, or "
                    "give padded_shapes."
                )

    def _pairs(self, window: DatasetOp) -> Iterator[tuple[TensorSpec, TensorSpec]]:
        declared, _ = flatten(self.source.element_spec())
        found, _ = flatten(window.element_spec())
        return zip(declared, found, strict=True)
