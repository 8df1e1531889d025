"""`evaluate` and `predict`: their numbers, the order of rows, what they refuse, and executions of several steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import raydist as rd
from raydist.training.passes import in_evaluation_mode
from tests.refused import check_refused
from tests.returned_classes import Cache, ModelOutput
from tests.training.toys import column, compiled, line, regression, small_net


class Generative(nn.Module):
    """As a causal model of transformers: what it keeps for later tokens is an object."""

    def forward(self, x: torch.Tensor) -> Any:
        return ModelOutput(logits=2 * x, cache=(Cache(4), x, None, 3), text="hi")


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["one", "two"])
def test_what_is_no_tensor_becomes_none(kind: str, request: pytest.FixtureRequest) -> None:
    strategy = rd.OneDeviceStrategy("cpu") if kind == "one" else request.getfixturevalue(kind)
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


def test_outputs_without_an_entry_a_row_are_refused() -> None:
    cases: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda x: {"boxes": [x]}, "a list"),  # tensors must not vanish with it
        (lambda x: {"y": x, "array": x.numpy()}, "a ndarray"),
        (lambda x: x.sum(), r"shape \(\)"),
        (lambda x: ModelOutput(text="hi"), "a ModelOutput without tensors"),
        (lambda x: {}, "a dict without tensors"),
    ]
    predict: Any = lambda make: rd.Model(Unusable(make)).predict(column([1, 2]), verbose=False)  # noqa: E731
    told = "one entry per input row .2. from the module, got "
    check_refused(predict, [(make, told + got) for make, got in cases], rd.SpecError)
    assert [part.shape for part in predict(lambda x: [x, x.sum(dim=1)])] == [(2, 1), (2,)], "a list becomes a tuple"
    data = rd.Dataset.from_tensor_slices(column([2, 3])).batch(1)
    with pytest.raises(rd.SpecError, match=r"agree in all but their first dimension, got rows of the shapes .*2.*3"):
        rd.Model(Unusable(lambda x: torch.zeros(len(x), int(x[0, 0])))).predict(data, verbose=False)


def test_evaluation_mode_inside_and_training_mode_afterwards() -> None:
    net = nn.Dropout(0.5)
    data = rd.Dataset.from_tensor_slices(column([1] * 50)).batch(50)
    assert rd.Model(net).predict(data, verbose=False).sum().item() == 50.0
    assert net.training
    flags = nn.Sequential(nn.Dropout(), nn.Dropout())
    flags[1].eval()
    with contextlib.suppress(ZeroDivisionError), in_evaluation_mode(flags):
        assert not any(part.training for part in flags.modules())
        raise ZeroDivisionError
    assert [part.training for part in flags.modules()] == [True, True, False]
    module = nn.Sequential(small_net(), nn.BatchNorm1d(1).double())
    before = [value.clone() for value in module.state_dict().values()]
    compiled(module).evaluate(regression(8, 4), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))


def test_empty_and_infinite_datasets_are_refused() -> None:
    model = compiled(small_net())
    for name in ("evaluate", "predict"):
        with pytest.raises(rd.InvalidArgumentError, match=f"dataset for {name} must have at least one batch"):
            getattr(model, name)(regression(4, 4).take(0), verbose=False)
        with pytest.raises(rd.InvalidArgumentError, match=rf"{name} needs a dataset that ends.*\.take"):
            getattr(model, name)(regression(4, 4).repeat(), verbose=False)


def test_predictions_of_arrays_of_some_steps_and_without_targets() -> None:
    model = rd.Model(line(2.0))
    x = column([1, 2, 3, 4, 5])
    assert model.predict(x, verbose=False).flatten().tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert model.predict(torch.from_numpy(x), batch_size=2, steps=2, verbose=False).flatten().tolist() == [2, 4, 6, 8]
    data = rd.Dataset.from_tensor_slices(x).batch(2)
    assert len(model.predict(data.repeat(), steps=4, verbose=False)) == 2 + 2 + 1 + 2
    with pytest.warns(UserWarning, match="steps=4, but only 3 were left for predict") as caught:
        model.predict(dataset=data, steps=4, verbose=False)
    assert [warning.filename for warning in caught] == [__file__]
    data = rd.Dataset.from_tensor_slices((x, x, np.ones(5))).batch(2)
    assert model.predict(data, steps=1, verbose=False).tolist() == [[2.0], [4.0]]


def test_loss_and_metrics_are_means_over_all_rows() -> None:
    # losses 1, 4, 9, 16, 25 in batches of two, two and one
    data = rd.Dataset.from_tensor_slices((column([1] * 5), column([1, 2, 3, 4, 5]))).batch(2)
    for steps_per_execution in (1, 2):
        model = compiled(line(), metrics={"mse": MeanSquaredError()}, steps_per_execution=steps_per_execution)
        assert model.evaluate(data, verbose=False) == {"loss": pytest.approx(11.0), "mse": pytest.approx(11.0)}
    # weights are those of the loss and not of metrics
    model = compiled(line(), loss=nn.MSELoss(reduction="none"), metrics={"mse": MeanSquaredError()})
    arrays = (column([1] * 3), column([1, 2, 3]), np.array([1.0, 1.0, 2.0]))
    data = rd.Dataset.from_tensor_slices(arrays).batch(2)
    assert model.evaluate(data, verbose=False) == {"loss": pytest.approx(23 / 4), "mse": pytest.approx(14 / 3)}


def test_steps_end_a_pass() -> None:
    for steps_per_execution in (1, 2, 5):
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
