"""Dataset.zip: tuples (or any nest) of the elements of several datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from raydist.nest import Structure, unflatten
from raydist.pipelines.elements.blocks import Block, copied
from raydist.pipelines.elements.items import (
    ElementError,
    Groups,
    Item,
    IteratorState,
    count_items,
    drop_items,
    keep_items,
)
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.resume import Outbox, read_items
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["ZipOp"]


@final
@dataclass(frozen=True, eq=False)
class ZipOp(DatasetOp):
    """Element k of every dataset in one nest; ends with the shortest dataset.

    Leaf i of the nest comes from the dataset number `places[i]`; by default, from dataset i.
    """

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    pure: ClassVar[bool] = True

    datasets: tuple[DatasetOp, ...]
    structure: Structure
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.places:
            object.__setattr__(self, "places", tuple(range(len(self.datasets))))

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return self.datasets

    def cardinality(self) -> int:
        counts = [op.cardinality() for op in self.datasets]
        if 0 in counts:
            return 0
        if UNKNOWN_CARDINALITY in counts:
            return UNKNOWN_CARDINALITY
        return min((count for count in counts if count != INFINITE_CARDINALITY), default=INFINITE_CARDINALITY)

    def element_spec(self) -> Any:
        specs = [op.element_spec() for op in self.datasets]
        return unflatten(self.structure, [specs[place] for place in self.places])

    def of_groups(self, inputs: Sequence[Groups]) -> Groups | None:
        if len({groups.size for groups in inputs}) > 1:
            return None
        rows = self.zip_blocks([groups.rows for groups in inputs])
        return Groups(rows, inputs[0].count, inputs[0].size)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _ZipIterator(self, [ctx.build(op) for op in self.datasets])

    def zip_blocks(self, blocks: Sequence[Block]) -> Block:
        """Return the elements of one block per dataset, all of one length, in one nest."""
        spread = [
            copied(blocks[place]) if place in self.places[:leaf] else blocks[place]
            for leaf, place in enumerate(self.places)
        ]
        inner = iter([block.structure for block in spread])
        specs = tuple(spec for block in spread for spec in block.specs)
        columns = tuple(column for block in spread for column in block.columns)
        return Block(_fill_in(self.structure, inner), specs, columns, blocks[0].num_rows)


@final
class _ZipIterator(OpIterator):
    def __init__(self, op: ZipOp, sources: Sequence[OpIterator]) -> None:
        self._op = op
        self._sources = sources
        self._ended = False
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            if self._ended:
                raise StopIteration
            self._fill(outbox, limit)
        return outbox.take(limit)

    def _fill(self, outbox: Outbox, limit: int) -> None:
        rows = limit
        columns: list[list[Item]] = []
        for source in self._sources:  # each source is asked for as many items as the sources before it had
            columns.append(read_items(source, rows))
            rows = count_items(columns[-1])
        self._ended = rows < limit
        outbox.put(_zip_items(self._op, [keep_items(items, rows) for items in columns]), self._border())

    def _border(self) -> IteratorState:
        return {"ended": self._ended, "inputs": [source.state_dict() for source in self._sources]}

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._border())
        return self._outbox

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        border = self._open_outbox().load_state_dict(state)
        self._ended = bool(border["ended"])
        for source, inner in zip(self._sources, border["inputs"], strict=True):
            source.load_state_dict(inner)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _zip_items(op: ZipOp, columns: list[list[Item]]) -> list[Item]:
    """Return blocks of rows over which no input changes block; an error where any input has one."""
    zipped: list[Item] = []
    while columns[0]:
        heads = [items[0] for items in columns]
        errors = [head for head in heads if isinstance(head, ElementError)]
        blocks = [head for head in heads if isinstance(head, Block)]
        rows = 1 if errors else min(block.num_rows for block in blocks)
        zipped.append(errors[0] if errors else op.zip_blocks([block.slice(0, rows) for block in blocks]))
        columns = [drop_items(items, rows) for items in columns]
    return zipped


def _fill_in(structure: Structure, inner: Iterator[Structure]) -> Structure:
    """Return `structure` with the next structure of `inner` in place of each leaf."""
    if structure.kind is None:
        return next(inner)
    children = tuple(_fill_in(child, inner) for child in structure.children)
    return replace(structure, children=children)
