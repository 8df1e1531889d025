from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, final

import pytest

import raydist as rd
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.sources.record_files import RecordFilesOp, RecordFormat
from tests.contracts.op import check_op


@final
class ByteReader:
    """Every byte is a record; a capital one is an error, and X the end of what can be read."""

    def __init__(self, stream: ByteStream, offset: int, index: int) -> None:
        stream.skip(offset)
        self.offset, self.index, self.ended = offset, index, False
        self._stream = stream

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        byte = self._stream.read(1)
        self.ended = byte in (b"", b"X")
        self.offset += len(byte)
        self.index += len(byte)
        if byte.isupper():
            return [], rd.DataLossError(f"{byte!r} at {self.offset}")
        return [byte] if byte else [], None

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True)
class ByteFormat(RecordFormat):
    name: ClassVar[str] = "ByteDataset"
    compression_type: str | None = None

    def reader(self, stream: ByteStream, offset: int, index: int) -> ByteReader:
        if index == 0 and stream.path.endswith("locked"):
            raise rd.FailedPreconditionError("locked")
        return ByteReader(stream, offset, index)


@pytest.mark.parametrize("cycle", [None, 1, 2, 5])
def test_any_format_keeps_the_contract(tmp_path: Path, cycle: int | None) -> None:
    contents = {"a": b"abc", "b": b"", "locked": b"z", "d": b"dEf", "e": b"gXh", "f": b"i"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    make = partial(RecordFilesOp.of, paths, ByteFormat(), cycle)
    check_op(lambda: rd.Dataset(make()))
    if cycle == 1:
        locked = ("FailedPreconditionError", "locked")
        errors = ("DataLossError", "b'E' at 2"), ("DataLossError", "b'X' at 2")
        check_op(lambda: rd.Dataset(make()), [b"a", b"b", b"c", locked, b"d", errors[0], b"f", b"g", errors[1], b"i"])


def test_names_its_format() -> None:
    op = RecordFilesOp.of("x", ByteFormat(), 3)
    assert (op.name, op.label) == ("ByteDataset", "ByteDataset(compression_type=None, files in turn: 3)")
    assert len(op.inputs) == 1


def test_bad_number_of_files_in_turn() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="num_parallel_reads must be >= 1, AUTOTUNE or None, got -2"):
        RecordFilesOp.of("x", ByteFormat(), -2)
