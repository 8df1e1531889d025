"""The class of the InputWorker actor, called in this process; its exit reason and memory limit."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from raydist.actors.version_check import Software, installed_packages
from raydist.actors.workers import worker as worker_module
from raydist.actors.workers.mapped_columns import StoredColumns
from raydist.actors.workers.memory_limit import limit_memory
from raydist.actors.workers.worker import ExitReasonFile, InputWorker, WorkerResult, unpack_result, write_exit_reason_to
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.run.iterator import DatasetIterator
from tests.pipelines.engine.toy_stages import block_of


class Seen(Executor):
    """Record the first stage and block that an iterator submits."""

    window = 1

    def __init__(self) -> None:
        self.submitted: list[tuple[StageSpec, Block, tuple[int, ...]]] = []

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.submitted.append((spec, block, starts))
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing was started."""


def first_work(dataset: Dataset) -> tuple[bytes, Block, tuple[int, ...]]:
    seen = Seen()
    iterator = DatasetIterator(
        dataset._op, options=Options(), seed=0, epoch=0, convert=Block.rows, make_executor=lambda options: seen
    )
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    spec, block, starts = seen.submitted[0]
    return cloudpickle.dumps(spec), block, starts


def across(returned: tuple[WorkerResult, StoredColumns | None]) -> StageResult:
    answer, stored = returned
    assert stored is None  # these results are small
    return unpack_result(pickle.loads(pickle.dumps(answer)))


def test_a_stage_is_sent_once() -> None:
    spec, block, starts = first_work(Dataset.range(3).map(lambda x: x + 1))
    worker = InputWorker("worker-0")
    expected = run_stage(pickle.loads(spec), block, starts)
    for sent in (spec, None):
        result = across(worker.run(b"a", sent, block, starts))
        assert [item.rows() for item in result.items if isinstance(item, Block)] == [
            item.rows() for item in expected.items if isinstance(item, Block)
        ]
        assert result.inputs == expected.inputs
    worker.forget([b"a", b"unknown"])
    with pytest.raises(KeyError):
        across(worker.run(b"a", None, block, starts))


def test_functions_of_a_program_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "limit_memory", lambda limit: limit)
    monkeypatch.setattr(worker_module, "keep_freed_memory", lambda limit: True)
    spec, block, starts = first_work(Dataset.range(3).map(lambda x: (tmp_path / "ran").write_bytes(b"") + x))
    worker = InputWorker("worker-0")
    own = dict(installed_packages().versions)
    worker.hello(driver=Software(tuple({**own, "raydist": "0.0.9"}.items())))
    with pytest.raises(FailedPreconditionError, match=r"input worker worker-0 has raydist \S+, not 0\.0\.9\. Install"):
        across(worker.run(b"a", spec, block, starts))
    assert not (tmp_path / "ran").exists()


def test_a_stage_that_cannot_be_loaded_says_so_of_every_block() -> None:
    worker = InputWorker("worker-0")
    block = block_of(Dataset.range(1))
    for sent in (b"cnowhere\nnothing\n.", None):
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            across(worker.run(b"a", sent, block, (0,)))


# --- exit reasons -----------------------------------------------------------------------------------------------------

PROGRAM = """
import ctypes, os, sys, time
from raydist.actors.workers.worker import write_exit_reason_to
assert write_exit_reason_to(sys.argv[1])
print("ready", flush=True)
{end}
"""


def exit_reason_of(end: str) -> str:
    reason = ExitReasonFile()
    assert reason.path is not None
    subprocess.run([sys.executable, "-c", PROGRAM.format(end=end), reason.path], check=False, capture_output=True)
    return reason.read()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("ctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
        ("os.abort()", "Fatal Python error: Aborted"),
        ("os._exit(3)", "os._exit(3)"),
        ("if os.fork() == 0: os._exit(3)\nos.wait()", ""),
        ("pass", ""),
    ],
)
def test_a_process_that_ends_itself_says_how(end: str, expected: str) -> None:
    assert exit_reason_of(end) == expected


def test_a_process_that_is_killed_says_nothing() -> None:
    reason = ExitReasonFile()
    command = [sys.executable, "-c", PROGRAM.format(end="time.sleep(60)"), reason.path or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert reason.read() == ""


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "file"
    other.write_text("")
    with other.open() as file:
        assert not write_exit_reason_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    assert not write_exit_reason_to("/proc/0/fd/0")
    assert not write_exit_reason_to(None)


def test_a_file_is_closed_with_its_object() -> None:
    reason = ExitReasonFile()
    path = reason.path or ""
    assert os.path.exists(path)
    del reason
    gc.collect()
    assert not os.path.lexists(path)


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
@pytest.mark.parametrize("limit", [200 << 20, None])
def test_a_process_cannot_take_more(limit: int | None) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(limit=limit)], capture_output=True, text=True, timeout=50)
    room, error = done.stdout.split()
    assert int(room) == limit if limit else int(room) > 20 << 20
    assert error == "MemoryError", done.stderr


def test_other_systems_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert limit_memory(1) is None


FAULTS = """
import resource, threading
import numpy as np
from raydist.actors.workers.memory_limit import keep_freed_memory
def faults(num_rounds, num_blocks, num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_rounds):
        blocks = [np.ones(num_bytes, np.uint8) for _ in range(num_blocks)]
        while blocks:
            blocks.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def work():
    faults({sizes})
    print(faults({sizes}))
keep_freed_memory({limit})
thread = threading.Thread(target=work)
{start}
"""


def num_faults(start: str, sizes: str, limit: int | None, **variables: str) -> int:
    code = FAULTS.format(start=start, sizes=sizes, limit=limit)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, timeout=50, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_there_for_the_next_arrays_unless_the_user_has_set_malloc_up() -> None:
    assert num_faults("work()", "20, 8, 600_000", 1 << 30) < 500
    assert num_faults("work()", "20, 8, 600_000", 1 << 30, MALLOC_MMAP_THRESHOLD_="65536") > 20_000
    tunable = "glibc.malloc.mmap_threshold=65536"
    assert num_faults("work()", "20, 8, 600_000", 1 << 30, GLIBC_TUNABLES=tunable) > 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_heaps_of_threads_are_kept_where_they_are_empty() -> None:
    assert num_faults("thread.start(); thread.join()", "5, 50, 2 << 20", None) < 1_000
