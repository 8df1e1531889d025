"""Dataset.batch, rebatch and unbatch: elements stacked along a new first dimension, and batches split into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast, final

import numpy as np

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate
from raydist.core.nest import Structure
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.batch_rows import row_spec, rows_of_batch
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.columns import Column, RemoteColumn
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.items import (
    ElementError,
    Groups,
    Item,
    IteratorState,
    count_items,
    drop_items,
    keep_items,
)
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp, UncountedOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import Outbox, read_items
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

_MAX_BATCHES = 64  # made at a time


def require_batch_size(size: int) -> None:
    """Raise InvalidArgumentError unless batches may have `size` elements."""
    if size < 1:
        raise InvalidArgumentError(f"batch_size must be >= 1, got {size}.")


def num_batches(count: int, size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `count` elements; a negative count is a cardinality, and stays."""
    if count < 0:
        return count
    return count // size if drop_remainder else -(-count // size)


@final
@dataclass(frozen=True, eq=False)
class BatchOp(UnaryOp):
    """Batches of `batch_size` elements of `input`."""

    pure: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    batch_size: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        require_batch_size(self.batch_size)

    @property
    def label(self) -> str:
        return f"batch({self.batch_size}{', drop_remainder' if self.drop_remainder else ''})"

    def cardinality(self) -> int:
        return num_batches(self.input.cardinality(), self.batch_size, self.drop_remainder)

    def element_spec(self) -> Any:
        size = self.batch_size if self.drop_remainder else None
        return map_element(lambda spec: spec.batched(size), self.input.element_spec())

    def of_groups(self, inputs: Sequence[Groups]) -> Groups | None:
        (groups,) = inputs
        size = min(self.batch_size, groups.size)
        short = size < self.batch_size
        if size == 0 or groups.size % size or (short and self.drop_remainder):
            return None
        try:
            batches = _stack(groups.rows, groups.rows.num_rows // size, size)
        except SpecError:  # shapes differ: an iterator finds the place
            return None
        return Groups(batches, groups.count, groups.size // size)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _BatchIterator(self, ctx.build(self.input), ctx.operation_names[id(self)])


@final
class _BatchIterator(ClosesInput, OpIterator):
    def __init__(self, op: BatchOp, source: OpIterator, name: str) -> None:
        self._op = op
        self._source = source
        self._name = name
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            wanted = limit * self._op.batch_size
            items = read_items(self._source, wanted)
            batches = cut_into_batches(items, self._op.batch_size, self._op.drop_remainder)
            for batch in batches:
                if isinstance(batch, ElementError) and isinstance(batch.error, SpecError):
                    annotate(batch.error, f"In {self._name}.")
            outbox.put(batches, self._source.state_dict())
            if not batches and count_items(items) < wanted:
                raise StopIteration
        return outbox.take(limit)

    def has_ready(self) -> bool:
        return bool(self._outbox) or self._source.has_ready()

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._source.state_dict())
        return self._outbox

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        self._source.load_state_dict(self._open_outbox().load_state_dict(state))


def cut_into_batches(items: Sequence[Item], size: int, drop_remainder: bool) -> list[Item]:
    """Return batches of `size` items. An error replaces its batch."""
    try:
        return _cut_blocks([item for item in items if isinstance(item, Block)], items, size, drop_remainder)
    except SpecError:
        return _cut_singly(items, size, drop_remainder)


def _cut_blocks(blocks: Sequence[Block], items: Sequence[Item], size: int, drop_remainder: bool) -> list[Item]:
    """Cut without errors and with one dtype and shape, the fast path: all whole batches are one reshape."""
    if not blocks:
        return _cut_singly(items, size, drop_remainder)
    if len(blocks) < len(items):
        raise SpecError("An error is among the elements.")
    if all(block.num_rows % size == 0 for block in blocks[:-1]) and len(blocks) > 1:
        return [batch for block in blocks for batch in _cut_rows(block, size, drop_remainder)]
    return _cut_rows(concat_blocks(blocks), size, drop_remainder)


def _cut_rows(rows: Block, size: int, drop_remainder: bool) -> list[Item]:
    whole = rows.num_rows // size
    rest = rows.num_rows - whole * size
    batches: list[Item] = [_stack(rows.slice(0, whole * size) if rest else rows, whole, size)] if whole else []
    if rest and not drop_remainder:
        batches.append(_stack(rows.slice(whole * size, rows.num_rows), 1, rest))
    return batches


def _cut_singly(items: Sequence[Item], size: int, drop_remainder: bool) -> list[Item]:
    batches: list[Item] = []
    while total := count_items(items):
        if total < size and drop_remainder:
            break
        batches.append(_one_batch(keep_items(items, size)))
        items = drop_items(items, size)
    return batches


def _one_batch(items: Sequence[Item]) -> Item:
    blocks = []
    for item in items:
        if isinstance(item, ElementError):
            return item
        blocks.append(item)
    try:
        rows = concat_blocks(blocks)
        return _stack(rows, 1, rows.num_rows)
    except SpecError as error:
        return ElementError(error)


def _stack(rows: Block, count: int, size: int) -> Block:
    """Return `count` batches of `size` rows."""
    rows = rows.of_tensors("batch")
    pairs = zip(rows.columns, rows.specs, rows.structure.paths(), strict=True)
    columns = [_dense(column, spec, path) for column, spec, path in pairs]
    stacked = tuple(
        cast(Column, column.batched(count, size))
        if isinstance(column, RemoteColumn)
        else column.reshape(count, size, *column.shape[1:])
        for column in columns
    )
    specs = tuple(
        TensorSpec((size, *column.shape[1:]), spec.dtype) for column, spec in zip(columns, rows.specs, strict=True)
    )
    return Block(rows.structure, specs, stacked, count)


def _dense(column: Column, spec: TensorSpec, path: str) -> Column:
    if isinstance(column, RemoteColumn):
        if len(column.row_shapes) == 1:
            return column
        shapes = column.shapes_by_row()
    elif column.dtype != object or column.ndim > 1 or spec.shape == ():
        return column
    else:
        shapes = [getattr(row, "shape", ()) for row in column]  # text has no shape
    if len(set(shapes)) > 1:
        where = f" of {path!r}" if path else ""
        other = next(row for row, shape in enumerate(shapes) if shape != shapes[0])
        raise SpecError(
            f"All elements of a batch must have one shape{where}, got {shapes[0]} and, {other} elements later, "
            f"{shapes[other]}. Make them equal in a map before the batch."
        )
    return np.stack(list(column))


@final
@dataclass(frozen=True, eq=False)
class RebatchOp(UnaryOp):
    """The rows in `input` as batches with the sizes `sizes`, repeatedly; 0 gives an empty batch."""

    state_is_recent: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0 or max(self.sizes) == 0:
            raise InvalidArgumentError(
                f"The sizes of a rebatch must be >= 0, and one of them > 0, got {list(self.sizes)}."
            )

    @property
    def label(self) -> str:
        return f"rebatch({list(self.sizes)}{', drop_remainder' if self.drop_remainder else ''})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        size = self.sizes[0] if self.drop_remainder and len(set(self.sizes)) == 1 else None
        return map_element(lambda spec: spec.batched(size), self.input.element_spec())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Rebatching(self, ctx.build(self.input)))


