"""Getting a graph ready to be run: names and rewrites."""

from __future__ import annotations

from raydist.options import Options
from raydist.pipelines.engine.build import Plan, name_operations, start
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.optimize import optimize

__all__ = ["make_nested_plan", "make_plan", "open_iterator"]


def make_plan(op: DatasetOp, options: Options) -> Plan:
    """Name and rewrite the graph of a whole pipeline. Runs nothing."""
    return _planned(op, options, nested=False)


def make_nested_plan(op: DatasetOp, options: Options) -> Plan:
    """The same for a dataset inside a function: some rewrites pay for whole pipelines only."""
    return _planned(op, options, nested=True)


def _planned(op: DatasetOp, options: Options, *, nested: bool) -> Plan:
    names = name_operations(op)
    optimised, rewrites = optimize(op, names, options, nested=nested)
    return Plan(op, optimised, names, options, rewrites)


def open_iterator(op: DatasetOp, *, seed: int, epoch: int, options: Options, executor: Executor) -> OpIterator:
    """One pass over the pipeline `op`; see :func:`make_plan` and :func:`start`."""
    return start(make_plan(op, options), make_nested_plan, seed=seed, epoch=epoch, executor=executor)
