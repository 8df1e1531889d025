"""Conversion of the batches of a DataLoader's `collate_fn` to elements of a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raydist.core.errors import SpecError


def element_of(batch: Any, num_samples: int | None) -> Any:
    """Return the element for a batch. A list of columns becomes a tuple; a list of text or numbers stays one leaf.

    Args:
        batch: Result of a collate function.
        num_samples: Number of samples in the batch; None if unknown.

    Raises:
        SpecError: The batch has a list with one value for each sample, which is not a column of rows.

    >>> element_of([torch.zeros(2, 3), ["a", "b"]], 2)[1]
    ['a', 'b']
    """
    if isinstance(batch, Mapping):
        return {key: element_of(value, num_samples) for key, value in batch.items()}
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        if isinstance(batch, list) and _is_leaf(batch):
            return batch
        _require_columns(batch, num_samples)
        return tuple(element_of(value, num_samples) for value in batch)
    if isinstance(batch, tuple):
        return type(batch)(*(element_of(value, num_samples) for value in batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: element_of(getattr(batch, name), num_samples) for name in names})
    return batch


def _is_leaf(values: list[Any], depth: int = 0) -> bool:
    """Return True for a list of text or numbers, or of lists of numbers: one tensor."""
    if all(isinstance(value, list) for value in values) and values:
        return all(_is_leaf(value, depth + 1) for value in values)
    allowed = (int, float, complex, np.generic) if depth else (int, float, complex, np.generic, str, bytes)
    return all(isinstance(value, allowed) for value in values)


def _require_columns(values: Sequence[Any], num_samples: int | None) -> None:
    if num_samples is None or num_samples < 2 or len(values) != num_samples:
        return
    rows = {_num_rows(value) for value in values}
    if num_samples in rows or rows == {None}:
        return
    raise SpecError(
        f"A collate_fn must return columns, with one row for each of the {num_samples} samples, so that the batch can "
        f"be split over replicas, got a {type(values).__name__} of {len(values)} values, one for each sample. Give the "
        "dataset and the function apart: rd.Dataset.from_torch(dataset).batch(n, collate=fn)."
    )


def _num_rows(value: Any) -> int | None:
    """Return the rows of a tensor, 0 for a nest of one sample's values, and None if unknown."""
    if isinstance(value, Mapping):
        return next((_num_rows(part) for part in value.values()), 0)
    if isinstance(value, torch.Tensor | np.ndarray):
        return len(value) if value.ndim else 0
    return len(value) if isinstance(value, list | str | bytes) else None
