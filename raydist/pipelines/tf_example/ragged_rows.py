"""How values are cut into rows of differing lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.pipelines.tf_example.ragged_features import RowPartition

__all__ = ["row_lengths"]

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


def row_lengths(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    """Values of each row; ValueError where `numbers` do not cut `num_values` values.

    >>> row_lengths(RowPartition("row_starts", "key"), np.array([0, 2, 2]), 5).tolist()
    [2, 0, 3]
    """
    lengths = _LENGTHS[partition.kind](partition, numbers, num_values)
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"they must ascend, but a row would have {int(lengths.min())} values")
    if lengths.sum() != num_values:
        raise ValueError(f"they cover {int(lengths.sum())} values")
    return lengths


def _of_splits(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    if len(numbers) and numbers[0] != 0:
        raise ValueError(f"the first must be 0, got {int(numbers[0])}")
    return np.diff(numbers)


def _of_lengths(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    return numbers


def _of_starts(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    return _of_splits(partition, np.append(numbers, num_values) if len(numbers) else numbers, num_values)


def _of_limits(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    return np.diff(numbers, prepend=0)


def _of_row_ids(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    if len(numbers) and (numbers[0] < 0 or np.diff(numbers).min(initial=0) < 0):
        raise ValueError(f"they must be >= 0 and ascend, got {int(numbers.min())} .. {int(numbers.max())}")
    if len(numbers) and numbers[-1] >= _MOST_EMPTY_ROWS + num_values:
        raise ValueError(f"row {int(numbers[-1])} would follow too many empty ones")
    return np.bincount(numbers).astype(np.int64) if len(numbers) else numbers


def _of_uniform(partition: RowPartition, numbers: _Numbers, num_values: int) -> _Numbers:
    return np.full(num_values // partition.length, partition.length, np.int64)


_MOST_EMPTY_ROWS = 1 << 20  # a damaged row number must not make memory run out
_LENGTHS = {
    "row_splits": _of_splits,
    "row_lengths": _of_lengths,
    "row_starts": _of_starts,
    "row_limits": _of_limits,
    "value_rowids": _of_row_ids,
    "uniform_row_length": _of_uniform,
}
