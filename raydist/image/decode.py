"""Images by what their first bytes say."""

from __future__ import annotations

from typing import Any

from raydist.errors import InvalidArgumentError
from raydist.image.arrays import Image
from raydist.image.encoded import MAX_PIXELS, require_bytes
from raydist.image.jpeg import decode_jpeg, jpeg_shape
from raydist.image.png import PNG_SIGNATURE, decode_png, png_shape

__all__ = ["decode_image", "image_shape"]


def image_shape(data: Any) -> tuple[int, int, int]:
    """(height, width, channels) that :func:`decode_image` would give, read from the header in some microseconds.

    Raises:
        InvalidArgumentError: The data is neither a JPEG nor a PNG.
        DataLossError: The header is corrupt or truncated.

    Source: tf.io.extract_jpeg_shape.

    >>> import numpy as np, simplejpeg
    >>> rd.image.image_shape(simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8)))
    (4, 6, 3)
    """
    data = require_bytes(data)
    return png_shape(data) if _kind(data) == "PNG" else jpeg_shape(data)


def decode_image(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The image in a JPEG or PNG, whichever it is: uint8 of shape (height, width, channels).

    Arguments and errors are those of :func:`decode_jpeg` and :func:`decode_png`; data of another format is an
    InvalidArgumentError.

    Source: tf.io.decode_image.

    >>> import numpy as np, simplejpeg
    >>> rd.image.decode_image(simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8)), channels=1).shape
    (4, 6, 1)
    """
    data = require_bytes(data)
    decode = decode_png if _kind(data) == "PNG" else decode_jpeg
    return decode(data, channels, max_pixels=max_pixels)


def _kind(data: bytes) -> str:
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    raise InvalidArgumentError(
        f"The data must be a JPEG or a PNG, got {len(data)} bytes that begin with {data[:8]!r}. "
        "Decode other formats with a function of your own, e.g. by Pillow."
    )
