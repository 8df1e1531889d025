"""Resizing and padding."""

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
from tests.image.tensorflow_values import PIXELS, check_call, values_of

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


@pytest.mark.parametrize(
    "row",
    values_of("pad_to_bounding_box", "resize_with_crop_or_pad", "resize_with_pad"),
    ids=lambda row: str(row["call"]),
)
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


@pytest.mark.parametrize("size", [(1, 2), (2, 3), (3, 5), (7, 4)])
def test_a_batch_is_its_images(size: tuple[int, int]) -> None:
    batch = np.stack([PIXELS, PIXELS[::-1]])
    for change in (rd.image.resize_with_crop_or_pad, rd.image.resize_with_pad):
        assert np.array_equal(change(batch, *size), np.stack([change(image, *size) for image in batch]))


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="2 x 4 pixels must fit into 3 x 4 at row 2, column 0"):
        rd.image.pad_to_bounding_box(PIXELS, 2, 0, 3, 4)
    with pytest.raises(rd.InvalidArgumentError, match="at row -1"):
        rd.image.pad_to_bounding_box(PIXELS, -1, 0, 3, 4)
    with pytest.raises(rd.InvalidArgumentError, match=r"at least \(1, 1\), got \(0, 4\)"):
        rd.image.resize_with_crop_or_pad(PIXELS, 0, 4)
    with pytest.raises(rd.InvalidArgumentError, match="needs an image with pixels"):
        rd.image.resize_with_pad(PIXELS[:0], 2, 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"at least \(1, 1\), got \(0, 1\)"):
        rd.image.resize_with_pad(PIXELS, 1, 1)  # of 2 x 4 pixels half a row would be left


def test_an_image_keeps_its_proportions() -> None:
    padded = rd.image.resize_with_pad(np.full((20, 10, 1), 9, np.uint8), 10, 11)
    assert (padded.any(axis=(0, 2)).sum(), padded.any(axis=(1, 2)).sum()) == (5, 10)
    assert picture(7, 5).dtype == rd.image.resize_with_pad(picture(7, 5), 14, 14).dtype
