"""The default writer of the driver, as sent along with a dispatched step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["SummaryOrder"]


@final
@dataclass(frozen=True, slots=True)
class SummaryOrder:
    """The state of `rd.summary` at a call of `strategy.run`.

    Attributes:
        writer: Key of the default writer; empty without one.
        step: Step of calls without a step; None for the global step.
        wanted: True if summaries are to be recorded.
    """

    writer: str = ""
    step: int | None = None
    wanted: bool = True
