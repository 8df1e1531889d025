from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import raydist as rd
from raydist.training.callbacks.tensor_board import ShownParameters
from tests.summary.reading import curves


def shown(folder: Path, parameters: ShownParameters, module: torch.nn.Module, *, epochs: int) -> None:
    with rd.summary.create_file_writer(folder) as writer:
        for epoch in range(epochs):
            with writer.as_default(epoch):
                parameters.show(module, epoch)


def test_histograms_and_pictures_come_every_so_many_epochs(tmp_path: Path) -> None:
    shown(tmp_path, ShownParameters(histogram_freq=2, write_images=True), torch.nn.Linear(3, 2), epochs=4)
    found = curves(tmp_path)
    assert found.names("histograms") == {"weight/histogram", "bias/histogram"}
    assert [event.step for event in found.accumulator.Histograms("weight/histogram")] == [0, 2]
    assert found.names("images") == {"weight/image"}, "a bias has one dimension"


def test_nothing_is_shown_unless_it_is_asked_for(tmp_path: Path) -> None:
    shown(tmp_path, ShownParameters(), torch.nn.Embedding(3, 2), epochs=1)
    assert curves(tmp_path).names("histograms") == set()
    assert not (tmp_path / "projector_config.pbtxt").exists()


def test_an_embedding_alone_and_a_list_of_labels_for_all(tmp_path: Path) -> None:
    parameters = ShownParameters(embeddings_freq=1, embeddings_metadata=["a", "b", "c"])
    shown(tmp_path, parameters, torch.nn.Embedding(3, 2), epochs=1)
    assert 'tensor_name: "embedding:00000"' in (tmp_path / "projector_config.pbtxt").read_text()
    assert (tmp_path / "projector" / "embedding-00000" / "metadata.tsv").read_text() == "a\nb\nc\n"


def test_a_picture_of_equal_values_is_grey(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(module.weight, 7.0)
    shown(tmp_path, ShownParameters(histogram_freq=1, write_images=True), module, epochs=1)
    (event,) = curves(tmp_path).accumulator.Images("weight/image")
    picture = Image.open(io.BytesIO(event.encoded_image_string)).convert("L")
    assert set(np.asarray(picture).ravel()) <= {127, 128}


@pytest.mark.parametrize("arguments", [{"histogram_freq": -1}, {"embeddings_freq": -1}])
def test_numbers_of_epochs_are_not_negative(arguments: dict[str, int]) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"must be >= 0, got .*-1"):
        ShownParameters(**arguments)  # type: ignore[arg-type]  # both are numbers
