"""Dataset.unbatch: the rows of every element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.batch_rows import row_spec, rows_of_batch
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["UnbatchOp"]


@final
@dataclass(frozen=True, eq=False)
class UnbatchOp(UnaryOp, ElementwiseOp):
    """Every element of `input` split along its first dimension."""

    pure: ClassVar[bool] = True

    takes_lists: bool = field(default=True, metadata=NOT_IN_FINGERPRINT)
    """False if the rows are stacked again (`rebatch`), which is impossible for the rows of a list of tensors."""

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return map_element(row_spec, self.input.element_spec())

    def kernel(self, ctx: IterContext) -> Kernel:
        return _UnbatchKernel(ctx.operation_names[id(self)], self.takes_lists)


@final
@dataclass(frozen=True, eq=False)
class _UnbatchKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    label: str
    takes_lists: bool

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if all(column.ndim > 1 for column in block.columns) and len({c.shape[1] for c in block.columns}) == 1:
            # Explicit sizes: numpy cannot infer a dimension beside one of 0.
            columns = tuple(each.reshape(len(each) * each.shape[1], *each.shape[2:]) for each in block.columns)
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
