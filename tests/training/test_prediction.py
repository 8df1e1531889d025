from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
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
