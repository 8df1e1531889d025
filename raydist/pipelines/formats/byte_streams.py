"""Sequential reading of the bytes of a file, decompressed where necessary, with bounded memory."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.formats.files import data_loss, file_errors, open_file

WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}  # zlib's `wbits` for the two containers of a deflate stream
_INPUT_BYTES = 1 << 16  # compressed bytes read at once
_MAX_DEFLATE_RATIO = 1032  # deflate codes at most 258 bytes in 2 bits
_HELD_INPUT_BYTES = 1 << 10  # more than the input that zlib buffers between two calls
_PLAIN_PIECE_BYTES = 1 << 30
_INFLATED_PIECE_BYTES = 1 << 25
_PIECE_RATIO = 4  # or this multiple of the compressed file: a small file must not use up all memory
_GZIP_MAGIC = b"\x1f\x8b"


class ByteStream(ABC):
    """Interface of the content of one file from a position on."""

    path: str

    @abstractmethod
    def read(self, size: int) -> bytes:
        """Return the next 1 .. `size` bytes; no bytes at the end.

        Raises:
            DataLossError: The compressed data is damaged here. All bytes before the damage were returned.
        """

    @abstractmethod
    def bound(self) -> int | None:
        """Return an upper bound of the bytes left, derived from the size of the file; None if unknown."""

    @abstractmethod
    def piece_limit(self) -> int:
        """Return the number of bytes that a reader may hold at once, if its user sets no limit."""

    @abstractmethod
    def skip(self, size: int) -> None:
        """Skip `size` bytes. Raises DataLossError if fewer are left."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. May be called twice."""


def check_compression(compression_type: str | None) -> str | None:
    """Return the name of the compression; None for none.

    >>> check_compression("")
    >>> check_compression("GZIP")
    'GZIP'
    """
    if not compression_type:
        return None
    if compression_type not in WINDOW_BITS:
        raise InvalidArgumentError(
            f"compression_type must be None, {' or '.join(map(repr, WINDOW_BITS))}, got {compression_type!r}."
        )
    return compression_type


def open_stream(path: str, compression_type: str | None) -> ByteStream:
    """Open `path`. Raises like :func:`open_file`."""
    plain = PlainStream(path)
    return plain if compression_type is None else InflatingStream(plain, compression_type)


class PlainStream(ByteStream):
    """An uncompressed file."""

    def __init__(self, path: str) -> None:
        opened = open_file(path)
        self.path = path
        self._file, self._size = opened.file, opened.size
        self._position = 0

    def read(self, size: int) -> bytes:
        left = self.bound()
        wanted = size if left is None else min(size, left)
        if wanted == 0:
            return b""
        with file_errors(self.path, self._position):
            data = self._file.read(wanted) or b""
        if not data and left is not None:
            raise data_loss(
                self.path, self._position, f"The file must keep its size while it is read, but {left} bytes have gone"
            )
        self._position += len(data)
        return data

    def bound(self) -> int | None:
        return None if self._size is None else self._size - self._position

    def piece_limit(self) -> int:
        return _PLAIN_PIECE_BYTES

    def skip(self, size: int) -> None:
        left = self.bound()
        if left is not None and size > left:
            raise _too_short(self.path, self._position + size, self._position + left)
        self._position += size
        with file_errors(self.path, self._position):
            self._file.seek(self._position)

    def close(self) -> None:
        self._file.close()


class InflatingStream(ByteStream):
    """A GZIP (of one or several members) or ZLIB file, decompressed in steps."""

    def __init__(self, source: PlainStream, compression_type: str) -> None:
        self.path = source.path
        self._source = source
        self._source_bytes = source.bound() or 0
        self._compression = compression_type
        self._inflater: Any = zlib.decompressobj(WINDOW_BITS[compression_type])
        self._input = b""  # compressed bytes not yet used
        self._consumed = 0  # compressed bytes used
        self._ready = b""  # decompressed bytes not yet handed out
        self._produced = 0  # decompressed bytes handed out
        self._damage: DataLossError | None = None  # comes after `_ready`

    def read(self, size: int) -> bytes:
        while not self._ready:
            if self._damage is not None:
                raise self._damage
            if not self._advance(size):
                return b""
        data, self._ready = self._ready[:size], self._ready[size:]
        self._produced += len(data)
        return data

    def bound(self) -> int | None:
        left = self._source.bound()
        if left is None:
            return None
        return len(self._ready) + (left + len(self._input) + _HELD_INPUT_BYTES) * _MAX_DEFLATE_RATIO

    def piece_limit(self) -> int:
        return max(_INFLATED_PIECE_BYTES, _PIECE_RATIO * self._source_bytes)

    def skip(self, size: int) -> None:
        end = self._produced + size
        while self._produced < end:
            if not self.read(min(end - self._produced, 1 << 20)):
                raise _too_short(self.path, end, self._produced)

    def close(self) -> None:
        self._source.close()

    def _advance(self, size: int) -> bool:
        """Decompress bytes, start the next member or find damage. Return False at the end."""
        self._input = self._input or self._source.read(_INPUT_BYTES)
        if self._inflater.eof or self._consumed == 0:
            if not self._input:
                return False
            if self._inflater.eof:
                self._next_member()
                return True
        ended = not self._input
        self._inflate(size)
        if ended and not self._ready and not self._inflater.eof:
            self._damage = self._loss("data must not end in the middle")
        return True

    def _inflate(self, size: int) -> None:
        before = self._inflater.copy()  # a failing call loses its output: the copy makes the output again
        try:
            self._ready = self._step(self._inflater, self._input, size)
        except zlib.error as error:
            self._ready = self._salvage(before)
            hint = f". Was the file written with compression_type={self._compression!r}?" if not self._consumed else ""
            self._damage = self._loss(f"data must be intact, but zlib reports {str(error).split(': ')[-1]!r}{hint}")

    def _step(self, inflater: Any, data: bytes, size: int) -> bytes:
        made: bytes = inflater.decompress(data, size)
        self._input = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        self._consumed += len(data) - len(self._input)
        return made

    def _salvage(self, inflater: Any) -> bytes:
        """Return the bytes before the damage, fed one by one. `inflater` is a copy from before the failing call."""
        made, data = [], self._input
        for at in range(len(data)):
            try:
                made.append(inflater.decompress(data[at : at + 1]))
            except zlib.error:
                self._consumed += at if self._consumed or any(made) else 0
                break
        return b"".join(made)

    def _next_member(self) -> None:
        if self._compression == "GZIP" and _GZIP_MAGIC.startswith(self._input[:2]):
            self._inflater = zlib.decompressobj(WINDOW_BITS[self._compression])
        else:
            self._damage = self._loss("data must be all there is, but other bytes follow it")

    def _loss(self, problem: str) -> DataLossError:
        return data_loss(self.path, self._consumed, f"{self._compression} {problem}")


def _too_short(path: str, wanted: int, size: int) -> DataLossError:
    return data_loss(
        path, size, f"The file must reach byte {wanted}, where reading is to go on, but it has {size} bytes"
    )
