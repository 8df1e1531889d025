from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raydist as rd
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
