"""Crops and boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.image.crop import require_window
from tests.image.tensorflow_values import PIXELS, check_call, values_of

SIDES = st.integers(1, 9)


def numbered(height: int, width: int) -> np.ndarray:
    return np.arange(height * width * 2).reshape(height, width, 2)


@given(SIDES, SIDES, st.data())
def test_a_random_crop_is_one_of_all_crops_and_the_same_for_the_same_rng(
    height: int, width: int, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    seed = data.draw(st.integers(0, 99))
    image = numbered(height, width)
    crop = rd.image.random_crop(image, (rows, columns), rng=np.random.default_rng(seed))
    top, left = divmod(int(crop[0, 0, 0]) // 2, width)
    assert np.array_equal(crop, image[top : top + rows, left : left + columns])
    assert np.array_equal(crop, rd.image.random_crop(image, (rows, columns), rng=np.random.default_rng(seed)))
    assert crop.base is None


def test_every_place_is_drawn() -> None:
    rng = np.random.default_rng(0)
    corners = [int(rd.image.random_crop(numbered(3, 4), (2, 2), rng=rng)[0, 0, 0]) // 2 for _ in range(300)]
    counts = np.bincount(corners)
    assert set(corners) == {0, 1, 2, 4, 5, 6}
    assert counts[counts > 0].min() > 25


def test_a_batch_is_cut_alike() -> None:
    batch = np.stack([numbered(5, 6)] * 2)
    crops = rd.image.random_crop(batch, (2, 3), rng=np.random.default_rng(3))
    assert crops.shape == (2, 2, 3, 2)
    assert np.array_equal(crops[0], crops[1])
    assert rd.image.central_crop(batch, 0.5).shape == (2, 3, 4, 2)


@given(SIDES, SIDES, st.floats(0.01, 1))
def test_a_central_crop_is_that_of_tf(height: int, width: int, fraction: float) -> None:
    top, left = int((height - height * fraction) / 2), int((width - width * fraction) / 2)
    expected = numbered(height, width)[top : height - top, left : width - left]
    assert np.array_equal(rd.image.central_crop(numbered(height, width), fraction), expected)


@pytest.mark.parametrize("fraction", [0, -1, 1.1])
def test_a_fraction_is_checked(fraction: float) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"central_fraction must be in \(0, 1\], got"):
        rd.image.central_crop(numbered(2, 2), fraction)


@pytest.mark.parametrize("size", [(5, 1), (1, 7)])
def test_a_crop_larger_than_the_image_has_both_sizes(size: tuple[int, int]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=f"image of 4 x 6 pixels, got {size[0]} x {size[1]} pixels"):
        rd.image.random_crop(numbered(4, 6), size, rng=np.random.default_rng(0))


def test_a_window_touching_all_borders_fits() -> None:
    require_window((0, 0, 4, 6), 4, 6)
    with pytest.raises(rd.InvalidArgumentError, match="at row 1, column 0. Crop less"):
        require_window((1, 0, 4, 6), 4, 6)
    assert rd.image.crop_to_bounding_box(numbered(4, 6), 3, 5, 1, 1).tolist() == [[[46, 47]]]


@pytest.mark.parametrize("row", values_of("central_crop"), ids=lambda row: str(row["call"]))
def test_the_middle_is_tensorflows(row: dict[str, Any]) -> None:
    check_call(row)


def test_a_random_crop_takes_a_whole_shape_too() -> None:
    image = np.arange(4 * 5 * 3).reshape(4, 5, 3)
    by_shape = rd.image.random_crop(image, (2, 3, 3), rng=np.random.default_rng(1))
    assert np.array_equal(by_shape, rd.image.random_crop(image, (2, 3), rng=np.random.default_rng(1)))
    batch = rd.image.random_crop(image[np.newaxis], [1, 2, 3, 3], rng=np.random.default_rng(1))
    assert np.array_equal(batch[0], by_shape)
    for shape in ((2, 3, 1), (2, 2, 3, 3)):
        with pytest.raises(rd.InvalidArgumentError, match="size of random_crop must"):
            rd.image.random_crop(image if len(shape) == 3 else image[np.newaxis], shape, rng=np.random.default_rng(1))


@pytest.mark.parametrize("row", values_of("crop_and_resize"), ids=lambda row: str(row["call"]))
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


def test_arguments_are_checked() -> None:
    batch = PIXELS[np.newaxis]
    with pytest.raises(rd.SpecError, match=r"needs a batch of images, got shape \(2, 4, 3\)"):
        rd.image.crop_and_resize(PIXELS, [[0, 0, 1, 1]], [0], 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"boxes must have shape \(boxes, 4\)"):
        rd.image.crop_and_resize(batch, [0, 0, 1, 1], [0], 2)
    with pytest.raises(rd.InvalidArgumentError, match=r"box_indices must be numbers of the 1 images, got \[1\]"):
        rd.image.crop_and_resize(batch, [[0, 0, 1, 1]], [1], 2)
    with pytest.raises(rd.InvalidArgumentError, match="method of crop_and_resize"):
        rd.image.crop_and_resize(batch, [[0, 0, 1, 1]], [0], 2, "cubic")  # type: ignore[arg-type]  # the point


def test_no_boxes_and_boxes_of_no_place() -> None:
    assert rd.image.crop_and_resize(PIXELS[np.newaxis], np.zeros((0, 4)), [], (2, 3)).shape == (0, 2, 3, 3)
    nowhere = rd.image.crop_and_resize(PIXELS[np.newaxis], [[np.nan, 0, 1, 1]], [0], 2, extrapolation_value=7)
    assert (nowhere == 7).all()
