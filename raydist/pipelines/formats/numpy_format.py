"""Positions of the arrays of .npy files and of the members of .npz files, for mapping them into memory.

Source: NumPy enhancement proposal 1 (the .npy format).
"""

from __future__ import annotations

import errno
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from raydist.errors import DataLossError, InvalidArgumentError, RaydistError, SpecError
from raydist.pipelines.formats.files import data_loss, file_errors

__all__ = ["Member", "StoredArray", "array_name", "numpy_damage", "read_header", "require_array_bytes", "stored_array"]

_READ_BYTES = 1 << 20  # at a time, to compute a checksum

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Exceptions of numpy and zipfile for invalid bytes; RuntimeError: an encrypted member.
_DAMAGE: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, EOFError, SyntaxError, OverflowError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)


@final
@dataclass(frozen=True, slots=True)
class Member:
    """The position and checksum of an uncompressed member of an archive.

    Attributes:
        start: Start of the member in the file.
        size: Bytes of the member: the array with its header.
        crc32: Checksum of these bytes.
    """

    start: int
    size: int
    crc32: int

    def compare(self, path: str, name: str) -> None:
        """Read all bytes; raise DataLossError if the checksum differs. Takes 1 ms per MB."""
        crc, left = self._read(path)
        if left or crc != self.crc32:
            problem = f"The checksum of {array_name(path, name)} must be {self.crc32:#010x}, got {crc:#010x}"
            raise data_loss(path, self.start, problem)

    def _read(self, path: str) -> tuple[int, int]:
        """Return the checksum of the bytes, and the number of missing bytes."""
        crc, left = 0, self.size
        with open(path, "rb") as file:
            file.seek(self.start)
            while left and (part := file.read(min(left, _READ_BYTES))):
                crc = zlib.crc32(part, crc)
                left -= len(part)
        return crc, left


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file.

    Attributes:
        path: Path of the file.
        member: Name inside a .npz file, without ".npy"; None for a .npy file.
        shape: All dimensions.
        dtype: Dtype as stored, of either byte order.
        fortran_order: True if the first index varies fastest.
        offset: Start of the array's bytes in the file, None if they are compressed.
        stored: Position and checksum to verify; None if the format has no checksum, or zipfile verifies it.
    """

    path: str
    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int | None
    stored: Member | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        size = self.dtype.itemsize
        for dim in self.shape:  # Python integers: a damaged header must not cause an overflow
            size *= dim
        return size

    def load(self, *, verify: bool = True) -> np.ndarray[Any, Any]:
        """Return the array: a read-only mapping of the file, or a copy in memory if compressed.

        `verify` first reads all of an array that has a checksum.
        """
        with file_errors(self.path), numpy_damage(self.path):
            if verify and self.stored is not None:
                self.stored.compare(self.path, self.member or "")
            if self.num_bytes == 0:  # nothing to map
                return np.empty(self.shape, self.dtype)
            return self._load_compressed() if self.offset is None else self._map(self.offset)

    def require_whole(self) -> None:
        """Raise DataLossError if the file is too short for its mapping: reading would crash the process.

        Takes a microsecond. (A file that shrinks between this call and the read still crashes the process.)
        """
        if self.offset is None:
            return
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:  # a removed file leaves the mapping whole
            return
        if size < self.offset + self.num_bytes:
            raise data_loss(
                self.path,
                size,
                f"A file must not change while a dataset reads it, but {array_name(self.path, self.member)} needs "
                f"{self.offset + self.num_bytes} bytes, and the file has {size} now",
            )

    def _map(self, offset: int) -> np.ndarray[Any, Any]:
        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=offset, shape=self.shape, order=order)
        return mapped.view(np.ndarray)

    def _load_compressed(self) -> np.ndarray[Any, Any]:
        with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.member}.npy") as file:
            array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
            file.read()  # to the end, where zipfile verifies the checksum
        array.flags.writeable = False
        return array


def stored_array(path: str, file: Any, size: int) -> StoredArray:
    """Return the array of a .npy file of `size` bytes."""
    with numpy_damage(path):
        found = read_header(path, None, file)
    require_array_bytes(found, size - (found.offset or 0))
    return found


def read_header(path: str, member: str | None, file: Any) -> StoredArray:
    """Return the shape and dtype of the array in `file`; `offset` counts from the start of `file`."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise InvalidArgumentError(
            f"A .npy file must have format version 1.0 or 2.0, but {array_name(path, member)} has {version}. Save it "
            "again as plain arrays, without field names."
        )
    shape, fortran_order, dtype = _HEADER_READERS[version](file)
    if any(dim < 0 for dim in shape) or (dtype.itemsize == 0 and shape):  # numpy would read bytes for size 0
        raise ValueError(f"the shape is {shape}, and the dtype {dtype.str}")
    _require_plain(path, member, dtype)
    return StoredArray(path, member, shape, dtype, fortran_order, file.tell())


def _require_plain(path: str, member: str | None, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise SpecError(
            f"An array file must hold numbers or text, but {array_name(path, member)} holds pickled Python objects, "
            "and unpickling a file could run any code. Save it with a plain dtype."
        )
    if dtype.kind not in "biufcSU":
        raise SpecError(
            f"An array file must hold numbers or text, but {array_name(path, member)} has dtype {dtype}. Save each "
            "field as an array of its own (np.savez)."
        )


def require_array_bytes(array: StoredArray, available: int) -> None:
    """Raise DataLossError if fewer bytes are left than the array has."""
    if array.num_bytes > available:
        raise data_loss(
            array.path,
            array.offset or 0,
            f"{array_name(array.path, array.member)} must hold {array.num_bytes} bytes ({array.dtype} {array.shape}), "
            f"but {max(0, available)} are left: it is truncated",
        )


def array_name(path: str, member: str | None) -> str:
    """Return the name of an array, for messages."""
    return repr(path) if member is None else f"{member!r} in {path!r}"


@contextmanager
def numpy_damage(path: str) -> Iterator[None]:
    """Turn the errors of numpy and zipfile on damaged bytes into a DataLossError."""
    try:
        yield
    except RaydistError:
        raise
    except _DAMAGE as error:
        raise _not_whole(path, error) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a seek to an invalid position
            raise _not_whole(path, error) from error
        raise


def _not_whole(path: str, error: Exception) -> DataLossError:
    return data_loss(path, 0, f"The file must be a whole .npy or .npz file, but: {error}")
