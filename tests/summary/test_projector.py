"""Embeddings for the projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

import raydist as rd
from raydist.summary.projector import embedding_of, write_embedding

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
        (POINTS, ["a"], None, "must have an entry for each of the 3 points, got 1"),
        (POINTS, {"a": [1, 2, 3], "b": [1]}, None, "got 3, 1"),
        (POINTS, None, np.zeros((2, 1, 2, 2), np.uint8), "must be one for each of the 3 points, got 2"),
        (POINTS, None, np.zeros((3, 1, 8000, 1), np.uint8), "must fit into 8192 x 8192"),
    ],
)
def test_what_does_not_fit_together(points: Any, metadata: Any, pictures: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        embedding_of("words", points, metadata, pictures, 0)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(rd.InvalidArgumentError, match="must be one that this program can write"):
        write_embedding(str(tmp_path / "file"), embedding_of("words", POINTS, None, None, 0))


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
