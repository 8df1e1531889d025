"""Computation of many short, similar datasets at once, such as the datasets that a function returns.

An iterator for each dataset would cost a hundred times as much as its few elements. Where the graphs differ only in the
data that they read from memory, and every operation implements `of_groups`, all datasets are computed together.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.items import Groups
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["groups_of", "rows_of"]


def rows_of(ops: Sequence[DatasetOp]) -> Block | None:
    """Return the elements of similar datasets, one dataset after the other; None where iterators are needed."""
    held = [op.held for op in ops]
    first = held[0]
    if first is None:
        groups = groups_of(ops)
        return None if groups is None else groups.rows
    same = [block for block in held if block is not None and _is_of_one_kind(first, block)]
    if len(same) < len(ops):
        return None
    return concat_blocks(same) if len(same) > 1 else first.shared()


def groups_of(ops: Sequence[DatasetOp]) -> Groups | None:
    """Return the elements of similar datasets as groups; None where they differ or iterators are needed."""
    first = ops[0]
    held = first.held
    if held is not None:
        return _joined([op.held for op in ops])
    if type(first).of_groups is DatasetOp.of_groups or not _alike(ops):
        return None
    inputs: list[Groups] = []
    for number in range(len(first.inputs)):
        groups = groups_of([op.inputs[number] for op in ops])
        if groups is None:
            return None
        inputs.append(groups)
    return first.of_groups(inputs)


def _joined(blocks: Sequence[Block | None]) -> Groups | None:
    first = blocks[0]
    if first is None:
        return None
    same = [block for block in blocks if block is not None and _fits(first, block)]
    if len(same) < len(blocks):
        return None
    rows = concat_blocks(same) if len(same) > 1 else first.shared()
    return Groups(rows, len(same), first.num_rows)


def _fits(first: Block, other: Block) -> bool:
    return first.num_rows == other.num_rows and _is_of_one_kind(first, other)


def _is_of_one_kind(first: Block, other: Block) -> bool:
    if first.structure != other.structure:
        return False
    return first.specs is other.specs or first.specs == other.specs


def _alike(ops: Sequence[DatasetOp]) -> bool:
    """Return True if the operations differ only in their inputs."""
    kind = type(ops[0])
    if any(type(op) is not kind for op in ops):
        return False
    settings = _settings(ops[0])
    try:
        return not settings or len(set(map(operator.attrgetter(*settings), ops))) == 1
    except TypeError:  # a setting that cannot be compared
        return False


def _settings(op: DatasetOp) -> list[str]:
    """Return the fields of an operation that are settings, not inputs."""
    inputs = op.inputs
    read = {id(inputs), *map(id, inputs)}
    names = [field.name for field in dataclasses.fields(op) if field.name != "given_name"]
    return [name for name in names if id(getattr(op, name)) not in read]
