"""Dataset.enumerate: pairs of number and element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp

__all__ = ["EnumerateOp"]

_NUMBER = TensorSpec((), np.int64)


@final
@dataclass(frozen=True, eq=False)
class EnumerateOp(UnaryOp, ElementwiseOp):
    """(number, element) pairs, counted from `start`; an error takes a number too."""

    passes_elements: ClassVar[bool] = True

    pure: ClassVar[bool] = True

    start: int = 0

    @property
    def label(self) -> str:
        return f"enumerate({self.start or ''})"

    def element_spec(self) -> Any:
        return (_NUMBER, self.input.element_spec())

    def kernel(self, ctx: IterContext) -> Kernel:
        return _EnumerateKernel(self.start, ctx.operation_names[id(self)])


@final
@dataclass(frozen=True, eq=False)
class _EnumerateKernel(Kernel):
    first: int
    label: str

    @property
    def uses_index(self) -> bool:
        return True

    def run(self, block: Block, start: int) -> Sequence[Item]:
        begin = self.first + start
        numbers = np.arange(begin, begin + block.num_rows, dtype=np.int64)
        structure = Structure(tuple, (0, 1), (LEAF, block.structure))
        return [Block(structure, (_NUMBER, *block.specs), (numbers, *block.columns), block.num_rows)]
