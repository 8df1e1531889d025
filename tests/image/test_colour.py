from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from tests.image.samples import picture
from tests.image.tensorflow_values import check_call, values_of


@pytest.mark.parametrize(
    "row", values_of("adjust_brightness", "adjust_contrast", "adjust_gamma"), ids=lambda row: str(row["call"])
)
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


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
