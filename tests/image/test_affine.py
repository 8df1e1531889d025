from __future__ import annotations

import numpy as np

from raydist.image.affine import affine, saturate_cast


def test_each_channel_has_its_own_numbers() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    result = affine(image, [2, 10], [0.5, 0])
    assert result.dtype == np.float32
    assert np.array_equal(result, image * np.array([2, 10]) + np.array([0.5, 0]))
    assert np.array_equal(affine(image[:, ::-1], 1, 1), image[:, ::-1] + 1.0)  # a view, from right to left


def test_uint8_is_rounded_and_cut_off() -> None:
    values = np.array([[[-3, 0.5, 1.5, 254.6, 300]]], np.float32)
    assert saturate_cast(values.copy(), np.dtype(np.uint8)).tolist() == [[[0, 0, 2, 255, 255]]]
    assert saturate_cast(values, np.dtype(np.float32)) is values
