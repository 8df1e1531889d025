"""Between colours and grey."""

from __future__ import annotations

import numpy as np

from raydist.errors import SpecError
from raydist.image.arrays import Image, require_image
from raydist.image.hue import require_rgb
from raydist.image.value_range import from_fractions, to_fractions

__all__ = ["grayscale_to_rgb", "rgb_to_grayscale"]

_WEIGHTS = np.array([0.2989, 0.587, 0.114], np.float32)
_WEIGHTS.flags.writeable = False


def rgb_to_grayscale(image: Image) -> Image:
    """How light each pixel is: 0.2989 red + 0.587 green + 0.114 blue, as one channel; of the same dtype.

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
