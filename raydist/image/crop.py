"""Pieces of images. Each is a copy, so that the rest of the image can be freed."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.image.arrays import Image, require_image, require_size


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


def crop_and_resize(
    image: Image,
    boxes: Any,
    box_indices: Any,
    crop_size: Any,
    method: Literal["bilinear", "nearest"] = "bilinear",
    extrapolation_value: float = 0.0,
) -> Image:
    """Boxes of the images of a batch, each resized: (images, h, w, c) -> (boxes, *crop_size, c), as float32.

    Args:
        image: A batch of images, of numbers.
        boxes: (boxes, 4) numbers: y1, x1, y2, x2 as fractions of height - 1 and width - 1; y1 > y2 turns upside down.
        box_indices: The image of each box.
        crop_size: (height, width) in pixels, or one number for both.
        method: "bilinear" or "nearest".
        extrapolation_value: What stands where a box is outside of its image.

    Raises:
        InvalidArgumentError: Boxes, indices, size or method that are not as above.
        SpecError: The image is no batch.

    Source: tf.image.crop_and_resize.

    >>> image = np.arange(9.0).reshape(1, 3, 3, 1)
    >>> rd.image.crop_and_resize(image, [[0.0, 0.0, 0.5, 1.0]], [0], (2, 2))[0, ..., 0].tolist()
    [[0.0, 2.0], [3.0, 5.0]]
    """
    image = require_image(image, "crop_and_resize")
    if image.ndim != 4:
        raise SpecError(f"crop_and_resize needs a batch of images, got shape {image.shape}. Add an axis: image[None].")
    size = require_size(crop_size, "crop_and_resize")
    corners, of_image = _checked(boxes, box_indices, len(image))
    if method not in ("bilinear", "nearest"):
        raise InvalidArgumentError(f"method of crop_and_resize must be bilinear or nearest, got {method!r}.")
    crops: Image = np.empty((len(corners), *size, image.shape[-1]), np.float32)
    for crop, box, number in zip(crops, corners, of_image, strict=True):
        rows = _places(box[0], box[2], image.shape[1], size[0])
        columns = _places(box[1], box[3], image.shape[2], size[1])
        crop[:] = _sampled(image[number], rows, columns, method)
        crop[_outside(rows, image.shape[1])] = extrapolation_value
        crop[:, _outside(columns, image.shape[2])] = extrapolation_value
    return crops


def _checked(boxes: Any, box_indices: Any, images: int) -> tuple[Image, Image]:
    corners, numbers = np.asarray(boxes, np.float32), np.asarray(box_indices)
    if corners.ndim != 2 or corners.shape[1] != 4 or numbers.shape != corners.shape[:1]:
        raise InvalidArgumentError(
            "boxes must have shape (boxes, 4) and box_indices one image for each of them, got shapes "
            f"{corners.shape} and {numbers.shape}."
        )
    if numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= images):
        raise InvalidArgumentError(f"box_indices must be numbers of the {images} images, got {box_indices!r:.100}.")
    return corners, numbers


def _places(first: Any, last: Any, length: int, count: int) -> Image:
    """Return the positions of the `count` pixels of a crop in a side of `length` pixels."""
    most = np.float32(length - 1)
    if count == 1:
        return np.array([np.float32(0.5) * (first + last) * most])
    step = (last - first) * most / np.float32(count - 1)
    places: Image = first * most + np.arange(count, dtype=np.float32) * step
    return places


def _outside(places: Image, length: int) -> Image:
    # Not by comparing with the opposite: a place that is no number is outside too.
    inside: Image = (places >= 0) & (places <= length - 1)
    return ~inside


def _sampled(image: Image, rows: Image, columns: Image, method: str) -> Image:
    if method == "nearest":
        return image[_nearest(rows, image.shape[0])[:, None], _nearest(columns, image.shape[1])].astype(np.float32)
    top, bottom, down = _neighbours(rows, image.shape[0])
    left, right, along = _neighbours(columns, image.shape[1])
    upper, lower = (_mixed(image[row][:, left], image[row][:, right], along[:, None]) for row in (top, bottom))
    return _mixed(upper, lower, down[:, None, None])


def _mixed(first: Image, second: Image, part: Image) -> Image:
    start = first.astype(np.float32)
    mixed: Image = start + (second.astype(np.float32) - start) * part
    return mixed


def _nearest(places: Image, length: int) -> Image:
    inside = np.clip(np.nan_to_num(places), 0, length - 1)
    nearest: Image = np.floor(inside + np.float32(0.5)).astype(np.int64)  # halves go up, as C's roundf does
    return nearest


def _neighbours(places: Image, length: int) -> tuple[Image, Image, Image]:
    inside = np.clip(np.nan_to_num(places), 0, length - 1)
    below = np.floor(inside)
    return below.astype(np.int64), np.ceil(inside).astype(np.int64), inside - below
