"""A call of a function of `rd.summary`: content, name and step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

__all__ = ["Record", "Shown"]


class Shown(ABC):
    """The content of one call, on one replica or on all. Small, and picklable once settled."""

    @abstractmethod
    def joined(self, others: Sequence[Self]) -> Shown:
        """Merge with the content of the other replicas. All are settled, of this class, and in rank order."""

    def settled(self) -> Shown:
        """Return the content without tensors. May block for a device."""
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
        shown: Content of the summary.
        wall_time: Time of the call, in seconds since 1970.
    """

    writer: str
    name: str
    step: int
    shown: Shown
    wall_time: float

    @property
    def place(self) -> Hashable:
        """Key by which records of several replicas are merged."""
        return self.writer, self.name, self.step, type(self.shown)

    def settled(self) -> Record:
        """Return a picklable copy of the record, see `Shown.settled`."""
        shown = self.shown.settled()
        return self if shown is self.shown else replace(self, shown=shown)
