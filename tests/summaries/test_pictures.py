from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

import raydist as rd
from raydist.summaries.pictures import Pictures, encode_png, pictures_of


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_holds_the_pixels(channels: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    decoded = np.asarray(Image.open(io.BytesIO(encode_png(picture))))
    assert (decoded.reshape(picture.shape) == picture).all()


@pytest.mark.parametrize(
    ("dataformats", "axes"),
    [("NCHW", (0, 1, 2, 3)), ("NHWC", (0, 2, 3, 1)), ("HWCN", (2, 3, 1, 0)), ("NCWH", (0, 1, 3, 2))],
)
def test_dimensions_may_be_in_any_order(dataformats: str, axes: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    found = pictures_of("x", data.transpose(axes), 3, dataformats).pictures
    assert [picture.tolist() for picture in found] == data.transpose(0, 2, 3, 1).tolist()


def test_a_single_picture_and_one_without_channels() -> None:
    data = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert pictures_of("x", data, 3, "HW").pictures[0][:, :, 0].tolist() == data.tolist()
    assert pictures_of("x", data[None], 3, "CHW").pictures[0].shape == (2, 3, 1)
    assert pictures_of("x", np.stack([data] * 5), 3, "NHW").pictures[2].shape == (2, 3, 1)


def test_floats_are_scaled_and_rounded() -> None:
    data = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert pictures_of("x", data, 1, "HW").pictures[0].ravel().tolist() == [0, 128, 255]


def test_the_first_pictures_of_all_replicas() -> None:
    one, two = np.zeros((1, 1, 1), np.uint8), np.ones((1, 1, 1), np.uint8)
    joined = Pictures((one,), 3).joined([Pictures((), 3), Pictures((two, two, two), 3)])
    assert isinstance(joined, Pictures)
    assert [int(picture[0, 0, 0]) for picture in joined.pictures] == [0, 1, 1]


def test_what_is_kept_is_not_what_the_step_goes_on_with() -> None:
    data = np.zeros((1, 1, 2, 2), np.uint8)
    kept = pictures_of("x", data, 1, "NCHW")
    data[:] = 7
    assert not kept.pictures[0].any()


@pytest.mark.parametrize(
    ("data", "dataformats", "message"),
    [
        (np.zeros((2, 2), np.uint8), "NCHW", r"must have the dimensions NCHW.*got shape \(2, 2\)"),
        (np.zeros((1, 5, 2, 2), np.uint8), "NCHW", "1 to 4 channels"),
        (np.zeros((1, 1, 0, 2), np.uint8), "NCHW", "must have the dimensions"),
        (np.zeros((2, 2), np.int64), "HW", "must be uint8, or float in .*got int64"),
        (np.full((2, 2), 255.0), "HW", "got float from 255 to 255. Scale it"),
        (np.full((2, 2), np.nan), "HW", "got float from nan to nan"),
        (np.full((2, 2), -0.1), "HW", "got float from -0.1"),
        (np.zeros((2, 2), np.uint8), "WXY", "dataformats must say .* got 'WXY'"),
    ],
)
def test_pictures_that_are_none(data: Any, dataformats: str, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        pictures_of("x", data, 3, dataformats)
