"""What every stage of one iteration has done so far, in numbers.

A stage's :class:`Meter` is written by the iterator that owns it, about a microsecond a block, and read by anyone at any
time: by the autotuner, by `stats()` and by the profile. Reading makes a :class:`Reading`, which is plain data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import final

from raydist.pipelines.metering.events import EventRing
from raydist.pipelines.metering.meter import Meter
from raydist.pipelines.metering.reading import Reading, StageKind

__all__ = ["IterationMeters"]

_KEPT_DECISIONS = 100


@final
class _Clock(threading.local):
    """Seconds that the metered calls inside the present one have taken, for each thread."""

    inner_s = 0.0


@final
class IterationMeters:
    """All meters of one iteration.

    Args:
        enabled: Whether there is a meter for each stage. False for thousands of short datasets inside a `flat_map`:
            they share one, which only notes what the consumer's thread cannot see.
        ring: Where to record every block; None for nowhere.

    Attributes:
        clock: See `engine/metered_iterator.py`.
        tops: Name of the last stage that makes the elements of an operation, by the operation's `id`.
        decisions: What the autotuner did and why, oldest first.
        consumer_wait_s: Seconds in which the consumer of the whole pipeline waited for it.
        consumer_busy_s: Seconds between the consumer's calls for blocks.
        shared: The meter of all stages if not `enabled`.
        convert_s: Of `consumer_wait_s`, the seconds spent on turning blocks into what the consumer gets.
    """

    def __init__(self, *, enabled: bool = True, ring: EventRing | None = None) -> None:
        self.enabled = enabled
        self._ring = ring
        self.clock = _Clock()
        self.tops: dict[int, str] = {}
        self.decisions: list[str] = []
        self.consumer_wait_s = 0.0
        self.consumer_busy_s = 0.0
        self.convert_s = 0.0
        self._meters: dict[str, tuple[tuple[str, ...], Meter]] = {}
        self.shared = Meter("")
        self._inside: dict[str, IterationMeters] = {}
        self._waits_since: float | None = None
        self._idle_since: float | None = None

    def meter(
        self,
        name: str,
        *,
        label: str = "",
        kind: StageKind = "stage",
        inputs: Sequence[int | str] = (),
        owner: tuple[str, ...] = (),
    ) -> Meter:
        """The meter of a stage; passes and epochs share it. If not `enabled`, one for all.

        Args:
            name: Name of the stage. A rewrite may leave two stages with one name: the second gets a suffix.
            label: What to show for it.
            kind: See :class:`Reading`.
            inputs: What it reads: names of meters, or keys of `tops`.
            owner: The kinds of its operations.
        """
        if not self.enabled:
            return self.shared
        unique = name
        while (found := self._meters.get(unique)) is not None:
            if found[0] == owner:
                found[1].inputs = tuple(inputs)
                return found[1]
            unique += "*"
        meter = Meter(unique, label, kind, inputs, self._now)
        meter.ring = self._ring
        return self._meters.setdefault(unique, (owner, meter))[1]

    def inside(self, name: str) -> IterationMeters:
        """What the pipelines inside the function of an operation get: all that they do counts as that operation's.

        Args:
            name: Name of the operation.
        """
        if name not in self._meters:
            return self
        inside = self._inside.get(name)
        if inside is None:
            inside = self._inside[name] = IterationMeters(enabled=False)
            self._meters[name][1].inside = inside.shared
        return inside

    def readings(self) -> tuple[Reading, ...]:
        """What every stage has done so far; inputs before their consumers. Any thread may ask."""
        found = {name: meter.read(self._names(meter.inputs)) for name, (_, meter) in tuple(self._meters.items())}
        return _inputs_first(found)

    def _names(self, inputs: Sequence[int | str]) -> list[str]:
        names = [self.tops.get(key, "") if isinstance(key, int) else key for key in inputs]
        return [name for name in names if name]  # a part of a concatenation that is not open yet has no name

    def decide(self, decision: str) -> None:
        """Log what the autotuner did and why."""
        self.decisions.append(decision)
        del self.decisions[:-_KEPT_DECISIONS]

    def begin_again(self) -> None:
        """Forget the totals, between two blocks of the consumer: what comes is what was started before."""
        self.consumer_wait_s = self.consumer_busy_s = self.convert_s = 0.0
        self._waits_since, self._idle_since = None, time.perf_counter()
        for _, meter in tuple(self._meters.values()):
            meter.begin_again()

    def consumer_asks(self) -> None:
        """The consumer of the pipeline wants a block."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self.consumer_busy_s += now - self._idle_since
        self._waits_since, self._idle_since = now, None

    def consumer_goes(self) -> None:
        """The consumer has its block, or the error or end in its place."""
        now = time.perf_counter()
        if self._waits_since is not None:
            self.consumer_wait_s += now - self._waits_since
        self._waits_since, self._idle_since = None, now

    def _now(self) -> float:
        return self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds that the totals are of: until now if the consumer waits, else until it got its last block."""
        since = self._waits_since
        waiting_s = 0.0 if since is None else time.perf_counter() - since
        return self.consumer_wait_s + self.consumer_busy_s + waiting_s


def _inputs_first(found: Mapping[str, Reading]) -> tuple[Reading, ...]:
    ordered: list[Reading] = []
    seen: set[str] = set()

    def visit(reading: Reading) -> None:
        if reading.name in seen:
            return
        seen.add(reading.name)
        for name in reading.inputs:
            if name in found:
                visit(found[name])
        ordered.append(reading)

    for reading in found.values():
        visit(reading)
    return tuple(ordered)
