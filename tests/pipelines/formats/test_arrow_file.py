from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raydist.errors import DataLossError, NotFoundError
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
