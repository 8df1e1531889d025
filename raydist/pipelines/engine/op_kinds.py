"""Kinds of operations: a source, one on a single input, and one that works element by element."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext, Placement
from raydist.pipelines.engine.op_iterator import OpIterator

__all__ = ["ElementwiseOp", "SourceOp", "UnaryOp"]


class SourceOp(DatasetOp):
    """An operation that reads no other."""

    @final
    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class UnaryOp(DatasetOp):
    """An operation on the elements of one input. Where it says nothing else, it has as many, and of the same kind."""

    input: DatasetOp

    @final
    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    def cardinality(self) -> int:
        return self.input.cardinality()

    def element_spec(self) -> Any:
        return self.input.element_spec()


class ElementwiseOp(DatasetOp):
    """An operation that works element by element (or block by block) and can therefore run anywhere, in parallel."""

    placement: ClassVar[Placement] = "pool"

    @abstractmethod
    def kernel(self, ctx: IterContext) -> Kernel:
        """The work on one block."""

    @property
    def parallelism(self) -> int | None:
        """Calls at a time; None lets the executor choose; 1 means in order, in one thread.

        Neighbours are fused into one stage only if theirs are equal.
        """
        return None

    @property
    def deterministic(self) -> bool | None:
        """False lets results come in any order; None leaves it to `Options.deterministic`."""
        return None

    @property
    def rows_together(self) -> int:
        """Elements that the consumer takes at a time: blocks had better be multiples of it."""
        return 1

    @final
    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ctx.build(self)
