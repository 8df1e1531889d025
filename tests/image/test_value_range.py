"""Ranges of values, normalising."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.image import value_range as affine_module
from raydist.image.value_range import affine
from tests.image.samples import picture
from tests.image.tensorflow_values import PIXELS, check_call, values_of


@pytest.mark.parametrize("row", values_of("convert_image_dtype"), ids=lambda row: str(row["call"]))
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


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


@pytest.mark.parametrize("row", values_of("per_image_standardization"), ids=lambda row: str(row["call"]))
def test_standardization_is_tensorflows(row: dict[str, Any]) -> None:
    check_call(row)


def test_standardization_of_each_image_of_a_batch() -> None:
    batch = np.stack([picture(4, 5), picture(4, 5)[::-1] // 2])
    expected = np.stack([rd.image.per_image_standardization(image) for image in batch])
    assert np.array_equal(rd.image.per_image_standardization(batch), expected)
    assert np.array_equal(rd.image.per_image_standardization(np.full((2, 2, 1), 7)), np.zeros((2, 2, 1)))
    assert rd.image.per_image_standardization(batch[:0]).shape == (0, 4, 5, 3)


def test_each_channel_has_its_own_numbers() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    result = affine(image, [2, 10], [0.5, 0])
    assert result.dtype == np.float32
    assert np.array_equal(result, image * np.array([2, 10]) + np.array([0.5, 0]))
    assert np.array_equal(affine(image[:, ::-1], 1, 1), image[:, ::-1] + 1.0)  # a view, from right to left


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 3, 4]), st.integers(1, 500), st.booleans())
def test_every_size_gives_what_numpy_gives(height: int, width: int, channels: int, line: int, whole: bool) -> None:
    image = np.arange(height * width * channels, dtype=np.uint8).reshape(height, width, channels)
    if not whole:
        image = image.astype(np.float32)
    kept = image.copy()
    scale, offset = np.linspace(0.1, 3, channels, dtype=np.float32), np.linspace(-1, 1, channels, dtype=np.float32)
    with mock.patch.object(affine_module, "_LINE", line):
        affine_module._rows_together.cache_clear()
        result = affine(image, scale, offset)
    affine_module._rows_together.cache_clear()
    assert np.array_equal(result, image.astype(np.float32) * scale + offset), "the same bits"
    assert np.array_equal(image, kept)
    assert result.dtype == np.float32
    assert result.flags.writeable
    assert result.base is None, "a map takes it over as it is"
