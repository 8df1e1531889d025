"""Dataset.padded_batch: elements of different shapes, padded and stacked.

One operation puts rows into groups, without looking at values; a kernel pads each group, on input workers if there are
any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast, final

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from raydist.core.nest import Structure, unflatten
from raydist.pipelines.elements.arguments import parts_like
from raydist.pipelines.elements.batch_rows import row_spec
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks
from raydist.pipelines.elements.columns import RemoteColumn
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import ObjectSpec, TensorSpec, spec_of_value
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.ops.batch import num_batches, require_batch_size
from raydist.pipelines.ops.grouped import BatchProducer

Shape = tuple[int | None, ...]


@final
@dataclass(frozen=True, eq=False)
class RowGroupsOp(UnaryOp):
    """Groups of `group_size` elements of `input`: batches whose elements may differ in shape."""

    pure: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    group_size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        require_batch_size(self.group_size)

    @property
    def label(self) -> str:
        return f"row_groups({self.group_size}{', drop_remainder' if self.drop_remainder else ''})"

    def cardinality(self) -> int:
        return num_batches(self.input.cardinality(), self.group_size, self.drop_remainder)

    def element_spec(self) -> Any:
        size = self.group_size if self.drop_remainder else None
        return map_element(lambda spec: spec.batched(size), self.input.element_spec())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source, name = ctx.build(self.input), ctx.operation_names[id(self)]
        return BorderIterator(BatchProducer(source, self.group_size, self.drop_remainder, group_of, name))


def group_of(blocks: Sequence[Block]) -> Block:
    """Return elements as a block of one row, without a copy. Raises SpecError if their structures differ."""
    rows = concat_blocks(blocks).of_tensors("padded_batch")
    columns = [_as_one_row(column) for column in rows.columns]
    specs = tuple(spec.batched(rows.num_rows) for spec in rows.specs)
    return Block(rows.structure, specs, tuple(columns), 1)


def rows_of_group(group: Block) -> Block:
    """Return the elements of a group with their values. Blocks while they are fetched."""
    rows = [column[0] for column in group.in_memory().columns]
    return Block(group.structure, tuple(map(row_spec, group.specs)), tuple(rows), len(rows[0]))


def _as_one_row(column: Column) -> Column:
    if isinstance(column, RemoteColumn):
        return cast(Column, column.batched(1, len(column)))
    return column[np.newaxis]


@final
@dataclass(frozen=True, eq=False)
class PaddedBatchOp(ElementwiseOp):
    """The groups of elements, padded and stacked."""

    groups: RowGroupsOp
    padding: Padding

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.groups,)

    @property
    def name(self) -> str:
        return "padded_batch"

    @property
    def label(self) -> str:
        return f"padded_batch({self.groups.group_size}{', drop_remainder' if self.groups.drop_remainder else ''})"

    def cardinality(self) -> int:
        return self.groups.cardinality()

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return self.padding.spec(self.groups.input, self.groups.group_size if self.groups.drop_remainder else None)

    def kernel(self, ctx: IterContext) -> Kernel:
        return _PadKernel(self.padding, ctx.operation_names[id(self)])


@final
@dataclass(frozen=True, eq=False)
class _PadKernel(Kernel):
    padding: Padding
    label: str

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if block.num_rows > 1:
            return [item for row in range(block.num_rows) for item in self.run(block.slice(row, row + 1), start + row)]
        try:
            return [self.padding.batch(rows_of_group(block))]
        except (DataLossError, InvalidArgumentError, SpecError) as error:
            return [ElementError(error, start)]


@final
@dataclass(frozen=True, slots=True)
class Padding:
    """Settings of a padding of elements to common shapes.

    Attributes:
        shapes: Nest like the element, with a shape in place of each leaf (None or -1 in a shape: the longest of the
            batch); None to pad all dimensions to the longest.
        values: Nest like the element, with a value in place of each leaf (None: 0, or empty text); None for None
            everywhere.
    """

    shapes: Any = None
    values: Any = None

    def spec(self, source: DatasetOp, size: int | None) -> Any:
        """Return the nest of specs of a batch of `size` elements of `source`."""
        specs, structure = flatten_element(source.element_spec())
        return unflatten(structure, [spec.batched(size) for spec in self.padded_specs(structure, specs)])

    def padded_specs(self, structure: Structure, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return the specs of the padded leaves."""
        for spec in specs:
            if isinstance(spec, ObjectSpec):
                raise spec.refused("padded_batch")
        shapes = parts_like(structure, self.shapes, "padded_shapes")
        return [TensorSpec(_target(spec, shape), spec.dtype) for spec, shape in zip(specs, shapes, strict=True)]

    def batch(self, rows: Block) -> Block:
        """Return all elements of a block as one batch.

        Raises:
            DataLossError: A row is longer than the padded shape.
            InvalidArgumentError: Shapes or values do not fit the element.
            SpecError: The type of a padding value differs from the type of its leaf.
        """
        shapes = parts_like(rows.structure, self.shapes, "padded_shapes")
        values = parts_like(rows.structure, self.values, "padding_values")
        paths = rows.structure.paths()
        columns = [
            _padded(column, spec, shape, value, path)
            for column, spec, shape, value, path in zip(rows.columns, rows.specs, shapes, values, paths, strict=True)
        ]
        specs = tuple(TensorSpec(column.shape, spec.dtype) for column, spec in zip(columns, rows.specs, strict=True))
        return Block(rows.structure, specs, tuple(column[np.newaxis] for column in columns), 1)