@final
class _Rebatching(ClosesInput, ResumableProducer):
    def __init__(self, op: RebatchOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._at = 0  # index of the next size
        self._ended = False
        self._seen: Block | None = None  # any block of rows

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        count = min(limit, _MAX_BATCHES)
        sizes = [self._op.sizes[(self._at + k) % len(self._op.sizes)] for k in range(count)]
        rows: Sequence[Item] = read_items(self._source, sum(sizes))
        batches: list[Item] = []
        for size in sizes:
            count = count_items(rows)
            if count:
                self._seen = next((item for item in rows if isinstance(item, Block)), self._seen)
            if size and not count:
                self._ended = True
                break
            batches += (
                cut_into_batches(keep_items(rows, size), size, self._op.drop_remainder) if size else [self._empty()]
            )
            rows = drop_items(rows, size)
            self._at = (self._at + 1) % len(self._op.sizes)
            if count < size:  # the input ended within this batch, so no empty batch follows
                self._ended = True
                break
        return batches

    def _empty(self) -> Block:
        specs, structure = self._row_specs
        shapes = [(0, *(dim or 0 for dim in spec.shape or ())) for spec in specs]
        columns = tuple(
            np.empty((1, *shape), object if spec.dtype.kind in "SU" else spec.dtype)
            for spec, shape in zip(specs, shapes, strict=True)
        )
        found = tuple(TensorSpec(shape, spec.dtype) for spec, shape in zip(specs, shapes, strict=True))
        return Block(structure, found, columns, 1)

    @cached_property
    def _row_specs(self) -> tuple[Sequence[TensorSpec], Structure]:
        try:
            return flatten_element(self._op.input.element_spec())
        except FailedPreconditionError:  # no spec: use the specs of the rows, if there are any
            if self._seen is None:
                raise
            return self._seen.specs, self._seen.structure

    def border(self) -> IteratorState:
        return {"at": self._at, "ended": self._ended, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._at, self._ended = int(border["at"]), bool(border["ended"])
        self._source.load_state_dict(border["input"])


@final
@dataclass(frozen=True, eq=False)
class UnbatchOp(UncountedOp, ElementwiseOp):
    """Every element of `input` split along its first dimension."""

    pure: ClassVar[bool] = True

    takes_lists: bool = field(default=True, metadata=NOT_IN_FINGERPRINT)
    """False if the rows are stacked again (`rebatch`), which is impossible for the rows of a list of tensors."""

    def element_spec(self) -> Any:
        return map_element(row_spec, self.input.element_spec())

    def kernel(self, ctx: IterContext) -> Kernel:
        return _UnbatchKernel(ctx.operation_names[id(self)], self.takes_lists)


def _ids_of_rows(block: Block) -> Block | None:
    """Return the rows of the batches in a block of row ids; None if they cannot be named."""
    columns = [
        column.unbatched() if isinstance(column, RemoteColumn) else _rows_of_arrays(column) for column in block.columns
    ]
    if any(column is None for column in columns) or len({len(column) for column in columns if column is not None}) > 1:
        return None
    specs = tuple(map(row_spec, block.specs))
    return Block(block.structure, specs, cast(tuple[Column, ...], tuple(columns)), len(cast(Column, columns[0])))


def _rows_of_arrays(column: Column) -> Column | None:
    # Explicit sizes: numpy cannot infer a dimension beside one of 0.
    return column.reshape(len(column) * column.shape[1], *column.shape[2:]) if column.ndim > 1 else None


@final
@dataclass(frozen=True, eq=False)
class _UnbatchKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    takes_row_ids: ClassVar[bool] = True
    label: str
    takes_lists: bool

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if block.is_remote:
            rows = _ids_of_rows(block)
            if rows is not None:
                return [rows]
            block = block.in_memory()
        if all(column.ndim > 1 for column in block.columns) and len({c.shape[1] for c in block.columns}) == 1:
            columns = tuple(cast(Column, _rows_of_arrays(each)) for each in block.columns)
            return [Block(block.structure, tuple(map(row_spec, block.specs)), columns, len(columns[0]))]
        items: list[Item] = []
        for row in range(block.num_rows):
            try:
                if not self.takes_lists:
                    block.of_tensors("rebatch")
                items.append(rows_of_batch(block.slice(row, row + 1)))
            except (InvalidArgumentError, SpecError) as error:
                items.append(ElementError(error, start + row))
        return items
