"""Where the arrays of .npy and .npz files lie, so that they can be mapped into memory.

Source: NumPy enhancement proposal 1 (the .npy format); PKWARE's APPNOTE.TXT 4.3.7 (local headers of zip files).
"""

from __future__ import annotations

import errno
import os
import struct
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

__all__ = ["MAX_DECOMPRESSED_BYTES", "StoredArray", "stored_array", "stored_arrays"]

MAX_DECOMPRESSED_BYTES = 1 << 33
"""A larger array must not be compressed."""

_MAX_DEFLATE_RATIO = 1032  # deflate codes at most 258 bytes in 2 bits

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What numpy and zipfile raise on bytes that make no sense to them; RuntimeError: an encrypted member.
_DAMAGE: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, EOFError, SyntaxError, OverflowError, RuntimeError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file.

    Attributes:
        path: The file.
        member: Name inside a .npz file, without ".npy"; None for a .npy file.
        shape: All dimensions.
        dtype: As stored, of either byte order.
        fortran_order: Whether the first index varies fastest.
        offset: Where the array's bytes begin in the file, or None where they are compressed.
    """

    path: str
    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        size = self.dtype.itemsize
        for dim in self.shape:  # Python's integers: a damaged header must not overflow
            size *= dim
        return size

    def load(self) -> np.ndarray[Any, Any]:
        """The array: a read-only mapping of the file, or a copy in memory where it is compressed."""
        with file_errors(self.path), _damage_of(self.path):
            if self.num_bytes == 0:  # nothing to map
                return np.empty(self.shape, self.dtype)
            return self._load_compressed() if self.offset is None else self._map(self.offset)

    def require_whole(self) -> None:
        """DataLossError where the file has become too short for its mapping: reading that would kill the process.

        A microsecond. (A file that shrinks between this call and the reading does kill it: nobody can prevent that.)
        """
        if self.offset is None:
            return
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:  # removed, which leaves the mapping whole
            return
        if size < self.offset + self.num_bytes:
            raise data_loss(
                self.path,
                size,
                f"A file must not change while a dataset reads it, but {_name(self.path, self.member)} needs "
                f"{self.offset + self.num_bytes} bytes, and the file has {size} now",
            )

    def _map(self, offset: int) -> np.ndarray[Any, Any]:
        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        mapped = np.memmap(self.path, self.dtype, mode="r", offset=offset, shape=self.shape, order=order)
        return mapped.view(np.ndarray)

    def _load_compressed(self) -> np.ndarray[Any, Any]:
        with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.member}.npy") as file:
            array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
            file.read()  # to the end: zipfile compares its checksum there
        array.flags.writeable = False
        return array


def stored_array(path: str, file: Any, size: int) -> StoredArray:
    """The array of a .npy file of `size` bytes."""
    with _damage_of(path):
        found = _read_header(path, None, file)
    _require_bytes(found, size - (found.offset or 0))
    return found


def stored_arrays(path: str, file: Any) -> list[StoredArray]:
    """The arrays of a .npz file."""
    with _damage_of(path), zipfile.ZipFile(file) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        arrays = [_read_member(path, archive, info, file) for info in members]
    if not arrays:
        raise InvalidArgumentError(f"A .npz file must hold at least one array, but {path!r} holds none.")
    return arrays


def _read_member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Any) -> StoredArray:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        found = _read_header(path, name, member)
        header_bytes = found.offset or 0
    _require_bytes(found, info.file_size - header_bytes)
    _require_moderate(found, info)
    start = None if info.compress_type != zipfile.ZIP_STORED else _data_start(path, info, file) + header_bytes
    return StoredArray(path, name, found.shape, found.dtype, found.fortran_order, start)


def _require_moderate(array: StoredArray, info: zipfile.ZipInfo) -> None:
    """Refuse what would take all memory when it is decompressed."""
    if info.compress_type == zipfile.ZIP_STORED:
        return
    if array.num_bytes > MAX_DECOMPRESSED_BYTES:
        raise InvalidArgumentError(
            f"A compressed array may have at most {MAX_DECOMPRESSED_BYTES} bytes, because it is held in memory, but "
            f"{_name(array.path, array.member)} has {array.num_bytes}. Save it with np.savez, which does not compress."
        )
    if array.num_bytes > (info.compress_size + 1) * _MAX_DEFLATE_RATIO and info.compress_type == zipfile.ZIP_DEFLATED:
        raise data_loss(
            array.path,
            info.header_offset,
            f"{info.compress_size} compressed bytes must hold {_name(array.path, array.member)}, but no compression "
            f"makes {array.num_bytes} bytes so small",
        )


def _data_start(path: str, info: zipfile.ZipInfo, file: Any) -> int:
    """Where the bytes of an uncompressed member begin. Its local header may be longer than the directory says."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise data_loss(path, info.header_offset, f"The member {info.filename!r} must have a zip header")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _read_header(path: str, member: str | None, file: Any) -> StoredArray:
    """Shape and dtype; `offset` counts from the start of `file`."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise InvalidArgumentError(
            f"A .npy file must have format version 1.0 or 2.0, but {_name(path, member)} has {version}. Save it again "
            "as plain arrays, without field names."
        )
    shape, fortran_order, dtype = _HEADER_READERS[version](file)
    if any(dim < 0 for dim in shape):
        raise ValueError(f"the shape is {shape}")
    _require_plain(path, member, dtype)
    return StoredArray(path, member, shape, dtype, fortran_order, file.tell())


def _require_plain(path: str, member: str | None, dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise SpecError(
            f"An array file must hold numbers or text, but {_name(path, member)} holds pickled Python objects, and "
            "unpickling a file could run any code. Save it with a plain dtype."
        )
    if dtype.kind not in "biufcSU":
        raise SpecError(
            f"An array file must hold numbers or text, but {_name(path, member)} has dtype {dtype}. Save each field as "
            "an array of its own (np.savez)."
        )


def _require_bytes(array: StoredArray, available: int) -> None:
    if array.num_bytes > available:
        raise data_loss(
            array.path,
            array.offset or 0,
            f"{_name(array.path, array.member)} must hold {array.num_bytes} bytes ({array.dtype} {array.shape}), "
            f"but {max(0, available)} are left: it is truncated",
        )


def _name(path: str, member: str | None) -> str:
    return repr(path) if member is None else f"{member!r} in {path!r}"


@contextmanager
def _damage_of(path: str) -> Iterator[None]:
    """Whatever numpy and zipfile make of damaged bytes is a DataLossError."""
    try:
        yield
    except RaydistError:
        raise
    except _DAMAGE as error:
        raise _not_whole(path, error) from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a seek to a senseless place
            raise _not_whole(path, error) from error
        raise


def _not_whole(path: str, error: Exception) -> DataLossError:
    return data_loss(path, 0, f"The file must be a whole .npy or .npz file, but: {error}")
