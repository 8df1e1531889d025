"""Helpers of the tests: files of shared memory that are left behind, and programs that hang."""

from __future__ import annotations

import contextlib
import mmap
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.shared_files import left_behind, used_by_others
from tests.watched_program import TOO_LONG, WatchedProgram

_MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""
_START = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid, flush=True)"


def test_what_a_process_has_mapped_that_is_no_child_is_in_use_by_others() -> None:
    file = Path("/dev/shm", f"raydist-of-a-test-{uuid.uuid4().hex}")
    file.write_bytes(bytes(mmap.PAGESIZE))
    try:
        assert left_behind((), within_s=0) >= {file.name}
        command = [sys.executable, "-c", _START, sys.executable, "-c", _MAP, str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
            assert starter.stdout is not None
            # The other one is a grandchild, and then has no parent any more.
            assert {starter.stdout.readline()[:1].isdigit(), starter.stdout.readline()[:1].isdigit()} == {True, False}
            starter.wait(20)
            assert used_by_others({file.name}) == {file.name}
    finally:
        file.unlink()


HANGS = """
import os, signal, threading, time
def waits_for_nobody():
    threading.Timer(0.2, os.kill, (os.getppid(), signal.SIGUSR1)).start()
    threading.Event().wait()
print("so far", flush=True)
threading.Thread(target=waits_for_nobody, daemon=True).start()
threading.Event().wait()
"""


def test_a_program_that_hangs_says_where_each_of_its_threads_was(tmp_path: Path) -> None:
    """SIGUSR1 does what pytest-timeout does when a test takes too long, whatever the machine is doing."""
    before = signal.signal(signal.SIGUSR1, lambda *_: pytest.fail("took too long"))
    try:
        program = WatchedProgram.start([sys.executable, "-c", HANGS], folder=tmp_path)
        with contextlib.closing(program):
            with pytest.raises(TOO_LONG):
                program.process.wait(50)
            assert re.search("(?s)in time.*so far.*in waits_for_nobody.*<string>", str(program.hangs()))
    finally:
        signal.signal(signal.SIGUSR1, before)
