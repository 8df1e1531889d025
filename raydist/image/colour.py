"""Brightness, contrast, gamma, hue, saturation and grey."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.image.arrays import Image, require_colours, require_image
from raydist.image.value_range import affine, from_fractions, to_fractions

_WEIGHTS = np.array([0.2989, 0.587, 0.114], np.float32)
_WEIGHTS.flags.writeable = False


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


def require_rgb(image: Any, what: str) -> Image:
    """Return `image` if it is uint8 or float32 with 3 channels; `what` is the caller's name."""
    array = require_colours(image, what)
    if array.shape[-1] != 3:
        raise SpecError(f"{what} needs 3 channels (red, green, blue), got {array.shape[-1]}: see grayscale_to_rgb.")
    return array


def rgb_to_hsv(image: Image) -> Image:
    """Red, green and blue as hue, saturation and value, each from 0 to 1.

    Args:
        image: An image or a batch, float32 from 0 to 1.

    Raises:
        SpecError: The image has another shape or dtype.

    Source: tf.image.rgb_to_hsv.

    >>> rd.image.rgb_to_hsv(np.array([[[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]], np.float32)).round(3).tolist()
    [[[0.3330000042915344, 1.0, 1.0], [0.0, 0.5, 0.5]]]
    """
    planes = _planes(_floats(image, "rgb_to_hsv"))
    value, spread = _extremes(planes)
    saturation = np.divide(spread, value, out=np.zeros_like(value), where=value > 0)
    return np.stack([_hue(planes, value, spread), saturation, value], axis=-1)


def hsv_to_rgb(image: Image) -> Image:
    """Hue, saturation and value, each from 0 to 1, as red, green and blue.

    Args:
        image: An image or a batch, float32.

    Raises:
        SpecError: The image has another shape or dtype.

    Source: tf.image.hsv_to_rgb.

    >>> rd.image.hsv_to_rgb(np.array([[[0.0, 0.5, 0.5]]], np.float32)).tolist()
    [[[0.5, 0.25, 0.25]]]
    """
    image = _floats(image, "hsv_to_rgb")
    hue, saturation, value = _planes(image)
    return _colours(hue, value * (1 - saturation), value * saturation)


def adjust_hue(image: Image, delta: float) -> Image:
    """The image with its hues turned by `delta` of the colour wheel; of the same dtype.

    Args:
        image: An image or a batch of 3 channels, uint8 or float32.
        delta: In [-1, 1]: 0 and 1 change nothing.

    Raises:
        InvalidArgumentError: `delta` is out of its range.
        SpecError: The image has another shape or dtype.

    Source: tf.image.adjust_hue.

    >>> rd.image.adjust_hue(np.array([[[255, 0, 0]]], np.uint8), 1 / 3).tolist()
    [[[0, 255, 0]]]
    """
    image = require_rgb(image, "adjust_hue")
    if not -1 <= delta <= 1:
        raise InvalidArgumentError(f"delta of adjust_hue must be in [-1, 1], got {delta!r}.")
    planes = _planes(to_fractions(image))
    value, spread = _extremes(planes)
    hue = _hue(planes, value, spread) + np.float32(delta)
    hue -= np.floor(hue)
    return from_fractions(_colours(hue, value - spread, spread), image.dtype)


def adjust_saturation(image: Image, saturation_factor: float) -> Image:
    """The image with its saturation (of hue, saturation, value) times `saturation_factor`; of the same dtype.

    Args:
        image: An image or a batch of 3 channels, uint8 or float32.
        saturation_factor: 0 for grey, 1 for no change. No colour is more saturated than one without grey.

    Raises:
        SpecError: The image has another shape or dtype.

    Source: tf.image.adjust_saturation.

    >>> rd.image.adjust_saturation(np.array([[[100, 50, 50]]], np.uint8), 0.5).tolist()
    [[[100, 75, 75]]]
    """
    image = require_rgb(image, "adjust_saturation")
    planes = _planes(to_fractions(image))
    value, spread = _extremes(planes)
    # The distance of each channel from the largest one grows with the saturation, which is at most 1.
    most = np.divide(value, spread, out=np.ones_like(value), where=spread > 0)
    factor = np.minimum(np.float32(max(saturation_factor, 0.0)), most)
    changed = [value - (value - plane) * factor for plane in planes]
    return from_fractions(np.stack(changed, axis=-1), image.dtype)


def random_hue(image: Image, max_delta: float, *, rng: np.random.Generator) -> Image:
    """:func:`adjust_hue` by a number drawn from [-max_delta, max_delta).

    Args:
        image: An image or a batch of 3 channels, uint8 or float32; a batch is turned alike.
        max_delta: In [0, 0.5].
        rng: Draws one number.

    Raises:
        InvalidArgumentError: `max_delta` is out of its range.
        SpecError: The image has another shape or dtype.

    Source: tf.image.random_hue.

    >>> rd.image.random_hue(np.full((1, 1, 3), 7, np.uint8), 0.5, rng=np.random.default_rng(0)).tolist()
    [[[7, 7, 7]]]
    """
    if not 0 <= max_delta <= 0.5:
        raise InvalidArgumentError(f"max_delta must be in [0, 0.5], got {max_delta!r}.")
    return adjust_hue(image, rng.uniform(-max_delta, max_delta))


