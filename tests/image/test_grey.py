from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.image.tensorflow_values import PIXELS, check_call, values_of


@pytest.mark.parametrize("row", values_of("rgb_to_grayscale"), ids=lambda row: str(row["call"]))
def test_as_in_tensorflow(row: dict[str, Any]) -> None:
    check_call(row)


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
