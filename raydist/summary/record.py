"""Calls of functions of `rd.summary`: data, name and step; and the merging of the records of replicas."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError


class SummaryData:
    """The data of one call, on one replica or on all. Small, and picklable once settled."""

    def merged(self, others: Sequence[Self]) -> SummaryData:
        """Merge with the data of the other replicas, all settled, of this class, and in rank order: keep the first."""
        return self

    def settled(self) -> SummaryData:
        """Return the data without tensors. May block for a device."""
        return self

    @property
    def num_bytes(self) -> int:
        """Approximate size."""
        return 64


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One call of a function of `rd.summary`.

    Attributes:
        writer: Key of the writer.
        name: Name of the summary.
        step: Step of the summary.
        data: Data of the summary.
        wall_time: Time of the call, in seconds since 1970.
    """

    writer: str
    name: str
    step: int
    data: SummaryData
    wall_time: float

    @property
    def place(self) -> Hashable:
        """Key by which records of several replicas are merged."""
        return self.writer, self.name, self.step, type(self.data)

    def settled(self) -> Record:
        """Return a picklable copy of the record, see `SummaryData.settled`."""
        data = self.data.settled()
        return self if data is self.data else replace(self, data=data)


def merge(replicas: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the merged records of a step: one per name for all replicas, in the order of the first call.

    The records of each replica are settled, and in rank order. The k-th record of a name at a step is merged with the
    k-th of all other replicas. A replica may skip some.
    """
    if len(replicas) == 1:
        return list(replicas[0])
    together: dict[Hashable, list[Record]] = {}
    for records in replicas:
        seen: Counter[Hashable] = Counter()
        for record in records:
            place = record.place
            together.setdefault((place, seen[place]), []).append(record)
            seen[place] += 1
    return [_joined(records) for records in together.values()]


def _joined(records: Sequence[Record]) -> Record:
    first, *others = records
    if not others:
        return first
    return replace(first, data=first.data.merged([other.data for other in others]))


_FIRST_TOO_LARGE = 1 << 63  # event files hold 64 bits


def step_number(step: Any) -> int | None:
    """Return `step` as a plain int, or None. Reads a tensor at once.

    Raises:
        InvalidArgumentError: The step is not a whole number.

    >>> step_number(3), step_number(None)
    (3, None)
    """
    if step is None:
        return None
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step.item() if hasattr(step, "item") else step)
        if not -_FIRST_TOO_LARGE <= number < _FIRST_TOO_LARGE:
            raise ValueError
        return number
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(
            f"The step of a summary must be a whole number, got {step!r:.80}. Pass e.g. step=epoch; it has 64 bits."
        ) from None


def as_array(data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a tensor, an array or nested numbers as an array, which may share memory with it. Blocks for a device.

    >>> import torch
    >>> as_array(torch.ones(2, dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    if not isinstance(data, torch.Tensor):
        return np.asarray(data)
    tensor = data.detach()
    tensor = tensor.as_subclass(torch.Tensor) if tensor.layout is torch.strided else tensor.to_dense()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    array: np.ndarray[Any, np.dtype[Any]] = tensor.cpu().numpy()
    return array
