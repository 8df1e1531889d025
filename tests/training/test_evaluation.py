from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import raydist as rd
from tests.training.toys import column, compiled, line, regression, small_net, weights_of


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_loss_and_metrics_are_means_over_all_rows(steps_per_execution: int) -> None:
    # losses 1, 4, 9, 16, 25 in batches of two, two and one
    model = compiled(line(), metrics={"mse": MeanSquaredError()}, steps_per_execution=steps_per_execution)
    data = rd.Dataset.from_tensor_slices((column([1] * 5), column([1, 2, 3, 4, 5]))).batch(2)
    assert model.evaluate(data, verbose=False) == {"loss": pytest.approx(11.0), "mse": pytest.approx(11.0)}


def test_sample_weights_weigh_the_loss_and_not_the_metrics() -> None:
    model = compiled(line(), loss=nn.MSELoss(reduction="none"), metrics={"mse": MeanSquaredError()})
    arrays = (column([1] * 3), column([1, 2, 3]), np.array([1.0, 1.0, 2.0]))
    data = rd.Dataset.from_tensor_slices(arrays).batch(2)
    assert model.evaluate(data, verbose=False) == {"loss": pytest.approx(23 / 4), "mse": pytest.approx(14 / 3)}


def test_nothing_is_trained() -> None:
    net = nn.Sequential(small_net(), nn.BatchNorm1d(1).double())
    before = [value.clone() for value in net.state_dict().values()]
    compiled(net).evaluate(regression(8, 4), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert weights_of(net)


def test_two_evaluations_give_the_same() -> None:
    model = compiled(small_net())
    assert model.evaluate(regression(7, 4), verbose=False) == model.evaluate(regression(7, 4), verbose=False)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="dataset for evaluate must have at least one batch"):
        compiled(small_net()).evaluate(regression(4, 4).take(0), verbose=False)


def test_an_infinite_dataset_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"evaluate needs a dataset that ends.*\.take"):
        compiled(small_net()).evaluate(regression(4, 4).repeat(), verbose=False)


@pytest.mark.parametrize("steps_per_execution", [1, 2, 5])
def test_steps_end_a_pass(steps_per_execution: int) -> None:
    model = compiled(small_net(), steps_per_execution=steps_per_execution)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some = model.evaluate(regression(20, 4).repeat(), steps=3, verbose=False)
        assert some == model.evaluate(regression(20, 4), steps=3, verbose=False)
    assert some == model.evaluate(regression(20, 4).take(3), verbose=False)
    with pytest.warns(UserWarning, match="steps=9, but only 5 were left for evaluate") as caught:
        model.evaluate(regression(20, 4), steps=9, verbose=False)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(rd.InvalidArgumentError, match="steps must be >= 1, got 0"):
        model.evaluate(regression(20, 4), steps=0, verbose=False)


def test_arrays_are_evaluated_in_their_order() -> None:
    x, y = column([1] * 5), column([1, 2, 3, 4, 5])
    model = compiled(line())
    assert model.evaluate(x, y, batch_size=2, steps=1, verbose=False) == {"loss": pytest.approx(2.5)}
    assert model.evaluate(x, y, verbose=False) == {"loss": pytest.approx(11.0)}
    assert compiled(small_net()).evaluate(dataset=regression(4, 2), verbose=False).keys() == {"loss"}
