"""Splitting of a global batch into one piece per replica.

Both rules keep the order of rows: the pieces of a step, concatenated, are the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NoReturn, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF, NOTHING, Structure, flatten, unflatten
from raydist.pipelines.elements.collated import CollatedLeaf, pieces_of_results
from raydist.pipelines.elements.columns import RemoteColumn
from raydist.pipelines.elements.object_leaves import ObjectLeaf, boxed

SplitRule = Literal["per_batch", "balanced"]
Columns = tuple[np.ndarray[Any, np.dtype[Any]], ...]

PADDING_ROWS = 2
"""Rows of a replica without own rows. Some layers (batch normalisation) raise on one row and give NaN on none."""


def per_batch(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """Return the rows of each replica: ceil(b / N) each, later ones fewer or none.

    >>> per_batch(4, 3)
    (2, 2, 0)
    """
    size = -(-num_rows // num_replicas)
    return tuple(max(0, min(size, num_rows - replica * size)) for replica in range(num_replicas))


def balanced(num_rows: int, num_replicas: int, step: int) -> tuple[int, ...]:
    """Return the rows of each replica: b // N, plus one for b % N replicas, which rotate from step to step.

    >>> balanced(4, 3, step=0), balanced(4, 3, step=1)
    ((2, 1, 1), (1, 2, 1))
    """
    quotient, rest = divmod(num_rows, num_replicas)
    return tuple(quotient + ((replica - step * rest) % num_replicas < rest) for replica in range(num_replicas))


def piece_sizes(num_rows: int, num_replicas: int, rule: SplitRule, step: int) -> tuple[int, ...]:
    """Return the rows of each replica by `rule`."""
    return per_batch(num_rows, num_replicas) if rule == "per_batch" else balanced(num_rows, num_replicas, step)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One replica's part of a step.

    Attributes:
        columns: One array per leaf: views of the global batch, row ids (`RemoteColumn`), or a `Box` in an array without
            dimensions. The first axis of a leaf may be empty.
        num_rows: Rows of the leaves, or elements of lists of tensors and of results of `collate`.
        padding: For a replica without rows: the first two rows (or the only one) of the same global batch.
    """

    columns: Columns
    num_rows: int
    padding: Columns | None = None


def common_rows(leaves: Sequence[Any], paths: Sequence[str]) -> int:
    """Return the number of rows that all leaves of a batch share; 0 without leaves.

    Leaves that go whole to every replica have no rows.

    Raises:
        InvalidArgumentError: A leaf is a scalar, leaves have different first dimensions, or no leaf has rows.
    """
    lengths: dict[str, int] = {}
    for index, leaf in enumerate(leaves):
        path = paths[index] if index < len(paths) else str(index)
        if isinstance(leaf, ObjectLeaf):
            if leaf.num_rows is not None:
                lengths[path] = leaf.num_rows
        elif np.ndim(leaf) == 0:
            raise _no_rows_error(getattr(leaf, "dtype", type(leaf).__name__), path)
        else:
            lengths[path] = len(leaf)
    return _the_one(lengths) if lengths or not leaves else _raise_only_whole(paths)


def _the_one(lengths: Mapping[str, int]) -> int:
    if len(set(lengths.values())) <= 1:
        return next(iter(lengths.values()), 0)
    shown = ", ".join(f"{path!r}: {length}" for path, length in list(lengths.items())[:8])
    raise InvalidArgumentError(
        f"All leaves of a batch must have equally many rows (one first dimension), got {shown}. Mark a leaf that goes "
        "whole to every replica with rd.Replicated(value); make batches of graphs or lists with batch(n, collate=fn) "
        "or ragged_batch(n), which are split by element."
    )


def _raise_only_whole(paths: Sequence[str]) -> NoReturn:
    raise InvalidArgumentError(
        f"A batch must have a leaf with rows beside those marked with rd.Replicated, got only {list(paths)}. Add the "
        "rows that the replicas are to share."
    )


def dealt_rows(leaves: Sequence[Any], paths: Sequence[str]) -> int:
    """Return the rows of an element for one replica: 1 if all leaves are scalars, otherwise `common_rows`.

    Raises:
        InvalidArgumentError: Some leaves are scalars and others are not, or first dimensions differ, so rows are
            undefined.
    """
    cut = [leaf for leaf in leaves if not isinstance(leaf, ObjectLeaf)]
    if cut and len(cut) == len(leaves) and all(np.ndim(leaf) == 0 for leaf in cut):
        return 1
    return common_rows(leaves, paths)


