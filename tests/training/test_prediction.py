from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from tests.returned_classes import Cache, ModelOutput
from tests.training.toys import column, compiled, line, regression, small_net


@pytest.mark.parametrize("num_rows", [1, 4, 9, 61])
def test_every_row_in_order(num_rows: int) -> None:
    model = rd.Model(line(2.0))
    data = rd.Dataset.from_tensor_slices(column(list(range(num_rows)))).batch(4)
    prediction = model.predict(data, verbose=False)
    assert prediction.flatten().tolist() == [2.0 * i for i in range(num_rows)]


def test_targets_and_weights_are_passed_over() -> None:
    arrays = (column([1, 2]), column([0, 0]), np.ones(2))
    data = rd.Dataset.from_tensor_slices(arrays).batch(2)
    assert compiled(line(3.0)).predict(data, verbose=False).tolist() == [[3.0], [6.0]]


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"twice": 2 * x, "both": (x, x.sum(dim=1))}


def test_a_nest_of_outputs() -> None:
    data = rd.Dataset.from_tensor_slices(column([1, 2, 3])).batch(2)
    prediction = rd.Model(Parts()).predict(data, verbose=False)
    assert prediction["twice"].flatten().tolist() == [2.0, 4.0, 6.0]
    assert prediction["both"][1].tolist() == [1.0, 2.0, 3.0]


class Generative(nn.Module):
    """As a causal model of transformers: what it keeps for later tokens is an object."""

    def forward(self, x: torch.Tensor) -> Any:
        return ModelOutput(logits=2 * x, cache=(Cache(4), x, None, 3), text="hi")


@pytest.mark.ray
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_what_is_no_tensor_becomes_none(num_replicas: int, mirrored: Callable[[int], rd.Strategy]) -> None:
    strategy = rd.OneDeviceStrategy("cpu") if num_replicas == 1 else mirrored(num_replicas)
    seen: list[Any] = []
    callback = rd.LambdaCallback(on_predict_batch_end=lambda batch, logs: seen.append(logs["outputs"]))
    with strategy.scope():
        model = rd.Model(Generative())
    prediction = model.predict(column([1, 2, 3, 4]), batch_size=3, callbacks=[callback], verbose=False)
    for found, rows in ((prediction, [1, 2, 3, 4]), (seen[0], [1, 2, 3]), (seen[1], [4])):
        assert type(found) is ModelOutput
        assert found.logits is found["logits"]
        assert found.logits.flatten().tolist() == [2.0 * row for row in rows]
        assert found.cache[1].flatten().tolist() == rows
        assert (found.cache[0], *found.cache[2:], found.text) == (None,) * 4


class Unusable(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x: {"boxes": [x]}, "a list"),  # tensors must not vanish with it
        (lambda x: {"y": x, "array": x.numpy()}, "a ndarray"),
        (lambda x: x.sum(), r"shape \(\)"),
        (lambda x: ModelOutput(text="hi"), "a ModelOutput without tensors"),
        (lambda x: {}, "a dict without tensors"),
    ],
)
def test_outputs_without_an_entry_a_row_are_refused(make: Callable[[torch.Tensor], Any], got: str) -> None:
    with pytest.raises(rd.SpecError, match=f"one entry per input row .2. from the module, got {got}"):
        rd.Model(Unusable(make)).predict(column([1, 2]), verbose=False)


def test_evaluation_mode_inside_and_training_mode_afterwards() -> None:
    net = nn.Dropout(0.5)
    data = rd.Dataset.from_tensor_slices(column([1] * 50)).batch(50)
    assert rd.Model(net).predict(data, verbose=False).sum().item() == 50.0
    assert net.training


class AsLongAsTheFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), int(x[0, 0]))


def test_rows_of_differing_shapes_are_refused() -> None:
    data = rd.Dataset.from_tensor_slices(column([2, 3])).batch(1)
    with pytest.raises(rd.SpecError, match=r"agree in all but their first dimension, got rows of the shapes .*2.*3"):
        rd.Model(AsLongAsTheFirst()).predict(data, verbose=False)


def test_empty_and_infinite_datasets_are_refused() -> None:
    model = compiled(small_net())
    with pytest.raises(rd.InvalidArgumentError, match="dataset for predict must have at least one batch"):
        model.predict(regression(4, 4).take(0), verbose=False)
    with pytest.raises(rd.InvalidArgumentError, match="predict needs a dataset that ends"):
        model.predict(regression(4, 4).repeat(), verbose=False)


def test_steps_end_a_pass_and_arrays_are_data() -> None:
    model = rd.Model(line(2.0))
    x = column([1, 2, 3, 4, 5])
    assert model.predict(x, verbose=False).flatten().tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert model.predict(torch.from_numpy(x), batch_size=2, steps=2, verbose=False).flatten().tolist() == [2, 4, 6, 8]
    data = rd.Dataset.from_tensor_slices(x).batch(2)
    assert len(model.predict(data.repeat(), steps=4, verbose=False)) == 2 + 2 + 1 + 2
    with pytest.warns(UserWarning, match="steps=4, but only 3 were left for predict") as caught:
        model.predict(dataset=data, steps=4, verbose=False)
    assert [warning.filename for warning in caught] == [__file__]
