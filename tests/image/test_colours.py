"""Colours, brightness, dtypes and normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.image.value_range import affine
from tests.image.samples import PIXELS, picture


def test_gamma_is_not_negative() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="gamma must be >= 0, got -1"):
        rd.image.adjust_gamma(picture(), -1)
    assert np.array_equal(rd.image.adjust_gamma(picture()), picture())


def nearest(value: float) -> int:
    return min(255, max(0, round(value)))


@given(st.floats(-1, 1))
def test_brightness_is_added(delta: float) -> None:
    image = picture(4, 5)
    expected = [nearest(value + delta * 255) for value in image.ravel().tolist()]
    assert np.abs(rd.image.adjust_brightness(image, delta).ravel().astype(int) - expected).max() <= 1  # ties in float32
    floats = image.astype(np.float32) / 255
    assert np.allclose(rd.image.adjust_brightness(floats, delta), floats + delta, atol=1e-6)


@given(st.floats(0, 3))
def test_contrast_is_the_distance_to_the_mean(factor: float) -> None:
    image = picture(4, 5)
    means = image.mean(axis=(0, 1))
    expected = np.clip(np.rint((image - means) * factor + means), 0, 255)
    result = rd.image.adjust_contrast(image, factor)
    assert result.dtype == np.uint8
    assert np.abs(result - expected).max() <= 1


def test_nothing_changes_with_neutral_arguments() -> None:
    assert np.array_equal(rd.image.adjust_brightness(picture(), 0), picture())
    assert np.array_equal(rd.image.adjust_contrast(picture(), 1), picture())


def test_random_ones_draw_from_their_range_and_depend_on_rng_alone() -> None:
    image = np.full((2, 2, 1), 100, np.uint8)
    rngs = [np.random.default_rng(seed) for seed in range(200)]
    values = [int(rd.image.random_brightness(image, 0.1, rng=rng)[0, 0, 0]) for rng in rngs]
    assert 74 <= min(values) < 80
    assert 120 < max(values) <= 126
    again = [
        int(rd.image.random_brightness(image, 0.1, rng=np.random.default_rng(seed))[0, 0, 0]) for seed in range(200)
    ]
    assert again == values
    spread = [
        np.ptp(rd.image.random_contrast(picture(), 0.5, 0.9, rng=np.random.default_rng(seed))) for seed in range(9)
    ]
    assert max(spread) < np.ptp(picture())


@pytest.mark.parametrize("bounds", [(-0.1, 1), (2, 1)])
def test_bounds_are_checked(bounds: tuple[float, float]) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(rd.InvalidArgumentError, match="0 <= lower <= upper, got"):
        rd.image.random_contrast(picture(), *bounds, rng=rng)
    with pytest.raises(rd.InvalidArgumentError, match="max_delta must be >= 0, got -1"):
        rd.image.random_brightness(picture(), -1, rng=rng)


def test_batches_are_refused() -> None:
    with pytest.raises(rd.SpecError, match=r"takes one image, got a batch of shape \(1, 37, 53, 3\). Map it before"):
        rd.image.adjust_brightness(picture()[np.newaxis], 0.1)


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


def test_random_hues_draw_from_their_range() -> None:
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


def test_bounds_of_hues_are_checked() -> None:
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


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "int64", "float32", "float64"])
def test_there_and_back_changes_nothing(dtype: str) -> None:
    there = rd.image.convert_image_dtype(PIXELS, dtype)
    assert there.dtype == dtype
    assert np.array_equal(rd.image.convert_image_dtype(there, np.uint8), PIXELS)


def test_one_dtype_is_no_change() -> None:
    assert rd.image.convert_image_dtype(PIXELS, np.uint8) is PIXELS


@pytest.mark.parametrize("target", ["uint8", "int8", "uint16", "int16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_saturation_stops_at_the_ends_of_the_range(source: str, target: str) -> None:
    bounds = np.iinfo(target)
    low, high = rd.image.convert_image_dtype(np.array([-3, 3], source), target, saturate=True).tolist()
    exact = source == "float64" or (source, bounds.bits) == ("float32", 8) or bounds.bits < 16
    most = float(np.finfo(source).max)
    assert low == max(bounds.min, int(np.array(max(float(bounds.min), -most), source)))
    assert high == bounds.max if exact and bounds.bits < 64 else high > 0.99 * min(bounds.max, most)


@pytest.mark.parametrize("image", [[1, 2], np.array(["a"]), np.array([True]), 3])
def test_what_has_no_range_is_an_error(image: Any) -> None:
    with pytest.raises(rd.SpecError, match="convert_image_dtype needs arrays of integers or floats, got"):
        rd.image.convert_image_dtype(image, np.float32)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@given(st.integers(1, 6), st.integers(1, 6), st.tuples(*[st.floats(-1, 2)] * 3), st.tuples(*[st.floats(0.1, 3)] * 3))
def test_values_are_those_of_plain_python(
    height: int, width: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    image = picture(height, width)
    result = rd.image.normalize(image, mean, std)
    assert result.dtype == np.float32
    expected = [
        [[(value / 255 - m) / s for value, m, s in zip(pixel, mean, std, strict=True)] for pixel in row]
        for row in image.tolist()
    ]
    assert np.allclose(result, expected, rtol=1e-6, atol=1e-5)
    assert np.allclose(
        result * np.array(std, np.float32) + np.array(mean, np.float32), image / 255, atol=1e-5
    )  # and back


def test_floats_are_taken_as_they_are() -> None:
    image = np.array([[[0.0, 255.0]]], np.float32)
    assert rd.image.normalize(image, 5, 2).tolist() == [[[-2.5, 125.0]]]


def test_a_batch_is_its_images_and_a_view_its_copy() -> None:
    batch = np.stack([picture(), picture()[::-1]])
    result = rd.image.normalize(batch, MEAN, STD)
    assert np.array_equal(result[1], rd.image.normalize(batch[1].copy(), MEAN, STD))
    assert np.array_equal(rd.image.normalize(batch[0][2:9, 3:7], MEAN, STD), result[0][2:9, 3:7])
    assert rd.image.normalize(batch[:0], MEAN, STD).shape == (0, 37, 53, 3)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((1, 2), 1, r"mean must be a number or 3 of them, .* got \(1, 2\)"),
        (0, (1, 2, 3, 4), "std must be a number or 3 of them"),
        (0, (1, 0, 1), r"std must not be 0, got \(1, 0, 1\)"),
    ],
)
def test_means_and_deviations_are_checked(mean: object, std: object, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.image.normalize(picture(), mean, std)


def test_channels_go_first() -> None:
    image = picture()
    assert np.array_equal(rd.image.channels_first(image), image.transpose(2, 0, 1))
    assert rd.image.channels_first(np.stack([image] * 2)).shape == (2, 3, 37, 53)
    assert rd.image.channels_first(image).flags.c_contiguous


def test_standardization_of_each_image_of_a_batch() -> None:
    batch = np.stack([picture(4, 5), picture(4, 5)[::-1] // 2])
    expected = np.stack([rd.image.per_image_standardization(image) for image in batch])
    assert np.array_equal(rd.image.per_image_standardization(batch), expected)
    assert np.array_equal(rd.image.per_image_standardization(np.full((2, 2, 1), 7)), np.zeros((2, 2, 1)))
    assert rd.image.per_image_standardization(batch[:0]).shape == (0, 4, 5, 3)


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 3, 4]), st.booleans())
def test_every_size_gives_what_numpy_gives(height: int, width: int, channels: int, whole: bool) -> None:
    image = np.arange(height * width * channels, dtype=np.uint8).reshape(height, width, channels)
    if not whole:
        image = image.astype(np.float32)
    kept = image.copy()
    scale, offset = np.linspace(0.1, 3, channels, dtype=np.float32), np.linspace(-1, 1, channels, dtype=np.float32)
    result = affine(image, scale, offset)
    assert np.array_equal(result, image.astype(np.float32) * scale + offset), "the same bits"
    assert np.array_equal(image, kept)
    assert result.dtype == np.float32
    assert result.flags.writeable
    assert result.base is None, "a map takes it over as it is"
