"""Turned images."""

from __future__ import annotations

import operator

import numpy as np

from raydist.image.arrays import Image, require_image

__all__ = ["rot90", "transpose"]


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
