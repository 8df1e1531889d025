"""Cutting a global batch into one piece per replica.

Both rules keep the rows in order: the pieces of a step, one after the other, are the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, final

import numpy as np

from raydist.errors import InvalidArgumentError

__all__ = ["STAND_IN_ROWS", "Cut", "SplitRule", "balanced", "cut_batch", "deal", "no_rows_error", "per_batch"]

SplitRule = Literal["per_batch", "balanced"]
Columns = tuple[np.ndarray[Any, np.dtype[Any]], ...]

STAND_IN_ROWS = 2
"""What a replica without rows works on: some layers (batch normalisation) raise on one row and give NaN on none."""


def per_batch(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica: ceil(b / N) each, later ones fewer or none.

    >>> per_batch(4, 3)
    (2, 2, 0)
    """
    size = -(-num_rows // num_replicas)
    return tuple(max(0, min(size, num_rows - replica * size)) for replica in range(num_replicas))


def balanced(num_rows: int, num_replicas: int, step: int) -> tuple[int, ...]:
    """Rows of each replica: b // N, and one more for r = b % N of them, who take turns from step to step.

    >>> balanced(4, 3, step=0), balanced(4, 3, step=1)
    ((2, 1, 1), (1, 2, 1))
    """
    quotient, rest = divmod(num_rows, num_replicas)
    return tuple(quotient + ((replica - step * rest) % num_replicas < rest) for replica in range(num_replicas))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One replica's share of a step.

    Attributes:
        columns: One array per leaf; views of the global batch. A leaf's first axis may have no entries.
        num_rows: Rows of the first leaf.
        stand_in: Where there are no rows: the first two rows (or the one there is) of the same global batch.
    """

    columns: Columns
    num_rows: int
    stand_in: Columns | None = None


def cut_batch(
    columns: Sequence[Any], *, num_replicas: int, rule: SplitRule, step: int, paths: Sequence[str] = ()
) -> tuple[Cut, ...]:
    """The pieces of one global batch, without copies.

    Each leaf is cut on its own where leading dimensions differ (`zip` of two batch sizes); the first leaf's count
    is the piece's number of rows.

    Args:
        columns: The leaves of the batch, each with rows along its first axis.
        num_replicas: Number of pieces, >= 1.
        rule: "per_batch" or "balanced".
        step: Index of the batch in the epoch (only "balanced" looks at it).
        paths: Names of the leaves, for the message.

    Raises:
        InvalidArgumentError: A leaf has no rows to cut (it is a scalar): the dataset is not batched.
    """
    cuts = [_cut_leaf(np.asarray(leaf), num_replicas, rule, step) for leaf in _require_rows(columns, paths)]
    return tuple(_share([leaf[replica] for leaf in cuts], columns) for replica in range(num_replicas))


def _require_rows(columns: Sequence[Any], paths: Sequence[str]) -> Sequence[Any]:
    for index, leaf in enumerate(columns):
        if np.ndim(leaf) == 0:
            raise no_rows_error(type(leaf).__name__, paths[index] if len(paths) > index else "")
    return columns


def no_rows_error(kind: str, path: str) -> InvalidArgumentError:
    """The error for a leaf of a distributed dataset that is a scalar of type `kind`."""
    name = f" {path!r}" if path else ""
    return InvalidArgumentError(
        f"Every leaf of a distributed dataset must have rows to split over the replicas, got a scalar{name} of type "
        f"{kind}. Call the `batch` method on the dataset, with the global batch size, before distributing it."
    )


def _cut_leaf(leaf: np.ndarray[Any, np.dtype[Any]], num_replicas: int, rule: SplitRule, step: int) -> list[Any]:
    rows = len(leaf)
    sizes = per_batch(rows, num_replicas) if rule == "per_batch" else balanced(rows, num_replicas, step)
    stops = list(accumulate(sizes))
    return [leaf[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def _share(columns: Sequence[np.ndarray[Any, np.dtype[Any]]], whole: Sequence[Any]) -> Cut:
    num_rows = len(columns[0]) if columns else 0
    return Cut(tuple(columns), num_rows, None if num_rows else _first_rows(whole))


def _first_rows(whole: Sequence[Any]) -> Columns | None:
    if not whole or len(whole[0]) == 0:
        return None
    return tuple(np.asarray(leaf)[:STAND_IN_ROWS] for leaf in whole)


def deal(elements: Sequence[Sequence[Any] | None]) -> tuple[Cut, ...]:
    """One whole element per replica, as `distribute_datasets_from_function` hands them out.

    A replica without an element gets no rows: arrays of length 0 along the first axis (for scalars: of shape (0,)),
    with the first rows of the first element as its stand-in.

    Args:
        elements: The leaves of each replica's element, or None where it has none; not all None.
    """
    arrays = [None if element is None else tuple(_as_array(leaf) for leaf in element) for element in elements]
    first = next(columns for columns in arrays if columns is not None)
    stand_in = tuple(leaf[:STAND_IN_ROWS] if leaf.ndim else leaf for leaf in first)
    no_rows = tuple(leaf[:0] if leaf.ndim else leaf.reshape(1)[:0] for leaf in first)
    return tuple(_dealt(no_rows if columns is None else columns, stand_in) for columns in arrays)


def _dealt(columns: Columns, stand_in: Columns) -> Cut:
    num_rows = 0 if not columns else 1 if columns[0].ndim == 0 else len(columns[0])
    return Cut(columns, num_rows, None if num_rows else stand_in)


def _as_array(leaf: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(leaf, bytes | str):  # numpy's own text types cut trailing zeros off
        boxed = np.empty((), dtype=object)
        boxed[()] = leaf
        return boxed
    return np.asarray(leaf)
