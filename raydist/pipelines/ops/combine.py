"""Operations on several datasets: zip, concatenate and choose_from_datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.nest import Structure, unflatten
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block, copied
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import (
    ElementError,
    Groups,
    Item,
    IteratorState,
    count_items,
    drop_items,
    keep_items,
)
from raydist.pipelines.elements.spec import most_specific_common
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, SpecGuard, read_item
from raydist.pipelines.engine.resume import read_items


@final
@dataclass(frozen=True, eq=False)
class ConcatenateOp(DatasetOp):
    """The elements of `first`, then the elements of `second`."""

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    first: DatasetOp
    second: DatasetOp

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.first, self.second)

    def cardinality(self) -> int:
        counts = [op.cardinality() for op in self.inputs]
        if INFINITE_CARDINALITY in counts:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else sum(counts)

    def element_spec(self) -> Any:
        return common_spec(self.inputs)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Concatenation(self, ctx))


def common_spec(ops: Sequence[DatasetOp]) -> Any:
    """Return the narrowest nest of specs for all of `ops`. Empty datasets without a spec are ignored.

    Raises:
        SpecError: The datasets differ in structure or dtype.
        FailedPreconditionError: No dataset has a spec.
    """
    specs: list[Any] = []
    for op in ops:
        try:
            specs.append(op.element_spec())
        except FailedPreconditionError as error:
            untold = error
    if not specs:
        raise untold
    common, structure = flatten_element(specs[0])
    for other in specs[1:]:
        leaves, found = flatten_element(other)
        pairs = zip(common, leaves, strict=True) if structure == found else ()
        merged = [most_specific_common(mine, theirs) for mine, theirs in pairs]
        if not merged or None in merged:
            raise SpecError(
                f"The datasets must have one structure and dtype, got {specs[0]} and {other}. Make them equal in a map."
            )
        common = merged
    return unflatten(structure, common)


@final
class _Concatenation(ResumableProducer):
    """A producer that reads one part at a time; only that part is open."""

    def __init__(self, op: ConcatenateOp, ctx: IterContext) -> None:
        self._parts = op.inputs
        self._ctx = ctx
        self._kind = SpecGuard(ctx.operation_names[id(op)])
        self._part = 0
        self._source: OpIterator | None = None

    def make(self, limit: int) -> Sequence[Item]:
        while self._part < len(self._parts):
            try:
                return self._kind.checked([read_item(self._open(), limit)])
            except StopIteration:
                self.close()
                self._part += 1
        raise StopIteration

    def _open(self) -> OpIterator:
        if self._source is None:
            self._source = self._ctx.build(self._parts[self._part])
        return self._source

    def border(self) -> IteratorState:
        ended = self._part == len(self._parts)
        return {
            "part": self._part,
            **self._kind.border(),
            "input": None if ended else self._open().state_dict(),
        }

    def restore(self, border: IteratorState) -> None:
        self.close()
        self._part = int(border["part"])
        self._kind.restore(border)
        if border["input"] is not None:
            self._open().load_state_dict(border["input"])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


@final
@dataclass(frozen=True, eq=False)
class ChooseOp(DatasetOp):
    """An operation that takes the next element of the dataset with each number of `choices`.

    An empty dataset ends the iteration if `stop_on_empty`; otherwise choices of it are skipped until all are empty.
    """

    takes_row_ids: ClassVar[bool] = True

    datasets: tuple[DatasetOp, ...]
    choices: DatasetOp
    stop_on_empty: bool
    made_by: str
    meets_all: bool = False
    """True if the choices return to every dataset again and again."""

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (*self.datasets, self.choices)

    @property
    def gives_rows(self) -> bool:
        return any(dataset.gives_rows for dataset in self.datasets)

    @property
    def name(self) -> str:
        return self.made_by

    def cardinality(self) -> int:
        endless = any(op.cardinality() == INFINITE_CARDINALITY for op in self.datasets)
        return INFINITE_CARDINALITY if self.meets_all and endless and not self.stop_on_empty else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return common_spec(self.datasets)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        sources = [ctx.build(op) for op in self.datasets]
        return BorderIterator(_Choosing(self, sources, ctx.build(self.choices), ctx.operation_names[id(self)]))


@final
class _Choosing(ResumableProducer):
    """A producer in which an error among the choices keeps its place."""

    def __init__(self, op: ChooseOp, sources: Sequence[OpIterator], choices: OpIterator, name: str) -> None:
        self._sources = sources
        self._choices = choices
        self._stop_on_empty = op.stop_on_empty
        self._empty = [False] * len(sources)
        self._ended = False
        self._kind = SpecGuard(name)

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        item = read_item(self._choices, 1)
        if isinstance(item, ElementError):
            return [item]
        try:
            chosen = self._checked(item)
        except InvalidArgumentError as error:
            return [ElementError(error)]
        return [] if self._empty[chosen] else self._next(chosen)

    def _checked(self, block: Block) -> int:
        value = block.in_memory().row(0)
        if getattr(value, "shape", None) != () or value.dtype.kind not in "iu":
            raise InvalidArgumentError(f"A choice must be one whole number, got {value!r:.100}.")
        if not 0 <= value < len(self._sources):
            raise InvalidArgumentError(
                f"A choice must be the number of a dataset, 0 .. {len(self._sources) - 1}, got {int(value)}."
            )
        return int(value)

    def _next(self, chosen: int) -> Sequence[Item]:
        try:
            return self._kind.checked([read_item(self._sources[chosen], 1)])
        except StopIteration:
            self._empty[chosen] = True
            self._ended = self._stop_on_empty or all(self._empty)
            return []

    def border(self) -> IteratorState:
        return {
            "empty": [number for number, empty in enumerate(self._empty) if empty],
            "ended": self._ended,
            **self._kind.border(),
            "choices": self._choices.state_dict(),
            "inputs": [source.state_dict() for source in self._sources],
        }

    def restore(self, border: IteratorState) -> None:
        self._empty = [number in border["empty"] for number in range(len(self._sources))]
        self._ended = bool(border["ended"])
        self._kind.restore(border)
        self._choices.load_state_dict(border["choices"])
        for source, state in zip(self._sources, border["inputs"], strict=True):
            source.load_state_dict(state)

    def close(self) -> None:
        for source in (*self._sources, self._choices):
            source.close()


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
        return BorderIterator(_Zipping(self, [ctx.build(op) for op in self.datasets]))

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
class _Zipping(ResumableProducer):
    def __init__(self, op: ZipOp, sources: Sequence[OpIterator]) -> None:
        self._op = op
        self._sources = sources
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        rows = limit
        columns: list[list[Item]] = []
        for source in self._sources:  # each source is asked for as many items as the sources before it had
            columns.append(read_items(source, rows))
            rows = count_items(columns[-1])
        self._ended = rows < limit
        return _zip_items(self._op, [keep_items(items, rows) for items in columns])

    def border(self) -> IteratorState:
        return {"ended": self._ended, "inputs": [source.state_dict() for source in self._sources]}

    def restore(self, border: IteratorState) -> None:
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
