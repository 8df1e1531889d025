"""Rewrites of a graph that change no element: each can be switched off in `Options.optimization`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raydist.options import Options
from raydist.pipelines.op import DatasetOp
from raydist.pipelines.ops.gather import GatherOp
from raydist.pipelines.sources.range import RangeOp

__all__ = ["optimize"]


def optimize(op: DatasetOp, names: dict[int, str], options: Options) -> DatasetOp:
    """The rewritten graph. `names` gains the names of new operations: those of the operations that they stand for."""
    flags = options.optimization
    if flags.noop_elimination:
        op = _rewrite(op, names, _without_noop)
    if flags.late_gather:
        op = _gather_late(op, names)
    return op


def _rewrite(op: DatasetOp, names: dict[int, str], change: Callable[[DatasetOp], DatasetOp]) -> DatasetOp:
    """Apply `change` to every operation, inputs first."""
    return change(_with_inputs(op, names, lambda source: _rewrite(source, names, change)))


def _with_inputs(op: DatasetOp, names: dict[int, str], change: Callable[[DatasetOp], DatasetOp]) -> DatasetOp:
    """`op` with changed inputs, under its old name; `op` itself where nothing changed."""
    changed = {source: change(source) for source in op.inputs}
    if all(old is new for old, new in changed.items()):
        return op

    def swap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(swap(part) for part in value)
        return changed.get(value, value) if isinstance(value, DatasetOp) else value

    fields = {field.name: swap(getattr(op, field.name)) for field in dataclasses.fields(op)}  # type: ignore[arg-type]  # every op is a dataclass: see DatasetOp
    rebuilt: DatasetOp = dataclasses.replace(op, **fields)  # type: ignore[type-var]  # as above
    names[id(rebuilt)] = names[id(op)]
    return rebuilt


def _without_noop(op: DatasetOp) -> DatasetOp:
    return op.inputs[0] if op.is_noop else op


def _gather_late(op: DatasetOp, names: dict[int, str]) -> DatasetOp:
    """Let shuffles, takes and repeats over a source with random access move indices, and read the elements behind them.

    A shuffle of images then moves 8 bytes an image, restoring it reads no image, and the reading joins the next map's
    stage.
    """
    if not op.content_blind:
        return _with_inputs(op, names, lambda source: _gather_late(source, names))
    source = op
    while source.content_blind:
        (source,) = source.inputs
    access = source.random_access()
    if access is None or access.cheap:
        return _with_inputs(op, names, lambda inner: _gather_late(inner, names))
    indices = RangeOp(0, len(access))
    names[id(indices)] = names[id(source)]
    gather = GatherOp(_swap_source(op, source, indices, names), source)
    names[id(gather)] = names[id(source)]
    return gather


def _swap_source(op: DatasetOp, old: DatasetOp, new: DatasetOp, names: dict[int, str]) -> DatasetOp:
    if op is old:
        return new
    return _with_inputs(op, names, lambda source: _swap_source(source, old, new, names))
