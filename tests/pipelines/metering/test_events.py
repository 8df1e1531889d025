from __future__ import annotations

import json
import threading
import time

from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.metering.events import Event, EventRing, chrome_trace
from raydist.pipelines.metering.iteration_meters import IterationMeters


def test_a_row_for_each_worker_and_a_bar_for_each_block() -> None:
    events = [
        Event("map-1", "worker-1", 100.5, 0.25, 64),
        Event("batch-2", "MainThread", 100.0, 1.0, 2),
        Event("range-0", "MainThread", 100.0, 0.125, 64),
    ]
    trace = json.loads(chrome_trace(events))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {0: "MainThread", 1: "worker-1"}
    bars = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]["elements"]) for e in trace if e["ph"] == "X"]
    assert bars == [  # an outer bar comes before those inside it
        ("batch-2", 0, 0.0, 1e6, 2),
        ("range-0", 0, 0.0, 125_000.0, 64),
        ("map-1", 1, 500_000.0, 250_000.0, 64),
    ]


def test_a_trace_of_nothing_is_valid() -> None:
    assert [event["ph"] for event in json.loads(chrome_trace([]))["traceEvents"]] == ["M"]


def test_old_events_make_room() -> None:
    ring = EventRing(most=2)
    for number in range(5):
        ring.record(f"map-{number}", "w", 0.0, 0.0, 1)
    assert [event.stage for event in ring.events()] == ["map-3", "map-4"]


def test_local_events_carry_their_thread_and_the_time_of_day() -> None:
    ring = EventRing()
    ring.record_here("map-1", time.perf_counter(), 0.5, 3)
    (event,) = ring.events()
    assert event.worker == threading.current_thread().name
    assert abs(event.begun_at - time.time()) < 5.0


def test_workers_are_recorded_with_their_own_times() -> None:
    ring = EventRing()
    meter = IterationMeters(ring=ring).meter("map-1")
    work = StageResult((), (4,), ("",), begun_at=100.0, busy_s=2.0, worker="input-3")
    meter.worked(work, here=False)
    meter.worked(work, here=True)  # the bar of the call around it shows that
    assert ring.events() == [Event("map-1", "input-3", 100.0, 2.0, 4)]
