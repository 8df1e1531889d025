"""Augmenting a JPEG with numpy and simplejpeg (libjpeg-turbo), for libraries without a decoder of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg

from benchmarks.pipelines.data import CROP, MEAN, STD

# For whole rows of pixels: numpy is slow along an axis of three.
SCALE = np.tile(1 / (255 * STD), CROP).astype(np.float32)
SHIFT = np.tile(MEAN / STD, CROP).astype(np.float32)


def augmented(data: bytes, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Decode, random crop, random flip, normalise: 224 x 224 x 3 float32."""
    image = simplejpeg.decode_jpeg(data)
    top = draw.integers(image.shape[0] - CROP + 1)
    left = draw.integers(image.shape[1] - CROP + 1)
    image = image[top : top + CROP, left : left + CROP]
    if draw.random() < 0.5:
        image = image[:, ::-1]
    rows = image.astype(np.float32, order="C").reshape(CROP, CROP * 3)
    rows *= SCALE
    rows -= SHIFT
    normal: np.ndarray[Any, Any] = rows.reshape(CROP, CROP, 3)
    return normal
