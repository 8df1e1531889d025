from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.image.samples import picture
from tests.image.tensorflow_values import PIXELS, check_call, values_of


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
