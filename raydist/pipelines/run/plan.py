"""Preparation of a graph for running: names and rewrites."""

from __future__ import annotations

from typing import Any

from raydist.options import Options
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.build import Plan, name_operations, start
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.optimize.rewrites import optimize, rewrite_each

__all__ = ["begin_epoch", "make_nested_plan", "make_plan", "open_iterator"]


def begin_epoch(op: DatasetOp, epoch: int, position: IteratorState | None = None) -> DatasetOp:
    """Return the graph to run for an epoch that begins now. Called once per epoch, in the driver process.

    Args:
        op: The pipeline as written.
        epoch: Number of the epoch, from 0.
        position: State of an iterator that continues the epoch; None for a new epoch.
    """
    names = name_operations(op)

    def begun(node: DatasetOp) -> DatasetOp:
        return node.at_epoch(epoch, None if position is None else _saved_of(names[id(node)], position))

    return rewrite_each(op, names, begun)


def _saved_of(name: str, state: Any) -> IteratorState:
    """Return the part of a state that the operation `name` marked with "of"; empty without one."""
    if isinstance(state, dict) and state.get("of") == name:
        return state
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return next((found for part in parts if (found := _saved_of(name, part))), {})


def make_plan(op: DatasetOp, options: Options) -> Plan:
    """Name and rewrite the graph of a whole pipeline. Runs nothing."""
    return _planned(op, options, nested=False)


def make_nested_plan(op: DatasetOp, options: Options) -> Plan:
    """Name and rewrite the graph of a dataset that a function returns. Some rewrites are too costly there."""
    return _planned(op, options, nested=True)


def _planned(op: DatasetOp, options: Options, *, nested: bool) -> Plan:
    names = name_operations(op)
    optimised, rewrites = optimize(op, names, options, nested=nested)
    return Plan(op, optimised, names, options, rewrites)


def open_iterator(op: DatasetOp, *, seed: int, epoch: int, options: Options, executor: Executor) -> OpIterator:
    """Start one pass over the pipeline `op`; see :func:`make_plan` and :func:`start`."""
    return start(make_plan(op, options), make_nested_plan, seed=seed, epoch=epoch, executor=executor)
