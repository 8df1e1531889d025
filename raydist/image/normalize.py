"""From pixels to what a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.image.affine import affine
from raydist.image.arrays import Image, require_colours, require_image

__all__ = ["channels_first", "normalize", "per_image_standardization"]


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
