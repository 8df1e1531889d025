"""Dataset.choose_from_datasets: take each element from the dataset whose number another dataset gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator, OneKind, ResumableProducer, read_item
from raydist.pipelines.ops.concatenate import common_spec
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["ChooseOp"]


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
        self._kind = OneKind(name)

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
