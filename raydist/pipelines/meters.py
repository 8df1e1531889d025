"""What every stage of one iteration has done so far, in numbers.

A stage's :class:`Meter` is written by the iterator that owns it, about a microsecond a block, and read by anyone at any
time: by the autotuner, by `stats()` and by the profile. Reading makes a :class:`Reading`, which is plain data.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from raydist.pipelines.blocks import Block
    from raydist.pipelines.executor import StageResult
    from raydist.pipelines.profiling.events import EventRing

__all__ = ["Kind", "Meter", "Meters", "Place", "Reading"]

Kind = Literal["source", "stage", "exchange", "prefetch"]
Place = Literal["inline", "threads", "actors"]

_KEPT_DECISIONS = 100


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Totals of one stage since the iteration began.

    Attributes:
        name: Its operations: "map-1+filter-2".
        label: What `explain()` shows for them.
        inputs: Names of the stages it reads.
        kind: "source", "stage", "exchange" (changes the order of elements) or "prefetch" (a queue and its thread).
        elements: Elements handed out.
        blocks: Blocks handed out.
        bytes: Bytes of these blocks; an estimate where elements are bytes, str or of varying shape.
        errors: Errors handed out in the place of elements.
        busy_s: Seconds its workers spent on its own work, without its inputs.
        cpu_s: CPU seconds of these, where they were measured.
        wait_s: Seconds in which its consumer's thread waited here for the inputs or for the workers.
        input_wait_s: Of `wait_s`, the seconds for the inputs; those of a "prefetch" work in another thread.
        handling_s: Of `busy_s`, the seconds in which its consumer's thread moved blocks to the workers and back.
        parallelism: Workers that it may use now.
        mean_parallelism: Workers that it could use on average so far; 0 for `parallelism`, all the time.
        buffered: Elements in its queue now.
        buffered_bytes: Bytes of these.
        buffer_limit: Elements for which the queue has room now; 0 for none.
        mean_buffered: Elements in its queue on average, of the moments when its consumer asked.
        place: "inline" (in its consumer's thread), "threads" or "actors".
    """

    name: str
    label: str
    inputs: tuple[str, ...] = ()
    kind: Kind = "stage"
    elements: int = 0
    blocks: int = 0
    bytes: int = 0
    errors: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    input_wait_s: float = 0.0
    handling_s: float = 0.0
    parallelism: int = 1
    mean_parallelism: float = 0.0
    buffered: int = 0
    buffered_bytes: int = 0
    buffer_limit: int = 0
    mean_buffered: float = 0.0
    place: Place = "inline"

    @property
    def workers(self) -> float:
        """Workers that it could use on average, >= 1."""
        return max(1.0, self.mean_parallelism or self.parallelism)


