"""Ranges of values: other dtypes, normalising, and the loop behind normalising, brightness and contrast."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.image.arrays import Image, require_colours, require_image
from raydist.pipelines.elements.spec import as_dtype


def convert_image_dtype(image: Any, dtype: Any, saturate: bool = False) -> Image:
    """The values as `dtype`, scaled: 0 to the largest number for integers, 0 to 1 for floats. The shape stays.

    Args:
        image: An array of integers or floats, of any shape.
        dtype: The new dtype (numpy, torch or text).
        saturate: Cut off what is outside of the new range; False leaves it undefined.

    Returns:
        A copy, or the image itself where it has that dtype already.

    Raises:
        SpecError: No array of integers or floats, or no such dtype.

    Source: tf.image.convert_image_dtype, to the bit; from floats it rounds down, after scaling by 255.5.

    >>> rd.image.convert_image_dtype(np.array([[[0, 128, 255]]], np.uint8), np.float32).round(3).tolist()
    [[[0.0, 0.5019999742507935, 1.0]]]
    >>> rd.image.convert_image_dtype(np.array([[[0.0, 0.5, 1.2]]], np.float32), np.uint8, saturate=True).tolist()
    [[[0, 127, 255]]]
    """
    target = as_dtype(dtype)
    if not isinstance(image, np.ndarray) or image.dtype.kind not in "iuf" or target.kind not in "iuf":
        got = f"dtype {image.dtype}" if isinstance(image, np.ndarray) else f"{image!r:.80}"
        raise SpecError(
            f"convert_image_dtype needs arrays of integers or floats, got {got} and {target}. Decode first."
        )
    if image.dtype == target:
        return image
    if image.dtype.kind == "f":
        return image.astype(target) if target.kind == "f" else _cast(_scaled_up(image, target), target, saturate)
    if target.kind == "f":
        return _fractions(image, target)
    return _between_integers(image, target, saturate)


def to_fractions(image: Image) -> Image:
    """uint8 or float32 as float32 from 0 to 1."""
    return image if image.dtype == np.float32 else _fractions(image, np.dtype(np.float32))


def from_fractions(image: Image, dtype: np.dtype[Any], *, saturate: bool = False) -> Image:
    """The way back from :func:`to_fractions`. Writes to `image`."""
    if dtype == np.float32:
        return image
    image *= np.float32(np.iinfo(dtype).max + 0.5)
    return _cast(image, dtype, saturate)


def _fractions(image: Image, target: np.dtype[Any]) -> Image:
    with np.errstate(over="ignore", invalid="ignore"):  # of float16: becomes inf, as in TensorFlow
        fractions: Image = image.astype(target)
        fractions *= target.type(1.0 / np.iinfo(image.dtype).max)
    return fractions


def _scaled_up(image: Image, target: np.dtype[Any]) -> Image:
    with np.errstate(over="ignore"):
        scaled: Image = image * image.dtype.type(np.iinfo(target).max + 0.5)
    return scaled


def _cast(values: Image, target: np.dtype[Any], saturate: bool) -> Image:
    if saturate:
        values = np.clip(values, *_limits(values.dtype, target))
    with np.errstate(invalid="ignore"):  # what is outside of the range is undefined
        return values.astype(target)


def _limits(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[Any, Any]:
    """The smallest and the largest number of `source` that `target` can hold."""
    theirs = np.iinfo(target)
    if source.kind != "f":
        mine = np.iinfo(source)
        return max(mine.min, theirs.min), min(mine.max, theirs.max)
    most = np.finfo(source)
    lowest, highest = (min(max(float(bound), float(most.min)), float(most.max)) for bound in (theirs.min, theirs.max))
    largest = source.type(highest)
    # float32 knows no 2**31 - 1, and would take 2**31 for it.
    return source.type(lowest), largest if int(largest) <= theirs.max else np.nextafter(largest, source.type(0))


def _between_integers(image: Image, target: np.dtype[Any], saturate: bool) -> Image:
    mine, theirs = int(np.iinfo(image.dtype).max), int(np.iinfo(target).max)
    if mine > theirs:
        return _cast(image // image.dtype.type((mine + 1) // (theirs + 1)), target, saturate)
    values = _cast(image, target, saturate)
    values *= target.type((theirs + 1) // (mine + 1))
    return values


def normalize(image: Image, mean: Any, std: Any) -> Image:
    """(image - mean) / std for each channel, as float32.

    Values of uint8 are taken as fractions of 255, so that means and deviations are those of torchvision's models.

    Args:
        image: An image or a batch, uint8 or float32.
        mean: A number, or one a channel.
        std: The same; not 0.

    Raises:
        InvalidArgumentError: `mean` or `std` has neither one number nor one a channel, or a deviation is 0.
        SpecError: The image has another shape or dtype.

    Source: torchvision.transforms.Normalize after ToTensor; the layout stays (..., height, width, channels).

    >>> rd.image.normalize(np.array([[[0, 255]]], np.uint8), mean=(0.5, 0.5), std=(0.5, 0.25)).tolist()
    [[[-1.0, 2.0]]]
    """
    image = require_colours(image, "normalize")
    means, deviations = (_per_channel(name, v, image.shape[-1]) for name, v in (("mean", mean), ("std", std)))
    if not deviations.all():
        raise InvalidArgumentError(f"std must not be 0, got {std!r}.")
    scale = 1 / deviations / (255 if image.dtype == np.uint8 else 1)
    return _each(image, scale, -means / deviations)


def _per_channel(name: str, values: Any, channels: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    numbers = np.asarray(values, np.float64)
    if numbers.shape not in ((), (channels,)):
        raise InvalidArgumentError(
            f"{name} must be a number or {channels} of them, one for each channel of the image, got {values!r}."
        )
    return numbers if numbers.ndim else np.full(channels, numbers)


def _each(image: Image, scale: Image, offset: Image) -> Image:
    if image.ndim == 3:
        return affine(image, scale, offset)
    result: Image = np.empty(image.shape, np.float32)
    for index, one in enumerate(image):  # an image fits into the processor's cache, a batch does not
        result[index] = affine(one, scale, offset)
    return result


def per_image_standardization(image: Image) -> Image:
    """(image - its mean) / its deviation, which counts as 1 / sqrt(numbers in the image) at least; as float32.

    Args:
        image: An image or a batch, of numbers; each image of a batch by itself.

    Raises:
        SpecError: The image has another shape.

    Source: tf.image.per_image_standardization.

    >>> rd.image.per_image_standardization(np.array([[[1], [3]]], np.uint8)).tolist()
    [[[-1.0], [1.0]]]
    """
    image = require_image(image, "per_image_standardization")
    if image.ndim == 4:
        return np.stack([per_image_standardization(one) for one in image]) if len(image) else image.astype(np.float32)
    mean = image.mean(dtype=np.float64)
    deviation = max(image.std(dtype=np.float64), 1 / np.sqrt(image.size))
    return affine(image, 1 / deviation, -mean / deviation)


def channels_first(image: Image) -> Image:
    """(..., height, width, channels) -> (..., channels, height, width), as torch's layers take images; a copy.

    Args:
        image: An image or a batch, of any dtype.

    Raises:
        SpecError: The image has another shape.

    Source: the layout of torchvision.transforms.ToTensor, without its scaling.

    >>> rd.image.channels_first(np.zeros((4, 5, 3), np.uint8)).shape
    (3, 4, 5)
    """
    image = require_image(image, "channels_first")
    return np.ascontiguousarray(np.moveaxis(image, -1, -3))


def affine(image: Image, scale: Any, offset: Any) -> Image:
    """Return `image * scale + offset` as float32; `scale` and `offset` are numbers, or one number per channel.

    For one image of shape (height, width, channels).
    """
    height, width, channels = image.shape
    result: Image = np.array(image, np.float32, order="C")  # an array of its own, which a map takes over without a copy
    lines = result.reshape(height, width * channels)  # numpy is 8 times slower where an inner loop has 3 numbers
    lines *= _line(scale, channels, width)
    lines += _line(offset, channels, width)
    return result


def _line(values: Any, channels: int, width: int) -> Image:
    return np.tile(np.broadcast_to(np.asarray(values, np.float32), channels), width)
