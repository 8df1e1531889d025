"""Colours, brightness, dtypes and normalisation; and what TensorFlow makes of all functions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from tests.image.samples import PIXELS, picture


def test_neutral_arguments_change_nothing() -> None:
    neutral: list[Callable[[Any], Any]] = [
        rd.image.adjust_gamma,
        lambda image: rd.image.adjust_brightness(image, 0),
        lambda image: rd.image.adjust_contrast(image, 1),
        lambda image: rd.image.adjust_hue(image, 0),
        lambda image: rd.image.adjust_hue(image, 1),
        lambda image: rd.image.adjust_saturation(image, 1),
    ]
    for number, change in enumerate(neutral):
        assert np.array_equal(change(picture()), picture()), number
    floats = (picture() / 255).astype(np.float32)
    assert np.allclose(rd.image.hsv_to_rgb(rd.image.rgb_to_hsv(floats)), floats, atol=1e-6)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def drawn(change: Callable[..., Any], image: Any, *bounds: float) -> list[float]:
    """One channel's value of 200 random changes."""
    rngs = (np.random.default_rng(seed) for seed in range(200))
    return [float(change(image, *bounds, rng=rng)[0, 0, 0]) for rng in rngs]


def test_random_ones_draw_from_their_range_and_depend_on_rng_alone() -> None:
    grey = np.full((2, 2, 1), 100, np.uint8)
    values = drawn(rd.image.random_brightness, grey, 0.1)
    assert 74 <= min(values) < 80
    assert 120 < max(values) <= 126
    assert drawn(rd.image.random_brightness, grey, 0.1) == values
    rngs = (np.random.default_rng(seed) for seed in range(9))
    spread = [np.ptp(rd.image.random_contrast(picture(), 0.5, 0.9, rng=rng)) for rng in rngs]
    assert max(spread) < np.ptp(picture())

    def hue(*arguments: Any, rng: Any) -> Any:
        return rd.image.rgb_to_hsv(rd.image.random_hue(*arguments, rng=rng))

    def saturation(*arguments: Any, rng: Any) -> Any:
        return rd.image.rgb_to_hsv(rd.image.random_saturation(*arguments, rng=rng))[..., 1:]

    turned = [hue - 1 if hue > 0.5 else hue for hue in drawn(hue, np.array([[[1, 0, 0]]], np.float32), 0.2)]
    assert -0.2 <= min(turned) < -0.18
    assert 0.18 < max(turned) <= 0.2
    saturations = drawn(saturation, np.array([[[1, 0.5, 0.5]]], np.float32), 0.5, 1.5)
    assert 0.25 <= min(saturations) < 0.27
    assert 0.73 < max(saturations) <= 0.75


def test_arguments_are_checked() -> None:
    image, rng = rd.image, np.random.default_rng(0)
    invalid: list[tuple[Callable[[], Any], str]] = [
        (lambda: image.adjust_gamma(PIXELS, -1), "gamma must be >= 0, got -1"),
        (lambda: image.random_contrast(PIXELS, -0.1, 1, rng=rng), "0 <= lower <= upper, got"),
        (lambda: image.random_contrast(PIXELS, 2, 1, rng=rng), "0 <= lower <= upper, got"),
        (lambda: image.random_brightness(PIXELS, -1, rng=rng), "max_delta must be >= 0, got -1"),
        (lambda: image.adjust_hue(PIXELS, 2), r"delta of adjust_hue must be in \[-1, 1\], got 2"),
        (lambda: image.random_hue(PIXELS, 0.6, rng=rng), r"max_delta must be in \[0, 0.5\], got 0.6"),
        (lambda: image.random_saturation(PIXELS, 2, 1, rng=rng), "0 <= lower <= upper, got 2 and 1"),
        (lambda: image.normalize(PIXELS, (1, 2), 1), r"mean must be a number or 3 of them, .* got \(1, 2\)"),
        (lambda: image.normalize(PIXELS, 0, (1, 2, 3, 4)), "std must be a number or 3 of them"),
        (lambda: image.normalize(PIXELS, 0, (1, 0, 1)), r"std must not be 0, got \(1, 0, 1\)"),
    ]
    for call, message in invalid:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            call()
    no_range = "convert_image_dtype needs arrays of integers or floats, got"
    others: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (image.adjust_brightness, (PIXELS[np.newaxis], 0.1), r"takes one image, got a batch of shape \(1, 2, 4, 3\)"),
        (image.adjust_hue, (PIXELS[..., :1], 0.1), "needs 3 channels .* got 1"),
        (image.rgb_to_hsv, (PIXELS,), "rgb_to_hsv needs float32 with 3 channels, got uint8 with 3"),
        (image.grayscale_to_rgb, (PIXELS,), "grayscale_to_rgb needs 1 channel, got 3"),
        (image.rgb_to_grayscale, (PIXELS[..., :1],), "rgb_to_grayscale needs 3 channels .* got 1"),
        *(
            (image.convert_image_dtype, (odd, np.float32), no_range)
            for odd in ([1, 2], np.array(["a"]), np.ones(2, bool), 3)
        ),
    ]
    for function, arguments, message in others:
        with pytest.raises(rd.SpecError, match=message):
            function(*arguments)


