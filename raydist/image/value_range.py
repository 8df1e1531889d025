"""Images of another dtype, with values of its range."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.errors import SpecError
from raydist.image.arrays import Image
from raydist.pipelines.elements.spec import as_dtype

__all__ = ["convert_image_dtype", "from_fractions", "to_fractions"]


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
