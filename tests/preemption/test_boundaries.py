"""The preemption flag, and the end between two steps: all save, then handlers run, then the process ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from raydist.cluster.preemption import Boundaries, Positions, PreemptionFlag, SigtermHandler
from raydist.core.errors import Preempted


def test_only_so_many_places_are_kept() -> None:
    positions = Positions()
    for boundary in range(1000):
        positions.note(boundary, boundary // 2)
    assert (positions.num_forgotten, positions.first, positions.last_change) == (244, 488, 998)
    assert (positions.before(488), positions.before(489), positions.before(491)) == (None, 244, 245)


def test_a_node_that_is_needed_and_drained_is_a_reason() -> None:
    going: set[str] = {"elsewhere"}
    flag = PreemptionFlag(lambda: {"here" * 4}, lambda: going, look_s=0.01)
    flag.start()
    time.sleep(0.05)
    assert flag.reason is None
    going.add("here" * 4)
    end = time.monotonic() + 10
    while flag.reason is None and time.monotonic() < end:
        time.sleep(0.01)
    assert flag.reason == "its node herehere is being drained"
    flag.stop()
    flag.stop()
    assert "raydist-preemption" not in [thread.name for thread in threading.enumerate()]


def test_sigterm_is_a_reason_until_it_stops() -> None:
    flag = PreemptionFlag(set)
    flag.start()
    flag.start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.reason == "it received SIGTERM"
    flag.stop()
    assert flag.reason is None


def test_in_another_thread_only_nodes_are_watched_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    flag = PreemptionFlag(set)
    with caplog.at_level(logging.WARNING, "raydist"):
        for _ in range(2):
            thread = threading.Thread(target=flag.start, name="mine")
            thread.start()
            thread.join()
    flag.stop()
    assert len(caplog.records) == 1
    assert "only the main thread may do that, this is mine" in caplog.text


class Watcher:
    """A watcher that records its calls."""

    def __init__(self, told: list[str], name: str, during: Callable[[], None] = lambda: None) -> None:
        self.told, self.name, self.during = told, name, during

    first_undoable = 0

    def before_step(self, boundary: int) -> None:
        self.told.append(f"step {self.name}")

    def save_before_exit(self, reason: str, *, undone: int | None) -> Preempted:
        self.told.append(f"save {self.name} {'now' if undone is None else 'before draw'}: {reason}")
        self.during()
        return Preempted(message=self.name)

    def nodes(self) -> set[str]:
        return {self.name}


def test_steps_are_told_to_who_watches_until_it_is_dropped() -> None:
    boundaries, told = Boundaries(), list[str]()
    first, second = Watcher(told, "a"), Watcher(told, "b")
    for watcher in (first, second, first):
        boundaries.watch(watcher)
    boundaries.pass_boundary()
    boundaries.note_draws()  # of that step, again
    assert (boundaries.boundary_number(), told) == (1, ["step a", "step b"] * 2)
    told.clear()
    boundaries.pass_boundary()
    del second, watcher
    gc.collect()
    boundaries.pass_boundary()
    boundaries.unwatch(first)
    boundaries.pass_boundary()
    assert told == ["step a", "step b", "step a"]
    assert "raydist-preemption" not in [thread.name for thread in threading.enumerate()]


def test_all_save_then_handlers_run_then_the_process_ends() -> None:
    boundaries, told = Boundaries(), list[str]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append("handler"))
    first, second = Watcher(told, "a", boundaries.pass_boundary), Watcher(told, "b")
    boundaries.watch(first)
    boundaries.watch(second)
    boundaries.end_if_preempted(before_draw=False)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted) as ended:
        boundaries.pass_boundary()
    assert (ended.value.code, str(ended.value)) == (42, "a")
    assert told == [f"save {name} before draw: it received SIGTERM" for name in "ab"] + ["handler"]
    with pytest.raises(Preempted):
        boundaries.end_if_preempted(before_draw=False)
    boundaries.unwatch(first)
    boundaries.unwatch(second)
    boundaries.pass_boundary()
    signal.signal(signal.SIGTERM, before)


class Queue:
    """Has functions that wait, each of a boundary."""

    def cancel_pending(self, boundary: int) -> list[int]:
        return [each for each in (3, 5, 6) if each >= boundary]


def test_functions_that_wait_are_given_up_and_what_was_drawn_for_them_is_undone() -> None:
    boundaries, told = Boundaries(), list[str]()

    class Undoes(Watcher):
        """Can go back to boundary 4."""

        first_undoable = 4

        def save_before_exit(self, reason: str, *, undone: int | None) -> Preempted:
            return Preempted(message=f"{reason}; undone from {undone}")

    watcher, queue = Undoes(told, "a"), Queue()
    boundaries.watch(watcher)
    boundaries.add_queue(queue)
    boundaries.flag.reason = "it received SIGTERM"
    with pytest.raises(Preempted, match="before 2 functions that were scheduled had begun.* undone from 5"):
        boundaries.end_if_preempted(before_draw=False)
    del queue
    gc.collect()
    with pytest.raises(Preempted, match="SIGTERM; undone from 1"):
        boundaries.pass_boundary()
    boundaries.unwatch(watcher)


def test_ignored_draws_are_no_boundaries() -> None:
    boundaries, watcher = Boundaries(), Watcher([], "a")
    boundaries.watch(watcher)
    assert boundaries.step_watchers() == [watcher]
    with boundaries.ignore_draws():
        assert boundaries.step_watchers() == ()
    assert boundaries.step_watchers() == [watcher]
    boundaries.unwatch(watcher)


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_noted_once_and_handlers_that_were_there_run_when_they_are_asked_to() -> None:
    before, ran, noted = signal.getsignal(signal.SIGTERM), list[int](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    handler = SigtermHandler(lambda: noted.append(1))
    assert handler.install()
    terminate()
    terminate()
    assert (noted, ran) == ([1], [])
    handler.run_found()
    assert ran == [signal.SIGTERM]
    handler.restore()
    handler.restore()
    terminate()
    assert ran == [signal.SIGTERM] * 2
    signal.signal(signal.SIGTERM, before)


def rays(number: int, frame: FrameType | None) -> None:
    raise AssertionError("this ends the process")


def test_rays_handler_is_put_back_but_never_run() -> None:
    before, noted = signal.getsignal(signal.SIGTERM), list[int]()
    rays.__module__ = "ray._private.worker"
    handler = SigtermHandler(lambda: noted.append(1))
    handler.install()
    signal.signal(signal.SIGTERM, rays)  # as ray.init does
    assert not handler.is_installed
    assert handler.install()
    terminate()
    handler.run_found()
    assert noted == [1]
    handler.restore()
    assert signal.getsignal(signal.SIGTERM) is rays
    signal.signal(signal.SIGTERM, before)


def test_what_another_thread_restores_is_there_when_it_comes() -> None:
    before, ran, noted = signal.getsignal(signal.SIGTERM), list[int](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    handler = SigtermHandler(lambda: noted.append(1))
    handler.install()
    in_thread(handler.restore)
    terminate()
    assert (noted, ran) == ([], [signal.SIGTERM])
    handler.install()
    in_thread(handler.restore)
    assert in_thread(handler.install)  # it watches again: nothing had to be done for it
    terminate()
    assert (noted, ran) == ([1], [signal.SIGTERM])
    handler.restore()
    assert not handler.is_installed
    signal.signal(signal.SIGTERM, before)


def in_thread(do: Callable[[], bool | None]) -> bool | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(do).result(10)


def test_only_the_main_thread_may_watch() -> None:
    handler = SigtermHandler(lambda: None)
    assert in_thread(handler.install) is False
    handler.restore()
