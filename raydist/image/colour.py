"""Brightness and contrast, given or drawn. For one image of uint8 (0 to 255) or float32 (0 to 1)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.image.arrays import Image, require_colours
from raydist.image.value_range import affine, from_fractions, to_fractions


def _one_image(image: Any, what: str) -> Image:
    array = require_colours(image, what)
    if array.ndim != 3:
        raise SpecError(f"{what} takes one image, got a batch of shape {array.shape}. Map it before the batch.")
    return array


def adjust_brightness(image: Image, delta: float) -> Image:
    """The image with `delta` added to every value, of the same dtype.

    Args:
        image: One image. uint8 is rounded down (from fractions of 255.5) and cut off at 0 and 255.
        delta: As a fraction of the range of values, which for uint8 is 255.

    Raises:
        SpecError: The image has another shape or dtype, or is a batch.

    Source: tf.image.adjust_brightness, to the bit.

    >>> rd.image.adjust_brightness(np.array([[[0, 100, 255]]], np.uint8), 0.2).tolist()
    [[[51, 151, 255]]]
    """
    image = _one_image(image, "adjust_brightness")
    if image.dtype == np.float32:
        return affine(image, 1.0, delta)
    return _brighter(float(delta)).take(image)  # of all values that there are: to the bit, and three times as fast


@lru_cache(maxsize=16)
def _brighter(delta: float) -> Image:
    values = to_fractions(np.arange(256, dtype=np.uint8)) + np.float32(delta)
    table = from_fractions(values, np.dtype(np.uint8), saturate=True)
    table.flags.writeable = False
    return table


def adjust_contrast(image: Image, contrast_factor: float) -> Image:
    """(value - mean) * contrast_factor + mean, each channel with its own mean; of the same dtype.

    Args:
        image: One image. uint8 is rounded down (from fractions of 255.5) and cut off at 0 and 255.
        contrast_factor: 0 for grey, 1 for no change.

    Raises:
        SpecError: The image has another shape or dtype, or is a batch.

    Source: tf.image.adjust_contrast.

    >>> rd.image.adjust_contrast(np.array([[[100], [200]]], np.uint8), 0.5)[..., 0].tolist()
    [[125, 175]]
    """
    image = _one_image(image, "adjust_contrast")
    means = image.mean(axis=(0, 1), dtype=np.float64)
    full = 255 if image.dtype == np.uint8 else 1
    fractions = affine(image, contrast_factor / full, means * (1 - contrast_factor) / full)
    return from_fractions(fractions, image.dtype, saturate=True)


def adjust_gamma(image: Image, gamma: float = 1.0, gain: float = 1.0) -> Image:
    """Gain * image ** gamma, the image being taken as fractions; of the same dtype.

    Args:
        image: An image or a batch, uint8 or float32 (from 0 on: a power of a negative number is NaN).
        gamma: >= 0; more than 1 makes darker.
        gain: Brighter or darker as a whole. uint8 is cut off at 255.

    Raises:
        InvalidArgumentError: `gamma` is negative.
        SpecError: The image has another shape or dtype.

    Source: tf.image.adjust_gamma.

    >>> rd.image.adjust_gamma(np.array([[[0, 51, 255]]], np.uint8), 2.0).tolist()
    [[[0, 10, 255]]]
    """
    image = require_colours(image, "adjust_gamma")
    if not gamma >= 0:
        raise InvalidArgumentError(f"gamma must be >= 0, got {gamma!r}.")
    if image.dtype == np.float32:
        return _power(image, gamma, gain)
    table = _power(to_fractions(np.arange(256, dtype=np.uint8)), gamma, gain)  # of all values that there are
    return from_fractions(table, image.dtype, saturate=True).take(image)


def _power(image: Image, gamma: float, gain: float) -> Image:
    return np.float32(gain) * image ** np.float32(gamma)


def random_brightness(image: Image, max_delta: float, *, rng: np.random.Generator) -> Image:
    """:func:`adjust_brightness` by a number drawn from [-max_delta, max_delta).

    Args:
        image: One image, uint8 or float32.
        max_delta: As a fraction of the range of values, >= 0.
        rng: Draws one number.

    Raises:
        InvalidArgumentError: `max_delta` is negative.
        SpecError: The image has another shape or dtype.

    Source: tf.image.random_brightness.

    >>> rd.image.random_brightness(np.zeros((1, 1, 1), np.uint8), 0.0, rng=np.random.default_rng(0)).tolist()
    [[[0]]]
    """
    if max_delta < 0:
        raise InvalidArgumentError(f"max_delta must be >= 0, got {max_delta!r}.")
    return adjust_brightness(image, rng.uniform(-max_delta, max_delta))


def random_contrast(image: Image, lower: float, upper: float, *, rng: np.random.Generator) -> Image:
    """:func:`adjust_contrast` by a factor drawn from [lower, upper).

    Args:
        image: One image, uint8 or float32.
        lower: Smallest factor, >= 0.
        upper: Largest factor, >= `lower`.
        rng: Draws one number.

    Raises:
        InvalidArgumentError: Not 0 <= lower <= upper.
        SpecError: The image has another shape or dtype.

    Source: tf.image.random_contrast.

    >>> rd.image.random_contrast(np.full((1, 1, 1), 7, np.uint8), 0.5, 1.5, rng=np.random.default_rng(0)).tolist()
    [[[7]]]
    """
    if not 0 <= lower <= upper:
        raise InvalidArgumentError(f"lower and upper must satisfy 0 <= lower <= upper, got {lower!r} and {upper!r}.")
    return adjust_contrast(image, rng.uniform(lower, upper))
