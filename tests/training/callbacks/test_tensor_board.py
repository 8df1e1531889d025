"""TensorBoard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import raydist as rd
from raydist.training.callbacks.tensor_board import InputClock, ShownParameters
from tests.refused import check_refused
from tests.summary.reading import curves
from tests.training.toys import compiled, regression, small_net


def fresh() -> rd.Model:
    """A model whose global step is 0."""
    with rd.OneDeviceStrategy("cpu").scope():
        return compiled(small_net())


def test_curves_have_the_global_step_on_their_x_axis(tmp_path: Path) -> None:
    data = regression(8, 4)
    model = fresh()
    board = rd.TensorBoard(tmp_path, histogram_freq=2, update_freq="batch", write_steps_per_second=True)
    history = model.fit(data, epochs=2, validation_data=data, callbacks=[board], verbose=False).history
    train, validation = curves(tmp_path / "train"), curves(tmp_path / "validation")
    assert [step for step, _ in train.scalars("epoch_loss")] == [2, 4]
    assert [loss for _, loss in train.scalars("epoch_loss")] == pytest.approx(history["loss"])
    assert [loss for _, loss in validation.scalars("epoch_loss")] == pytest.approx(history["val_loss"])
    assert [step for step, _ in train.scalars("batch_loss")] == [1, 2, 3, 4]
    assert [step for step, _ in validation.scalars("evaluation_loss_vs_iterations")] == [2, 4]
    assert train.names("histograms") == {
        f"{name.replace('.', '/')}/histogram" for name, _ in model.module.named_parameters()
    }
    assert [event.step for event in train.accumulator.Histograms("0/weight/histogram")] == [2], "every other epoch"
    assert {
        "epoch_learning_rate",
        "step/seconds",
        "input/wait",
        "input/batches_per_second",
        "epoch_steps_per_second",
    } <= (train.names("scalars"))
    assert train.names("tensors") == {"input/bottleneck"}
    assert train.accumulator.Tags()["graph"]


def test_a_training_that_goes_on_takes_the_place_of_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    data = regression(8, 4)
    model = fresh()
    model.fit(data, epochs=2, callbacks=[rd.TensorBoard(tmp_path, update_freq="batch")], verbose=False)
    with model.strategy.scope():
        rd.get_global_step().fill_(3)
    model.fit(data, epochs=1, callbacks=[rd.TensorBoard(tmp_path, update_freq="batch")], verbose=False)
    assert [step for step, _ in curves(tmp_path / "train").scalars("batch_loss")] == [1, 2, 3, 4, 5]


def test_words_of_an_embedding_are_in_the_projector(tmp_path: Path) -> None:
    with rd.OneDeviceStrategy("cpu").scope():
        model = rd.Model(torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Flatten(), torch.nn.Linear(2, 1)))
        model.compile("sgd", "mse")
    x, y = torch.tensor([[0], [1], [2]]), torch.zeros(3, 1)
    board = rd.TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"0": ["a", "b", "c"]})
    model.fit(x, y, callbacks=[board], verbose=False)
    config = (tmp_path / "train" / "projector_config.pbtxt").read_text()
    assert 'tensor_name: "0:00001"' in config
    assert (tmp_path / "train" / "projector" / "0-00001" / "metadata.tsv").read_text() == "a\nb\nc\n"


def test_arguments_that_mean_nothing() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"update_freq": "step"}, r"update_freq must be .*'step'"),
        ({"update_freq": 0}, "update_freq must be"),
        ({"histogram_freq": -1}, "must be >= 0, got -1 and 0"),
        ({"profile_batch": 2}, "profile_batch must be 0, got 2"),
    ]
    check_refused(lambda arguments: rd.TensorBoard(**arguments), cases)


def test_a_picture_of_equal_values_is_grey(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, 7.0)
    shown(tmp_path, ShownParameters(histogram_freq=1, write_images=True), module, epochs=1)
    assert curves(tmp_path).names("images") == {"weight/image"}, "a bias has one dimension"
    (event,) = curves(tmp_path).accumulator.Images("weight/image")
    picture = Image.open(io.BytesIO(event.encoded_image_string)).convert("L")
    assert set(np.asarray(picture).ravel()) <= {127, 128}


def test_the_time_between_a_dispatched_step_and_the_next_batch_is_waiting() -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0, 8.0])
    clock = InputClock(lambda: next(times))
    clock.begin()
    clock.drawn()
    clock.dispatched()
    clock.drawn()
    assert clock.steps_per_second(2) == 2 / 0.5
    assert clock.waiting() == 1.0 + 0.5
    assert clock.seconds() == 8.0


def shown(folder: Path, parameters: ShownParameters, module: torch.nn.Module, *, epochs: int) -> None:
    with rd.summary.create_file_writer(folder) as writer:
        for epoch in range(epochs):
            with writer.as_default(epoch):
                parameters.show(module, epoch)
