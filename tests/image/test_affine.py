from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raydist.image import affine as affine_module
from raydist.image.affine import affine


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
