"""Positions of the arrays of .npy and .npz files, for mapping them into memory.

A .npz file is a zip file of .npy files.

Source: NumPy enhancement proposal 1 (the .npy format).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from raydist.core.errors import InvalidArgumentError, RaydistError, SpecError
from raydist.pipelines.formats.files import data_loss, file_errors

_READ_BYTES = 1 << 20  # at a time, to compute a checksum

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Exceptions of numpy and zipfile for invalid bytes; RuntimeError: an encrypted member.
_DAMAGE: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, EOFError, SyntaxError, OverflowError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, OSError),
)
MAX_ARRAY_BYTES = 1 << 28
"""Accepted size of a compressed array in memory, whatever its size in the file, unless a user allows more."""

_USUAL_RATIO = 64  # accepted ratio to the size in the file above that
_MAX_DEFLATE_RATIO = 1032  # deflate codes at most 258 bytes in 2 bits
_MAX_MEMBERS = 1 << 14  # each takes 40 us to inspect


class Member(NamedTuple):
    """The position, size and checksum of an uncompressed member of an archive: the array with its header."""

    start: int
    size: int
    crc32: int

    def compare(self, path: str, name: str) -> None:
        """Read all bytes; raise DataLossError if the checksum differs. Takes 1 ms per MB."""
        crc, left = 0, self.size
        with open(path, "rb") as file:
            file.seek(self.start)
            while left and (part := file.read(min(left, _READ_BYTES))):
                crc = zlib.crc32(part, crc)
                left -= len(part)
        if left or crc != self.crc32:
            problem = f"The checksum of {array_name(path, name)} must be {self.crc32:#010x}, got {crc:#010x}"
            raise data_loss(path, self.start, problem)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file."""

    path: str
    member: str | None  # name inside a .npz file, without ".npy"; None for a .npy file
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as stored, of either byte order
    fortran_order: bool  # True if the first index varies fastest
    offset: int | None  # start of the array's bytes in the file, None if they are compressed
    # Position and checksum to verify; None if the format has no checksum, or zipfile verifies it.
    stored: Member | None = None

    @property
    def num_bytes(self) -> int:
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
            if self.offset is None:
                return self._load_compressed()
            order: Literal["F", "C"] = "F" if self.fortran_order else "C"
            mapped = np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape, order=order)
            return mapped.view(np.ndarray)

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
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to an invalid position
            raise
        raise data_loss(path, 0, f"The file must be a whole .npy or .npz file, but: {error}") from error


def stored_arrays(path: str, file: Any, size: int, max_array_bytes: int | None = None) -> list[StoredArray]:
    """Return the arrays of an open .npz file of `size` bytes.

    A compressed array may have `max_array_bytes` in memory; None for `MAX_ARRAY_BYTES`, or 64 times the size in the
    file.
    """
    with numpy_damage(path), zipfile.ZipFile(file) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        if len(members) > _MAX_MEMBERS:
            raise data_loss(path, 0, f"An archive may have at most {_MAX_MEMBERS} arrays, got {len(members)}")
        arrays = [_read_member(path, archive, info, file, size, max_array_bytes) for info in members]
    if not arrays:
        raise InvalidArgumentError(f"A .npz file must hold at least one array, but {path!r} holds none.")
    return arrays


def _read_member(
    path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Any, size: int, max_array_bytes: int | None
) -> StoredArray:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        start = file.tell()  # zipfile has read the local header, which may be longer than the directory states
        found = read_header(path, name, member)
        header_bytes = found.offset or 0
    require_array_bytes(found, info.file_size - header_bytes)
    if info.compress_size > size - start:
        raise data_loss(path, start, f"{array_name(path, name)} must have {info.compress_size} bytes in the file")
    if info.compress_type != zipfile.ZIP_STORED:
        _require_moderate(found, info, start, max_array_bytes)
        return dataclasses.replace(found, offset=None)
    if info.compress_size != info.file_size:
        raise data_loss(path, start, f"{array_name(path, name)} must have one size: it is not compressed")
    return dataclasses.replace(found, offset=start + header_bytes, stored=Member(start, info.file_size, info.CRC))


def _require_moderate(array: StoredArray, info: zipfile.ZipInfo, start: int, max_array_bytes: int | None) -> None:
    """Raise an error if decompression would use up all memory."""
    name = array_name(array.path, array.member)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise InvalidArgumentError(
            f"The members of a .npz file must be stored or deflated, as numpy writes them, but {name} has compression "
            f"type {info.compress_type}. Write it with np.savez or np.savez_compressed."
        )
    if info.file_size > (info.compress_size + 1) * _MAX_DEFLATE_RATIO:
        raise data_loss(
            array.path,
            start,
            f"{info.compress_size} compressed bytes must hold {name}, but no compression makes {info.file_size} bytes "
            "so small",
        )
    usual = max(MAX_ARRAY_BYTES, info.compress_size * _USUAL_RATIO)
    limit = usual if max_array_bytes is None else max_array_bytes
    if info.file_size > limit:
        raise InvalidArgumentError(
            f"A compressed array may have at most {limit} bytes, because it is held in memory, but {name} "
            f"(byte {start}) has {info.file_size}. Pass a larger max_array_bytes, or save it with np.savez, which does "
            "not compress."
        )
