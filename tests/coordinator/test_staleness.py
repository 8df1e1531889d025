"""BoundedStaleness: no worker begins a closure while its clock is too far ahead of the smallest one."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import Counter

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.coordinator.closures import Closure, ClosureQueue
from raydist.coordinator.coordinator import Coordinator
from raydist.core.nest import flatten
from raydist.mirroring.messages import StepPayload
from raydist.replicas.ps.work_message import PlannedWork
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from tests.coordinator.in_process import coordinated

RESULT = StepResult(flatten(0)[1], (0,))


class Log:
    """Clocks as the workers' own threads count them, and the largest lead with which a closure began."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.finished: Counter[str] = Counter()
        self.largest_lead = 0

    def begin(self, workers: list[str]) -> None:
        with self.lock:
            own = self.finished[threading.current_thread().name]
            self.largest_lead = max(self.largest_lead, own - min(self.finished[each] for each in workers))

    def end(self) -> None:
        with self.lock:
            self.finished[threading.current_thread().name] += 1


LOGS: dict[str, Log] = {}


def busy(log: str, workers: list[str], seconds: dict[str, float]) -> None:
    from tests.coordinator.test_staleness import LOGS

    LOGS[log].begin(workers)
    time.sleep(seconds[threading.current_thread().name])
    LOGS[log].end()


def schedule(coordinator: Coordinator, *args: object) -> None:
    payload = StepPayload(function=cloudpickle.dumps(busy), arguments=cloudpickle.dumps((args, {})))
    coordinator.schedule(payload, lambda number: pickle.dumps(StepHeader(number, 0, payload.of_step(), padding=False)))


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_no_closure_begins_further_ahead_than_the_bound(num_workers: int, bound: int) -> None:
    log = LOGS[f"{num_workers}, {bound}"] = Log()
    names = [f"worker {number}" for number in range(num_workers)]
    seconds = {name: 0.0002 * 4**number for number, name in enumerate(names)}
    with coordinated(num_workers, max_clocks=bound) as (coordinator, _, side):
        for _ in range(500):
            schedule(coordinator, f"{num_workers}, {bound}", names, seconds)
        coordinator.join()
        assert len(side.shared.begun) == log.finished.total() == 500
    assert min(bound, 1) <= log.largest_lead <= bound


def closures_in(queue: ClosureQueue, count: int) -> None:
    for _ in range(count):
        number = queue.next_number()
        queue.add(Closure(number, PlannedWork(number, b"")))


def finish_one(queue: ClosureQueue, worker: int) -> None:
    queue.succeed(worker, queue.running_on(worker)[0], RESULT)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_one_worker_can_always_go_on_and_no_clock_is_too_far_ahead(bound: int, num_workers: int, seed: int) -> None:
    """Workers take, finish and die in any order."""
    draw = random.Random(seed)
    queue, living = ClosureQueue(bound), list(range(num_workers))
    clocks: Counter[int] = Counter()
    closures_in(queue, 200)
    while queue.num_waiting:
        worker = draw.choice(living)
        capacity = queue.capacity_of(worker, living)
        assert capacity is not None
        held = len(queue.running_on(worker))
        assert clocks[worker] + held + capacity <= min(clocks[each] for each in living) + bound + 1 or not capacity
        if capacity and draw.random() < 0.5:
            queue.take(worker)
        elif held and draw.random() < 0.9:
            finish_one(queue, worker)
            clocks[worker] += 1
        elif draw.random() < 0.02 and len(living) > 1:
            queue.lost(worker, RuntimeError("gone"))
            clocks[worker] = min(clocks[each] for each in living if each != worker)
            queue.error = None
        assert any(queue.running_on(each) or queue.capacity_of(each, living) for each in living)


def test_clocks_begin_again_when_the_queue_was_empty() -> None:
    queue = ClosureQueue(0)
    closures_in(queue, 2)
    queue.take(0)
    assert (queue.capacity_of(0, [0, 1]), queue.capacity_of(1, [0, 1])) == (0, 1)
    finish_one(queue, 0)
    assert queue.capacity_of(0, [0, 1]) == 0  # worker 1 has done none, and one waits for it
    queue.take(1)
    finish_one(queue, 1)
    closures_in(queue, 1)
    assert queue.capacity_of(0, [0, 1]) == 1


def test_a_worker_that_is_new_starts_at_the_smallest_clock() -> None:
    queue = ClosureQueue(1)
    closures_in(queue, 20)
    for _ in range(10):
        assert queue.capacity_of(0, [0]) == 2
        queue.take(0)
        finish_one(queue, 0)
    assert queue.capacity_of(1, [0, 1]) == queue.capacity_of(0, [0, 1]) == 2


def test_without_a_bound_there_is_no_limit() -> None:
    queue = ClosureQueue()
    closures_in(queue, 5)
    assert queue.capacity_of(0, [0, 1]) is None
