"""Images, audio, texts, and embeddings for the projector."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

import raydist as rd
from raydist.summary.media import clips_of, encode_png, encode_wav, images_of
from raydist.summary.projector import embedding_of, write_embedding


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


POINTS = np.arange(6.0).reshape(3, 2)


def config(logdir: Path) -> Any:
    return text_format.Parse((logdir / "projector_config.pbtxt").read_text(), ProjectorConfig())


def test_points_labels_and_pictures_are_beside_each_other(tmp_path: Path) -> None:
    pictures = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 2, 4), np.uint8)
    write_embedding(str(tmp_path), embedding_of("words", POINTS, ["a\tb", "c\nd", "e"], pictures, 7))
    (entry,) = config(tmp_path).embeddings
    assert entry.tensor_name == "words:00007"
    assert np.loadtxt(tmp_path / entry.tensor_path).tolist() == POINTS.tolist()
    assert (tmp_path / entry.metadata_path).read_text() == "a b\nc d\ne\n"
    assert list(entry.sprite.single_image_dim) == [4, 2]
    from PIL import Image

    sprite = np.asarray(Image.open(tmp_path / entry.sprite.image_path))
    assert sprite[::2, ::4].tolist() == [[0, 1], [2, 0]]


def test_columns_have_names_where_there_are_several(tmp_path: Path) -> None:
    points = embedding_of("words", POINTS, {"word": ["a", "b", "c"], "count": [1, 2, 3]}, None, 0)
    assert points.labels == ("word\tcount", "a\t1", "b\t2", "c\t3")


def test_points_of_several_steps_are_listed_each_once(tmp_path: Path) -> None:
    for step in (0, 1, 1):
        write_embedding(str(tmp_path), embedding_of("words", POINTS, None, None, step))
    assert [entry.tensor_name for entry in config(tmp_path).embeddings] == ["words:00000", "words:00001"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs", 'quo"te\n}', "nul\0", "..", "ä/ö"])
def test_no_name_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    write_embedding(str(tmp_path / "logs"), embedding_of(name, POINTS, None, None, 0))
    (entry,) = config(tmp_path / "logs").embeddings
    assert entry.tensor_name == f"{name}:00000"
    assert (tmp_path / "logs" / entry.tensor_path).resolve().is_relative_to(tmp_path / "logs" / "projector")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize(
    ("points", "metadata", "pictures", "message"),
    [
        (np.zeros(3), None, None, r"must be numbers of shape \(points, dimensions\), got float64 of shape \(3,\)"),
        (np.zeros((0, 2)), None, None, "must be numbers of shape"),
        (POINTS, ["a"], None, "must have a label for each of the 3 points, got 1"),
        (POINTS, {"a": [1, 2, 3], "b": [1]}, None, "got 3, 1"),
        (POINTS, None, np.zeros((2, 1, 2, 2), np.uint8), "must have a picture for each of the 3 points, got 2"),
        (POINTS, None, np.zeros((3, 1, 8000, 1), np.uint8), "must fit into 8192 x 8192"),
    ],
)
def test_what_does_not_fit_together(points: Any, metadata: Any, pictures: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        embedding_of("words", points, metadata, pictures, 0)


def test_points_are_in_the_directory_of_the_writer(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=2):
        assert rd.summary.embedding("words", torch.eye(2), metadata=["a", "b"], images=torch.zeros(2, 1, 2, 2))
        with rd.summary.record_if(False):
            assert not rd.summary.embedding("others", torch.eye(2))
    folder = tmp_path / "projector" / "words-00002"
    assert sorted(path.name for path in folder.iterdir()) == ["metadata.tsv", "sprite.png", "tensors.tsv"]


def test_it_is_for_the_driver() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="rd.summary.embedding is for the driver"):
        rd.OneDeviceStrategy("cpu").run(rd.summary.embedding, args=("words", torch.eye(2)))