@final
class Meter:
    """Totals of one stage, written by one thread at a time.

    Attributes:
        inputs: Keys of the operations it reads; see `Meters.tops`.
        own_s: Seconds in the consumer's thread without the inputs: own work, handling, and waiting for workers.
        input_s: Seconds in the consumer's thread in which the inputs worked.
        awaited_s: Of `own_s`, the seconds spent waiting for workers or for a queue to fill.
        worked_s: Seconds of work that `run_stage` measured, wherever it ran.
        here_s: Of `worked_s`, those in the consumer's thread, which `own_s` contains too.
        asked: How often the queue was asked.
        found_buffered: Sum of the elements that were in it then.
        ring: Where what happened is recorded; None if it is not.
        parallelism: See :class:`Reading`; set by the owner, whenever it changes.
        buffered, buffered_bytes, buffer_limit, place, kind: See :class:`Reading`; set by the owner.
    """

    __slots__ = (
        "_changed_at",
        "_clock",
        "_parallelism",
        "_worker_s",
        "asked",
        "awaited_s",
        "blocks",
        "buffer_limit",
        "buffered",
        "buffered_bytes",
        "bytes",
        "cpu_s",
        "elements",
        "errors",
        "found_buffered",
        "here_s",
        "input_s",
        "inputs",
        "kind",
        "label",
        "name",
        "own_s",
        "place",
        "ring",
        "worked_s",
    )

    def __init__(
        self,
        name: str,
        label: str = "",
        kind: Kind = "stage",
        inputs: Sequence[int | str] = (),
        clock: Callable[[], float] = float,
    ) -> None:
        self.name = name
        self.label = label or name
        self.kind = kind
        self.inputs = tuple(inputs)
        self.elements = self.blocks = self.bytes = self.errors = 0
        self.own_s = self.input_s = self.awaited_s = self.worked_s = self.here_s = self.cpu_s = 0.0
        self._clock = clock
        self._parallelism = 1
        self._worker_s = 0.0  # seconds times workers, until the number of workers changed last
        self._changed_at = 0.0
        self.buffered = self.buffered_bytes = self.buffer_limit = 0
        self.asked = self.found_buffered = 0
        self.place: Place = "inline"
        self.ring: EventRing | None = None

    @property
    def parallelism(self) -> int:
        return self._parallelism

    @parallelism.setter
    def parallelism(self, workers: int) -> None:
        now = self._clock()
        self._worker_s += self._parallelism * (now - self._changed_at)
        self._parallelism, self._changed_at = workers, now

    def handed_out(self, block: Block) -> None:
        """Count a block."""
        self.blocks += 1
        self.elements += block.num_rows
        self.bytes += block.num_bytes

    def worked(self, result: StageResult, *, here: bool) -> None:
        """Add the work on one block: done `here`, in the consumer's thread, or by a worker."""
        self.worked_s += result.busy_s
        self.cpu_s += result.cpu_s
        if here:
            self.here_s += result.busy_s
        elif self.ring is not None:
            self.ring.record(self.name, result.worker, result.begun_at, result.busy_s, result.inputs[0])

    def ask(self) -> None:
        """Note how full the queue is when the consumer asks it."""
        self.asked += 1
        self.found_buffered += self.buffered

    def read(self, inputs: Sequence[str] = ()) -> Reading:
        """The totals now. A block that is being made is not among them."""
        now = self._clock()
        worker_s = self._worker_s + self._parallelism * (now - self._changed_at)
        handling_s = max(0.0, self.own_s - self.awaited_s - self.here_s)
        return Reading(
            name=self.name,
            label=self.label,
            inputs=tuple(inputs),
            kind=self.kind,
            elements=self.elements,
            blocks=self.blocks,
            bytes=self.bytes,
            errors=self.errors,
            busy_s=self.worked_s + handling_s,
            cpu_s=self.cpu_s,
            wait_s=self.input_s + self.awaited_s,
            input_wait_s=self.input_s,
            handling_s=handling_s if self.worked_s else 0.0,
            parallelism=self.parallelism,
            mean_parallelism=worker_s / now if now else 0.0,
            buffered=self.buffered,
            buffered_bytes=self.buffered_bytes,
            buffer_limit=self.buffer_limit,
            mean_buffered=self.found_buffered / max(1, self.asked),
            place=self.place,
        )


@final
class _Clock(threading.local):
    """Seconds that the metered calls inside the present one have taken, for each thread."""

    inner_s = 0.0


@final
class Meters:
    """All meters of one iteration.

    Args:
        enabled: Whether anything is metered; thousands of short datasets inside a `flat_map` make no meters.
        ring: Where to record every block; None for nowhere.

    Attributes:
        clock: See `metered.py`.
        tops: Name of the last stage that makes the elements of an operation, by the operation's `id`.
        decisions: What the autotuner did and why, oldest first.
        consumer_wait_s: Seconds in which the consumer of the whole pipeline waited for it.
        consumer_busy_s: Seconds between the consumer's calls for blocks.
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
        self._unread = Meter("")
        self._waits_since: float | None = None
        self._idle_since: float | None = None

    def meter(
        self,
        name: str,
        *,
        label: str = "",
        kind: Kind = "stage",
        inputs: Sequence[int | str] = (),
        owner: tuple[str, ...] = (),
    ) -> Meter:
        """The meter of a stage; passes and epochs share it. If not `enabled`, one that nobody reads.

        Args:
            name: Name of the stage. A rewrite may leave two stages with one name: the second gets a suffix.
            label: What to show for it.
            kind: See :class:`Reading`.
            inputs: What it reads: names of meters, or keys of `tops`.
            owner: The kinds of its operations.
        """
        if not self.enabled:
            return self._unread
        unique = name
        while (found := self._meters.get(unique)) is not None:
            if found[0] == owner:
                found[1].inputs = tuple(inputs)
                return found[1]
            unique += "*"
        meter = Meter(unique, label, kind, inputs, self._now)
        meter.ring = self._ring
        return self._meters.setdefault(unique, (owner, meter))[1]

    @functools.cached_property
    def inner(self) -> Meters:
        """What pipelines inside a function of this one get: their work counts as that function's."""
        return Meters(enabled=False)

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
