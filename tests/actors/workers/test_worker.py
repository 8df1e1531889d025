"""The class of the InputWorker actor, called in this process; its exit reason and memory limit."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from raydist.actors.version_check import Software, installed_packages
from raydist.actors.workers import worker as worker_module
from raydist.actors.workers.mapped_columns import StoredColumns
from raydist.actors.workers.worker import ExitReasonFile, InputWorker, WorkerResult, unpack_result, write_exit_reason_to
from raydist.core.errors import FailedPreconditionError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of


def across(returned: tuple[WorkerResult, StoredColumns | None]) -> StageResult:
    answer, stored = returned
    assert stored is None  # these results are small
    return unpack_result(pickle.loads(pickle.dumps(answer)))


STAGE, BLOCK = cloudpickle.dumps(spec_of(SOURCE.map(lambda x: x + 1))), block_of(SOURCE)


def test_a_stage_is_sent_once() -> None:
    worker = InputWorker("worker-0")
    for sent in (STAGE, None):
        result = across(worker.run(b"a", sent, BLOCK, (0,)))
        assert [item.rows() for item in result.items if isinstance(item, Block)] == [[1, 2, 3, 4, 5, 6]]
        assert result.inputs == (6,)
    worker.forget([b"a", b"unknown"])
    with pytest.raises(KeyError):
        across(worker.run(b"a", None, BLOCK, (0,)))
    for sent in (b"cnowhere\nnothing\n.", None):  # one that cannot be loaded says so of every block
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            across(worker.run(b"b", sent, BLOCK, (0,)))


def test_functions_of_a_program_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "limit_memory", lambda limit: limit)
    monkeypatch.setattr(worker_module, "keep_freed_memory", lambda limit: True)
    spec = cloudpickle.dumps(spec_of(SOURCE.map(lambda x: (tmp_path / "ran").write_bytes(b"") + x)))
    worker = InputWorker("worker-0")
    own = dict(installed_packages().versions)
    worker.hello(driver=Software(tuple({**own, "raydist": "0.0.9"}.items())))
    with pytest.raises(FailedPreconditionError, match=r"input worker worker-0 has raydist \S+, not 0\.0\.9\. Install"):
        across(worker.run(b"a", spec, BLOCK, (0,)))
    assert not (tmp_path / "ran").exists()


# --- exit reasons -----------------------------------------------------------------------------------------------------

PROGRAM = """
import ctypes, os, sys, time
from raydist.actors.workers.worker import write_exit_reason_to
assert write_exit_reason_to(sys.argv[1])
print("ready", flush=True)
{end}
"""


def test_a_process_that_ends_itself_says_how_and_one_that_is_killed_says_nothing() -> None:
    for end, expected in [
        ("ctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
        ("os.abort()", "Fatal Python error: Aborted"),
        ("os._exit(3)", "os._exit(3)"),
        ("if os.fork() == 0: os._exit(3)\nos.wait()", ""),
        ("os.kill(os.getpid(), 9)", ""),
        ("pass", ""),
    ]:
        reason = ExitReasonFile()
        assert reason.path is not None
        command = [sys.executable, "-c", PROGRAM.format(end=end), reason.path]
        done = subprocess.run(command, check=False, capture_output=True)
        assert done.stdout == b"ready\n", done.stderr
        assert reason.read() == expected, end
        path = reason.path
        del reason
        assert not os.path.lexists(path), "the file is closed with its object"


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "file"
    other.write_text("")
    with other.open() as file:
        assert not write_exit_reason_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    assert not write_exit_reason_to("/proc/0/fd/0")
    assert not write_exit_reason_to(None)


# --- memory limit -----------------------------------------------------------------------------------------------------

CODE = """
import numpy as np
from raydist.actors.workers.memory_limit import limit_memory

print(limit_memory({limit}))
np.ones(20 << 20, np.uint8)
try:
    np.ones(1 << 44, np.uint8)
except MemoryError as error:
    print(type(error).__mro__[1].__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has mapped for itself")
def test_a_process_cannot_take_more() -> None:
    for limit in (200 << 20, None):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(limit=limit)], capture_output=True, text=True, timeout=50
        )
        room, error = done.stdout.split()
        assert int(room) == limit if limit else int(room) > 20 << 20
        assert error == "MemoryError", done.stderr


FAULTS = """
import resource, threading
import numpy as np
from raydist.actors.workers.memory_limit import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [np.ones(2 << 20, np.uint8) for _ in range(50)]
        while blocks:
            blocks.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
thread = threading.Thread(target=lambda: print(faults() > 0, faults()))  # threads have heaps of their own
thread.start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_there_for_the_next_arrays_unless_the_user_has_set_malloc_up() -> None:
    of_user = {"MALLOC_MMAP_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
    for variables in ({}, *of_user):
        command = [sys.executable, "-c", FAULTS]
        done = subprocess.run(command, env=variables, capture_output=True, timeout=50, check=True)
        again = int(done.stdout.split()[1])
        assert again > 20_000 if variables else again < 1_000
