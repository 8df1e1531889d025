"""Images by what their first bytes say."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.image.arrays import Image
from raydist.image.crop import crop_to_bounding_box, random_window
from raydist.image.encoded import MAX_PIXELS, require_bytes
from raydist.image.jpeg import decode_jpeg, jpeg_shape
from raydist.image.png import PNG_SIGNATURE, decode_png, png_shape

__all__ = ["decode_and_random_crop", "decode_image", "image_shape"]


def image_shape(data: Any) -> tuple[int, int, int]:
    """(height, width, channels) that :func:`decode_image` would give, read from the header in some microseconds.

    Args:
        data: The bytes of a JPEG or a PNG; the first kilobytes may be enough of a JPEG.

    Raises:
        SpecError: The data is no bytes.
        FailedPreconditionError: The extra `raydist[images]` is not installed (JPEG only).
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

    Args:
        data: The file's bytes.
        channels: As for :func:`decode_jpeg` and :func:`decode_png`; 0 for what is stored.
        max_pixels: Most pixels that the header may announce.

    Raises:
        InvalidArgumentError: The data is of another format, has more than `max_pixels` pixels, or cannot be given these
            `channels`.
        DataLossError: The data is corrupt or truncated.
        SpecError: It is no bytes.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_image.

    >>> import numpy as np, simplejpeg
    >>> rd.image.decode_image(simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8)), channels=1).shape
    (4, 6, 1)
    """
    data = require_bytes(data)
    decode = decode_png if _kind(data) == "PNG" else decode_jpeg
    return decode(data, channels, max_pixels=max_pixels)


def decode_and_random_crop(
    data: Any, size: Any, channels: int = 0, *, rng: np.random.Generator, max_pixels: int = MAX_PIXELS
) -> Image:
    """What `decode_image` and then `random_crop` give; a `size` that does not fit is found before anything is decoded.

    Args:
        data: The bytes of a JPEG or a PNG.
        size: (height, width) in pixels, or one number for both.
        channels: See :func:`decode_image`, as for `max_pixels` and the errors.
        rng: Draws two integers.
        max_pixels: Of the whole image.

    Raises:
        InvalidArgumentError: As for :func:`decode_image`, or `size` is larger than the image, or below 1.

    Source: tf.io.decode_and_crop_jpeg, tf.image.random_crop.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_and_random_crop(data, (2, 3), rng=np.random.default_rng(0)).shape
    (2, 3, 3)
    """
    height, width, _ = image_shape(data)
    window = random_window(height, width, size, "decode_and_random_crop", rng)
    return crop_to_bounding_box(decode_image(data, channels, max_pixels=max_pixels), *window)


def _kind(data: bytes) -> str:
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    raise InvalidArgumentError(
        f"The data must be a JPEG or a PNG, got {len(data)} bytes that begin with {data[:8]!r}. "
        "Decode other formats with a function of your own, e.g. by Pillow."
    )
