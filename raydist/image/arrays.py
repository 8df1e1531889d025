"""Checks of image arrays and of image sizes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError

Image = np.ndarray[Any, np.dtype[Any]]


def require_image(image: Any, what: str) -> Image:
    """Return `image` if it is an array (height, width, channels), or a batch of images; `what` names the caller.

    Raises:
        SpecError: `image` is neither an image nor a batch of images.
    """
    if isinstance(image, np.ndarray) and image.ndim in (3, 4) and image.dtype != object:
        return image
    got = f"shape {image.shape}, dtype {image.dtype}" if isinstance(image, np.ndarray) else f"{image!r:.80}"
    hint = "Decode it first." if isinstance(image, bytes) else "Add the missing axis, e.g. image[..., np.newaxis]."
    raise SpecError(f"{what} needs an array (height, width, channels), or a batch of images, got {got}. {hint}")


def require_colours(image: Any, what: str) -> Image:
    """Return `image` if :func:`require_image` accepts it and its dtype is uint8 or float32; else raise SpecError."""
    array = require_image(image, what)
    if array.dtype not in (np.uint8, np.float32):
        raise SpecError(f"{what} needs uint8 or float32, got {array.dtype}. Convert it, e.g. image.astype(np.float32).")
    return array


def require_size(size: Any, what: str) -> tuple[int, int]:
    """Return a size as (height, width), both >= 1. One number stands for both.

    >>> require_size((2, 3), "resize"), require_size(4, "resize")
    ((2, 3), (4, 4))
    """
    try:
        height, width = map(operator.index, (size, size) if np.ndim(size) == 0 else size)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"size of {what} must be (height, width) or one int for both, got {size!r}."
        ) from None
    if height < 1 or width < 1:
        raise InvalidArgumentError(f"size of {what} must be at least (1, 1), got {(height, width)}.")
    return height, width