def test_a_batch_is_its_images() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda image: rd.image.adjust_hue(image, 0.3),
        lambda image: rd.image.adjust_saturation(image, 1.7),
        rd.image.rgb_to_grayscale,
        lambda image: rd.image.normalize(image, MEAN, STD),
        rd.image.per_image_standardization,
        rd.image.channels_first,
    ]
    whole = np.stack([PIXELS, PIXELS[::-1]])
    for batch in (whole, (whole / 255).astype(np.float32)):
        kept = batch.copy()
        for number, change in enumerate(changes):
            assert np.array_equal(change(batch), np.stack([change(image) for image in batch])), number
            assert np.array_equal(batch, kept)
            assert change(batch).dtype == (np.float32 if number in (3, 4) else batch.dtype), number
    assert rd.image.normalize(whole[:0], MEAN, STD).shape == (0, 2, 4, 3)
    assert rd.image.per_image_standardization(whole[:0]).shape == (0, 2, 4, 3)
    assert np.array_equal(rd.image.per_image_standardization(np.full((2, 2, 1), 7)), np.zeros((2, 2, 1)))
    faint = np.array([[[0.0], [0.1]], [[0.0], [0.1]]], np.float32)  # its deviation counts as 1/2
    assert np.allclose(rd.image.per_image_standardization(faint), 2 * (faint - 0.05))
    assert np.array_equal(rd.image.channels_first(PIXELS), PIXELS.transpose(2, 0, 1))
    assert rd.image.channels_first(PIXELS).flags.c_contiguous
    result = rd.image.normalize(picture(), MEAN, STD)
    assert np.array_equal(rd.image.normalize(picture()[2:9, 3:7], MEAN, STD), result[2:9, 3:7])  # a view is its copy


def test_saturation_stops_at_the_ends_of_the_range() -> None:
    targets = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64")
    for source, target in itertools.product(("float16", "float32", "float64"), targets):
        bounds = np.iinfo(target)
        low, high = rd.image.convert_image_dtype(np.array([-3, 3], source), target, saturate=True).tolist()
        exact = source == "float64" or (source, bounds.bits) == ("float32", 8) or bounds.bits < 16
        most = float(np.finfo(source).max)
        assert low == max(bounds.min, int(np.array(max(float(bounds.min), -most), source))), (source, target)
        assert high == bounds.max if exact and bounds.bits < 64 else high > 0.99 * min(bounds.max, most), target


@given(st.integers(1, 30), st.integers(1, 30), st.tuples(*[st.floats(-1, 2)] * 3), st.tuples(*[st.floats(0.1, 3)] * 3))
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
    floats = np.array([[[0.0, 255.0]]], np.float32)  # are taken as they are
    assert rd.image.normalize(floats, 5, 2).tolist() == [[[-2.5, 125.0]]]


BOXES = [[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.9], [0.9, 0.8, 0.1, 0.2], [-0.2, -0.3, 1.2, 1.1], [0.33, 0.5, 0.33, 0.5]]
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("tensorflow_values.json").read_text())


def test_values_are_tensorflows() -> None:
    """To the bit in integers, to the last bits in float32."""
    for row in ROWS:
        name, _, arguments = row["call"].partition("(")
        known = {"function": getattr(rd.image, name), "image": _image(row), "BOXES": BOXES}
        got = eval(f"function(image, {arguments}", known)
        expected = np.array(row["values"])
        assert got.shape == tuple(row.get("shape", expected.shape)), row["call"]
        if got.dtype.kind == "f":
            np.testing.assert_allclose(got.ravel().astype(np.float64), expected, atol=2e-5, err_msg=row["call"])
        else:
            assert got.ravel().tolist() == row["values"], row["call"]


def _image(row: dict[str, Any]) -> Any:
    if "of" in row:
        return np.array(row["of"], row["image"])
    if row["image"] == "batch":
        return PIXELS[np.newaxis]
    return PIXELS if row["image"] == "uint8" else (PIXELS / 255).astype(np.float32)