def _target(spec: TensorSpec, shape: Any) -> Shape | None:
    """Return the shape to pad to, None where the batch decides."""
    if shape is None:
        return None if spec.shape is None else (None,) * len(spec.shape) if not spec.is_fixed else spec.shape
    dims = tuple(None if dim in (None, -1) else int(dim) for dim in shape)
    if spec.shape is not None and len(dims) != len(spec.shape):
        raise InvalidArgumentError(f"A padded shape must have {len(spec.shape)} dimensions, like {spec}, got {dims}.")
    return dims


def _padded(column: Column, spec: TensorSpec, shape: Any, value: Any, path: str) -> Column:
    where = f" of {path!r}" if path else ""
    rows = [row if isinstance(row, np.ndarray) else np.array(row, column.dtype) for row in column]
    ranks = {row.ndim for row in rows}
    target = _target(TensorSpec((None,) * max(ranks), spec.dtype), shape) or ()
    if len(ranks) > 1:
        raise InvalidArgumentError(f"The elements{where} of a padded batch must have one rank, got {sorted(ranks)}.")
    longest = [max(dims) for dims in zip(*(row.shape for row in rows), strict=True)]
    final_shape = [most if dim is None else dim for most, dim in zip(longest, target, strict=True)]
    if any(most > dim for most, dim in zip(longest, final_shape, strict=True)):
        raise DataLossError(
            f"A padded shape{where} must hold every element, got elements up to {tuple(longest)} for "
            f"{tuple(final_shape)}. Give a larger one, or None for the longest of each batch."
        )
    if not final_shape:
        return column
    filled = np.full((len(rows), *final_shape), _value(value, spec, where), dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        filled[number][tuple(map(slice, row.shape))] = row
    return filled


def _value(value: Any, spec: TensorSpec, where: str) -> Any:
    """Return the padding value of a leaf: the default, or `value` as a scalar of the leaf's dtype."""
    kind = spec.dtype.kind
    if value is None:
        return {"S": b"", "U": ""}.get(kind, 0)
    leaf = as_leaf(value)
    got = spec_of_value(leaf)
    exact = got.dtype == spec.dtype or (isinstance(value, int | float) and _fits(leaf, spec.dtype))
    if got.shape != () or not exact:
        raise SpecError(f"A padding value{where} must be one scalar of {spec.dtype}, got {value!r:.100} ({got}).")
    return leaf


def _fits(leaf: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if a Python number fits `dtype`: an int fits all numbers, a float only floats and complex numbers."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return leaf.dtype.kind in "iu" and limits.min <= int(leaf) <= limits.max
    return dtype_kind(dtype) in "fc" and leaf.dtype.kind != "b"
