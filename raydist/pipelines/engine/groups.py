"""Many short datasets at once: those that a function makes of one input after the other, often alike.

An iterator for each would cost a hundred times what its few elements cost. Where their graphs differ only in the data
that they read from memory, and every operation knows what it makes of equal groups of rows, all are computed together.
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
    """The elements of datasets that are alike, one dataset after the other; None where it takes iterators."""
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
    """The elements of datasets that are alike; None where they are not, or where it takes an iterator."""
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
    """Whether operations differ in nothing but what they read."""
    kind = type(ops[0])
    if any(type(op) is not kind for op in ops):
        return False
    settings = _settings(ops[0])
    try:
        return not settings or len(set(map(operator.attrgetter(*settings), ops))) == 1
    except TypeError:  # a setting that cannot be compared
        return False


def _settings(op: DatasetOp) -> list[str]:
    """The fields of an operation that say what it does, not what it reads."""
    inputs = op.inputs
    read = {id(inputs), *map(id, inputs)}
    names = [field.name for field in dataclasses.fields(op) if field.name != "given_name"]
    return [name for name in names if id(getattr(op, name)) not in read]
