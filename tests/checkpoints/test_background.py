"""Writing beside training: in order, one at a time, and failures are told."""

from __future__ import annotations

import threading
import warnings

import pytest

from raydist.checkpoints.saves import BackgroundWriter, SaveHandle
from raydist.core.errors import DeadlineExceededError


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_a_write_runs_in_a_thread_and_the_next_waits_for_it() -> None:
    writer, may_end, order = BackgroundWriter(), threading.Event(), list[str]()

    def slow() -> None:
        assert may_end.wait(10)
        order.append("slow")

    first = writer.submit("a", slow)
    assert not first.done()
    with pytest.raises(DeadlineExceededError, match="'a' must be written within 0.01 s"):
        first.wait(0.01)
    threading.Timer(0.05, may_end.set).start()
    second = writer.submit("b", lambda: order.append("quick"))
    second.wait()
    assert order == ["slow", "quick"]
    first.wait()
    writer.close()


def test_two_failures_warn_and_the_third_in_a_row_is_raised() -> None:
    writer = BackgroundWriter()
    writer.submit("a", fail)
    with pytest.warns(RuntimeWarning, match="'a' could not be saved: OSError: .*No space left"):
        writer.submit("b", fail)
    with pytest.warns(RuntimeWarning, match="'b' could not be saved"):
        writer.submit("c", fail)
    with pytest.raises(OSError, match="No space left") as told:
        writer.wait()
    assert "save 3 in a row" in told.value.__notes__[0]
    writer.close()


def test_a_success_between_failures_starts_the_count_again() -> None:
    writer = BackgroundWriter()
    for write in (fail, fail, lambda: None, fail, fail):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            writer.submit("a", write)
    with pytest.warns(RuntimeWarning):
        writer.wait()
    writer.submit("a", lambda: None)
    writer.close()


def test_closing_raises_the_last_failure_unless_an_exception_told_it() -> None:
    writer = BackgroundWriter()
    writer.submit("a", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.close()
    handle = writer.submit("b", fail)
    with pytest.raises(OSError, match="No space left"):
        handle.wait()
    writer.close()


def test_a_failure_that_was_only_warned_of_is_raised_by_closing() -> None:
    writer = BackgroundWriter()
    writer.submit("a", fail)
    with pytest.warns(RuntimeWarning):
        writer.wait()
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_what_has_failed_before_the_last_save_is_told_by_nobody() -> None:
    writer = BackgroundWriter()
    for _ in range(3):
        writer.submit("a", fail)
        writer.join_silently()
    assert writer.num_failures == 3
    writer.report_failure()
    writer.submit("b", lambda: None, here=True).wait()
    assert writer.num_failures == 0
    writer.submit("c", fail)
    writer.join_silently()
    writer.close()


def test_writing_here_is_done_when_it_returns() -> None:
    writer = BackgroundWriter()
    thread: list[threading.Thread] = []
    handle = writer.submit("a", lambda: thread.append(threading.current_thread()), here=True)
    assert handle.done()
    assert thread == [threading.current_thread()]
    with pytest.raises(KeyboardInterrupt):
        writer.submit("b", interrupted, here=True)


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_handle_shows_what_has_become_of_it() -> None:
    handle = SaveHandle("runs/ckpt-1")
    assert repr(handle) == "SaveHandle('runs/ckpt-1', being written)"
    handle.end()
    assert repr(handle) == "SaveHandle('runs/ckpt-1', whole)"
