"""Forked children, threads at the end of a program, and failpoints."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.failpoints import FAILPOINT_VARIABLE, KNOWN_FAILPOINTS, failpoint
from raydist.core.fork_guard import OwningProcess, call_here, register_after_fork
from raydist.utils import shared_segment as segments
from raydist.utils.shared_segment import Segment
from tests.forks import in_a_forked_child
from tests.import_graph import modules


def test_only_the_process_that_made_it_may_use_it() -> None:
    process = OwningProcess("This pool")
    process.require("used")

    def child() -> None:
        assert not process.is_this
        message = rf"This pool must be used by the process that made it \({os.getppid()}\), .*child {os.getpid()}"
        with pytest.raises(FailedPreconditionError, match=message):
            process.require("used")

    assert process.is_this
    assert in_a_forked_child(child) == 0


class Thing:
    """Wants to be told."""

    copies = 0

    def after_fork_in_child(self) -> None:
        self.copies += 1


def test_copies_are_told_and_nothing_is_kept_for_it() -> None:
    kept, dropped = Thing(), Thing()
    register_after_fork(kept)
    register_after_fork(dropped)
    del dropped
    gc.collect()

    def child() -> None:
        assert kept.copies == 1

    assert in_a_forked_child(child) == 0
    assert kept.copies == 0


def test_a_child_that_a_function_forks_does_not_come_back_from_it(tmp_path: Path) -> None:
    def fork(fails: bool) -> int:
        pid = os.fork()
        if pid == 0 and fails:
            raise KeyError("in the child")
        return pid

    for fails, status in ((False, 0), (True, 1)):
        pid = call_here(fork, fails)
        (tmp_path / f"{os.getpid()}-{fails}").touch()  # a child that came back would leave one, too
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(KeyError, match="mine"):
        call_here({}.__getitem__, "mine")


# The thread is in C++ most of the time, and takes the interpreter's lock on its way back, many times a second.
_MAPPED = """
import sys
import torch
import raydist as rd

def products(x):
    a = torch.ones(200, 200)
    for _ in range(20):
        a = a @ a * 1e-3
    return a.numpy()[0]

numbers = rd.Dataset.range(100_000)
options = rd.Options()
options.threading.private_threadpool_size = 2
datasets = [
    numbers.map(products).prefetch(8),
    numbers.map(products).with_options(options),
    numbers.interleave(lambda x: rd.Dataset.range(100).map(products), num_parallel_calls=2),
]
kept = [iter(dataset) for dataset in datasets]
for iterator in kept:
    next(iterator)
if sys.argv[1] == "dropped":
    del kept, iterator
sys.exit(3)
"""

_ENDS = """
import threading, time
from raydist.core.thread_shutdown import end_at_exit

def work(told, seconds):
    told.wait(20.0)
    time.sleep(seconds)
    print("ended", flush=True)

for seconds in (0.2, 0.4):
    told = threading.Event()
    thread = threading.Thread(target=work, args=(told, seconds), daemon=True)
    end_at_exit(thread, told.set)
    thread.start()
over = threading.Thread(target=print, args=("over",), daemon=True)
end_at_exit(over, lambda: print("was told"))
over.start()
over.join()
"""

_HELD_UP = """
import threading
from raydist.core import thread_shutdown

thread_shutdown._LIMIT_S = 0.5
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(2)]
for thread in threads:
    thread_shutdown.end_at_exit(thread, lambda: None)
    thread.start()
"""


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("state", ["kept", "dropped"])
def test_a_program_may_end_in_the_middle_of_pipelines(state: str) -> None:
    done = run(_MAPPED, state)
    assert (done.returncode, done.stderr) == (3, "")


def test_threads_are_told_to_end_and_awaited_but_not_for_ever() -> None:
    done = run(_ENDS)
    assert (done.returncode, done.stdout) == (0, "over\nended\nended\n")
    done = run(_HELD_UP)
    assert (done.returncode, done.stderr) == (0, "")


NAME = KNOWN_FAILPOINTS[0]


def test_names_of_failpoints_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "".join(path.read_text() for path in modules().values())
    assert set(re.findall(r'\bfailpoint\("([a-z_.]+)"\)', source)) <= set(KNOWN_FAILPOINTS)
    with pytest.raises(InvalidArgumentError, match="'checkpoint.never'"):
        failpoint("checkpoint.never")
    monkeypatch.setenv(FAILPOINT_VARIABLE, "checkpoint.nevermore")
    with pytest.raises(InvalidArgumentError, match="'checkpoint.nevermore'"):
        failpoint(NAME)


# --- shared segments --------------------------------------------------------------------------------------------------

SIZE = 1 << 16


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create_nameless(SIZE)
    yield made
    made.close()


def test_more_than_the_machine_has_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends processes to make room for files in memory."""
    monkeypatch.setattr(segments, "free_memory", lambda: SIZE - 1)
    monkeypatch.setattr(os, "posix_fallocate", pytest.fail)
    with pytest.raises(OSError, match="65,536 bytes are wanted, 65,535 are left") as caught:
        Segment.create_nameless(SIZE)
    assert caught.value.errno == errno.ENOSPC


def test_another_file_of_that_name_is_refused(segment: Segment) -> None:
    with pytest.raises(OSError, match="somebody else"):
        Segment.open(segment.name, SIZE, b"x" * 32)
    with pytest.raises(OSError, match=f"has {SIZE} bytes and should have {SIZE + 1}"):
        Segment.open(segment.name, SIZE + 1, segment.token)
    with pytest.raises(FileNotFoundError):
        Segment.open("raydist-shm-nowhere", SIZE, segment.token)


def test_a_child_does_not_hold_for_its_parent(segment: Segment) -> None:
    holder = Segment.open(segment.name, SIZE, segment.token)
    holder.hold(1)
    begun, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    holder.close()
    held = segment.holds(1)
    os.write(go_on[1], b"x")
    os.waitpid(child, 0)
    for descriptor in (*begun, *go_on):
        os.close(descriptor)
    assert not held


def test_a_file_without_a_name_is_found_through_its_process(segment: Segment) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    other = Segment.open(segment.name, SIZE, segment.token)
    segment.view(4096, 1, torch.int64).fill_(7)
    assert other.view(4096, 1, torch.int64).item() == 7
    assert bytes(other.bytes()[4096:4104]) == b"\7" + bytes(7)
    assert other.view(0, 0, torch.float32).shape == (0,)
    assert {path.name for path in Path("/dev/shm").iterdir()} == before
    segment.hold(0)
    assert other.holds(0)
    segment.close()
    assert not other.holds(0)
    with pytest.raises(OSError):  # noqa: PT011  # what is there by then is up to the process
        Segment.open(segment.name, SIZE, segment.token)
    other.close()
    other.close()
    with pytest.raises(OSError, match="closed"):
        other.hold(1)
