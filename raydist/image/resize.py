"""Images of another size.

Pixels are squares whose centres lie at 0.5, 1.5, ...; shrinking takes every pixel below a filter as wide as an output
pixel (antialiasing). So smooth results are Pillow's, those of torchvision's `resize` (within 1 for uint8), and those of
tf.image.resize(antialias=True) before it rounds; "nearest" is that of tf.image.resize.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.image.arrays import Image, require_colours, require_size
from raydist.image.libraries import codec

__all__ = ["resize"]

_FILTERS = {"bilinear": "BILINEAR", "area": "BOX", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}
# Modes of four bytes a pixel that Pillow treats as independent channels (it would weigh RGBA by its alpha).
_UINT8_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


def resize(
    image: Image, size: Any, method: Literal["bilinear", "nearest", "area", "bicubic", "lanczos"] = "bilinear"
) -> Image:
    """The image, or every image of a batch, with `size` pixels; of the same dtype.

    Args:
        image: An image or a batch, uint8 or float32.
        size: (height, width) in pixels, or one number for both.
        method: "nearest" takes the pixel at the centre; "bilinear" weighs by distance; "area" averages what an output
            pixel covers; "bicubic" and "lanczos" may overshoot (uint8 is cut off at 0 and 255).

    Raises:
        InvalidArgumentError: `size` is not at least (1, 1), `method` is unknown, or the image is empty.
        SpecError: The image has another shape or dtype.
        FailedPreconditionError: The extra `raydist[images]` is not installed ("nearest" does without).

    Source: PIL.Image.resize; arguments as in tf.image.resize.

    >>> rd.image.resize(np.array([[[0], [100]]], np.uint8), (1, 4))[..., 0].tolist()
    [[0, 25, 75, 100]]
    """
    image = require_colours(image, "resize")
    size = require_size(size, "resize")
    if method != "nearest" and method not in _FILTERS:
        raise InvalidArgumentError(f"method of resize must be one of nearest, {', '.join(_FILTERS)}, got {method!r}.")
    if 0 in image.shape[-3:]:
        raise InvalidArgumentError(f"resize needs an image with pixels, got shape {image.shape}.")
    if method == "nearest":
        return _nearest(image, size)
    if image.ndim == 3:
        return _resize_one(image, size, method)
    resized: Image = np.empty((len(image), *size, image.shape[-1]), image.dtype)
    for index, one in enumerate(image):
        resized[index] = _resize_one(one, size, method)
    return resized


def _nearest(image: Image, size: tuple[int, int]) -> Image:
    for axis, length in zip((-3, -2), size, strict=True):
        # The pixel below the centre: floor((i + 1/2) * old / new), in integers.
        image = image.take((2 * np.arange(length) + 1) * image.shape[axis] // (2 * length), axis)
    return image


def _resize_one(image: Image, size: tuple[int, int], method: str) -> Image:
    channels = image.shape[-1]
    mode = _UINT8_MODES.get(channels) if image.dtype == np.uint8 else None
    if mode is not None:
        return _by_pillow(image, mode, size, method).reshape(*size, channels)
    mode = "L" if image.dtype == np.uint8 else "F"
    return np.stack([_by_pillow(image[..., k], mode, size, method) for k in range(channels)], axis=-1)


def _by_pillow(pixels: Image, mode: str, size: tuple[int, int], method: str) -> Image:
    library = codec("PIL.Image")
    height, width = pixels.shape[:2]
    picture = library.frombytes(mode, (width, height), np.ascontiguousarray(pixels))
    return np.array(picture.resize(size[::-1], getattr(library.Resampling, _FILTERS[method])))
