"""Learned costs of a stage: the time of a row inline; elsewhere, the gain from more workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from raydist.pipelines.autotune.model import StageSetting, Workload

__all__ = ["Cost", "StagePeriod", "learn"]

_RECENT = 0.3  # weight of the newest period in running means
_FORGOTTEN = 0.01  # weight of the prior in each period without threads: results of threads expire slowly
_CONTENDED = 1.25  # inflation of work beside other work that indicates contention
_COPY_BYTES_S = 1e9  # to and from the object store, measured
_MOST_ROWS, _MOST_BYTES = 4096, 8 << 20  # of a block: see engine/block_size.py
_CALL_S = 0.001  # call of an actor with a block, measured: 0.5 to 0.8 ms


@final
@dataclass(frozen=True, slots=True)
class StagePeriod:
    """The activity of one setting (knob) in a period.

    Attributes:
        name: Name of the knob.
        setting: Its setting.
        rows: Number of elements processed.
        blocks: Number of blocks of these elements.
        busy_s: Seconds of work of its workers (inline: of the consumer's thread), including waits for the GIL.
        cpu_s: CPU seconds of that work.
        awaited_s: Seconds that the consumer's thread waited for the workers.
        num_bytes: Bytes of the blocks.
    """

    name: str
    setting: StageSetting
    rows: int
    blocks: int
    busy_s: float
    cpu_s: float = 0.0
    awaited_s: float = 0.0
    num_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated cost of a stage.

    Attributes:
        row_s: Seconds per row for one undisturbed thread.
        serial: Share of these seconds with the GIL held. Before a trial of threads, half of the share that computes:
            the first trial is then two threads for work that computes, and as many as allowed for work that waits.
        call_s: Additional seconds for moving one block to an actor and back.
        block_rows: Mean rows of a block.
        block_bytes: Largest mean size of a period's blocks.
        proven: Number of workers that is known to help; the next trial uses at most twice as many.
    """

    row_s: float
    serial: float
    call_s: float
    block_rows: float
    block_bytes: float
    proven: int = 1

    @property
    def handed_over_s(self) -> float:
        """Seconds of work in the largest block for a thread."""
        row_bytes = max(1.0, self.block_bytes / max(1.0, self.block_rows))
        return self.row_s * max(1.0, min(_MOST_ROWS, _MOST_BYTES / row_bytes))

    def work(self, period: StagePeriod) -> Workload:
        """Return the workload of `period`."""
        moving_s = self.call_s * period.rows / max(1.0, self.block_rows)
        return Workload(period.name, period.rows * self.row_s, self.serial, moving_s, self.block_bytes)


def learn(costs: Mapping[str, Cost], periods: Sequence[StagePeriod], elapsed_s: float) -> dict[str, Cost]:
    """Return `costs` updated by a period of `elapsed_s`. Costs without new data are kept."""
    alone = all(period.setting.place != "threads" for period in periods)
    found = dict(costs)
    for period in periods:
        if not period.rows or period.busy_s <= 0:
            continue
        cost = found.get(period.name)
        if cost is None or (period.setting.place == "inline" and alone):
            found[period.name] = _learn_inline(cost, period)
        else:
            found[period.name] = _learn_beside_others(cost, period, elapsed_s)
    return _share_the_gil(found, periods, elapsed_s)


def _block_bytes(cost: Cost | None, period: StagePeriod) -> float:
    return max(cost.block_bytes if cost else 0.0, period.num_bytes / max(1, period.blocks))


def _learn_inline(cost: Cost | None, period: StagePeriod) -> Cost:
    row_s, block_rows = period.busy_s / period.rows, period.rows / max(1, period.blocks)
    block_bytes = _block_bytes(cost, period)
    prior = 0.5 * min(1.0, period.cpu_s / period.busy_s)
    if cost is not None:
        row_s = cost.row_s + _RECENT * (row_s - cost.row_s)
        block_rows = cost.block_rows + _RECENT * (block_rows - cost.block_rows)
        serial = cost.serial + _FORGOTTEN * (prior - cost.serial)
        return replace(cost, row_s=row_s, serial=serial, block_rows=block_rows, block_bytes=block_bytes)
    return Cost(row_s, prior, _CALL_S + block_bytes / _COPY_BYTES_S, block_rows, block_bytes)


def _learn_beside_others(cost: Cost, period: StagePeriod, elapsed_s: float) -> Cost:
    row_s = min(cost.row_s, period.busy_s / period.rows)  # work is never faster beside other work than alone
    cost = replace(cost, row_s=row_s, block_bytes=_block_bytes(cost, period))
    workers = period.setting.workers
    if period.setting.place == "actors":
        if period.awaited_s > 0.1 * elapsed_s:  # the bottleneck: the rest of the workers' time is moving blocks
            spent_s = workers * elapsed_s / period.rows - cost.row_s
            cost = replace(cost, call_s=max(0.0, spent_s) * cost.block_rows)
        return replace(cost, proven=max(cost.proven, workers))
    if workers < 2:
        return cost
    inflation = _inflation(cost, period)
    if inflation > _CONTENDED:
        gained = workers / inflation
        return replace(cost, serial=min(1.0, 1 / gained), proven=max(cost.proven, math.ceil(gained)))
    return replace(cost, serial=min(cost.serial, 1 / (4 * workers)), proven=max(cost.proven, workers))


def _inflation(cost: Cost, period: StagePeriod) -> float:
    """Return the duration of the work relative to undisturbed work."""
    return period.busy_s / (period.rows * cost.row_s) if period.rows and cost.row_s > 0 else 0.0


def _share_the_gil(costs: dict[str, Cost], periods: Sequence[StagePeriod], elapsed_s: float) -> dict[str, Cost]:
    """Raise the serial shares if stages slowed each other down: the GIL was then held all the time."""
    here = [period for period in periods if period.name in costs and period.setting.place != "actors"]
    if all(period.setting.place == "inline" for period in here):  # no stage can slow down another
        return costs
    if max((_inflation(costs[period.name], period) for period in here), default=0.0) < _CONTENDED:
        return costs
    held_s = sum(period.rows * costs[period.name].row_s * costs[period.name].serial for period in here)
    factor = elapsed_s / held_s if held_s > 0 else 1.0
    if factor <= 1:
        return costs
    raised = {p.name: replace(costs[p.name], serial=min(1.0, factor * costs[p.name].serial)) for p in here}
    return costs | raised
