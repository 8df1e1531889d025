"""Pieces of images. Each is a copy, so that the rest of the image can be freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.image.arrays import Image, require_image, require_size

__all__ = ["central_crop", "crop_to_bounding_box", "random_crop", "random_window", "require_window"]


def require_window(window: tuple[int, int, int, int], height: int, width: int) -> None:
    """InvalidArgumentError unless (top, left, height, width) lies inside of an image of `height` x `width`."""
    top, left, rows, columns = window
    if min(top, left) < 0 or min(rows, columns) < 1 or top + rows > height or left + columns > width:
        raise InvalidArgumentError(
            f"A crop must lie inside of the image of {height} x {width} pixels, got {rows} x {columns} pixels at row "
            f"{top}, column {left}. Crop less, or resize the image first."
        )


def crop_to_bounding_box(
    image: Image, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Image:
    """The piece of `target_height` x `target_width` pixels whose upper left corner is at the offsets; a copy.

    Args:
        image: An image or a batch, of any dtype.
        offset_height: First row, from 0.
        offset_width: First column, from 0.
        target_height: Number of rows, >= 1.
        target_width: Number of columns, >= 1.

    Raises:
        InvalidArgumentError: It is not inside of the image, or empty.
        SpecError: The image has another shape.

    Source: tf.image.crop_to_bounding_box.

    >>> image = np.arange(12).reshape(3, 4, 1)
    >>> rd.image.crop_to_bounding_box(image, 1, 2, 2, 2)[..., 0].tolist()
    [[6, 7], [10, 11]]
    """
    image = require_image(image, "crop_to_bounding_box")
    window = (int(offset_height), int(offset_width), int(target_height), int(target_width))
    require_window(window, *image.shape[-3:-1])
    top, left, height, width = window
    return image[..., top : top + height, left : left + width, :].copy()


def central_crop(image: Image, central_fraction: float) -> Image:
    """The middle of the image: about `central_fraction` of each side.

    Args:
        image: An image or a batch.
        central_fraction: In (0, 1]. int((side - side * fraction) / 2) pixels go at either end of a side.

    Raises:
        InvalidArgumentError: `central_fraction` is out of its range.
        SpecError: The image has another shape.

    Source: tf.image.central_crop.

    >>> rd.image.central_crop(np.zeros((10, 8, 3), np.uint8), 0.5).shape
    (6, 4, 3)
    """
    image = require_image(image, "central_crop")
    if not 0 < central_fraction <= 1:
        raise InvalidArgumentError(f"central_fraction must be in (0, 1], got {central_fraction!r}.")
    height, width = image.shape[-3:-1]
    top, left = (int((side - side * central_fraction) / 2) for side in (height, width))
    return crop_to_bounding_box(image, top, left, height - 2 * top, width - 2 * left)


def random_crop(image: Image, size: Any, *, rng: np.random.Generator) -> Image:
    """A piece of `size` at a random place, each place being equally likely. All images of a batch are cut alike.

    Args:
        image: An image or a batch.
        size: (height, width) in pixels, one number for both, or the whole shape of the result.
        rng: Draws two integers.

    Raises:
        InvalidArgumentError: `size` is larger than the image, or below 1, or has other channels than the image.
        SpecError: The image has another shape.

    Source: tf.image.random_crop.

    >>> rd.image.random_crop(np.zeros((10, 8, 3)), (4, 5), rng=np.random.default_rng(0)).shape
    (4, 5, 3)
    """
    image = require_image(image, "random_crop")
    height, width = image.shape[-3:-1]
    return crop_to_bounding_box(image, *random_window(height, width, _of_shape(image, size), "random_crop", rng))


def _of_shape(image: Image, size: Any) -> Any:
    """The (height, width) of a whole shape, as tf.image.random_crop takes it; any other size as it is."""
    shape = tuple(size) if np.ndim(size) == 1 else ()
    if len(shape) != image.ndim:
        return size
    if (shape[:-3], shape[-1]) != (image.shape[:-3], image.shape[-1]):
        raise InvalidArgumentError(
            f"size of random_crop must leave the channels as they are, got {shape} for shape {image.shape}. Give "
            "(height, width)."
        )
    return shape[-3:-1]


def random_window(height: int, width: int, size: Any, what: str, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random piece of `size`, for a function called `what`."""
    rows, columns = require_size(size, what)
    require_window((0, 0, rows, columns), height, width)
    # One by one: numpy needs 20 us to draw two integers at once, and 3 us for each of these.
    return int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns
