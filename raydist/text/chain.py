"""Several steps as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pyarrow as pa

from raydist.errors import InvalidArgumentError
from raydist.text.step import TextStep

__all__ = ["Chain"]


@final
@dataclass(frozen=True)
class Chain(TextStep):
    """The steps one after the other. Nothing in between becomes Python objects: faster than calling them in turn.

    Attributes:
        steps: At least one.

    Raises:
        InvalidArgumentError: There is none, or something else than a step.

    >>> encode = rd.text.Chain((rd.text.Split(), rd.text.HashBuckets(1000, first_id=1), rd.text.PadTo(3)))
    >>> encode(["cat dog", ""]).tolist()
    [[940, 466, 0], [0, 0, 0]]
    """

    steps: tuple[TextStep, ...]

    def __post_init__(self) -> None:
        if not self.steps or not all(isinstance(step, TextStep) for step in self.steps):
            raise InvalidArgumentError(f"Chain needs a tuple of one step of rd.text or more, got {self.steps!r:.200}.")

    @property
    def takes_lists(self) -> bool:  # type: ignore[override]  # a constant of each other class, here that of the first step
        """That of the first step."""
        return self.steps[0].takes_lists

    def apply(self, array: pa.Array) -> pa.Array:
        """What the last step gives."""
        for step in self.steps:
            array = step.apply(array)
        return array
