from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading

import pytest

from raydist.strategies.hosted import WhenDropped


class _Owner:
    def __init__(self) -> None:
        self.when_dropped = WhenDropped(self)


def _await_closing() -> None:
    for thread in threading.enumerate():
        if thread.name == "raydist-closes-dropped":
            thread.join(10)


def test_closes_the_newest_first_on_a_thread_of_its_own() -> None:
    seen: list[tuple[str, bool]] = []
    here = threading.current_thread()

    def close(name: str) -> None:
        seen.append((name, threading.current_thread() is here))

    owner = _Owner()
    for name in ("old", "new"):
        owner.when_dropped.add(functools.partial(close, name))
    del owner
    gc.collect()
    _await_closing()
    assert seen == [("new", False), ("old", False)]


def test_garbage_that_is_collected_on_a_thread_that_brings_answers_does_not_stop_it() -> None:
    """As Ray's thread does: what is closed waits for an answer that only this thread brings."""
    answered, closed = threading.Event(), threading.Event()

    def close() -> None:
        assert answered.wait(10)
        closed.set()

    def bring_answers() -> None:
        owner = _Owner()
        owner.when_dropped.add(close)
        del owner
        gc.collect()
        answered.set()

    thread = threading.Thread(target=bring_answers)
    thread.start()
    thread.join(20)
    assert closed.wait(10)
    _await_closing()


def test_what_was_closed_is_not_closed_again() -> None:
    owner = _Owner()
    owner.when_dropped.add(lambda: pytest.fail("closed again"))
    owner.when_dropped.forget()
    del owner
    gc.collect()
    _await_closing()


def test_one_that_fails_keeps_none_from_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    seen: list[str] = []
    owner = _Owner()
    owner.when_dropped.add(lambda: seen.append("closed"))
    owner.when_dropped.add(lambda: [][0])
    del owner
    gc.collect()
    _await_closing()
    assert (seen, len(failures)) == (["closed"], 1)


def test_closes_at_the_end_of_the_program_what_it_held_till_then() -> None:
    program = (
        "from raydist.strategies.hosted import WhenDropped\n"
        "class Owner: pass\n"
        "owner = Owner()\n"
        "WhenDropped(owner).add(lambda: print('closed'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("closed\n", "")
