"""Dataset.unbatch: the rows of every element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.nest import map_structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import DatasetOp, ElementError, ElementwiseOp, Item, IterContext, Kernel
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["UnbatchOp", "rows_of_batch"]


@final
@dataclass(frozen=True, eq=False)
class UnbatchOp(ElementwiseOp):
    """Every element of `input` split along its first dimension."""

    input: DatasetOp

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    @property
    def is_pure(self) -> bool:
        return True

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return map_structure(_row_spec, self.input.element_spec())

    def kernel(self, ctx: IterContext) -> Kernel:
        return _UnbatchKernel(ctx.operation_names[id(self)])


def _row_spec(spec: TensorSpec) -> TensorSpec:
    if spec.shape == ():
        raise InvalidArgumentError(f"unbatch needs elements with a first dimension to split, got {spec}.")
    return TensorSpec(None if spec.shape is None else spec.shape[1:], spec.dtype)


@final
@dataclass(frozen=True, eq=False)
class _UnbatchKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    label: str

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if all(column.ndim > 1 for column in block.columns) and len({c.shape[1] for c in block.columns}) == 1:
            columns = tuple(column.reshape(-1, *column.shape[2:]) for column in block.columns)
            return [Block(block.structure, tuple(map(_row_spec, block.specs)), columns, len(columns[0]))]
        items: list[Item] = []
        for row in range(block.num_rows):
            try:
                items.append(rows_of_batch(block.slice(row, row + 1)))
            except InvalidArgumentError as error:
                items.append(ElementError(error, start + row))
        return items


def rows_of_batch(batch: Block) -> Block:
    """The rows of one element as a block.

    Raises:
        InvalidArgumentError: A leaf has no first dimension, or first dimensions differ.
    """
    leaves = [column[0] for column in batch.columns]
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    lengths = [shape[0] for shape in shapes if shape]
    if len(lengths) < len(leaves) or len(set(lengths)) > 1:
        raise InvalidArgumentError(f"The leaves of a batch must share their first dimension, got shapes {shapes}.")
    return Block(batch.structure, tuple(map(_row_spec, batch.specs)), tuple(leaves), lengths[0])
