"""Pictures for the tests of rd.image, and plain ways to encode them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import PIL.Image

Picture = np.ndarray[Any, np.dtype[Any]]
PIXELS = np.array(
    [
        [[0, 0, 0], [255, 255, 255], [200, 30, 90], [13, 250, 77]],
        [[5, 5, 250], [128, 127, 129], [250, 140, 20], [1, 2, 3]],
    ],
    np.uint8,
)


def picture(height: int = 37, width: int = 53, channels: int = 3) -> Picture:
    """Smooth colours with some noise, uint8."""
    rng = np.random.default_rng(height * width)
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., np.newaxis] * np.arange(1, channels + 1)
    return ((ramp + rng.integers(0, 30, ramp.shape)) % 256).astype(np.uint8)


def encode(pixels: Picture, kind: str = "JPEG", mode: str | None = None, **options: Any) -> bytes:
    """A file of `pixels` by Pillow, in its mode `mode`."""
    modes = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
    height, width, channels = pixels.shape
    image = PIL.Image.frombytes(modes[channels], (width, height), pixels.tobytes())
    file = BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def by_pillow(data: bytes, mode: str) -> Picture:
    """The pixels that Pillow finds in a file, as `mode`."""
    image = PIL.Image.open(BytesIO(data))
    return np.asarray(image.convert(mode)).reshape(image.height, image.width, len(mode))
