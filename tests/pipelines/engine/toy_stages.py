"""Stages and blocks to run them on."""

from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.build import build
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.run.plan import make_nested_plan, make_plan

__all__ = ["SOURCE", "block_of", "divide", "spec_of"]


def spec_of(dataset: Dataset) -> StageSpec:
    """The kernels of all operations behind the source, in one stage."""
    plan = make_plan(dataset._op, Options())
    ctx = IterContext(0, (0,), Options(), InlineExecutor(), plan.names, build, make_nested_plan)
    kernels = []
    op = dataset._op
    while isinstance(op, ElementwiseOp):
        kernels.append(op.kernel(ctx))
        (op,) = op.inputs
    return StageSpec("stage", tuple(reversed(kernels)))


def block_of(dataset: Dataset) -> Block:
    access = dataset._op.random_access()
    assert access is not None
    return access.gather(np.arange(len(access)))


SOURCE = Dataset.range(6)


def divide(x: int) -> int:
    return 6 // int(x)
