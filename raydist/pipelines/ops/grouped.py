"""Batches that are made one at a time: ragged, and batches of a `collate` function."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, final

import numpy as np

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, RaydistError
from raydist.core.exception_utils import annotate
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.collated import CollatedLeaf, pieces_of_results
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, drop_items, keep_items
from raydist.pipelines.elements.object_leaves import ListLeaf
from raydist.pipelines.elements.spec import CollatedSpec, ObjectSpec, RaggedSpec, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.probe import PROBED_ELEMENTS, QUICK_S, open_probe
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.ops.batch import num_batches, require_batch_size

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
        require_batch_size(self.batch_size)

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def label(self) -> str:
        dropping = ", drop_remainder" if self.drop_remainder else ""
        return f"{self.made_by}({self.batch_size}{dropping}{self.maker.label})"

    def cardinality(self) -> int:
        return num_batches(self.input.cardinality(), self.batch_size, self.drop_remainder)

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return self.maker.spec(self.input, self.batch_size if self.drop_remainder else None)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source, name = ctx.build(self.input), ctx.operation_names[id(self)]

        def make_batch(blocks: Sequence[Block]) -> Block:
            return self.maker.batch(blocks, self.input)

        return BorderIterator(BatchProducer(source, self.batch_size, self.drop_remainder, make_batch, name))


@final
class BatchProducer(ClosesInput, ResumableProducer):
    """A producer of batches of `size` elements of `source`, each made by `make_batch`; `name` is for error notes."""

    def __init__(
        self,
        source: OpIterator,
        size: int,
        drop_remainder: bool,
        make_batch: Callable[[Sequence[Block]], Block],
        name: str,
    ) -> None:
        self._source = source
        self._size = size
        self._drop_remainder = drop_remainder
        self._make_batch = make_batch
        self._name = name

    def make(self, limit: int) -> Sequence[Item]:
        wanted = min(limit, _MAX_BATCHES) * self._size
        items: Sequence[Item] = read_items(self._source, wanted)
        batches: list[Item] = []
        ended = count_items(items) < wanted
        while count_items(items) >= (self._size if self._drop_remainder else 1):
            batches.append(self._batch(keep_items(items, self._size)))
            items = drop_items(items, self._size)
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
            return self._make_batch(blocks)
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
