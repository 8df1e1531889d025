"""Rewriting of a graph of immutable operations: changed operations are copied under their old name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raydist.pipelines.engine.op import DatasetOp

__all__ = ["Change", "Names", "named_like", "rewrite_each", "settings_of", "with_inputs"]

Names = dict[int, str]
"""Name of each operation, by `id`: see `engine.build.name_operations`."""

Change = Callable[[DatasetOp], DatasetOp]


def rewrite_each(op: DatasetOp, names: Names, change: Change) -> DatasetOp:
    """Apply `change` to every operation, inputs first. An operation at several places stays one object."""
    done: dict[DatasetOp, DatasetOp] = {}

    def visit(node: DatasetOp) -> DatasetOp:
        if node not in done:
            done[node] = change(with_inputs(node, names, visit))
        return done[node]

    return visit(op)


def with_inputs(op: DatasetOp, names: Names, change: Change) -> DatasetOp:
    """Return `op` with changed inputs, under its old name; `op` itself if nothing changed."""
    changed = {source: change(source) for source in op.inputs}
    if all(old is new for old, new in changed.items()):
        return op

    def swap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(swap(part) for part in value)
        return changed.get(value, value) if isinstance(value, DatasetOp) else value

    return named_like(op, _replaced(op, {name: swap(value) for name, value in _fields(op).items()}), names)


def named_like(old: DatasetOp, new: DatasetOp, names: Names) -> DatasetOp:
    """Name `new` like `old` and return `new`."""
    names[id(new)] = names[id(old)]
    return new


def settings_of(op: DatasetOp) -> tuple[Any, ...]:
    """Return the settings of an operation, without its inputs. Equal settings mean equal work."""
    inputs = op.inputs
    read = {id(inputs), *map(id, inputs)}
    return tuple(value for name, value in _fields(op).items() if name != "given_name" and id(value) not in read)


def _fields(op: DatasetOp) -> dict[str, Any]:
    return {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}


def _replaced(op: DatasetOp, fields: dict[str, Any]) -> DatasetOp:
    return dataclasses.replace(op, **fields)
