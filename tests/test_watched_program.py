"""Programs that hang say where."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.watched_program import run_program

HANGS = """
import os, signal, threading, time
def waits_for_nobody():
    threading.Timer(0.2, os.kill, (os.getppid(), signal.SIGUSR1)).start()
    threading.Event().wait()
print("so far", flush=True)
threading.Thread(target=waits_for_nobody, daemon=True).start()
threading.Event().wait()
"""


@contextmanager
def time_is_over_on_a_signal() -> Iterator[None]:
    """SIGUSR1 does what pytest-timeout does when a test takes too long, whatever the machine is doing."""
    before = signal.signal(signal.SIGUSR1, lambda *_: pytest.fail("took too long"))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_program_that_hangs_says_where_each_of_its_threads_was(tmp_path: Path) -> None:
    with (
        time_is_over_on_a_signal(),
        pytest.raises(AssertionError, match="(?s)in time.*so far.*in waits_for_nobody.*<string>"),
    ):
        run_program([sys.executable, "-c", HANGS], folder=tmp_path)


def test_a_program_that_fails_shows_what_it_has_printed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="(?s)ended with 3:.*one.*two"):
        run_program(
            [sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"],
            folder=tmp_path,
        )
