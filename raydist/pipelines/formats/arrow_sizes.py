"""Uncompressed sizes of the record batches of an Arrow IPC file, checked before Arrow reads them.

A buffer's first 8 bytes are its size, which Arrow trusts: 17 KB may ask for 512 MB.

Source: apache/arrow, `format/File.fbs`, `Message.fbs`; google/flatbuffers, `docs/source/internals.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, final

from raydist.pipelines.formats.files import ReadableFile

__all__ = ["ArrowSizes", "MessageSize", "is_compressed"]

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


def is_compressed(metadata: bytes) -> bool:
    """Return True if a message is a compressed record batch. `metadata` is the flatbuffer of the message."""
    message = _Table.root(metadata)
    header = message.table(_HEADER)
    if header is not None and message.byte(_HEADER_TYPE) == _DICTIONARY_BATCH:
        header = header.table(_DATA)
    is_batch = message.byte(_HEADER_TYPE) in (_DICTIONARY_BATCH, _RECORD_BATCH)
    return is_batch and header is not None and header.table(_COMPRESSION) is not None


class MessageSize(NamedTuple):
    """The size of a part of a file.

    Attributes:
        offset: Start of the part.
        stored: Bytes of the body in the file.
        raw: Bytes of the body after decompression.
    """

    offset: int
    stored: int
    raw: int


@final
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
        message = _Table.root(metadata[start:])
        kind, header = message.byte(_HEADER_TYPE), message.table(_HEADER)
        if header is not None and kind == _DICTIONARY_BATCH:
            header = header.table(_DATA)
        if header is None or kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
            raise ValueError(f"the message at byte {offset} is no record batch")
        if header.table(_COMPRESSION) is None:
            return MessageSize(offset, body_bytes, body_bytes)
        raw = 0
        for at, length in header.structs(_BUFFERS, _BUFFER):
            if length >= _SIZE.size:
                (size,) = _SIZE.unpack(self._read(offset + metadata_bytes + at, _SIZE.size))
                raw += length if size < 0 else size  # -1: this buffer is not compressed
        return MessageSize(offset, body_bytes, raw)

    def _read(self, start: int, size: int) -> bytes:
        if start < 0 or size < 0 or start + size > self._bytes:
            raise ValueError(f"it has a part of {size} bytes at byte {start}, and {self._bytes} in all")
        self._file.seek(start)
        parts = []
        while size > 0 and (part := self._file.read(size)):
            parts.append(part)
            size -= len(part)
        if size:
            raise ValueError(f"it ends {size} bytes early")
        return b"".join(parts)


@final
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
