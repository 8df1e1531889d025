"""What the autotuner can set while a pipeline runs, as its executor sees it."""

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
    """What a part of a pipeline has done so far. Written without a lock: a block that goes uncounted changes little."""

    rows: int = 0
    blocks: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    awaited_s: float = 0.0
    num_bytes: int = 0

    def take(self, name: str, setting: StageSetting) -> StagePeriod:
        """The totals as those of a period, which ends: they begin at 0 again."""
        period = StagePeriod(
            name, setting, self.rows, self.blocks, self.busy_s, self.cpu_s, self.awaited_s, self.num_bytes
        )
        self.rows = self.blocks = self.num_bytes = 0
        self.busy_s = self.cpu_s = self.awaited_s = 0.0
        return period


class TunedPart(ABC):
    """A stage, or a prefetch.

    Attributes:
        knob: What can be set.
        setting: What it is set to.
        totals: What was done since somebody took them.
        least_blocks: Blocks of a period that says enough: one, where they are made one after the other.
        charged_bytes: What it has taken of the budget for memory because of its setting.
    """

    knob: Knob
    setting: StageSetting = INLINE
    totals: Totals
    least_blocks: int = 1
    charged_bytes: int = 0

    @abstractmethod
    def apply(self, wanted: StageSetting, *, row_s: float, block_bytes: float) -> None:
        """Work as `wanted` from the next block on, as far as the budgets allow: `setting` says how far.

        Args:
            wanted: The setting.
            row_s: Seconds that one row takes.
            block_bytes: Bytes of a block.
        """

    @abstractmethod
    def end(self) -> None:
        """End all threads. May be called twice."""
