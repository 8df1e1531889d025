"""What a dispatched step must know of the writer that is the driver's default: it travels with the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["SummaryOrder"]


@final
@dataclass(frozen=True, slots=True)
class SummaryOrder:
    """The state of `rd.summary` where `strategy.run` was called.

    Attributes:
        writer: Key of the default writer; empty without one.
        step: The step of calls that name none; None for the global step.
        wanted: Whether anything is to be recorded.
    """

    writer: str = ""
    step: int | None = None
    wanted: bool = True
