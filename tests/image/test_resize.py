from __future__ import annotations

import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from tests.image.samples import picture

SIDES = st.integers(1, 12)


@given(SIDES, SIDES, SIDES, SIDES, st.integers(1, 5))
def test_nearest_takes_the_pixel_at_the_centre(height: int, width: int, rows: int, columns: int, channels: int) -> None:
    image = picture(height, width, channels)
    down = [math.floor((row + 0.5) * height / rows) for row in range(rows)]
    across = [math.floor((column + 0.5) * width / columns) for column in range(columns)]
    assert np.array_equal(rd.image.resize(image, (rows, columns), "nearest"), image[down][:, across])


def triangles(old: int, new: int) -> np.ndarray:
    """Weight of every old pixel in every new one: a triangle around its centre, at least as wide as it."""
    scale = old / new
    distances = np.abs(np.add.outer((np.arange(new) + 0.5) * scale, -(np.arange(old) + 0.5)))
    weights = np.clip(1 - distances / max(scale, 1), 0, None)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@given(SIDES, SIDES, SIDES, SIDES, st.integers(1, 5))
def test_bilinear_weighs_by_distance(height: int, width: int, rows: int, columns: int, channels: int) -> None:
    image = picture(height, width, channels)
    expected = np.einsum("yh,xw,hwc->yxc", triangles(height, rows), triangles(width, columns), image)
    assert np.allclose(rd.image.resize(image.astype(np.float32), (rows, columns)), expected, atol=1e-3)
    assert np.abs(rd.image.resize(image, (rows, columns)) - expected).max() <= 1.5


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_area_averages_what_a_pixel_covers(rows: int, columns: int, down: int, across: int) -> None:
    image = picture(rows * down, columns * across).astype(np.float32)
    blocks = image.reshape(rows, down, columns, across, 3)
    assert np.allclose(rd.image.resize(image, (rows, columns), "area"), blocks.mean(axis=(1, 3)), atol=1e-3)


@pytest.mark.parametrize("method", ["bilinear", "area", "bicubic", "lanczos"])
def test_rgb_is_that_of_pillow(method: Any) -> None:
    names = {"bilinear": "BILINEAR", "area": "BOX", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}
    expected = PIL.Image.fromarray(picture()).resize((20, 60), getattr(PIL.Image.Resampling, names[method]))
    assert np.array_equal(rd.image.resize(picture(), (60, 20), method), np.asarray(expected))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_channels_do_not_mix_and_batches_are_their_images(channels: int, dtype: Any) -> None:
    image = picture(channels=channels).astype(dtype)
    resized = rd.image.resize(image, (9, 11))
    assert resized.shape == (9, 11, channels)
    assert resized.dtype == dtype
    for channel in range(channels):
        alone = rd.image.resize(image[..., channel : channel + 1], (9, 11))
        assert np.array_equal(resized[..., channel : channel + 1], alone)
    batch = rd.image.resize(np.stack([image, image[::-1]]), (9, 11))
    assert np.array_equal(batch[0], resized)
    assert np.array_equal(batch[1], rd.image.resize(image[::-1], (9, 11)))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_the_same_size_changes_nothing_and_is_a_copy(dtype: Any) -> None:
    image = picture().astype(dtype)
    resized = rd.image.resize(image, image.shape[:2])
    assert np.array_equal(resized, image)
    assert not np.shares_memory(resized, image)


def test_arguments_are_checked() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="one of nearest, bilinear, area, bicubic, lanczos, got 'cubic'"):
        rd.image.resize(picture(), (2, 2), "cubic")  # type: ignore[arg-type]  # the point of this test
    with pytest.raises(rd.InvalidArgumentError, match=r"image with pixels, got shape \(0, 4, 3\)"):
        rd.image.resize(np.zeros((0, 4, 3), np.uint8), (2, 2))
    with pytest.raises(rd.InvalidArgumentError, match=r"size of resize must be at least \(1, 1\), got \(2, 0\)"):
        rd.image.resize(picture(), (2, 0))
