"""Images, audio and texts."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import raydist as rd
from raydist.summary.media import AudioClips, Images, clips_of, encode_png, encode_wav, images_of


@pytest.mark.parametrize("data", [["a", "b"], [["a", "b"], ["c", "d"]], "a", ("a",)])
def test_texts_and_tables_of_them(data: Any, tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
        assert rd.summary.text("x", data)


@pytest.mark.parametrize("data", [3, [], ["a", 3], [["a"], ["b", "c"]], [[]], b"a"])
def test_what_is_no_text(data: Any, tmp_path: Path) -> None:
    wrong = pytest.raises(rd.InvalidArgumentError, match="text 'x' must be a str, a list of str")
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0), wrong:
        rd.summary.text("x", data)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_so_many_are_shown(count: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="max_outputs must be a number >= 1, got"):
        rd.summary.image("x", torch.zeros(1, 1, 2, 2), max_outputs=count)
    with pytest.raises(rd.InvalidArgumentError, match="max_outputs must be a number >= 1, got"):
        rd.summary.audio("x", torch.zeros(1, 2, 1), 8000, max_outputs=count)


def test_an_image_of_a_wrong_range_is_told_where_it_is_shown(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
        with pytest.raises(rd.InvalidArgumentError, match="image 'x' must be uint8, or float in"):
            rd.summary.image("x", torch.full((1, 1, 2, 2), 255.0))
        with pytest.raises(rd.InvalidArgumentError, match="image 'x' must have the dimensions NCHW"):
            rd.summary.image("x", torch.zeros(1, 28, 28))


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
    found = images_of("x", data.transpose(axes), 3, dataformats).images
    assert [picture.tolist() for picture in found] == data.transpose(0, 2, 3, 1).tolist()


def test_a_single_picture_and_one_without_channels() -> None:
    data = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert images_of("x", data, 3, "HW").images[0][:, :, 0].tolist() == data.tolist()
    assert images_of("x", data[None], 3, "CHW").images[0].shape == (2, 3, 1)
    assert images_of("x", np.stack([data] * 5), 3, "NHW").images[2].shape == (2, 3, 1)


def test_floats_are_scaled_and_rounded() -> None:
    data = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert images_of("x", data, 1, "HW").images[0].ravel().tolist() == [0, 128, 255]


def test_the_first_pictures_of_all_replicas() -> None:
    one, two = np.zeros((1, 1, 1), np.uint8), np.ones((1, 1, 1), np.uint8)
    joined = Images((one,), 3).merged([Images((), 3), Images((two, two, two), 3)])
    assert isinstance(joined, Images)
    assert [int(picture[0, 0, 0]) for picture in joined.images] == [0, 1, 1]


def test_what_is_kept_is_not_what_the_step_goes_on_with() -> None:
    data = np.zeros((1, 1, 2, 2), np.uint8)
    kept = images_of("x", data, 1, "NCHW")
    data[:] = 7
    assert not kept.images[0].any()


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
        images_of("x", data, 3, dataformats)


def test_a_wav_holds_the_samples() -> None:
    data = np.array([[[0.0, 1.0], [-1.0, 0.5]]])
    with wave.open(io.BytesIO(encode_wav(clips_of("x", data, 8000, 3).clips[0], 8000))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (8000, 2, 2, 2)
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, -32767, 16384]


def test_the_first_sounds_of_all_replicas() -> None:
    one, two = np.zeros((1, 1), np.int16), np.ones((1, 1), np.int16)
    joined = AudioClips((one,), 8000, 2).merged([AudioClips((two, two), 8000, 2)])
    assert joined == AudioClips((one, two), 8000, 2)
    assert joined.num_bytes > 0


@pytest.mark.parametrize(
    ("data", "sample_rate", "message"),
    [
        (np.zeros((4, 2)), 8000, r"must have the shape \(sounds, frames, channels\), got float64 of shape \(4, 2\)"),
        (np.zeros((1, 4, 0)), 8000, "must have the shape"),
        (np.full((1, 4, 1), 1.5), 8000, r"must be in \[-1, 1\], got 1.5 to 1.5"),
        (np.full((1, 4, 1), np.nan), 8000, "got nan to nan"),
        (np.zeros((1, 4, 1)), 0, "sample_rate must be frames a second, >= 1, got 0"),
        (np.zeros((1, 4, 1)), 8000.5, "got 8000.5"),
    ],
)
def test_sounds_that_are_none(data: Any, sample_rate: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        clips_of("x", data, sample_rate, 3)
