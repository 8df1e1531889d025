"""What rests while others are measured: processes that are stopped and go on, with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.pipelines.contestant import Contestant
from benchmarks.processes import pause, read_processes, resume, started_by

# It starts another one in a session of its own, as a driver starts Ray.
TREE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
print(child.pid, flush=True)
while True:
    pass
"""
ECHO = """
import sys
for line in sys.stdin:
    print(line.strip(), flush=True)
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, int]]:
    """A busy process and the busy one that it has started."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield parent.pid, child
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def become(stopped: bool, *pids: int) -> bool:
    """Whether they all come to be so, within ten seconds: a signal takes a moment."""
    deadline = time.monotonic() + 10.0
    while not all(is_stopped(pid) is stopped for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def cpu_ms(root: int) -> float:
    return sum(process.cpu_ms for process in started_by(root, read_processes()))


def test_a_process_rests_with_all_that_it_started(tree: tuple[int, int]) -> None:
    pause(tree[0])
    assert become(True, *tree)
    before = cpu_ms(tree[0])
    time.sleep(0.2)
    assert cpu_ms(tree[0]) == before
    resume(tree[0])
    assert become(False, *tree)


def test_a_contestant_goes_on_with_the_next_request(tmp_path: Path) -> None:
    contestant = Contestant([sys.executable, "-c", ECHO], tmp_path / "log", limit_s=30.0)
    try:
        contestant.pause()  # there is no process yet
        assert contestant.request({"turn": 1}) == {"turn": 1}
        contestant.pause()
        contestant.pause()
        (pid,) = [each.pid for each in started_by(os.getpid(), read_processes()) if ECHO.strip() in each.command]
        assert become(True, pid)
        assert contestant.request({"turn": 2}) == {"turn": 2}
        assert become(False, pid)
    finally:
        contestant.close()


def test_a_contestant_that_rests_ends_by_itself(tmp_path: Path) -> None:
    """It is not killed: what it has started would stay."""
    ended = tmp_path / "ended"
    program = f"{ECHO}\nopen({str(ended)!r}, 'w').close()"
    contestant = Contestant([sys.executable, "-c", program], tmp_path / "log", limit_s=30.0)
    contestant.request({})
    contestant.pause()
    contestant.close()
    assert ended.exists()
