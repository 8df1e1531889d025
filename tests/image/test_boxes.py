from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.image.tensorflow_values import PIXELS, check_call, values_of


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
