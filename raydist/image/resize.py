"""Flipping, turning, resizing and padding."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.image.arrays import Image, require_colours, require_image, require_size
from raydist.image.crop import crop_to_bounding_box
from raydist.image.decode import codec

if TYPE_CHECKING:
    from collections.abc import Callable

_FILTERS = {"bilinear": "BILINEAR", "area": "BOX", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}
# Modes of four bytes a pixel that Pillow treats as independent channels (it would weigh RGBA by its alpha).
_UINT8_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


def flip_left_right(image: Image) -> Image:
    """The image, or every image of a batch, mirrored: its first column becomes the last; a copy.

    Args:
        image: An image or a batch, of any dtype.

    Raises:
        SpecError: The image has another shape.

    Source: tf.image.flip_left_right.

    >>> rd.image.flip_left_right(np.array([[[1], [2], [3]]]))[..., 0].tolist()
    [[3, 2, 1]]
    """
    image = require_image(image, "flip_left_right")
    flipped = np.empty(image.shape, image.dtype)
    # Channel by channel: numpy copies pixels of 3 bytes, from right to left, 4 times slower.
    for channel in range(image.shape[-1]):
        flipped[..., channel] = image[..., ::-1, channel]
    return flipped


def flip_up_down(image: Image) -> Image:
    """The image, or every image of a batch, upside down: its first row becomes the last; a copy.

    Args:
        image: An image or a batch, of any dtype.

    Raises:
        SpecError: The image has another shape.

    Source: tf.image.flip_up_down.

    >>> rd.image.flip_up_down(np.array([[[1]], [[2]]]))[..., 0].tolist()
    [[2], [1]]
    """
    return require_image(image, "flip_up_down")[..., ::-1, :, :].copy()


def random_flip_left_right(image: Image, *, rng: np.random.Generator) -> Image:
    """:func:`flip_left_right` with probability 1/2; for every image of a batch by itself.

    Args:
        image: An image or a batch.
        rng: Draws one number an image.

    Source: tf.image.random_flip_left_right.

    >>> rd.image.random_flip_left_right(np.array([[[1], [2]]]), rng=np.random.default_rng(0))[..., 0].tolist()
    [[1, 2]]
    """
    return _sometimes(flip_left_right, require_image(image, "random_flip_left_right"), rng)


def random_flip_up_down(image: Image, *, rng: np.random.Generator) -> Image:
    """:func:`flip_up_down` with probability 1/2; for every image of a batch by itself.

    Args:
        image: An image or a batch.
        rng: Draws one number an image.

    Source: tf.image.random_flip_up_down.

    >>> rd.image.random_flip_up_down(np.array([[[1]], [[2]]]), rng=np.random.default_rng(1))[..., 0].tolist()
    [[1], [2]]
    """
    return _sometimes(flip_up_down, require_image(image, "random_flip_up_down"), rng)


def _sometimes(flip: Callable[[Image], Image], image: Image, rng: np.random.Generator) -> Image:
    if image.ndim == 3:
        return flip(image) if rng.random() < 0.5 else image
    chosen = rng.random(len(image)) < 0.5
    flipped = image.copy()
    flipped[chosen] = flip(image[chosen])
    return flipped


def rot90(image: Image, k: int = 1) -> Image:
    """The image, or every image of a batch, turned by `k` quarters of a circle, counter-clockwise; a copy.

    Args:
        image: An image or a batch, of any dtype.
        k: Number of quarters; negative ones are clockwise.

    Raises:
        SpecError: The image has another shape.
        TypeError: `k` is no whole number.

    Source: tf.image.rot90.

    >>> rd.image.rot90(np.array([[[1], [2]], [[3], [4]]]))[..., 0].tolist()
    [[2, 4], [1, 3]]
    """
    image = require_image(image, "rot90")
    return np.rot90(image, operator.index(k), axes=(-3, -2)).copy()


def transpose(image: Image) -> Image:
    """The image, or every image of a batch, with rows and columns exchanged; a copy.

    Args:
        image: An image or a batch, of any dtype.

    Raises:
        SpecError: The image has another shape.

    Source: tf.image.transpose.

    >>> rd.image.transpose(np.array([[[1], [2]], [[3], [4]]]))[..., 0].tolist()
    [[1, 3], [2, 4]]
    """
    return require_image(image, "transpose").swapaxes(-3, -2).copy()


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


def pad_to_bounding_box(
    image: Image, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Image:
    """An image of `target_height` x `target_width` pixels with this one at the offsets, and zeros around it.

    Args:
        image: An image or a batch, of any dtype.
        offset_height: Rows of zeros above, >= 0.
        offset_width: Columns of zeros to the left, >= 0.
        target_height: Number of rows.
        target_width: Number of columns.

    Raises:
        InvalidArgumentError: The image does not fit.
        SpecError: The image has another shape.

    Source: tf.image.pad_to_bounding_box.

    >>> rd.image.pad_to_bounding_box(np.array([[[7]]]), 0, 1, 2, 3)[..., 0].tolist()
    [[0, 7, 0], [0, 0, 0]]
    """
    image = require_image(image, "pad_to_bounding_box")
    height, width = image.shape[-3:-1]
    top, left = int(offset_height), int(offset_width)
    if min(top, left) < 0 or top + height > target_height or left + width > target_width:
        raise InvalidArgumentError(
            f"An image of {height} x {width} pixels must fit into {target_height} x {target_width} at row {top}, "
            f"column {left}. Pad less at the offsets, or see resize_with_crop_or_pad."
        )
    padded: Image = np.zeros((*image.shape[:-3], target_height, target_width, image.shape[-1]), image.dtype)
    padded[..., top : top + height, left : left + width, :] = image
    return padded


def resize_with_crop_or_pad(image: Image, target_height: int, target_width: int) -> Image:
    """The middle of the image, or the image in the middle of zeros: each side cut or filled up to its target.

    Args:
        image: An image or a batch, of any dtype.
        target_height: Number of rows, >= 1.
        target_width: Number of columns, >= 1.

    Raises:
        InvalidArgumentError: A target below 1.
        SpecError: The image has another shape.

    Source: tf.image.resize_with_crop_or_pad.

    >>> rd.image.resize_with_crop_or_pad(np.array([[[1], [2], [3]]]), 2, 1)[..., 0].tolist()
    [[2], [0]]
    """
    image = require_image(image, "resize_with_crop_or_pad")
    target = require_size((target_height, target_width), "resize_with_crop_or_pad")
    (top, above), (left, before) = map(_overhang, image.shape[-3:-1], target)
    kept = map(min, image.shape[-3:-1], target)
    return pad_to_bounding_box(crop_to_bounding_box(image, top, left, *kept), above, before, *target)


def _overhang(side: int, target: int) -> tuple[int, int]:
    """Return the numbers of pixels to cut off and to add at the beginning of a side."""
    return max((side - target) // 2, 0), max((target - side) // 2, 0)


def resize_with_pad(
    image: Image,
    target_height: int,
    target_width: int,
    method: Literal["bilinear", "nearest", "area", "bicubic", "lanczos"] = "bilinear",
) -> Image:
    """The whole image as large as fits, undistorted, in the middle of zeros; of the same dtype.

    Args:
        image: An image or a batch, uint8 or float32.
        target_height: Number of rows, >= 1.
        target_width: Number of columns, >= 1.
        method: As for :func:`resize`.

    Raises:
        InvalidArgumentError: A target below 1, an unknown method, or an image so long that nothing of it is left.
        SpecError: The image has another shape or dtype.
        FailedPreconditionError: As for :func:`resize`.

    Source: tf.image.resize_with_pad.

    >>> rd.image.resize_with_pad(np.full((2, 4, 1), 9, np.uint8), 3, 2, method="nearest")[..., 0].tolist()
    [[0, 0], [9, 9], [0, 0]]
    """
    image = require_image(image, "resize_with_pad")
    high, wide = require_size((target_height, target_width), "resize_with_pad")
    height, width = image.shape[-3:-1]
    if not height or not width:
        raise InvalidArgumentError(f"resize_with_pad needs an image with pixels, got shape {image.shape}.")
    # In whole numbers: the one side that decides is exactly its target.
    size = (high, width * high // height) if height * wide >= width * high else (height * wide // width, wide)
    # Half of what is left over beside the size before it was rounded down.
    over = max(0, (wide * height - width * high) // (2 * height)), max(0, (high * width - height * wide) // (2 * width))
    return pad_to_bounding_box(resize(image, size, method), over[1], over[0], high, wide)
