"""PNG, decoded by Pillow. Checksums are verified first."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np

from raydist.image.arrays import Image
from raydist.image.encoded import MAX_PIXELS, corrupt, require_bytes, require_channels, require_pixels
from raydist.image.libraries import codec

__all__ = ["PNG_SIGNATURE", "decode_png", "png_shape"]

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_HEADER_BYTES = 13
_CHANNELS_OF_COLOUR_TYPE = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
)  # those of Pillow's PNG plugin


def png_shape(data: bytes) -> tuple[int, int, int]:
    """(height, width, channels) from the header; a palette counts as RGB, and a transparent colour adds alpha."""
    if data[:8] != PNG_SIGNATURE or data[12:16] != b"IHDR" or len(data) < 33:
        raise corrupt("PNG", data, "the header is not a PNG's")
    _verify_chunk(data, len(PNG_SIGNATURE), _HEADER_BYTES)
    width, height = struct.unpack_from(">II", data, 16)
    channels = _CHANNELS_OF_COLOUR_TYPE.get(data[25])
    if channels is None or not width or not height:
        raise corrupt("PNG", data, f"its header says {height} x {width} pixels of colour type {data[25]}", 16)
    names = [data[start + 4 : start + 8] for start, _ in _chunks(data)]
    return height, width, channels + (channels in (1, 3) and b"tRNS" in names)


def _chunks(data: bytes) -> list[tuple[int, int]]:
    """(start, length of the content) of every chunk up to the last one. Each ends within the data."""
    found = []
    start = len(PNG_SIGNATURE)
    while start + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, start)
        if start + 12 + length > len(data):
            break
        found.append((start, length))
        if data[start + 4 : start + 8] == b"IEND":
            return found
        start += 12 + length
    raise corrupt("PNG", data, "it is truncated, a chunk is not complete", start)


def _verify(data: bytes) -> None:
    for start, length in _chunks(data):
        _verify_chunk(data, start, length)


def _verify_chunk(data: bytes, start: int, length: int) -> None:
    end = start + 8 + length
    (stored,) = struct.unpack_from(">I", data, end)
    if zlib.crc32(memoryview(data)[start + 4 : end]) != stored:
        raise corrupt("PNG", data, f"the checksum of chunk {data[start + 4 : start + 8]!r} is wrong", start)


def decode_png(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The image in a PNG: uint8 of shape (height, width, channels).

    Args:
        data: The file's bytes.
        channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha, 0 for what is stored (a palette is RGB; a
            transparent colour is alpha). 16 bits a channel become 8, the upper ones.
        max_pixels: Most pixels that the header may announce.

    Raises:
        DataLossError: The data is corrupt (a checksum is wrong, say), truncated, or no PNG.
        InvalidArgumentError: More than `max_pixels` pixels, or `channels` is none of 0 to 4.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_png.

    >>> from io import BytesIO
    >>> import PIL.Image
    >>> file = BytesIO()
    >>> PIL.Image.new("RGB", (2, 1), (1, 2, 3)).save(file, "png")
    >>> rd.image.decode_png(file.getvalue()).tolist()
    [[[1, 2, 3], [1, 2, 3]]]
    """
    require_channels(channels, (0, 1, 2, 3, 4), "PNG")
    data = require_bytes(data)
    height, width, stored = png_shape(data)
    require_pixels(height, width, max_pixels)
    _verify(data)
    channels = channels or stored
    try:
        picture = codec("PIL.PngImagePlugin").PngImageFile(io.BytesIO(data))
        picture.load()
        pixels = _pixels(picture, channels)
    except _DECODING_ERRORS as error:
        raise corrupt("PNG", data, error) from error
    return pixels.reshape(height, width, channels)


def _pixels(picture: Any, channels: int) -> Image:
    if picture.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip where it should scale
        grey = (np.asarray(picture) >> 8).astype(np.uint8)
        picture = codec("PIL.Image").fromarray(grey)
    return np.array(picture.convert(_MODES[channels]))
