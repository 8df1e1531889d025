"""Arrow IPC files: files with a footer (also known as Feather, version 2), and memory-mapped streams.

The format has no checksums, so damaged values go unnoticed. Every record batch is validated before use: damaged offsets
are found, and never lead outside the buffers. Uncompressed sizes are checked before Arrow reads a batch: the first 8
bytes of a compressed buffer are its size, which Arrow trusts, so that 17 KB may ask for 512 MB.

Source: apache/arrow, `format/File.fbs`, `Message.fbs`; google/flatbuffers, `docs/source/internals.md`.
"""

from __future__ import annotations

import atexit
import io
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, RaydistError
from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.files import ReadableFile, data_loss, file_errors, local_path, open_file, read_range

_AT_EXIT_S = 1.0
_LOOK_S = 1e-3
_END = struct.Struct("<i6s")  # length of the footer, magic
_DICTIONARIES, _RECORD_BATCHES = 2, 3  # fields of a footer
_HEADER_TYPE, _HEADER = 1, 2  # of a message
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # types of headers
_DATA = 1  # of a dictionary batch: its record batch
_BUFFERS, _COMPRESSION = 2, 3  # of a record batch
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of body
_BUFFER = struct.Struct("<qq")  # offset, length
_SIZE = struct.Struct("<q")
_CONTINUED = b"\xff\xff\xff\xff"
_MAGIC = b"ARROW1"
_OLD_MAGIC = b"FEA1"
_USUAL_BATCH_BYTES = 1 << 26  # accepted size of a compressed record batch in memory, whatever its size in the file
_USUAL_RATIO = 64  # accepted ratio above that
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # ends of a stream; the second one until Arrow 0.15


class _Lent:
    """A Python file that Arrow's threads use. The caller keeps the file itself."""

    def __init__(self, file: Any) -> None:
        self._file = file
        _lent.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_lent: weakref.WeakSet[_Lent] = weakref.WeakSet()


def as_arrow_file(file: ReadableFile) -> Any:
    """Return the file as an input of pyarrow's readers, which must be closed in addition to `file`.

    Arrow opens a local file again (14 us) and reads it without Python. For other files, the exit of the process waits
    until Arrow's threads have released those that are closed.
    """
    if isinstance(file, pa.NativeFile):
        return file
    if isinstance(file, io.FileIO):
        try:
            return pa.OSFile(f"/dev/fd/{file.fileno()}")
        except OSError:  # a container without /proc, or a process that changed to a user without permission
            pass
    return pa.PythonFile(_Lent(file), mode="r")


