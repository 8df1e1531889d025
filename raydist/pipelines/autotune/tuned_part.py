"""The interface between the autotuner's executor and the parts of a pipeline that it can set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from raydist.pipelines.autotune.costs import StagePeriod
from raydist.pipelines.autotune.model import INLINE, Knob, StageSetting

__all__ = ["Totals", "TunedPart"]


@final
@dataclass(slots=True)
class Totals:
    """The totals of a part of a pipeline. Written without a lock: an uncounted block matters little."""

    rows: int = 0
    blocks: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    awaited_s: float = 0.0
    num_bytes: int = 0

    def take(self, name: str, setting: StageSetting) -> StagePeriod:
        """Return the totals as a period, and reset them."""
        period = StagePeriod(
            name, setting, self.rows, self.blocks, self.busy_s, self.cpu_s, self.awaited_s, self.num_bytes
        )
        self.rows = self.blocks = self.num_bytes = 0
        self.busy_s = self.cpu_s = self.awaited_s = 0.0
        return period


class TunedPart(ABC):
    """Interface of a stage or a prefetch with a setting.

    Attributes:
        knob: Description of the setting.
        setting: Current setting.
        totals: Totals since the last period.
        least_blocks: Blocks that a period needs: one, if blocks are made one after the other.
        charged_bytes: Bytes taken from the memory budget for the setting.
    """

    knob: Knob
    setting: StageSetting = INLINE
    totals: Totals
    least_blocks: int = 1
    charged_bytes: int = 0

    @abstractmethod
    def apply(self, wanted: StageSetting, *, row_s: float, block_bytes: float) -> None:
        """Work as `wanted` from the next block on, as far as the budgets allow: `setting` has the result.

        Args:
            wanted: The setting.
            row_s: Seconds per row.
            block_bytes: Bytes of a block.
        """

    @abstractmethod
    def end(self) -> None:
        """End all threads. May be called twice."""
