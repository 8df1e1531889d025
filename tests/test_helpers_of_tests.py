"""Helpers of the tests: files of shared memory that are left behind, and programs that hang."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.shared_files import left_behind, used_by_others
from tests.watched_program import run_program

_MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""
_START = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid, flush=True)"


@pytest.fixture
def file() -> Iterator[Path]:
    path = Path("/dev/shm", f"raydist-of-a-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink()


def test_what_nobody_has_mapped_is_left_behind(file: Path) -> None:
    assert left_behind((), within_s=0) >= {file.name}


def test_what_a_child_has_mapped_is_left_behind(file: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _MAP, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        assert used_by_others({file.name}) == set()
        child.communicate()


def test_what_a_process_has_mapped_that_is_no_child_is_in_use(file: Path) -> None:
    command = [sys.executable, "-c", _START, sys.executable, "-c", _MAP, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert {starter.stdout.readline()[:1].isdigit(), starter.stdout.readline()[:1].isdigit()} == {True, False}
        starter.wait(20)  # then the other one has no parent any more
        assert used_by_others({file.name}) == {file.name}


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