@atexit.register
def _await_arrow() -> None:
    """Wait until Arrow's threads have released closed files. They do not release files that are still open."""
    deadline = time.monotonic() + _AT_EXIT_S
    while any(one.closed for one in tuple(_lent)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


class MessageSize(NamedTuple):
    """The start of a message in a file, and the bytes of its body in the file and after decompression."""

    offset: int
    stored: int
    raw: int


def is_compressed(metadata: bytes) -> bool:
    """Return True if a message is a compressed record batch. `metadata` is the flatbuffer of the message."""
    batch = _record_batch(metadata)
    return batch is not None and batch.table(_COMPRESSION) is not None


def _record_batch(metadata: bytes) -> _Table | None:
    """Return the record batch that a message describes, or the one of its dictionary."""
    message = _Table.root(metadata)
    kind, header = message.byte(_HEADER_TYPE), message.table(_HEADER)
    if header is not None and kind == _DICTIONARY_BATCH:
        return header.table(_DATA)
    return header if kind == _RECORD_BATCH else None


class ArrowSizes:
    """Sizes of the messages of one open file. Invalid data raises ValueError."""

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._file = file
        self._bytes = size
        length, _ = _END.unpack(self._read(size - _END.size, _END.size))
        footer = _Table.root(self._read(size - _END.size - length, length))
        self._dictionaries = list(footer.structs(_DICTIONARIES, _BLOCK))
        self._batches = list(footer.structs(_RECORD_BATCHES, _BLOCK))

    def dictionaries(self) -> list[MessageSize]:
        """Return the sizes of the dictionaries, which are read with the first record batch."""
        return [self._of(*block) for block in self._dictionaries]

    def batch(self, number: int) -> MessageSize:
        """Return the size of a record batch."""
        if number >= len(self._batches):
            raise ValueError(f"it has {len(self._batches)} record batches")
        return self._of(*self._batches[number])

    def _of(self, offset: int, metadata_bytes: int, body_bytes: int) -> MessageSize:
        metadata = self._read(offset, metadata_bytes)
        start = 8 if metadata.startswith(_CONTINUED) else 4
        batch = _record_batch(metadata[start:])
        if batch is None:
            raise ValueError(f"the message at byte {offset} is no record batch")
        if batch.table(_COMPRESSION) is None:
            return MessageSize(offset, body_bytes, body_bytes)
        raw = 0
        for at, length in batch.structs(_BUFFERS, _BUFFER):
            if length >= _SIZE.size:
                (size,) = _SIZE.unpack(self._read(offset + metadata_bytes + at, _SIZE.size))
                raw += length if size < 0 else size  # -1: this buffer is not compressed
        return MessageSize(offset, body_bytes, raw)

    def _read(self, start: int, size: int) -> bytes:
        if start < 0 or size < 0 or start + size > self._bytes:
            raise ValueError(f"it has a part of {size} bytes at byte {start}, and {self._bytes} in all")
        data = read_range(self._file, start, size)
        if len(data) < size:
            raise ValueError(f"it ends {size - len(data)} bytes early")
        return data


class _Table:
    """A table of a flatbuffer: fields by number, with their offsets in a second table."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - self._number("<i", at)
        self._fields_bytes = self._number("<H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        if len(data) < 4:
            raise ValueError("it has no metadata")
        return cls(data, int.from_bytes(data[:4], "little"))

    def byte(self, field: int) -> int:
        place = self._place(field)
        return self._number("<B", place) if place else 0

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self._data, place + self._number("<I", place)) if place else None

    def structs(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        place = self._place(field)
        if place:
            start = place + self._number("<I", place)
            end = start + 4 + self._number("<I", start) * kind.size
            if end > len(self._data):
                raise ValueError("it ends within a list")
            yield from kind.iter_unpack(self._data[start + 4 : end])

    def _place(self, field: int) -> int:
        entry = 4 + 2 * field
        offset = self._number("<H", self._fields + entry) if entry < self._fields_bytes else 0
        return self._at + offset if offset else 0

    def _number(self, kind: str, at: int) -> int:
        if at < 0 or at + struct.calcsize(kind) > len(self._data):
            raise ValueError("its metadata point beyond their end")
        (number,) = struct.unpack_from(kind, self._data, at)
        return int(number)


class ArrowFile:
    """An open file.

    Attributes:
        path: Path as given.
        size: Bytes of the file; None if the server does not tell.
        schema: Schema of all batches.
        num_batches: Number of record batches in the footer.
    """

    def __init__(self, path: str, max_batch_bytes: int | None = None) -> None:
        """Open the file and read its footer. Raises like `open_file`, and DataLossError.

        `max_batch_bytes` limits a compressed record batch in memory; None for 64 MiB, or 64 times the bytes in the
        file.
        """
        self.path = path
        self._max_batch_bytes = max_batch_bytes
        self._sizes: ArrowSizes | None = None
        opened = open_file(path)
        self.size = opened.size
        self._file = opened.file
        self._arrow: Any = None
        self._reader: Any = None
        try:
            with file_errors(path):
                self._require_magic(bytes(opened.file.read(len(_MAGIC)) or b""))
            with arrow_errors(path, opened.size):
                self._arrow = as_arrow_file(opened.file)
                self._reader = pa.ipc.open_file(self._arrow)
                self.schema: pa.Schema = self._reader.schema
                read_names(self.schema)
                self.num_batches: int = self._reader.num_record_batches
        except BaseException:
            self.close()
            raise

    def _require_magic(self, found: bytes) -> None:
        if found != _MAGIC:
            old = found.startswith(_OLD_MAGIC)
            hint = ": Feather version 1 is another format. Write it again" if old else ""
            raise data_loss(self.path, 0, f"An Arrow IPC file must begin with {_MAGIC!r}, got {found!r}{hint}")

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch after a full validation. Raises DataLossError if it is damaged."""
        with arrow_errors(self.path, None, f"record batch {number} of {self.num_batches}"):
            self._require_moderate(number)
            batch = self._reader.get_batch(number)
            batch.validate(full=True)  # a file may contain invalid offsets
            return batch

    def _require_moderate(self, number: int) -> None:
        """Raise DataLossError if Arrow would use up all memory. Takes 40 us."""
        first = self._sizes is None
        if self._sizes is None:
            size = self._arrow.size() if self.size is None else self.size
            self._sizes = ArrowSizes(self._file, size)
        for part in (*(self._sizes.dictionaries() if first else ()), self._sizes.batch(number)):
            usual = max(_USUAL_BATCH_BYTES, _USUAL_RATIO * part.stored)
            most = usual if self._max_batch_bytes is None else self._max_batch_bytes
            if part.raw > max(most, part.stored):
                raise data_loss(
                    self.path,
                    part.offset,
                    f"A record batch may have at most {most} bytes, but {part.stored} compressed ones are to become "
                    f"{part.raw}. Raise max_batch_bytes if the file is right",
                )

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._arrow is not None:
            self._arrow.close()
        self._arrow = self._reader = None
        self._file.close()


@contextmanager
def arrow_errors(path: str, offset: int | None, part: str = "its footer", kind: str = "Arrow IPC") -> Iterator[None]:
    """Turn Arrow's errors about damage at `offset` into a DataLossError."""
    try:
        with file_errors(path):
            yield
    except RaydistError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        problem = f"The file must be an intact {kind} file, but reading {part} fails: {error}"
        raise data_loss(path, offset or 0, problem) from error


@dataclass(frozen=True)
class MappedStream:
    """A mapped file: its path, its size when it was mapped, and a table of all record batches."""

    path: str
    size: int
    table: pa.Table

    def batch(self, number: int) -> pa.RecordBatch:
        """Validate and return a record batch. Raises DataLossError if it is damaged, or the file is shorter."""
        found = os.stat(self.path).st_size
        if found < self.size:
            raise data_loss(self.path, found, f"The file must keep its size of {self.size} bytes while it is mapped")
        batch = self.table.to_batches()[number]
        with arrow_errors(self.path, None, f"record batch {number}"):
            batch.validate(full=True)  # a file may contain invalid offsets
        return batch


def map_stream(path: str) -> MappedStream:
    """Map a file into memory.

    Raises:
        InvalidArgumentError: The file is on another file system, or its record batches are compressed.
        NotFoundError: The file does not exist.
        DataLossError: The file is damaged or truncated.
    """
    local = local_path(path)
    if local is None:
        raise InvalidArgumentError(f"Files are mapped into memory and need a local path, got {path!r}. Copy the files.")
    opened = open_file(local)  # raises for anything but a plain file
    opened.file.close()
    with file_errors(local), arrow_errors(local, opened.size, "its messages"):
        if not opened.size:
            raise ValueError(f"it must have messages, got {opened.size} bytes")
        source = pa.memory_map(local)
        _check_messages(local, source)
        source.seek(max(0, opened.size - len(_ENDS[0])))
        if not source.read().endswith(_ENDS):
            raise ValueError(f"it must end with the end of a stream, and ends after {opened.size} bytes")
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
        read_names(table.schema)
    return MappedStream(local, opened.size, table)


def _check_messages(path: str, source: pa.NativeFile) -> None:
    for message in pa.ipc.MessageReader.open_stream(source):
        if is_compressed(message.metadata.to_pybytes()):
            raise InvalidArgumentError(
                f"Files that are mapped into memory must not be compressed, but {path!r} is. Write it without "
                "compression, or read it with from_arrow."
            )