def cut_batch(
    leaves: Sequence[Any], *, num_replicas: int, rule: SplitRule, step: int, structure: Structure = LEAF
) -> tuple[tuple[Cut, ...], Structure]:
    """Return the pieces of one global batch, without copies, and their nest.

    Args:
        leaves: The leaves of the batch: arrays with rows along the first axis, or objects with their own rule for cuts.
        num_replicas: Number of pieces, >= 1.
        rule: "per_batch" or "balanced".
        step: Index of the batch in the epoch (used only by "balanced").
        structure: The nest of the leaves. The result of a `collate` function replaces its leaf.

    Raises:
        InvalidArgumentError: The leaves have different numbers of rows, or a leaf is a scalar: the dataset is not
            batched.
        Exception: The error of a `collate` function.
    """
    num_rows = common_rows(leaves, structure.paths())
    sizes = piece_sizes(num_rows, num_replicas, rule, step)
    stops = list(accumulate(sizes))
    pieces = [_between(leaves, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    first = _between(leaves, 0, PADDING_ROWS) if num_rows else None
    return _settled(pieces, sizes, first, structure)


def _no_rows_error(kind: Any, path: str) -> InvalidArgumentError:
    """Return the error for a leaf of a distributed dataset that is a scalar of type `kind`."""
    name = f" {path!r}" if path else ""
    return InvalidArgumentError(
        f"Every leaf of a distributed dataset must have rows to split over the replicas, got a scalar{name} of type "
        f"{kind}. Call the `batch` method on the dataset, with the global batch size, before distributing it, or mark "
        "what goes whole to every replica with rd.Replicated(value)."
    )


def rows_behind(leaves: Sequence[Any], num_rows: int) -> list[Any]:
    """Return the leaves without their first `num_rows` rows."""
    return _between(leaves, num_rows, None)


def _between(leaves: Sequence[Any], start: int, stop: int | None) -> list[Any]:
    return [
        leaf.cut(start, (leaf.num_rows or 0) if stop is None else stop)
        if isinstance(leaf, ObjectLeaf)
        else (leaf if isinstance(leaf, RemoteColumn) else np.asarray(leaf))[start:stop]
        for leaf in leaves
    ]


def deal(elements: Sequence[Sequence[Any] | None], structure: Structure = LEAF) -> tuple[tuple[Cut, ...], Structure]:
    """Return one whole element per replica, as in `distribute_datasets_from_function`, and their nest.

    A replica without an element gets no rows: arrays of length 0 along the first axis (for scalars: of shape (0,)),
    with the first rows of the first element as `padding`.

    Args:
        elements: The leaves of each replica's element, None for a replica without one; not all None.
        structure: The nest of the leaves.

    Raises:
        InvalidArgumentError: The number of rows of an element is undefined; see `dealt_rows`.
    """
    paths = structure.paths()
    leaves = [None if element is None else [_as_leaf(leaf) for leaf in element] for element in elements]
    sizes = [0 if element is None else dealt_rows(element, paths) for element in leaves]
    first = next(element for element in leaves if element is not None)
    none = [_no_rows(leaf) for leaf in first]
    return _settled([none if element is None else element for element in leaves], sizes, _first_rows(first), structure)


def _no_rows(leaf: Any) -> Any:
    return leaf.cut(0, 0) if isinstance(leaf, ObjectLeaf) else leaf[:0] if leaf.ndim else leaf.reshape(1)[:0]


def _first_rows(leaves: Sequence[Any]) -> list[Any]:
    of_scalars = all(not isinstance(leaf, ObjectLeaf) and leaf.ndim == 0 for leaf in leaves)
    return list(leaves) if of_scalars else _between(leaves, 0, PADDING_ROWS)


def _as_leaf(leaf: Any) -> Any:
    if isinstance(leaf, bytes | str):  # numpy's own text types cut off trailing zeros
        return boxed(leaf)
    return leaf if isinstance(leaf, ObjectLeaf | RemoteColumn) else np.asarray(leaf)


def _settled(
    pieces: Sequence[Sequence[Any]], sizes: Sequence[int], first: Sequence[Any] | None, structure: Structure
) -> tuple[tuple[Cut, ...], Structure]:
    """Return the pieces of a step as arrays, with `first` as `padding` of replicas without rows."""
    first = None if all(sizes) else first
    if any(isinstance(leaf, ObjectLeaf) for leaf in pieces[0]):
        rows, structure = _in_boxes([*pieces, *([] if first is None else [first])], structure)
        pieces, first = rows[: len(sizes)], None if first is None else rows[-1]
    padding = None if first is None else tuple(first)
    cuts = zip(pieces, sizes, strict=True)
    return tuple(Cut(tuple(piece), size, None if size else padding) for piece, size in cuts), structure


def _in_boxes(rows: Sequence[Sequence[Any]], structure: Structure) -> tuple[list[list[Any]], Structure]:
    """Return pieces with boxes in place of objects, and the nest including the results of `collate` functions."""
    columns = [
        pieces_of_results(column)
        if isinstance(column[0], CollatedLeaf)
        else [boxed(leaf.in_pieces()) if isinstance(leaf, ObjectLeaf) else leaf for leaf in column]
        for column in zip(*rows, strict=True)
    ]
    nests = [flatten(unflatten(structure, row), NOTHING) for row in zip(*columns, strict=True)]
    return [leaves for leaves, _ in nests], nests[0][1]
