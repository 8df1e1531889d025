"""Fusion of neighbouring operations into one stage: the settings `map_fusion` and `filter_fusion`.

A stage runs its kernels on a block one after the other. The elements between them pass through no queue and no other
thread or process.
"""

from __future__ import annotations

from collections.abc import Sequence

from raydist.options import Options
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp

Stage = list[tuple[ElementwiseOp, Kernel]]
"""Operations that run together, each with its kernel."""


def chain_of(op: DatasetOp) -> tuple[list[ElementwiseOp], DatasetOp]:
    """Return the chain of elementwise operations that ends in `op`, source side first, and its input."""
    chain: list[ElementwiseOp] = []
    while isinstance(op, ElementwiseOp):
        chain.append(op)
        (op,) = op.inputs
    return chain[::-1], op


def fuse(chain: Sequence[ElementwiseOp], ctx: IterContext) -> list[Stage]:
    """Cut a chain into stages.

    The cuts depend on the operations and options alone, never on the executor: a state saved with one executor loads
    with another.
    """
    stages: list[Stage] = []
    for op in chain:
        kernel = op.kernel(ctx)
        if not stages or not _joins(stages[-1], op, kernel, ctx.options):
            stages.append([])
        stages[-1].append((op, kernel))
    return stages


def _joins(stage: Stage, op: ElementwiseOp, kernel: Kernel, options: Options) -> bool:
    if stage[-1][0].parallelism != op.parallelism or stage[-1][1].multiplies:
        return False
    if not all(_may_fuse(part, options) for part in (stage[-1][1], kernel)):
        return False
    # The index of an element after a filter is known only once the filter has run.
    return not kernel.uses_index or all(part.preserves_count for _, part in stage)


def _may_fuse(kernel: Kernel, options: Options) -> bool:
    flags = options.optimization
    return flags.map_fusion if kernel.preserves_count else flags.filter_fusion
