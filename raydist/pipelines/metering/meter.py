"""Counters and timers of one running stage, and their totals as plain data."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult

StageKind = Literal["source", "stage", "exchange", "prefetch"]
StagePlace = Literal["inline", "threads", "actors"]

_CLOCK_ZERO = time.time() - time.perf_counter()


class Event(NamedTuple):
    """The production of one block.

    Attributes:
        stage: Name of the stage.
        worker: Name of the thread or actor.
        begun_at: Start in seconds since 1970, a clock that several machines share.
        seconds: Duration, including inputs in the same thread.
        elements: Number of elements in the result, or in the input of a worker's stage.
    """

    stage: str
    worker: str
    begun_at: float
    seconds: float
    elements: int


EventLog = deque[Event]
"""The last events of an iteration, in the order in which they ended."""


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Totals of one stage since the iteration began.

    Attributes:
        name: Names of the operations: "map-1+filter-2".
        label: The label of the operations in `explain()`.
        inputs: Names of the input stages.
        kind: "source", "stage", "exchange" (changes the order of elements) or "prefetch" (a queue and its thread).
        elements: Elements handed out.
        blocks: Blocks handed out.
        bytes: Bytes of these blocks; an estimate where elements are bytes, str or of varying shape.
        bytes_here: Bytes of these that were in the pipeline's process; the values that row ids name are not.
        errors: Errors handed out in place of elements.
        busy_s: Seconds that the workers spent on the stage's own work, without its inputs.
        cpu_s: CPU seconds of that work, where measured.
        wait_s: Seconds that the consumer's thread waited here for the inputs or for the workers.
        input_wait_s: Of `wait_s`, the seconds for the inputs; the inputs of a "prefetch" work in another thread.
        handling_s: Of `busy_s`, the seconds that the consumer's thread spent on moving blocks to the workers and back.
        parallelism: Current number of workers.
        mean_parallelism: Mean number of workers so far; 0 if it has always been `parallelism`.
        buffered: Current number of elements in the queue.
        buffered_bytes: Bytes of these elements.
        buffer_limit: Current capacity of the queue in elements; 0 without a queue.
        mean_buffered: Mean number of elements in the queue when the consumer asked.
        place: "inline" (in the consumer's thread), "threads" or "actors".
    """

    name: str
    label: str
    inputs: tuple[str, ...] = ()
    kind: StageKind = "stage"
    elements: int = 0
    blocks: int = 0
    bytes: int = 0
    bytes_here: int = 0
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
    place: StagePlace = "inline"

    @property
    def workers(self) -> float:
        """Mean number of workers, >= 1."""
        return max(1.0, self.mean_parallelism or self.parallelism)


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
        events: Log of blocks; None for no log.
        parallelism: See :class:`Reading`; the owner sets it on every change.
        buffered, buffered_bytes, buffer_limit, place, kind: See :class:`Reading`; the owner sets them.
    """

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
        self.events: EventLog | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Reset the totals; the clock restarts at 0."""
        self.elements = self.blocks = self.bytes = self.bytes_here = self.errors = 0
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
        num_bytes = block.num_bytes
        self.bytes += num_bytes
        self.bytes_here += block.bytes_here if block.is_remote else num_bytes

    def read_ahead(self, seconds: float) -> None:
        """Add `seconds` of a prefetch thread for a pipeline inside a function."""
        self.ahead_s += seconds

    def worked(self, result: StageResult, *, here: bool) -> None:
        """Add the work on one block: `here`, in the consumer's thread, or by a worker."""
        self.worked_s += result.busy_s
        self.cpu_s += result.cpu_s
        if here:
            self.here_s += result.busy_s
        elif self.events is not None:
            self.events.append(Event(self.name, result.worker, result.begun_at, result.busy_s, result.inputs[0]))

    def log_here(self, begin: float, seconds: float, elements: int) -> None:
        """Log a call in the current thread, if there is a log; `begin` is a value of `time.perf_counter()`."""
        if self.events is not None:
            worker = threading.current_thread().name
            self.events.append(Event(self.name, worker, _CLOCK_ZERO + begin, seconds, elements))

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
            bytes_here=self.bytes_here,
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
