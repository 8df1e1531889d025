"""Hue, saturation, grey."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.image.samples import picture
from tests.image.tensorflow_values import PIXELS, check_call, values_of


@pytest.mark.parametrize(
    "row",
    values_of("rgb_to_hsv", "hsv_to_rgb", "adjust_hue", "adjust_saturation", "rgb_to_grayscale"),
    ids=lambda row: str(row["call"]),
)
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


@pytest.mark.parametrize(
    "change",
    [
        lambda image: rd.image.adjust_hue(image, 0.3),
        lambda image: rd.image.adjust_saturation(image, 1.7),
        rd.image.rgb_to_grayscale,
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_batch_is_its_images(change: Any, dtype: Any) -> None:
    batch = np.stack([PIXELS, PIXELS[::-1]]).astype(dtype) / dtype(1 if dtype is np.uint8 else 255)
    batch = batch.astype(dtype)
    kept = batch.copy()
    assert np.array_equal(change(batch), np.stack([change(image) for image in batch]))
    assert np.array_equal(batch, kept)
    assert change(batch).dtype == dtype


def test_neutral_arguments_change_nothing() -> None:
    assert np.array_equal(rd.image.adjust_hue(picture(), 0), picture())
    assert np.array_equal(rd.image.adjust_hue(picture(), 1), picture())
    assert np.array_equal(rd.image.adjust_saturation(picture(), 1), picture())
    floats = (picture() / 255).astype(np.float32)
    assert np.allclose(rd.image.hsv_to_rgb(rd.image.rgb_to_hsv(floats)), floats, atol=1e-6)


def test_random_ones_draw_from_their_range_and_depend_on_rng_alone() -> None:
    red = np.array([[[1, 0, 0]]], np.float32)
    hues = [
        float(rd.image.rgb_to_hsv(rd.image.random_hue(red, 0.2, rng=np.random.default_rng(seed)))[0, 0, 0])
        for seed in range(200)
    ]
    turned = [hue - 1 if hue > 0.5 else hue for hue in hues]
    assert -0.2 <= min(turned) < -0.18
    assert 0.18 < max(turned) <= 0.2
    pale = np.array([[[1, 0.5, 0.5]]], np.float32)
    drawn = [
        float(rd.image.rgb_to_hsv(rd.image.random_saturation(pale, 0.5, 1.5, rng=np.random.default_rng(seed)))[0, 0, 1])
        for seed in range(200)
    ]
    assert 0.25 <= min(drawn) < 0.27
    assert 0.73 < max(drawn) <= 0.75


def test_bounds_are_checked() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(rd.InvalidArgumentError, match=r"delta of adjust_hue must be in \[-1, 1\], got 2"):
        rd.image.adjust_hue(PIXELS, 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"max_delta must be in \[0, 0.5\], got 0.6"):
        rd.image.random_hue(PIXELS, 0.6, rng=rng)
    with pytest.raises(rd.InvalidArgumentError, match="0 <= lower <= upper, got 2 and 1"):
        rd.image.random_saturation(PIXELS, 2, 1, rng=rng)
    with pytest.raises(rd.SpecError, match="needs 3 channels .* got 1"):
        rd.image.adjust_hue(PIXELS[..., :1], 0.1)
    with pytest.raises(rd.SpecError, match="rgb_to_hsv needs float32 with 3 channels, got uint8 with 3"):
        rd.image.rgb_to_hsv(PIXELS)


def test_grey_three_times_is_the_same_grey() -> None:
    grey = rd.image.rgb_to_grayscale(PIXELS)
    colours = rd.image.grayscale_to_rgb(grey)
    assert colours.shape == PIXELS.shape
    assert np.array_equal(rd.image.rgb_to_grayscale(colours), grey)
    assert rd.image.grayscale_to_rgb(grey[np.newaxis]).shape == (1, *PIXELS.shape)


def test_the_number_of_channels_is_checked() -> None:
    with pytest.raises(rd.SpecError, match="grayscale_to_rgb needs 1 channel, got 3"):
        rd.image.grayscale_to_rgb(PIXELS)
    with pytest.raises(rd.SpecError, match="rgb_to_grayscale needs 3 channels .* got 1"):
        rd.image.rgb_to_grayscale(PIXELS[..., :1])
