"""One call of a function of `rd.summary`: what it shows, under which name, at which step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

__all__ = ["Record", "Shown"]


class Shown(ABC):
    """What one call shows, on one replica or on all. Small, and fit to travel once it is settled."""

    @abstractmethod
    def joined(self, others: Sequence[Self]) -> Shown:
        """What this replica and the others show together. All are settled, of this class, and in rank order."""

    def settled(self) -> Shown:
        """The same without tensors, for which a device may have to be waited for."""
        return self

    @property
    def num_bytes(self) -> int:
        """About its size."""
        return 64


@final
@dataclass(frozen=True, slots=True)
class Record:
    """One call.

    Attributes:
        writer: Key of the writer that it is for.
        name: Under which it is shown.
        step: Where it is shown.
        shown: What.
        wall_time: When it was called, in seconds since 1970.
    """

    writer: str
    name: str
    step: int
    shown: Shown
    wall_time: float

    @property
    def place(self) -> Hashable:
        """Records of several replicas with the same one belong together."""
        return self.writer, self.name, self.step, type(self.shown)

    def settled(self) -> Record:
        """The same, fit to travel."""
        shown = self.shown.settled()
        return self if shown is self.shown else replace(self, shown=shown)
