"""JPEG, decoded by libjpeg-turbo.

Pixels are those of libjpeg's defaults (accurate integer DCT, smooth upsampling of colours), hence equal to Pillow's.
"""

from __future__ import annotations

from typing import Any

from raydist.image.arrays import Image
from raydist.image.crop import crop_to_bounding_box, require_window
from raydist.image.encoded import MAX_PIXELS, corrupt, require_bytes, require_channels, require_pixels
from raydist.image.libraries import codec

__all__ = ["decode_and_crop_jpeg", "decode_jpeg", "jpeg_shape"]

_COLOUR_SPACES = {1: "GRAY", 3: "RGB"}


def jpeg_shape(data: bytes) -> tuple[int, int, int]:
    """(height, width, channels) from the header: 1 channel if it is grey, else 3."""
    try:
        height, width, colours, _ = codec("simplejpeg").decode_jpeg_header(data)
    except ValueError as error:
        raise corrupt("JPEG", data, error) from error
    return height, width, 1 if colours == "Gray" else 3


def decode_jpeg(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS, strict: bool = True) -> Image:
    """The image in a JPEG: uint8 of shape (height, width, channels). A camera's orientation tag (EXIF) is left alone.

    Args:
        data: The file's bytes.
        channels: 1 for grey, 3 for RGB (CMYK is converted), 0 for what is stored.
        max_pixels: Most pixels that the header may announce.
        strict: False takes what can be decoded of a damaged image, where libjpeg can; the rest is grey.

    Raises:
        DataLossError: The data is corrupt, truncated, or no JPEG.
        InvalidArgumentError: More than `max_pixels` pixels, or `channels` is none of 0, 1, 3.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_jpeg.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_jpeg(data).shape, rd.image.decode_jpeg(data, channels=1).shape
    ((4, 6, 3), (4, 6, 1))
    """
    require_channels(channels, (0, 1, 3), "JPEG")
    data = require_bytes(data)
    height, width, stored = jpeg_shape(data)
    require_pixels(height, width, max_pixels)
    try:
        image: Image = codec("simplejpeg").decode_jpeg(data, _COLOUR_SPACES[channels or stored], strict=strict)
    except ValueError as error:
        raise corrupt("JPEG", data, error) from error
    return image


def decode_and_crop_jpeg(
    data: Any,
    crop_window: tuple[int, int, int, int],
    channels: int = 0,
    *,
    max_pixels: int = MAX_PIXELS,
    strict: bool = True,
) -> Image:
    """What `decode_jpeg` and then `crop_to_bounding_box` give; the rest of the image is freed at once.

    Args:
        data: The file's bytes.
        crop_window: (top, left, height, width) in pixels.
        channels: See :func:`decode_jpeg`, as for `max_pixels`, `strict` and the errors.
        max_pixels: Of the whole image.
        strict: See :func:`decode_jpeg`.

    Raises:
        InvalidArgumentError: Also if the window is not inside of the image; found before anything is decoded.

    Source: tf.io.decode_and_crop_jpeg.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_and_crop_jpeg(data, (1, 2, 3, 4)).shape
    (3, 4, 3)
    """
    data = require_bytes(data)
    height, width, _ = jpeg_shape(data)
    require_window(crop_window, height, width)
    return crop_to_bounding_box(decode_jpeg(data, channels, max_pixels=max_pixels, strict=strict), *crop_window)
