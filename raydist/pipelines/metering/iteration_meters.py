"""The meters of all stages of one iteration.

The iterator that owns a stage's :class:`Meter` writes it, in about a microsecond per block. Any thread may read it at
any time: the autotuner, `stats()` and the profile do. Reading returns a :class:`Reading`, which is plain data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import final

from raydist.pipelines.metering.meter import EventLog, Meter, Reading, StageKind

_KEPT_DECISIONS = 100


@final
class _Clock(threading.local):
    """Seconds spent in metered calls inside the current one, per thread."""

    inner_s = 0.0


@final
class IterationMeters:
    """All meters of one iteration.

    Args:
        enabled: True for a meter per stage. False for thousands of short datasets inside a `flat_map`: these share one
            meter, which counts only what the consumer's thread cannot see.
        events: Log for every block; None for no log.

    Attributes:
        clock: See `MeteredIterator` in `engine/build.py`.
        tops: Name of the last stage of an operation, by the operation's `id`.
        decisions: Changes by the autotuner with reasons, oldest first.
        consumer_wait_s: Seconds that the consumer waited for the pipeline.
        consumer_busy_s: Seconds between the consumer's calls for blocks.
        shared: The meter of all stages if not `enabled`.
        convert_s: Of `consumer_wait_s`, the seconds of converting blocks to elements.
    """

    def __init__(self, *, enabled: bool = True, events: EventLog | None = None) -> None:
        self.enabled = enabled
        self._events = events
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
        """Return the meter of a stage, which its passes and epochs share; the only meter if not `enabled`.

        Args:
            name: Name of the stage. If a rewrite leaves two stages with one name, the second gets a suffix.
            label: Text to show.
            kind: See :class:`Reading`.
            inputs: Inputs of the stage: names of meters, or keys of `tops`.
            owner: Types of the operations in the stage.
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
        meter.events = self._events
        return self._meters.setdefault(unique, (owner, meter))[1]

    def inside(self, name: str) -> IterationMeters:
        """Return the meters of pipelines inside the function of an operation, whose work counts for that operation."""
        if name not in self._meters:
            return self
        inside = self._inside.get(name)
        if inside is None:
            inside = self._inside[name] = IterationMeters(enabled=False)
            self._meters[name][1].inside = inside.shared
        return inside

    def readings(self) -> tuple[Reading, ...]:
        """Return the readings of all stages, inputs before their consumers. Any thread may call this."""
        found = {name: meter.read(self._names(meter.inputs)) for name, (_, meter) in tuple(self._meters.items())}
        return _inputs_first(found)

    def _names(self, inputs: Sequence[int | str]) -> list[str]:
        names = [self.tops.get(key, "") if isinstance(key, int) else key for key in inputs]
        return [name for name in names if name]  # an unopened part of a concatenation has no name

    def decide(self, decision: str) -> None:
        """Log a change by the autotuner, with the reason."""
        self.decisions.append(decision)
        del self.decisions[:-_KEPT_DECISIONS]

    def begin_again(self) -> None:
        """Reset the totals, between two blocks of the consumer. The pipeline keeps running."""
        self.consumer_wait_s = self.consumer_busy_s = self.convert_s = 0.0
        self._waits_since, self._idle_since = None, time.perf_counter()
        for _, meter in tuple(self._meters.values()):
            meter.begin_again()

    def consumer_asks(self) -> None:
        """Note that the consumer of the pipeline requests a block."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self.consumer_busy_s += now - self._idle_since
        self._waits_since, self._idle_since = now, None

    def consumer_goes(self) -> None:
        """Note that the consumer has received a block, an error or the end."""
        now = time.perf_counter()
        if self._waits_since is not None:
            self.consumer_wait_s += now - self._waits_since
        self._waits_since, self._idle_since = None, now

    def _now(self) -> float:
        return self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds covered by the totals: until now while the consumer waits, otherwise until its last block."""
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
