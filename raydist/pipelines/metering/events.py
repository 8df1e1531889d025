"""What happened when: the blocks that every thread and worker made, for a timeline."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, final

__all__ = ["Event", "EventRing", "chrome_trace"]

_MOST_EVENTS = 100_000  # about 15 MB of JSON


class Event(NamedTuple):
    """One block in the making.

    Attributes:
        stage: Name of the stage.
        worker: The thread or actor that did it.
        begun_at: In seconds since 1970: workers on several machines share that clock.
        seconds: How long it took, inputs in the same thread included.
        elements: How many elements came of it, or went into a worker's stage.
    """

    stage: str
    worker: str
    begun_at: float
    seconds: float
    elements: int


@final
class EventRing:
    """The last events of an iteration. Any thread may record.

    Args:
        most: How many to keep.
    """

    def __init__(self, most: int = _MOST_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._clock_zero = time.time() - time.perf_counter()

    def record(self, stage: str, worker: str, begun_at: float, seconds: float, elements: int) -> None:
        """Add what a worker did; the oldest event makes room."""
        self._events.append(Event(stage, worker, begun_at, seconds, elements))

    def record_here(self, stage: str, begin: float, seconds: float, elements: int) -> None:
        """Add what the present thread did, `begin` as `time.perf_counter()` tells it."""
        self.record(stage, threading.current_thread().name, self._clock_zero + begin, seconds, elements)

    def events(self) -> list[Event]:
        """What is kept, in the order in which it ended."""
        return list(self._events)


def chrome_trace(events: Iterable[Event]) -> str:
    """JSON for ui.perfetto.dev and chrome://tracing: one row a thread or worker, a bar a block.

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
