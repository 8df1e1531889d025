"""What is the same on all replicas and shown once: texts, hyperparameters, graphs."""

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
        texts: One, or several in a nest of lists, flat.
        shape: Of that nest.
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
    """What a run was started with.

    Attributes:
        values: By name.
        metrics: Names of scalars to be shown beside them.
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
        graph: A GraphDef, in bytes.
    """

    graph: bytes

    @property
    def num_bytes(self) -> int:
        return 64 + len(self.graph)

    def joined(self, others: Sequence[Self]) -> Shown:
        return self
