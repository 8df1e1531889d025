"""Random access to elements by index, which the optimiser puts after operations that only pick and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from raydist.core.errors import FailedPreconditionError
from raydist.core.nest import leaves_in
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.sources.torch_datasets import SampleReader


def picked_op(indices: DatasetOp, source: DatasetOp) -> DatasetOp | None:
    """Return the elements of `source` that `indices` name; None if `source` has no random access."""
    if source.random_access() is not None:
        return GatherOp(indices, source)
    if isinstance(source, MapOp) and isinstance(source.fn, SampleReader):  # its inputs are the indices
        return replace(source, input=indices)
    return None


@final
@dataclass(frozen=True, eq=False)
class GatherOp(UnaryOp, ElementwiseOp):
    """The elements of `source` whose indices `input` gives."""

    pure: ClassVar[bool] = True

    source: DatasetOp

    @property
    def label(self) -> str:
        return f"gather({self.source.label})"

    @property
    def parallelism(self) -> int | None:
        # Data in this process's memory is gathered here: otherwise its pickle would go to every worker in every epoch.
        return None if self._access().portable else 1

    @property
    def gives_rows(self) -> bool:
        return self.source.gives_rows

    @property
    def has_declared_shapes(self) -> bool:
        return self.source.has_declared_shapes

    def element_spec(self) -> Any:
        return self.source.element_spec()

    def kernel(self, ctx: IterContext) -> Kernel:
        access = self._access()
        known = None if access.portable else _bytes_of(self.element_spec())  # files are measured on a few rows
        return _GatherKernel(access, ctx.operation_names[id(self)], known)

    def _access(self) -> RandomAccess:
        access = self.source.random_access()
        if access is None:
            raise FailedPreconditionError(f"raydist bug: {self.source.label} has no random access.")
        return access


@final
@dataclass(frozen=True, eq=False)
class _GatherKernel(Kernel):
    access: RandomAccess
    label: str
    element_bytes: int | None = None

    def run(self, block: Block, start: int) -> Sequence[Item]:
        return [self.access.gather(block.columns[0])]


def _bytes_of(spec: Any) -> int | None:
    """Return the bytes of an element, if all of its leaves are numbers of one shape."""
    sizes = [leaf.num_bytes if isinstance(leaf, TensorSpec) else None for leaf in leaves_in(spec)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
