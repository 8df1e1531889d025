"""Preparation of a graph for running: names, rewrites, and the limit on its length."""

from __future__ import annotations

import sys
from typing import Any

from raydist.errors import InvalidArgumentError
from raydist.options import Options
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.build import Plan, name_operations, start
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.optimize.rewrites import optimize, rewrite_each

__all__ = ["begin_epoch", "explain_recursion", "make_nested_plan", "make_plan", "open_iterator", "require_short_chain"]


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


_FRAMES = 4  # of most operations; an interleave has the most, 10
_LONG = 50


def require_short_chain(op: DatasetOp) -> DatasetOp:
    """Return `op`, if the chain of operations up to it is short enough to run.

    Raises:
        InvalidArgumentError: The chain is too long. The message names the limit.
    """
    most = sys.getrecursionlimit() // _FRAMES
    if op.chain_length > most:
        raise InvalidArgumentError(
            f"At most {most} operations may follow each other (a quarter of sys.getrecursionlimit()), got "
            f"{op.chain_length} with {op.label}. Do several steps in one map, concatenate parts in pairs, or save what "
            "is made so far and load it."
        )
    return op


def explain_recursion(error: RecursionError, op: DatasetOp) -> None:
    """Add a note to `error` about the length of the pipeline."""
    if op.chain_length > _LONG:
        error.add_note(
            f"{op.chain_length} operations follow each other up to {op.label}: some need more of Python's stack than "
            "others. Use fewer, or raise sys.setrecursionlimit."
        )
