"""What a process knows of its end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest

from raydist.preemption.notice import Notice


def test_a_node_that_is_needed_and_drained_is_a_reason() -> None:
    going: set[str] = {"elsewhere"}
    notice = Notice(lambda: {"here" * 4}, lambda: going, look_s=0.01)
    notice.start()
    time.sleep(0.05)
    assert notice.reason is None
    going.add("here" * 4)
    end = time.monotonic() + 10
    while notice.reason is None and time.monotonic() < end:
        time.sleep(0.01)
    assert notice.reason == "its node herehere is being drained"
    notice.stop()
    notice.stop()
    assert "raydist-preemption" not in [thread.name for thread in threading.enumerate()]


def test_sigterm_is_a_reason_until_it_stops() -> None:
    notice = Notice(set)
    notice.start()
    notice.start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.reason == "it received SIGTERM"
    notice.stop()
    assert notice.reason is None


def start_twice(notice: Notice) -> None:
    notice.start()
    notice.start()


def test_in_another_thread_only_nodes_are_watched_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    notice = Notice(set)
    with caplog.at_level(logging.WARNING, "raydist"):
        thread = threading.Thread(target=start_twice, args=(notice,), name="mine")
        thread.start()
        thread.join()
    notice.stop()
    assert len(caplog.records) == 1
    assert "only the main thread may do that, this is mine" in caplog.text
