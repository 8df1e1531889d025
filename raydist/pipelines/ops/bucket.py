"""Dataset.bucket_by_sequence_length: batches of elements of similar length.

Three operations: the bucket of each element, found where the element is made; groups of elements of one bucket, without
looking at values; a kernel that pads each group.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, Structure, unflatten
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import in_memory
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp, UncountedOp
from raydist.pipelines.engine.producers import Producer, ReplayIterator, read_watched
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.ops.batch import cut_into_batches
from raydist.pipelines.ops.group_by_window import KeyedGroups
from raydist.pipelines.ops.padded_batch import Padding, group_of, rows_of_group

_INT64 = TensorSpec((), np.int64)


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

    @property
    def common_size(self) -> int | None:
        """The batch size of all buckets; None if they differ."""
        return self.batch_sizes[0] if len(set(self.batch_sizes)) == 1 else None

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


def bucket_op(
    source: DatasetOp,
    length_func: Callable[..., Any],
    buckets: Buckets,
    padding: Padding | None,
    drop_remainder: bool,
) -> BucketedBatchOp:
    """Return the operation. Without `padding`, elements of a bucket must have one shape."""
    if not callable(length_func):
        raise InvalidArgumentError(f"element_length_func must be a function, got {length_func!r:.100}.")
    if buckets.bounded and not buckets.boundaries:
        raise InvalidArgumentError("pad_to_bucket_boundary needs at least one boundary, got none.")
    found = BucketsOp(source, length_func, buckets)
    return BucketedBatchOp(BucketGroupsOp(found, buckets, drop_remainder), padding)


@final
@dataclass(frozen=True, eq=False)
class BucketsOp(UnaryOp, ElementwiseOp):
    """Pairs (number of the bucket, element of `input`)."""

    length_func: Callable[..., Any]
    buckets: Buckets

    @property
    def label(self) -> str:
        return f"buckets({function_label(self.length_func)})"

    @property
    def parallelism(self) -> int | None:
        """Work where the elements are made: workers would have to send elements of other places back."""
        return self.input.parallelism if isinstance(self.input, ElementwiseOp) else 1

    def element_spec(self) -> Any:
        return _INT64, self.input.element_spec()

    def kernel(self, ctx: IterContext) -> Kernel:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.length_func)})"
        return _BucketKernel(self.length_func, self.buckets, label)


@final
@dataclass(frozen=True, eq=False)
class _BucketKernel(Kernel):
    length_func: Callable[..., Any]
    buckets: Buckets
    label: str

    def run(self, block: Block, start: int) -> Sequence[Item]:
        lengths, _ = call_rows(self.length_func, block.shared(), start)
        found = [self._bucket(length, start + row) for row, length in enumerate(lengths)]
        if not any(isinstance(bucket, ElementError) for bucket in found):
            return [_keyed(block, found)]
        return [
            bucket if isinstance(bucket, ElementError) else _keyed(block.slice(row, row + 1), [bucket])
            for row, bucket in enumerate(found)
        ]

    def _bucket(self, length: Any, index: int) -> Any:
        if isinstance(length, ElementError):
            return length
        try:
            leaf = as_leaf(length)
            if getattr(leaf, "ndim", -1) != 0 or leaf.dtype.kind not in "iu":
                raise SpecError(f"element_length_func must return one whole number, got {length!r:.100}.")
            return self.buckets.index(int(leaf))
        except (InvalidArgumentError, SpecError) as error:
            return ElementError(error, index)


@final
@dataclass(frozen=True, eq=False)
class BucketGroupsOp(UncountedOp):
    """Pairs (number of the bucket, group of elements): each group when its bucket is full; at the end the rest."""

    takes_row_ids: ClassVar[bool] = True

    buckets: Buckets
    drop_remainder: bool

    def element_spec(self) -> Any:
        size = self.buckets.common_size if self.drop_remainder else None
        bucket, rows = self.input.element_spec()
        return bucket, map_element(lambda spec: spec.batched(size), rows)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ReplayIterator(_BucketGroups(self, ctx.build(self.input)))


@final
class _BucketGroups(ClosesInput, Producer):
    """A producer that holds the elements of all buckets that are not full."""

    def __init__(self, op: BucketGroupsOp, source: OpIterator) -> None:
        self._drop_remainder = op.drop_remainder
        self._source = source
        self._groups = KeyedGroups(op.buckets.batch_sizes.__getitem__)
        self._request = RequestSize()
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if not self._ended:
            try:
                item = read_watched(self._source, self._request)
            except StopIteration:
                self._ended = True
            else:
                return [item] if isinstance(item, ElementError) else self._added(item)
        if not self._groups:
            raise StopIteration
        rest = _group(*self._groups.pop_first())
        return [] if self._drop_remainder else [rest]

    def _added(self, block: Block) -> list[Item]:
        items: list[Item] = []
        for row, bucket in enumerate(in_memory(block.columns[0]).tolist()):
            full = self._groups.add(bucket, row, block)
            if full is not None:
                items.append(_group(bucket, full))
        self._groups.end_block(block)
        return items


def _group(bucket: int, blocks: list[Block]) -> Item:
    try:
        return _keyed(group_of([_rows_of(block) for block in blocks]), [bucket])
    except SpecError as error:
        return ElementError(error)


def _keyed(rows: Block, buckets: Sequence[int]) -> Block:
    structure = Structure(tuple, (0, 1), (LEAF, rows.structure))
    return Block(structure, (_INT64, *rows.specs), (np.array(buckets, np.int64), *rows.columns), rows.num_rows)


def _rows_of(block: Block) -> Block:
    """Return the elements of pairs."""
    return Block(block.structure.children[1], block.specs[1:], block.columns[1:], block.num_rows)


@final
@dataclass(frozen=True, eq=False)
class BucketedBatchOp(ElementwiseOp):
    """A batch of each group of elements: padded, or stacked if `padding` is None."""

    groups: BucketGroupsOp
    padding: Padding | None

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.groups,)

    @property
    def name(self) -> str:
        return "bucket_by_sequence_length"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        size = self.groups.buckets.common_size if self.groups.drop_remainder else None
        specs, structure = self._row_specs
        return unflatten(structure, [spec.batched(size) for spec in specs])

    @property
    def _source(self) -> DatasetOp:
        (found,) = self.groups.inputs
        return found.inputs[0]

    @cached_property
    def _row_specs(self) -> tuple[list[TensorSpec], Structure]:
        """Specs of the rows of a batch."""
        specs, structure = flatten_element(self._source.element_spec())
        return (specs if self.padding is None else self.padding.padded_specs(structure, specs)), structure

    def kernel(self, ctx: IterContext) -> Kernel:
        label, buckets = ctx.operation_names[id(self)], self.groups.buckets
        if self.padding is None or not buckets.bounded:
            return _BatchKernel(label, self.padding)
        try:
            specs, structure = self._row_specs
        except FailedPreconditionError:  # such as an empty dataset, which has no batch
            return _BatchKernel(label, self.padding)
        declared = None
        if self.padding.shapes is None:
            declared = tuple(flatten_element(self._source.element_spec())[0])
        return _BatchKernel(label, self.padding, _Bounds(buckets.boundaries, structure, tuple(specs), declared))


@final
@dataclass(frozen=True, slots=True)
class _Bounds:
    """The shapes to which `pad_to_bucket_boundary` pads."""

    boundaries: tuple[int, ...]
    structure: Structure
    padded: tuple[TensorSpec, ...]  # specs of padded rows; unknown dimensions are padded to the boundary minus 1
    declared: tuple[TensorSpec, ...] | None  # specs of the elements, if these tell which dimensions are unknown

    def padding(self, given: Padding, bucket: int, rows: Block) -> Padding:
        """Return the padding for a bucket. Raises SpecError if elements differ from their declared shape."""
        for declared, found in zip(self.declared or (), rows.specs, strict=False):
            # An inferred spec takes the length of a first element for the length of all.
            if not declared.accepts(found):
                raise SpecError(
                    "pad_to_bucket_boundary reads off the element_spec which dimensions to pad, and it says "
                    f"{declared} where elements are {found}. Declare output_spec= on the map that makes them, or "
                    "give padded_shapes."
                )
        longest = self.boundaries[bucket] - 1
        shapes = [tuple(longest if dim is None else dim for dim in spec.shape or ()) for spec in self.padded]
        return replace(given, shapes=unflatten(self.structure, shapes))


@final
@dataclass(frozen=True, eq=False)
class _BatchKernel(Kernel):
    label: str
    padding: Padding | None
    bounds: _Bounds | None = None

    def run(self, block: Block, start: int) -> Sequence[Item]:
        return [self._batch(block.slice(row, row + 1), start + row) for row in range(block.num_rows)]

    def _batch(self, group: Block, index: int) -> Item:
        rows = rows_of_group(_rows_of(group))
        try:
            if self.padding is None:
                return cut_into_batches([rows], rows.num_rows, drop_remainder=False)[0]
            if self.bounds is None:
                return self.padding.batch(rows)
            return self.bounds.padding(self.padding, int(group.columns[0][0]), rows).batch(rows)
        except (DataLossError, InvalidArgumentError, SpecError) as error:
            return ElementError(error, index)
