"""Filling columns from the records of a batch that are written alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raydist.pipelines.tf_example.columns import FeatureColumn
from raydist.pipelines.tf_example.layout import ExampleLayout
from raydist.pipelines.tf_example.values import Values

__all__ = ["fill_alike"]

_Indices = np.ndarray[Any, np.dtype[np.int64]]

_MIN_RECORDS = 8  # fewer are parsed one by one in less time
_MAX_LAYOUTS = 4  # tried among records of one length


def fill_alike(records: Sequence[Any], columns: Sequence[FeatureColumn]) -> list[int]:
    """Fill the rows of all records that share a layout with enough others; returns the records that are left, in order.

    A record is filled only if nothing is wrong with it.
    """
    if len(records) < _MIN_RECORDS or set(map(type, records)) != {bytes}:
        return list(range(len(records)))
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    left: list[int] = []
    for length in set(lengths.tolist()):
        left += _fill_one_length(records, np.flatnonzero(lengths == length), columns)
    return sorted(left)


def _fill_one_length(records: Sequence[bytes], rows: _Indices, columns: Sequence[FeatureColumn]) -> list[int]:
    left: list[int] = []
    for _ in range(_MAX_LAYOUTS):
        if len(rows) < _MIN_RECORDS:
            break
        layout = ExampleLayout.of(records[rows[0]])
        wanted = None if layout is None else _wanted(layout, columns)
        if layout is None or wanted is None:
            left.append(int(rows[0]))
            rows = rows[1:]
            continue
        alike = [records[row] for row in rows.tolist()]
        matrix = np.frombuffer(b"".join(alike), np.uint8).reshape(len(rows), -1)
        same = layout.matches(matrix)
        _fill(wanted, alike, matrix, rows, same)
        rows = rows[~same]
    return [*left, *rows.tolist()]


def _wanted(layout: ExampleLayout, columns: Sequence[FeatureColumn]) -> list[tuple[FeatureColumn, Values]] | None:
    """Where the values of each column stand; None where a column would not take them."""
    found = [(column, layout.features.get(column.name)) for column in columns]
    wanted = [(column, values) for column, values in found if values is not None]
    fits = all(values.kind == column.kind and column.accepts(len(values)) for column, values in wanted)
    return wanted if fits and len(wanted) == len(columns) else None


def _fill(
    wanted: Sequence[tuple[FeatureColumn, Values]],
    records: list[bytes],
    matrix: np.ndarray[Any, np.dtype[np.uint8]],
    rows: _Indices,
    same: np.ndarray[Any, np.dtype[np.bool_]],
) -> None:
    if not same.all():
        records = [record for record, is_same in zip(records, same.tolist(), strict=True) if is_same]
        matrix, rows = matrix[same], rows[same]
    for column, values in wanted:
        column.fill(rows, values.decode(records, matrix))
