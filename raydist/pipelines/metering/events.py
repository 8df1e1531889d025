"""A log of the blocks that every thread and worker made, for a timeline."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, final

_MOST_EVENTS = 100_000  # about 15 MB of JSON


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


@final
class EventRing:
    """The last events of an iteration. Safe for several threads.

    Args:
        most: Number of events to keep.
    """

    def __init__(self, most: int = _MOST_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._clock_zero = time.time() - time.perf_counter()

    def record(self, stage: str, worker: str, begun_at: float, seconds: float, elements: int) -> None:
        """Add the event of a worker; drops the oldest event if full."""
        self._events.append(Event(stage, worker, begun_at, seconds, elements))

    def record_here(self, stage: str, begin: float, seconds: float, elements: int) -> None:
        """Add an event of the current thread; `begin` is a value of `time.perf_counter()`."""
        self.record(stage, threading.current_thread().name, self._clock_zero + begin, seconds, elements)

    def events(self) -> list[Event]:
        """Return the events in the order in which they ended."""
        return list(self._events)


def chrome_trace(events: Iterable[Event]) -> str:
    """Return JSON for ui.perfetto.dev and chrome://tracing: a row per thread or worker, a bar per block.

    Source: Trace Event Format (Google), complete events ("X") and names of threads ("M").
    """
    ordered = sorted(events, key=lambda event: (event.begun_at, -event.seconds))
    rows = {worker: row for row, worker in enumerate(dict.fromkeys(event.worker for event in ordered))}
    names = [_name("process_name", 0, "raydist"), *(_name("thread_name", row, name) for name, row in rows.items())]
    zero = ordered[0].begun_at if ordered else 0.0
    bars = [_bar(event, rows[event.worker], zero) for event in ordered]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *bars]})


def _name(kind: str, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _bar(event: Event, row: int, zero: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.stage,
        "cat": "block",
        "pid": 0,
        "tid": row,
        "ts": round(1e6 * (event.begun_at - zero), 1),  # microseconds
        "dur": round(1e6 * event.seconds, 1),
        "args": {"elements": event.elements},
    }
