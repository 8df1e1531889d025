"""Boxes cut out of images and brought to one size."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.image.arrays import Image, require_image, require_size

__all__ = ["crop_and_resize"]


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
    """Where in a side of `length` pixels the `count` pixels of a crop lie."""
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