def random_saturation(image: Image, lower: float, upper: float, *, rng: np.random.Generator) -> Image:
    """:func:`adjust_saturation` by a factor drawn from [lower, upper).

    Args:
        image: An image or a batch of 3 channels, uint8 or float32; a batch is changed alike.
        lower: Smallest factor, >= 0.
        upper: Largest factor, >= `lower`.
        rng: Draws one number.

    Raises:
        InvalidArgumentError: Not 0 <= lower <= upper.
        SpecError: The image has another shape or dtype.

    Source: tf.image.random_saturation.

    >>> rd.image.random_saturation(np.full((1, 1, 3), 7, np.uint8), 0.5, 1.5, rng=np.random.default_rng(0)).tolist()
    [[[7, 7, 7]]]
    """
    if not 0 <= lower <= upper:
        raise InvalidArgumentError(f"lower and upper must satisfy 0 <= lower <= upper, got {lower!r} and {upper!r}.")
    return adjust_saturation(image, rng.uniform(lower, upper))


def _floats(image: Any, what: str) -> Image:
    array = require_image(image, what)
    if array.dtype != np.float32 or array.shape[-1] != 3:
        raise SpecError(
            f"{what} needs float32 with 3 channels, got {array.dtype} with {array.shape[-1]}. Convert it with "
            "convert_image_dtype(image, np.float32)."
        )
    return array


def _planes(image: Image) -> list[Image]:
    """The channels, each by itself: numpy is ten times slower where an inner loop has 3 numbers."""
    return [np.ascontiguousarray(image[..., channel]) for channel in range(3)]


def _extremes(planes: list[Image]) -> tuple[Image, Image]:
    """The largest channel of each pixel, and by how much it is larger than the smallest."""
    red, green, blue = planes
    value = np.maximum(np.maximum(red, green), blue)
    return value, value - np.minimum(np.minimum(red, green), blue)


def _hue(planes: list[Image], value: Image, spread: Image) -> Image:
    """From 0 to 1: which channel is largest, and how much the next ones differ."""
    red, green, blue = planes
    scale = np.divide(np.float32(1 / 6), spread, out=np.zeros_like(spread), where=spread > 0)
    by_blue = scale * (red - green) + np.float32(4 / 6)
    by_green = scale * (blue - red) + np.float32(2 / 6)
    hue: Image = np.where(red == value, scale * (green - blue), np.where(green == value, by_green, by_blue))
    hue[spread <= 0] = 0
    hue[hue < 0] += 1
    return hue


def _colours(hue: Image, lowest: Image, spread: Image) -> Image:
    """Lowest + spread * (0 to 1 for each channel, by the hue)."""
    turned = hue * np.float32(6)
    red = np.clip(np.abs(turned - 3) - 1, 0, 1)
    green = np.clip(2 - np.abs(turned - 2), 0, 1)
    blue = np.clip(2 - np.abs(turned - 4), 0, 1)
    return np.stack([lowest + spread * part for part in (red, green, blue)], axis=-1)


def rgb_to_grayscale(image: Image) -> Image:
    """Convert colours to grey: 0.2989 red + 0.587 green + 0.114 blue, as one channel; of the same dtype.

    Args:
        image: An image or a batch of 3 channels, uint8 or float32.

    Raises:
        SpecError: The image has another shape or dtype.

    Source: tf.image.rgb_to_grayscale.

    >>> rd.image.rgb_to_grayscale(np.array([[[255, 0, 0], [10, 10, 10]]], np.uint8)).tolist()
    [[[76], [10]]]
    """
    image = require_rgb(image, "rgb_to_grayscale")
    red, green, blue = (to_fractions(image[..., channel]) * _WEIGHTS[channel] for channel in range(3))
    return from_fractions((red + green + blue)[..., np.newaxis], image.dtype)


def grayscale_to_rgb(image: Image) -> Image:
    """The only channel three times.

    Args:
        image: An image or a batch of 1 channel, of any dtype.

    Raises:
        SpecError: The image has another shape.

    Source: tf.image.grayscale_to_rgb.

    >>> rd.image.grayscale_to_rgb(np.array([[[7]]], np.uint8)).tolist()
    [[[7, 7, 7]]]
    """
    image = require_image(image, "grayscale_to_rgb")
    if image.shape[-1] != 1:
        raise SpecError(f"grayscale_to_rgb needs 1 channel, got {image.shape[-1]}. It has colours already.")
    return image.repeat(3, axis=-1)
