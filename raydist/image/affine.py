"""The one loop behind normalising, brightness and contrast."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.image.arrays import Image

__all__ = ["affine", "saturate_cast"]


def affine(image: Image, scale: Any, offset: Any) -> Image:
    """`image * scale + offset` as float32, `scale` and `offset` being numbers or one number a channel.

    For one image of shape (height, width, channels).
    """
    height, width, channels = image.shape
    # Whole rows: numpy is 8 times slower where an inner loop has 3 numbers.
    rows = np.ascontiguousarray(image).reshape(height, width * channels)
    result: Image = np.multiply(rows, _row(scale, width, channels), dtype=np.float32)
    result += _row(offset, width, channels)
    return result.reshape(height, width, channels)


def _row(values: Any, width: int, channels: int) -> Image:
    return np.tile(np.broadcast_to(np.asarray(values, np.float32), channels), width)


def saturate_cast(image: Image, dtype: np.dtype[Any]) -> Image:
    """A float32 image as `dtype`: for uint8 rounded, and cut off at 0 and 255 (tf.saturate_cast rounds down)."""
    if dtype != np.uint8:
        return image
    np.rint(image, out=image)
    np.clip(image, 0, 255, out=image)
    return image.astype(np.uint8)
