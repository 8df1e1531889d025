"""Results of stages in the object store: a worker stores the large columns, and the pipeline gets row ids of them.

A call of a worker has two return values, so that the caller owns both: the answer, in which a :class:`ColumnPlace`
stands for each stored column, and a :class:`StoredColumns`, which the pipeline never fetches. Results that are small,
or whose rows are, travel with the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from raydist.actors.packed_columns import ConcatenatedParts, pack_column
from raydist.actors.workers.mapped_columns import ColumnPlace, PackedResultColumn, StoredColumns
from raydist.actors.workers.result_recipes import Recipe, ResultColumn, StoredResult, made_by
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, concat_columns, remote_of
from raydist.pipelines.elements.items import Item, StageResult

_LEAST_ROW_BYTES = 512  # the values of smaller rows cost no more than row ids and the search for the rows
_LEAST_BYTES = 32 << 10  # of a column


def store_result(result: StageResult) -> tuple[StageResult, StoredColumns | None]:
    """Take the large columns out of a result.

    Neighbouring blocks of one kind become one block: each large element is a block of its own after a map.

    Returns:
        The answer, and the columns to store; None if there are none.
    """
    stored: list[PackedResultColumn] = []
    items: list[Item] = []
    for kind, run in itertools.groupby(result.items, _kind):
        blocks = list(run)
        if kind is None:
            items += blocks
        else:
            items.append(_without_large_columns(cast(list[Block], blocks), stored))
    if not stored:
        return result, None
    return replace(result, items=tuple(items)), StoredColumns(stored)


def _kind(item: Item) -> Any:
    """Return a key that is equal for blocks that can be concatenated; None for other items."""
    if not isinstance(item, Block) or item.holds_objects:
        return None
    return item.structure, item.specs, tuple((column.dtype, column.shape[1:]) for column in item.columns)


def _without_large_columns(blocks: Sequence[Block], stored: list[PackedResultColumn]) -> Block:
    num_rows = sum(block.num_rows for block in blocks)
    columns: list[Any] = []
    for number in range(len(blocks[0].columns)):
        parts = [block.columns[number] for block in blocks]
        place = _place_of(parts, num_rows, len(stored))
        if place is not None:
            is_faster = ConcatenatedParts.saves_time(parts)
            stored.append(ConcatenatedParts(parts) if is_faster else pack_column(_joined(parts)))
        columns.append(_joined(parts) if place is None else place)
    return Block(blocks[0].structure, blocks[0].specs, tuple(columns), num_rows)


def _joined(parts: Sequence[Column]) -> Column:
    return parts[0] if len(parts) == 1 else concat_columns(parts)


def _place_of(parts: Sequence[Column], num_rows: int, index: int) -> ColumnPlace | None:
    """Return the place of a column that is worth storing; None for one that is not."""
    first = parts[0]
    is_text = first.dtype.hasobject
    if is_text and first.ndim > 1:
        return None
    num_bytes = sum(map(_object_bytes if is_text else _dense_bytes, parts))
    if num_bytes < max(_LEAST_BYTES, _LEAST_ROW_BYTES * num_rows):
        return None
    shapes = None
    if any(isinstance(part[0], np.ndarray) for part in parts if is_text and len(part)):
        shapes = tuple(row.shape for part in parts for row in part)
    return ColumnPlace(index, first.dtype, (num_rows, *first.shape[1:]), num_bytes // num_rows, shapes)


def _dense_bytes(column: Column) -> int:
    return column.nbytes


def _object_bytes(column: Column) -> int:
    return sum(len(row) if isinstance(row, bytes | str) else getattr(row, "nbytes", 0) for row in column)


def with_row_ids(result: StageResult, ref: Any, recipe: Recipe | None = None, node: str = "") -> StageResult:
    """Return the result of an answer, with row ids of the columns stored under `ref`.

    Args:
        result: The answer.
        ref: Reference to the stored columns.
        recipe: Makes the columns again; None if nothing can.
        node: Ray node of the worker; "" if unknown.
    """
    places = [
        column
        for item in result.items
        if isinstance(item, Block)
        for column in cast(Sequence[Any], item.columns)
        if isinstance(column, ColumnPlace)
    ]
    if not places:
        return result
    stored = made_by(recipe, ref, places, node)
    return replace(result, items=tuple(_with_ids(item, stored) for item in result.items))


def _with_ids(item: Item, stored: StoredResult) -> Item:
    if not isinstance(item, Block) or ColumnPlace not in map(type, item.columns):
        return item
    columns: list[Any] = list(item.columns)  # places stand among them
    named = [remote_of(ResultColumn(stored, each)) if isinstance(each, ColumnPlace) else each for each in columns]
    return Block(item.structure, item.specs, tuple(named), item.num_rows)
