"""Kinds of operations: sources, operations with a single input, and elementwise operations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext, Placement
from raydist.pipelines.engine.op_iterator import OpIterator


class SourceOp(DatasetOp):
    """An operation without inputs."""

    @final
    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class UnaryOp(DatasetOp):
    """An operation with one input. By default its cardinality and element spec are those of the input."""

    input: DatasetOp

    @final
    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    def cardinality(self) -> int:
        return self.input.cardinality()

    def element_spec(self) -> Any:
        return self.input.element_spec()


@dataclass(frozen=True, eq=False)
class UncountedOp(UnaryOp):
    """An operation with one input whose number of results only running tells, unless the input is empty."""

    @final
    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY


class ElementwiseOp(DatasetOp):
    """An operation that works element by element (or block by block) and can therefore run anywhere, in parallel."""

    placement: ClassVar[Placement] = "pool"

    @abstractmethod
    def kernel(self, ctx: IterContext) -> Kernel:
        """Return the work on one block."""

    @property
    def parallelism(self) -> int | None:
        """Number of parallel calls; None lets the executor choose; 1 means in order, in one thread.

        Fusion joins only neighbours of equal parallelism.
        """
        return None

    @property
    def deterministic(self) -> bool | None:
        """False lets results come in any order; None leaves the choice to `Options.deterministic`."""
        return None

    @property
    def rows_together(self) -> int:
        """Elements that the consumer takes at a time: blocks should be multiples of this number."""
        return 1

    @final
    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ctx.build(self)
