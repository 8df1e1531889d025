"""Batches that are made one at a time: padded, ragged, and batches of a `collate` function."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, final

import numpy as np

from raydist.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, RaydistError, SpecError
from raydist.foreign_errors import annotate
from raydist.nest import LEAF, Structure, unflatten
from raydist.pipelines.elements.arguments import parts_like
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.collated import CollatedLeaf, pieces_of_results
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, drop_items, keep_items
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.object_leaves import ListLeaf
from raydist.pipelines.elements.small_floats import dtype_kind
from raydist.pipelines.elements.spec import CollatedSpec, ObjectSpec, RaggedSpec, TensorSpec, spec_of_value
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.probe import PROBED_ELEMENTS, QUICK_S, open_probe
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import read_items

__all__ = ["BatchMaker", "Collate", "GroupedBatchOp", "Padding", "Ragged"]

_MAX_BATCHES = 64  # made at a time


class BatchMaker(Protocol):
    """Interface of a function that makes one batch of some elements."""

    @property
    def label(self) -> str:
        """The main arguments, with a leading comma."""

    def spec(self, source: DatasetOp, size: int | None) -> Any:
        """Return the nest of specs of a batch of `size` elements of `source`."""

    def batch(self, blocks: Sequence[Block], source: DatasetOp) -> Block:
        """Return the elements of `blocks`, which come from `source`, as one batch: a block of one row."""


@final
@dataclass(frozen=True, eq=False)
class GroupedBatchOp(UnaryOp):
    """Batches of `batch_size` elements of `input`, each made by `maker`."""

    state_is_recent: ClassVar[bool] = True

    batch_size: int
    maker: BatchMaker
    drop_remainder: bool = False
    made_by: str = "batch"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be >= 1, got {self.batch_size}.")

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def label(self) -> str:
        dropping = ", drop_remainder" if self.drop_remainder else ""
        return f"{self.made_by}({self.batch_size}{dropping}{self.maker.label})"

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.batch_size if self.drop_remainder else -(-count // self.batch_size)

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return self.maker.spec(self.input, self.batch_size if self.drop_remainder else None)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Batches(self, ctx.build(self.input), ctx.operation_names[id(self)]))


@final
class _Batches(ClosesInput, ResumableProducer):
    def __init__(self, op: GroupedBatchOp, source: OpIterator, name: str) -> None:
        self._op = op
        self._source = source
        self._name = name

    def make(self, limit: int) -> Sequence[Item]:
        size = self._op.batch_size
        wanted = min(limit, _MAX_BATCHES) * size
        items: Sequence[Item] = read_items(self._source, wanted)
        batches: list[Item] = []
        ended = count_items(items) < wanted
        while count_items(items) >= (size if self._op.drop_remainder else 1):
            batches.append(self._batch(keep_items(items, size)))
            items = drop_items(items, size)
        if ended and not batches:
            raise StopIteration
        return batches

    def _batch(self, items: Sequence[Item]) -> Item:
        """Return one batch; an error among its elements replaces it."""
        blocks: list[Block] = []
        for item in items:
            if isinstance(item, ElementError):
                return item
            blocks.append(item)
        try:
            return self._op.maker.batch(blocks, self._op.input)
        except RaydistError as error:
            annotate(error, f"In {self._name}.")
            return ElementError(error)

    def border(self) -> IteratorState:
        return self._source.state_dict()

    def restore(self, border: IteratorState) -> None:
        self._source.load_state_dict(border)


@final
@dataclass(frozen=True, eq=False)
class Ragged:
    """A batch maker that stacks leaves of declared fixed shape, and makes lists of tensors of all others.

    The declaration decides, not the values: a leaf is a list in every batch or in none.
    """

    label: ClassVar[str] = ""

    def spec(self, source: DatasetOp, size: int | None) -> Any:
        declared = source.has_declared_shapes

        def batched(spec: TensorSpec) -> TensorSpec:
            if isinstance(spec, ObjectSpec):
                raise spec.refused("ragged_batch")
            if _is_stacked(spec, declared):
                return spec.batched(size)
            return RaggedSpec(None if spec.shape is None else (size, *spec.shape), spec.dtype)

        return map_element(batched, source.element_spec())

    def batch(self, blocks: Sequence[Block], source: DatasetOp) -> Block:
        rows = concat_blocks(blocks).of_tensors("ragged_batch")
        promised = flatten_element(source.element_spec())[0] if source.has_declared_shapes else rows.specs
        columns, specs = [], []
        for column, spec, promise in zip(rows.columns, rows.specs, promised, strict=True):
            if _is_stacked(promise, source.has_declared_shapes):
                columns.append(column[None])
                specs.append(spec.batched(rows.num_rows))
            else:
                leaf = ListLeaf(_entries(column), spec)
                columns.append(object_column([leaf]))
                specs.append(leaf.batch_spec)
        return Block(rows.structure, tuple(specs), tuple(columns), 1)


def _is_stacked(spec: TensorSpec, declared: bool) -> bool:
    return spec.shape == () or (declared and spec.is_fixed)


def _entries(column: Column) -> list[Any]:
    return [column[row, ...] for row in range(len(column))] if column.ndim > 1 else list(column)


@final
@dataclass(frozen=True, eq=False)
class Collate:
    """A batch maker with a user's function, which runs when a batch or a replica's part is handed out."""

    fn: Callable[[list[Any]], Any]
    size: int

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidArgumentError(f"collate must be a function of a list of elements, got {self.fn!r:.100}.")

    @property
    def label(self) -> str:
        return f", collate={function_label(self.fn)}"

    def spec(self, source: DatasetOp, size: int | None) -> Any:
        """Call the function on at most three first elements. The spec has only dtypes and ranks."""
        leaf = CollatedLeaf(tuple(_first_elements(source, min(self.size, PROBED_ELEMENTS))), self.fn)
        (nest,) = pieces_of_results([leaf])
        return map_element(_spec_of_box, nest)

    def batch(self, blocks: Sequence[Block], source: DatasetOp) -> Block:
        # Shared, because the function may run several times: it receives copies.
        leaf = CollatedLeaf(tuple(block.of_tensors("batch").shared() for block in blocks), self.fn)
        return Block(LEAF, (CollatedSpec(),), (object_column([leaf]),), 1)


def _first_elements(source: DatasetOp, count: int) -> list[Block]:
    """Return the first elements of `source`: at least one, and more within 0.2 s."""
    blocks: list[Block] = []
    deadline = time.monotonic() + QUICK_S
    iterator = open_probe(source)
    try:
        while not blocks or (len(blocks) < count and time.monotonic() <= deadline):
            blocks.append(iterator.next_block(1).of_tensors("batch").shared())
    except StopIteration:
        if not blocks:
            raise FailedPreconditionError(
                "The element_spec of batch(collate=) is found by collating first elements, and the dataset is empty. "
                "Give it elements, or do without the spec."
            ) from None
    finally:
        iterator.close()
    return blocks


def _spec_of_box(array: Any) -> TensorSpec:
    value = array.item().value
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    return TensorSpec((None,) * value.ndim, value.dtype) if is_array else CollatedSpec()


Shape = tuple[int | None, ...]


@final
@dataclass(frozen=True, slots=True)
class Padding:
    """A batch maker that pads elements to common shapes.

    Attributes:
        shapes: Nest like the element, with a shape in place of each leaf (None or -1 in a shape: the longest of the
            batch); None to pad all dimensions to the longest.
        values: Nest like the element, with a value in place of each leaf (None: 0, or empty text); None for None
            everywhere.
    """

    shapes: Any = None
    values: Any = None

    @property
    def label(self) -> str:
        """An empty text: shapes and values would be too long."""
        return ""

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

    def batch(self, blocks: Sequence[Block], source: DatasetOp | None = None) -> Block:
        """Return all elements of `blocks` as one batch.

        Raises:
            DataLossError: A row is longer than the padded shape.
            InvalidArgumentError: Shapes or values do not fit the element.
            SpecError: The type of a padding value differs from the type of its leaf.
        """
        rows = concat_blocks(blocks).of_tensors("padded_batch")
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
