from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raydist.pipelines.formats.arrow_file import ArrowFile
from raydist.pipelines.formats.arrow_input import as_arrow_file
from raydist.pipelines.formats.opening import open_file
from raydist.pipelines.formats.parquet_file import ParquetFile

# A thread that lets go of a closed file 0.3 s after its reader has answered, as Arrow's may do.
_SLOW_THREAD = """
import io, sys, threading, time
from raydist.pipelines.formats.arrow_input import as_arrow_file

file = as_arrow_file(io.BytesIO(b"x"))
if sys.argv[1] == "closed":
    file.close()
def hold(held):
    time.sleep(float(sys.argv[2]))
    print("let go", flush=True)
threading.Thread(target=hold, args=(file,), daemon=True).start()
del file
"""


def _table_file(folder: Path, suffix: str) -> str:
    table = pa.table({"x": list(range(100))})
    path = str(folder / f"x.{suffix}")
    if suffix == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_no_thread_of_arrow_runs_python_for_a_local_file(tmp_path: Path, monkeypatch: Any, suffix: str) -> None:
    path = _table_file(tmp_path, suffix)
    readers = set()

    class Watched(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(threading.get_ident())
            return super().read(-1 if size is None else size)

    monkeypatch.setattr("raydist.pipelines.formats.opening._LocalFile", Watched)
    file: Any = ArrowFile(path) if suffix == "arrow" else ParquetFile(path)
    rows = file.batch(0).num_rows if suffix == "arrow" else sum(part.num_rows for part in file.batches(0, ["x"], None))
    file.close()
    assert rows == 100
    assert readers == {threading.get_ident()}


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_a_closed_file_leaves_no_descriptor(tmp_path: Path, suffix: str) -> None:
    path = _table_file(tmp_path, suffix)
    file = ArrowFile(path) if suffix == "arrow" else ParquetFile(path)
    assert path in _open_paths()
    file.close()
    file.close()
    assert path not in _open_paths()


def _open_paths() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]


def test_reads_through_python_what_cannot_be_opened_once_more(tmp_path: Path, monkeypatch: Any) -> None:
    def denied(path: str) -> Any:
        raise PermissionError(13, f"Failed to open local file {path!r}")

    path = _table_file(tmp_path, "arrow")
    monkeypatch.setattr(pa, "OSFile", denied)
    opened = open_file(path)
    assert as_arrow_file(opened.file).size() == opened.size
    opened.file.close()
    file = ArrowFile(path)
    assert file.batch(0).num_rows == 100
    file.close()


def test_a_process_ends_when_threads_of_arrow_have_let_go_of_closed_files() -> None:
    assert _ends("closed", 0.3) == "let go\n"


def test_a_process_does_not_wait_for_who_keeps_an_open_file() -> None:
    assert _ends("open", 60.0) == ""


def test_a_process_ends_where_a_thread_never_lets_go() -> None:
    assert _ends("closed", 60.0) == ""


def _ends(state: str, held_s: float) -> str:
    command = [sys.executable, "-c", _SLOW_THREAD, state, str(held_s)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=40, check=True)
    assert child.stderr == ""
    return child.stdout
