"""Preparation of a pipeline's graph for running: names, rewrites, the limit on its length, and `explain`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from raydist.core.errors import InvalidArgumentError
from raydist.options import Options
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.build import Plan, build, chain_of, fuse, name_operations, start
from raydist.pipelines.engine.executor import Executor, InlineExecutor
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.metering.stats import PipelineStats, percent
from raydist.pipelines.optimize.rewrites import optimize, rewrite_each


def begin_epoch(op: DatasetOp, epoch: int, position: IteratorState | None = None) -> DatasetOp:
    """Return the graph to run for an epoch that begins now. The driver calls this once per epoch.

    Args:
        op: The pipeline as written.
        epoch: Number of the epoch, from 0.
        position: State of an iterator that continues the epoch; None for a new epoch.
    """
    names = name_operations(op)

    def at_epoch_start(node: DatasetOp) -> DatasetOp:
        return node.at_epoch(epoch, None if position is None else _state_of(names[id(node)], position))

    return rewrite_each(op, names, at_epoch_start)


def _state_of(name: str, state: Any) -> IteratorState:
    """Return the part of a saved state whose entry "of" is the operation `name`; an empty dict if there is none."""
    if isinstance(state, dict) and state.get("of") == name:
        return state
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return next((found for part in parts if (found := _state_of(name, part))), {})


def make_plan(op: DatasetOp, options: Options) -> Plan:
    """Name and rewrite the graph of a whole pipeline. Runs nothing."""
    return _plan(op, options, nested=False)


def make_nested_plan(op: DatasetOp, options: Options) -> Plan:
    """Name and rewrite the graph of a dataset that a function returns. Leave out rewrites that cost too much there."""
    return _plan(op, options, nested=True)


def _plan(op: DatasetOp, options: Options, *, nested: bool) -> Plan:
    names = name_operations(op)
    optimised, rewrites = optimize(op, names, options, nested=nested)
    return Plan(op, optimised, names, options, rewrites)


def open_iterator(op: DatasetOp, *, seed: int, epoch: int, options: Options, executor: Executor) -> OpIterator:
    """Start one pass over the pipeline `op`; see :func:`make_plan` and :func:`start`."""
    return start(make_plan(op, options), make_nested_plan, seed=seed, epoch=epoch, executor=executor)


_FRAMES_PER_OP = 4  # of the Python stack, for most operations; an interleave needs the most, 10
_LONG_CHAIN = 50  # operations; `explain_recursion` ignores shorter chains


def require_short_chain(op: DatasetOp) -> DatasetOp:
    """Return `op`, if the chain of operations up to it is short enough to run.

    Raises:
        InvalidArgumentError: The chain is too long. The message names the limit.
    """
    most = sys.getrecursionlimit() // _FRAMES_PER_OP
    if op.chain_length > most:
        raise InvalidArgumentError(
            f"A pipeline may have at most {most} operations in a row (a quarter of sys.getrecursionlimit()), got "
            f"{op.chain_length} up to {op.label}. Do several steps in one map, concatenate parts in pairs, or save the "
            "dataset at some point and load it."
        )
    return op


def explain_recursion(error: RecursionError, op: DatasetOp) -> None:
    """Add a note to `error` about the length of the pipeline."""
    if op.chain_length > _LONG_CHAIN:
        error.add_note(
            f"{op.chain_length} operations follow each other up to {op.label}: some of them need much of Python's "
            "stack. Use fewer operations, or raise the limit with sys.setrecursionlimit."
        )


def explain(plan: Plan, stats: PipelineStats | None = None) -> str:
    """Return a text with the graph as written and as optimised, the place of each stage, and its load, if measured."""
    lines = ["as written:", *_tree(plan.written, plan, 1)]
    rewrites = f" ({', '.join(plan.rewrites)})" if plan.rewrites else ""
    lines += [f"as optimised{rewrites}:", *_tree(plan.optimised, plan, 1)]
    lines += ["stages:", *(f"  {line}" for line in _stages(plan.optimised, plan))]
    if stats is not None and stats.stages:
        lines += ["running:", *(f"  {line}" for line in _running(stats))]
    return "\n".join(lines)


def _tree(op: DatasetOp, plan: Plan, depth: int) -> Iterator[str]:
    """Yield the lines of a graph: consumers above their inputs, inputs indented."""
    yield f"{'  ' * depth}{plan.names[id(op)]}: {op.full_label}"
    for source in op.inputs:
        yield from _tree(source, plan, depth + 1)


def _stages(op: DatasetOp, plan: Plan) -> Iterator[str]:
    if not isinstance(op, ElementwiseOp):
        for source in op.inputs:
            yield from _stages(source, plan)
        on_ids = (
            ", on ids of rows that input workers store" if op.takes_row_ids and plan.options.num_input_workers else ""
        )
        yield f"{plan.names[id(op)]}: in the consumer's process{on_ids}"
        return
    chain, base = chain_of(op)
    yield from _stages(base, plan)
    for stage in fuse(chain, IterContext(0, (0,), plan.options, InlineExecutor(), plan.names, build, make_nested_plan)):
        yield f"{'+'.join(plan.names[id(part)] for part, _ in stage)}: {_place(stage[0][0], plan.options)}"


def _running(stats: PipelineStats) -> Iterator[str]:
    for stage in stats.stages:
        where = "in its consumer's thread" if stage.where == "inline" else f"on {stage.where}"
        yield f"{stage.name}: {where}, busy {percent(stage.busy)}"
    yield from stats.findings


def _place(op: ElementwiseOp, options: Options) -> str:
    calls, workers = op.parallelism, options.num_input_workers
    if calls == 1:
        return "in the consumer's thread"
    if not workers:
        return "on the iterator's executor" if calls is None else f"on up to {calls} threads or workers"
    place = f"on {workers} input worker{'s' if workers > 1 else ''}"
    return place if calls is None else f"{place}, up to {calls} blocks at a time"
