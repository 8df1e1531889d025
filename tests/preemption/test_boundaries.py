"""Leaving between two steps: all save, then handlers run, then the process ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest

from raydist.errors import Preempted
from raydist.preemption.boundaries import Boundaries, GivenUp


class Watcher:
    """Somebody who notes what it is told."""

    def __init__(self, told: list[str], name: str, during: Callable[[], None] = lambda: None) -> None:
        self.told, self.name, self.during = told, name, during

    first_undoable = 0

    def before_step(self, boundary: int) -> None:
        self.told.append(f"step {self.name}")

    def save_to_leave(self, reason: str, *, undone: int | None) -> Preempted:
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
    boundaries.pass_one()
    boundaries.note_draws()  # of that step, again
    assert (boundaries.number, told) == (1, ["step a", "step b"] * 2)
    told.clear()
    boundaries.pass_one()
    del second, watcher
    gc.collect()
    boundaries.pass_one()
    boundaries.unwatch(first)
    boundaries.pass_one()
    assert told == ["step a", "step b", "step a"]
    assert "raydist-preemption" not in [thread.name for thread in threading.enumerate()]


def test_all_save_then_handlers_run_then_the_process_ends() -> None:
    boundaries, told = Boundaries(), list[str]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append("handler"))
    first, second = Watcher(told, "a", boundaries.pass_one), Watcher(told, "b")
    boundaries.watch(first)
    boundaries.watch(second)
    boundaries.leave(before_draw=False)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted) as ended:
        boundaries.pass_one()
    assert (ended.value.code, str(ended.value)) == (42, "a")
    assert told == [f"save {name} before draw: it received SIGTERM" for name in "ab"] + ["handler"]
    with pytest.raises(Preempted):
        boundaries.leave(before_draw=False)
    boundaries.unwatch(first)
    boundaries.unwatch(second)
    boundaries.pass_one()
    signal.signal(signal.SIGTERM, before)


class Queue:
    """Has functions that wait, each of a boundary."""

    def __init__(self, *waiting: int) -> None:
        self.waiting = waiting

    def give_up_from(self, boundary: int) -> GivenUp | None:
        given = [each for each in self.waiting if each >= boundary]
        return GivenUp(given[0], len(given)) if given else None


def test_functions_that_wait_are_given_up_and_what_was_drawn_for_them_is_undone() -> None:
    boundaries, told = Boundaries(), list[str]()

    class Undoes(Watcher):
        """Can go back to boundary 4."""

        first_undoable = 4

        def save_to_leave(self, reason: str, *, undone: int | None) -> Preempted:
            return Preempted(message=f"{reason}; undone from {undone}")

    watcher, empty, queue = Undoes(told, "a"), Queue(), Queue(3, 5, 6)
    boundaries.watch(watcher)
    for each in (empty, queue):
        boundaries.add_queue(each)
    boundaries.notice.reason = "it received SIGTERM"
    with pytest.raises(Preempted, match="before 2 functions that were scheduled had begun.* undone from 5"):
        boundaries.leave(before_draw=False)
    del queue, each
    gc.collect()
    with pytest.raises(Preempted, match="SIGTERM; undone from 1"):
        boundaries.pass_one()
    boundaries.unwatch(watcher)


def test_draws_within_an_undivided_run_are_no_boundaries() -> None:
    boundaries = Boundaries()
    assert boundaries.divides_runs
    with boundaries.undivided():
        assert not boundaries.divides_runs
    assert boundaries.divides_runs
