"""Counters and timers of one running stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.metering.events import EventRing
from raydist.pipelines.metering.reading import Reading, StageKind, StagePlace

__all__ = ["Meter"]


@final
class Meter:
    """Totals of one stage. Only one thread at a time may write them.

    Attributes:
        inputs: Keys of its inputs; see `IterationMeters.tops`.
        own_s: Seconds in the consumer's thread without the inputs: own work, handling, and waits for workers.
        input_s: Seconds in the consumer's thread for the work of inputs.
        awaited_s: Of `own_s`, the seconds of waits for workers or for a queue to fill.
        worked_s: Seconds of work that `run_stage` measured, in any thread or process.
        here_s: Of `worked_s`, the seconds in the consumer's thread, which `own_s` includes.
        ahead_s: Seconds that prefetch threads worked for pipelines inside a function.
        inside: Meter of the pipelines inside this operation's function.
        asked: Number of requests to the queue.
        found_buffered: Sum of the elements in the queue at these requests.
        ring: Log of blocks; None for no log.
        parallelism: See :class:`Reading`; the owner sets it on every change.
        buffered, buffered_bytes, buffer_limit, place, kind: See :class:`Reading`; the owner sets them.
    """

    __slots__ = (
        "_changed_at",
        "_clock",
        "_parallelism",
        "_worker_s",
        "ahead_s",
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
        "inside",
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
        kind: StageKind = "stage",
        inputs: Sequence[int | str] = (),
        clock: Callable[[], float] = float,
    ) -> None:
        self.name = name
        self.label = label or name
        self.kind = kind
        self.inputs = tuple(inputs)
        self._clock = clock
        self._parallelism = 1
        self.buffered = self.buffered_bytes = self.buffer_limit = 0
        self.inside: Meter | None = None
        self.place: StagePlace = "inline"
        self.ring: EventRing | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Reset the totals; the clock restarts at 0."""
        self.elements = self.blocks = self.bytes = self.errors = 0
        self.own_s = self.input_s = self.awaited_s = self.worked_s = self.here_s = self.cpu_s = self.ahead_s = 0.0
        self.asked = self.found_buffered = 0
        self._worker_s = 0.0  # seconds times workers, until the last change of the number of workers
        self._changed_at = 0.0
        if self.inside is not None:
            self.inside.begin_again()

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

    def handed_out_together(self, blocks: Sequence[Block]) -> None:
        """Count several blocks."""
        for block in blocks:
            self.handed_out(block)

    def read_ahead(self, seconds: float) -> None:
        """Add `seconds` of a prefetch thread for a pipeline inside a function."""
        self.ahead_s += seconds

    def worked(self, result: StageResult, *, here: bool) -> None:
        """Add the work on one block: `here`, in the consumer's thread, or by a worker."""
        self.worked_s += result.busy_s
        self.cpu_s += result.cpu_s
        if here:
            self.here_s += result.busy_s
        elif self.ring is not None:
            self.ring.record(self.name, result.worker, result.begun_at, result.busy_s, result.inputs[0])

    def ask(self) -> None:
        """Note the fill level of the queue at a request of the consumer."""
        self.asked += 1
        self.found_buffered += self.buffered

    def read(self, inputs: Sequence[str] = ()) -> Reading:
        """Return the current totals, without the block in production."""
        now = self._clock()
        awaited_s, worked_s = self.awaited_s, self.worked_s
        if self.inside is not None:
            awaited_s += self.inside.awaited_s
            worked_s += self.inside.ahead_s
        worker_s = self._worker_s + self._parallelism * (now - self._changed_at)
        handling_s = max(0.0, self.own_s - awaited_s - self.here_s)
        return Reading(
            name=self.name,
            label=self.label,
            inputs=tuple(inputs),
            kind=self.kind,
            elements=self.elements,
            blocks=self.blocks,
            bytes=self.bytes,
            errors=self.errors,
            busy_s=worked_s + handling_s,
            cpu_s=self.cpu_s,
            wait_s=self.input_s + awaited_s,
            input_wait_s=self.input_s,
            handling_s=handling_s if worked_s else 0.0,
            parallelism=self.parallelism,
            mean_parallelism=worker_s / now if now else 0.0,
            buffered=self.buffered,
            buffered_bytes=self.buffered_bytes,
            buffer_limit=self.buffer_limit,
            mean_buffered=self.found_buffered / max(1, self.asked),
            place=self.place,
        )
