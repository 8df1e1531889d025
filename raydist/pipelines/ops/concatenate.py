"""Dataset.concatenate: one dataset after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import FailedPreconditionError, SpecError
from raydist.nest import unflatten
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import Item, IteratorState
from raydist.pipelines.elements.spec import most_specific_common
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator, OneKind, ResumableProducer, read_item
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["ConcatenateOp", "common_spec"]


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
        self._kind = OneKind(ctx.operation_names[id(op)])
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
