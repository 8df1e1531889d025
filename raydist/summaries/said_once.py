"""Summaries that are the same on all replicas: texts, hyperparameters, graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from raydist.summaries.record import Shown

__all__ = ["GraphShown", "Hyperparameters", "Text"]


@final
@dataclass(frozen=True, slots=True)
class Text(Shown):
    """Lines of Markdown.

    Attributes:
        texts: One text, or the flattened texts of a nest of lists.
        shape: Shape of the nest.
    """

    texts: tuple[str, ...]
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return 64 + sum(map(len, self.texts))

    def joined(self, others: Sequence[Self]) -> Shown:
        return self


@final
@dataclass(frozen=True, slots=True)
class Hyperparameters(Shown):
    """The hyperparameters of a run.

    Attributes:
        values: Values by name.
        metrics: Names of scalars to show next to them.
    """

    values: Mapping[str, bool | float | str]
    metrics: tuple[str, ...] = ()

    def joined(self, others: Sequence[Self]) -> Shown:
        return self


@final
@dataclass(frozen=True, slots=True)
class GraphShown(Shown):
    """A graph of operations or modules.

    Attributes:
        graph: A serialised GraphDef.
    """

    graph: bytes

    @property
    def num_bytes(self) -> int:
        return 64 + len(self.graph)

    def joined(self, others: Sequence[Self]) -> Shown:
        return self
