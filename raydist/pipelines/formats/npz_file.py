"""The arrays of .npz files, which are zip files of .npy files.

Source: PKWARE's APPNOTE.TXT 4.3.7 (local headers of zip files).
"""

from __future__ import annotations

import dataclasses
import struct
import zipfile
from typing import Any

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import data_loss
from raydist.pipelines.formats.numpy_format import (
    Member,
    StoredArray,
    array_name,
    numpy_damage,
    read_header,
    require_array_bytes,
)

__all__ = ["MAX_ARRAY_BYTES", "stored_arrays"]

MAX_ARRAY_BYTES = 1 << 28
"""Accepted size of a compressed array in memory, whatever its size in the file, unless a user allows more."""

_USUAL_RATIO = 64  # accepted ratio to the size in the file above that
_MAX_DEFLATE_RATIO = 1032  # deflate codes at most 258 bytes in 2 bits
_MAX_MEMBERS = 1 << 14  # each takes 40 us to inspect
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field


def stored_arrays(path: str, file: Any, size: int, max_array_bytes: int | None = None) -> list[StoredArray]:
    """Return the arrays of a .npz file of `size` bytes.

    Args:
        path: Path of the file, for messages.
        file: The open file.
        size: Bytes of the file.
        max_array_bytes: Largest size of a compressed array in memory. None for `MAX_ARRAY_BYTES`, or 64 times the size
            in the file.
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
        found = read_header(path, name, member)
        header_bytes = found.offset or 0
    require_array_bytes(found, info.file_size - header_bytes)
    start = _data_start(path, info, file)
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


def _data_start(path: str, info: zipfile.ZipInfo, file: Any) -> int:
    """Return the start of a member's bytes. The local header may be longer than the directory states."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise data_loss(path, info.header_offset, f"The member {info.filename!r} must have a zip header")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    return info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
