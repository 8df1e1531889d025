"""Pictures and their PNG encoding."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.summaries.record import Shown

__all__ = ["Pictures", "encode_png", "pictures_of"]

_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels, as PNG numbers them
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class Pictures(Shown):
    """The first pictures of a batch.

    Attributes:
        pictures: Arrays of shape (height, width, channels), uint8.
        most: Maximum number of pictures to show.
    """

    pictures: tuple[_Array, ...]
    most: int

    @property
    def num_bytes(self) -> int:
        return 64 + sum(picture.nbytes for picture in self.pictures)

    def joined(self, others: Sequence[Self]) -> Shown:
        every = [picture for each in (self.pictures, *(other.pictures for other in others)) for picture in each]
        return Pictures(tuple(every[: self.most]), self.most)


def pictures_of(name: str, data: _Array, most: int, dataformats: str) -> Pictures:
    """Return the first pictures of `data` after checking them.

    Raises:
        InvalidArgumentError: The shape does not match `dataformats`, or values are out of range.
    """
    if sorted(dataformats) not in (sorted("NCHW"), sorted("CHW"), sorted("NHW"), sorted("HW")):
        raise InvalidArgumentError(
            f"dataformats must say where N, C, H and W are, got {dataformats!r}. Pass 'NCHW', 'NHWC', 'CHW' or 'HW'."
        )
    if data.ndim != len(dataformats):
        raise _wrong_shape(name, data, dataformats)
    first = data if "N" not in dataformats else np.moveaxis(data, dataformats.index("N"), 0)[:most]
    batch = first if "N" in dataformats else first[None]
    rest = dataformats.replace("N", "")
    ordered = np.moveaxis(batch, [1 + rest.index("H"), 1 + rest.index("W")], [1, 2])
    ordered = ordered if "C" in rest else ordered[..., None]
    if ordered.shape[-1] not in _COLOUR_TYPES or 0 in ordered.shape[1:]:
        raise _wrong_shape(name, data, dataformats)
    return Pictures(tuple(np.ascontiguousarray(_bytes(name, picture)) for picture in ordered), most)


def _wrong_shape(name: str, data: _Array, dataformats: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"image {name!r} must have the dimensions {dataformats}, with 1 to 4 channels, got shape {data.shape}. Pass "
        "dataformats= for another order, or reshape it."
    )


def _bytes(name: str, picture: _Array) -> _Array:
    if picture.dtype == np.uint8:
        return picture.copy()
    if picture.dtype.kind != "f":
        raise InvalidArgumentError(
            f"image {name!r} must be uint8, or float in [0, 1], got {picture.dtype}. Convert it."
        )
    if not (picture.min() >= 0.0 and picture.max() <= 1.0):  # also rejects NaN
        raise InvalidArgumentError(
            f"image {name!r} must be uint8, or float in [0, 1], got float from {picture.min():g} to "
            f"{picture.max():g}. Scale it, e.g. (x - x.min()) / (x.max() - x.min()), or pass uint8."
        )
    return (picture.astype(np.float64) * 255.0 + 0.5).astype(np.uint8)


def encode_png(picture: _Array) -> bytes:
    """Encode a picture of shape (height, width, channels), uint8, as a PNG file.

    >>> import numpy as np
    >>> encode_png(np.zeros((2, 3, 1), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = picture.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with the number of its filter: none
    rows[:, 1:] = picture.reshape(height, -1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
