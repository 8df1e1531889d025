"""Brightness and contrast, given or drawn. For one image of uint8 (0 to 255) or float32 (0 to 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.image.affine import affine, saturate_cast
from raydist.image.arrays import Image, require_colours

__all__ = ["adjust_brightness", "adjust_contrast", "random_brightness", "random_contrast"]


def _one_image(image: Any, what: str) -> Image:
    array = require_colours(image, what)
    if array.ndim != 3:
        raise SpecError(f"{what} takes one image, got a batch of shape {array.shape}. Map it before the batch.")
    return array


def adjust_brightness(image: Image, delta: float) -> Image:
    """The image with `delta` added to every value, of the same dtype.

    Args:
        image: One image. uint8 is rounded and cut off at 0 and 255.
        delta: As a fraction of the range of values, which for uint8 is 255.

    Raises:
        SpecError: The image has another shape or dtype, or is a batch.

    Source: tf.image.adjust_brightness (uint8 may differ by 1: it is rounded here).

    >>> rd.image.adjust_brightness(np.array([[[0, 100, 255]]], np.uint8), 0.2).tolist()
    [[[51, 151, 255]]]
    """
    image = _one_image(image, "adjust_brightness")
    full = 255 if image.dtype == np.uint8 else 1
    return saturate_cast(affine(image, 1.0, delta * full), image.dtype)


def adjust_contrast(image: Image, contrast_factor: float) -> Image:
    """(value - mean) * contrast_factor + mean, each channel with its own mean; of the same dtype.

    Args:
        image: One image. uint8 is rounded and cut off at 0 and 255.
        contrast_factor: 0 for grey, 1 for no change.

    Raises:
        SpecError: The image has another shape or dtype, or is a batch.

    Source: tf.image.adjust_contrast (uint8 may differ by 1: it is rounded here).

    >>> rd.image.adjust_contrast(np.array([[[100], [200]]], np.uint8), 0.5)[..., 0].tolist()
    [[125, 175]]
    """
    image = _one_image(image, "adjust_contrast")
    means = image.mean(axis=(0, 1), dtype=np.float64)
    return saturate_cast(affine(image, contrast_factor, means * (1 - contrast_factor)), image.dtype)


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
