"""Arrow and Parquet files: batches, damage, memory, threads."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.formats.arrow_file import ArrowFile, as_arrow_file, map_stream
from raydist.pipelines.formats.files import open_file
from raydist.pipelines.formats.parquet_file import ParquetFile, parse_footer, read_struct


def write(path: Path, table: pa.Table) -> bytes:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.read_bytes()


def test_offsets_that_lead_nowhere_are_found_before_they_are_followed(tmp_path: Path) -> None:
    content = write(tmp_path / "x", pa.table({"s": ["a" * 100, "b" * 100]}))
    offsets = b"\0\0\0\0\x64\0\0\0\xc8\0\0\0"
    assert content.count(offsets) == 1
    (tmp_path / "x").write_bytes(content.replace(offsets, b"\0\0\0\0\xff\xff\xff\x7f\xc8\0\0\0"))
    file = ArrowFile(str(tmp_path / "x"))
    with pytest.raises(DataLossError, match="reading record batch 0 of 1 fails: .*/x', byte 0"):
        file.batch(0)
    file.close()


def test_what_is_no_arrow_file(tmp_path: Path) -> None:
    for content in (b"", b"ARROW1", b"ARROW1\0\0" + b"\xff" * 40 + b"ARROW1", b"text"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataLossError, match="Arrow IPC file must begin|must be an intact Arrow IPC file"):
            ArrowFile(str(tmp_path / "x"))
    content = write(tmp_path / "x", pa.table({"x": pa.array([7] * 1000, pa.int64())}).combine_chunks())
    length = (16).to_bytes(8, "little")
    assert length in content
    (tmp_path / "x").write_bytes(content.replace(length, (1 << 62).to_bytes(8, "little")))
    with pytest.raises(DataLossError, match="must be an intact Arrow IPC file"):  # noqa: PT012 - any of the steps may find it
        file = ArrowFile(str(tmp_path / "x"))
        for number in range(file.num_batches):
            file.batch(number)


def test_a_batch_that_would_take_all_memory(tmp_path: Path) -> None:
    """8 KB that become 128 MB."""
    path, table = tmp_path / "x", pa.table({"x": np.zeros(1 << 24)})
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    before = pa.total_allocated_bytes()
    file = ArrowFile(str(path))
    with pytest.raises(DataLossError, match="at most 67108864 bytes, .* become 134217728.*max_batch_bytes") as caught:
        file.batch(0)
    file.close()
    assert caught.value.offset is not None
    assert pa.total_allocated_bytes() - before < 1 << 20
    allowed = ArrowFile(str(path), 1 << 28)
    assert allowed.batch(0).num_rows == 1 << 24
    allowed.close()
    with pytest.raises(InvalidArgumentError, match="max_batch_bytes must be >= 1"):
        rd.Dataset.from_arrow(path, max_batch_bytes=0)
    with pytest.raises(DataLossError, match="max_batch_bytes"):
        next(rd.Dataset.from_arrow(path).as_numpy_iterator())
    assert next(rd.Dataset.from_arrow(path, max_batch_bytes=1 << 28).as_numpy_iterator()) == {"x": 0.0}


def test_a_dictionary_that_would_take_all_memory(tmp_path: Path) -> None:
    table = pa.table({"x": pa.DictionaryArray.from_arrays([0, 0], ["a" * (1 << 20)])})
    with pa.ipc.new_file(tmp_path / "x", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    file = ArrowFile(str(tmp_path / "x"), 1 << 16)
    with pytest.raises(DataLossError, match="at most 65536 bytes, .* Raise max_batch_bytes"):
        file.batch(0)
    file.close()


def test_a_mapped_file_that_shrinks_is_not_read(tmp_path: Path) -> None:
    path, table = str(tmp_path / "x"), pa.table({"x": [1, 2]})
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    mapped = map_stream(path)
    assert mapped.batch(0).num_rows == 2
    os.truncate(path, 10)
    with pytest.raises(DataLossError, match=r"must keep its size of \d+ bytes while it is mapped .*byte 10"):
        mapped.batch(0)


# A thread that lets go of a closed file 0.3 s after its reader has answered, as Arrow's may do.
_SLOW_THREAD = """
import io, sys, threading, time
from raydist.pipelines.formats.arrow_file import as_arrow_file

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
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_no_thread_of_arrow_runs_python_for_a_local_file_and_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: Any, suffix: str
) -> None:
    path = _table_file(tmp_path, suffix)
    readers = set()

    class Watched(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(threading.get_ident())
            return super().read(-1 if size is None else size)

    monkeypatch.setattr("raydist.pipelines.formats.files._LocalFile", Watched)
    file: Any = ArrowFile(path) if suffix == "arrow" else ParquetFile(path)
    rows = file.batch(0).num_rows if suffix == "arrow" else sum(part.num_rows for part in file.batches(0, ["x"], None))
    assert path in _open_paths()
    file.close()
    file.close()
    assert path not in _open_paths()
    assert rows == 100
    assert readers == {threading.get_ident()}


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


def test_a_process_ends_when_threads_have_let_go_of_closed_files_or_never_will() -> None:
    cases = [("closed", 0.3, "let go\n"), ("open", 60, ""), ("closed", 60, "")]
    children = [
        subprocess.Popen([sys.executable, "-c", _SLOW_THREAD, state, str(held_s)], stdout=PIPE, stderr=PIPE, text=True)
        for state, held_s, _ in cases
    ]
    for child, (*case, printed) in zip(children, cases, strict=True):
        assert child.communicate(timeout=40) == (printed, ""), case
        assert child.returncode == 0, case


@pytest.fixture
def file(tmp_path: Path) -> ParquetFile:
    pq.write_table(pa.table({"x": range(10), "y": ["a"] * 10}), tmp_path / "x", row_group_size=4)
    return ParquetFile(str(tmp_path / "x"))


TABLE = pa.table(
    {
        "id": pa.array(range(10), pa.int64()),
        "half": pa.array([None, *np.arange(9) / 2], pa.float32()),
        "text": [f"row {i}" for i in range(10)],
        "list": pa.array([[1, 2]] * 10, pa.list_(pa.int16())),
        "in": pa.array([{"a": 1, "b": [True]}] * 10),
        "blob": pa.array([b"abcd"] * 10, pa.binary(4)),
    }
)


def parquet(table: pa.Table = TABLE, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=4, **options)
    return file.getvalue()


def footer_of(content: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", content, len(content) - 8)
    return content[-8 - length : -8]


def with_footer(content: bytes, footer: bytes) -> bytes:
    return content[: -8 - len(footer_of(content))] + footer + struct.pack("<I4s", len(footer), b"PAR1")


def test_files_that_ended_the_process(tmp_path: Path) -> None:
    """Each is given to Arrow by a child process, as raydist did before it looked itself."""
    content = parquet(pa.table({"id": pa.array(range(10), pa.int64())}))
    footer = footer_of(content)
    name = footer.index(b"\x19\x18\x02id")  # a path of one name: in the column of the first row group
    kind = footer.rindex(b"\x15\x04", 0, name)
    damaged = footer[:kind] + b"\x15\x02" + footer[kind + 2 :]  # int32 in a file of int64
    path = tmp_path / "x.parquet"
    path.write_bytes(with_footer(content, damaged))
    code = "import sys, pyarrow.parquet as pq; pq.read_metadata(sys.argv[1]).row_group(0).column(0).statistics"
    assert subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True).returncode < 0
    with pytest.raises(rd.DataLossError, match="has the type 2, but in a row group the type 1") as caught:
        rd.Dataset.from_parquet(path)
    assert caught.value.path == str(path)
    largest = b"\x08" + (3).to_bytes(8, "little")
    assert largest in footer
    with pytest.raises(ValueError, match="least or largest value has 4 bytes, not 8"):
        parse_footer(footer.replace(largest, b"\x04" + (3).to_bytes(4, "little")))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_changed_bytes_of_a_footer(tmp_path: Path, step: int) -> None:
    """Whatever is let through, Arrow survives: this process would end otherwise."""
    content = parquet(TABLE.select(["id", "list"]), write_page_checksum=True, store_schema=False)
    footer = footer_of(content)
    path = tmp_path / "x.parquet"
    changed = range(0, len(footer), step)
    refused = 0
    for at in changed:
        path.write_bytes(with_footer(content, footer[:at] + bytes([footer[at] ^ 2]) + footer[at + 1 :]))
        try:
            list(rd.Dataset.from_parquet(path, filters=[("id", ">", 3)]))
        except rd.RaydistError:
            refused += 1
    assert refused > len(changed) / 8


def deep(depth: int) -> bytes:
    """A footer whose columns are nested."""
    inner = b"\x48\x01a\x15\x02\x00"  # name, one child
    return (
        b"\x15\x02\x19\xfc"
        + varint(depth + 2)
        + inner * (depth + 1)
        + b"\x15\x04\x25\x00\x18\x01b\x00"
        + b"\x16\x00\x19\x0c\x00"
    )


def varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


END = b"\x00"


def field(step: int, kind: int, value: bytes = b"") -> bytes:
    return bytes([step << 4 | kind]) + value


def test_what_is_refused() -> None:
    cases = [
        (b"", "too early"),
        (field(1, 5), "too early"),
        (field(1, 8, b"\x05ab") + END, "5 bytes"),
        (field(1, 9, b"\xf5\xff\xff\xff\x7f"), "bytes, but only"),  # 268 million numbers are not made
        (field(1, 5, b"\x02") + bytes([5, 2, 2]) + END, "twice"),
        (field(1, 14) + END, "unknown kind"),
        (field(1, 5, b"\xff" * 10 + b"\x01") + END, "64 bits"),
        (field(1, 12) * 100_000, "deep"),
        (field(1, 9, b"\x19" * 100_000), "deep"),
    ]
    for data, problem in cases:
        with pytest.raises(ValueError, match=problem):
            read_struct(data)
    assert parse_footer(deep(50)) == ()
    with pytest.raises(ValueError, match="at most 100 deep"):
        parse_footer(deep(50_000))
