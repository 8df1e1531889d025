"""Stages, blocks to run them on, and an executor."""

from __future__ import annotations

import random
from collections import deque
from typing import final

import numpy as np

from raydist.core.errors import UnavailableError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.build import build
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.run.plan import make_nested_plan, make_plan

__all__ = ["SOURCE", "ToyPool", "block_of", "divide", "spec_of"]


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


@final
class ToyPool(Executor):
    """An executor that works when a result is requested, says at random what is done, and counts blocks in flight."""

    def __init__(self, window: int, seed: int = 0, lose: int = 0) -> None:
        self.window = self.num_workers = window
        self.random = random.Random(seed)
        self.waiting: deque[_Later] = deque()
        self.most = 0
        self.lost = [None] * lose
        self.closed = False

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.waiting.append(_Later(self, spec, block, starts))
        self.most = max(self.most, len(self.waiting))
        return self.waiting[-1]

    def close(self) -> None:
        self.closed = True


@final
class _Later(Pending):
    def __init__(self, pool: ToyPool, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> None:
        self.pool = pool
        self.work = (spec, block, starts)

    def done(self) -> bool:
        return self.pool.random.random() < 0.3

    def result(self) -> StageResult:
        self.pool.waiting.remove(self)
        if self.pool.lost:
            self.pool.lost.pop()
            self.pool.waiting.appendleft(self)
            raise UnavailableError("worker 1 is gone")
        return run_stage(*self.work)
