from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from raydist.errors import DataLossError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.arrow_file import ArrowFile, arrow_errors


def write(path: Path, table: pa.Table) -> bytes:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.read_bytes()


def test_record_batches(tmp_path: Path) -> None:
    content = write(tmp_path / "x", pa.table({"x": [1, 2, 3]}))
    file = ArrowFile(str(tmp_path / "x"))
    assert (file.num_batches, file.size, file.schema.names) == (2, len(content), ["x"])
    assert [file.batch(number).to_pydict() for number in (1, 0)] == [{"x": [3]}, {"x": [1, 2]}]
    file.close()
    file.close()


def test_offsets_that_lead_nowhere_are_found_before_they_are_followed(tmp_path: Path) -> None:
    content = write(tmp_path / "x", pa.table({"s": ["a" * 100, "b" * 100]}))
    offsets = b"\0\0\0\0\x64\0\0\0\xc8\0\0\0"
    assert content.count(offsets) == 1
    (tmp_path / "x").write_bytes(content.replace(offsets, b"\0\0\0\0\xff\xff\xff\x7f\xc8\0\0\0"))
    file = ArrowFile(str(tmp_path / "x"))
    with pytest.raises(DataLossError, match="reading record batch 0 of 1 fails: .*/x', byte 0"):
        file.batch(0)
    file.close()


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"ARROW1\0\0" + b"\xff" * 40 + b"ARROW1", b"text"])
def test_what_is_no_arrow_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataLossError, match="Arrow IPC file must begin|must be an intact Arrow IPC file"):
        ArrowFile(str(tmp_path / "x"))


def test_a_length_of_2_to_the_62_allocates_nothing(tmp_path: Path) -> None:
    content = write(tmp_path / "x", pa.table({"x": pa.array([7] * 1000, pa.int64())}).combine_chunks())
    length = (16).to_bytes(8, "little")
    assert length in content
    (tmp_path / "x").write_bytes(content.replace(length, (1 << 62).to_bytes(8, "little")))
    with pytest.raises(DataLossError, match="must be an intact Arrow IPC file"):  # noqa: PT012 - any of the steps may find it
        file = ArrowFile(str(tmp_path / "x"))
        for number in range(file.num_batches):
            file.batch(number)


def test_errors_that_are_no_damage() -> None:
    with pytest.raises(NotFoundError), arrow_errors("x", 0):
        raise FileNotFoundError(2, "gone")
    with pytest.raises(OSError, match="disk"), arrow_errors("x", 0):
        raise OSError(5, "disk")


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
