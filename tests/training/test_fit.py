"""`fit` trains what a bare loop trains; what it does when data ends, callbacks stop it or steps fail."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from tests.training.toys import (
    Recorder,
    bare_loop,
    batches_of,
    column,
    compiled,
    line,
    regression,
    regression_arrays,
    small_net,
    weights_of,
)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 21])
def test_equals_a_bare_loop(num_rows: int, steps_per_execution: int) -> None:
    net, reference = small_net(), small_net()
    losses = bare_loop(reference, batches_of(regression_arrays(num_rows), 4), epochs=3)
    model = compiled(net, steps_per_execution=steps_per_execution)
    history = model.fit(regression(num_rows, 4), epochs=3, verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True))
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert not torch.equal(weights_of(net)[0], weights_of(small_net())[0])


def test_validation_runs_in_evaluation_mode_and_training_flags_come_back() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = line(1.0)
            self.frozen = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x) * (100.0 if self.training else 1.0)
            return y

    net = Noisy()
    net.frozen.eval()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    data = rd.Dataset.from_tensor_slices((column([1, 2]), column([1, 2]))).batch(2)
    history = model.fit(data, validation_data=data, verbose=False)
    assert history.history["val_loss"] == [0.0]
    assert history.history["loss"][0] > 1.0
    assert net.training
    assert not net.frozen.training


@pytest.mark.parametrize("steps_per_execution", [1, 2, 5])
def test_data_that_runs_out_warns_once_and_stops(steps_per_execution: int) -> None:
    model = compiled(small_net(), steps_per_execution=steps_per_execution)
    recorder = Recorder()
    with pytest.warns(UserWarning, match=r"ran out of batches: steps_per_epoch=3, but only 2 were left") as caught:
        history = model.fit(regression(20, 4), epochs=4, steps_per_epoch=3, callbacks=[recorder], verbose=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert len(history.history["loss"]) == 2
    assert [call for call in recorder.calls if call.startswith("epoch_end")] == ["epoch_end 0", "epoch_end 1"]


def test_an_epoch_without_any_batch_left_has_empty_logs() -> None:
    model = compiled(small_net())
    recorder = Recorder(read=("epoch_end",))
    with pytest.warns(UserWarning, match="only 0 were left"):
        history = model.fit(regression(8, 4), epochs=3, steps_per_epoch=2, callbacks=[recorder], verbose=False)
    assert history.epoch == [0]
    assert recorder.logs[1:] == [{}]


def test_an_infinite_dataset_trains_by_steps_per_epoch() -> None:
    model = compiled(small_net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(regression(8, 4).repeat(), epochs=2, steps_per_epoch=5, verbose=False)
    assert len(history.history["loss"]) == 2


def test_stopping_before_the_first_batch_is_no_error() -> None:
    class Never(rd.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
            self.model.stop_training = True

    net = small_net()
    assert compiled(net).fit(regression(4, 4), callbacks=[Never()], verbose=False).history == {}
    assert torch.equal(weights_of(net)[0], weights_of(small_net())[0])


def test_logs_that_a_callback_adds_are_in_the_history() -> None:
    class AddRate(rd.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            logs["lr"] = 0.1 / (epoch + 1)

    history = compiled(small_net()).fit(regression(4, 4), epochs=2, callbacks=[AddRate()], verbose=False)
    assert history.history["lr"] == pytest.approx([0.1, 0.05])


def test_sample_weights_give_the_weighted_mean() -> None:
    # prediction 0: losses 1, 4, 9, 16 with the weights 1, 0, 1, 2; batches of three and one
    net = line()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss(reduction="none"))
    arrays = (column([1, 1, 1, 1]), column([1, 2, 3, 4]), np.array([1.0, 0.0, 1.0, 2.0]))
    whole = rd.Dataset.from_tensor_slices(arrays).batch(4)
    history = model.fit(whole, verbose=False)
    assert history.history["loss"] == [pytest.approx((1 + 9 + 2 * 16) / 4)]
    assert net.weight.item() == pytest.approx(0.1 * 2 * (1 + 3 + 2 * 4) / 4)


def test_a_batch_whose_weights_are_all_zero_changes_nothing() -> None:
    net = line(1.0)
    model = compiled(net, loss=nn.MSELoss(reduction="none"))
    arrays = (column([1, 1]), column([5, 5]), np.zeros(2))
    history = model.fit(rd.Dataset.from_tensor_slices(arrays).batch(2), verbose=False)
    assert net.weight.item() == 1.0
    assert history.history["loss"] == [0.0]


def test_several_inputs_are_arguments() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.scale * (a + b)

    data = rd.Dataset.from_tensor_slices(((column([1, 2]), column([3, 4])), column([4, 6]))).batch(2)
    assert compiled(Sum()).fit(data, verbose=False).history["loss"] == [0.0]


def test_a_module_as_loss_may_have_parameters_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (self.scale * prediction - target).square()

    net, loss = line(1.0), Scaled()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    data = rd.Dataset.from_tensor_slices((column([1]), column([2]))).batch(1)
    compiled(net, optimizer=optimizer, loss=loss).fit(data, verbose=False)
    assert loss.scale.item() == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (regression(4, 4), {"epochs": 0}, "epochs must be >= 1, got 0"),
        (regression(4, 4), {"steps_per_epoch": 0}, "steps_per_epoch must be >= 1, got 0"),
        (regression(4, 4), {"initial_epoch": -1}, "initial_epoch must be >= 0, got -1"),
        (regression(4, 4).take(0), {}, "dataset for fit must have at least one batch"),
        (regression(4, 4).take(0), {"steps_per_epoch": 2}, "dataset for fit must have at least one batch"),
        (regression(4, 4).repeat(), {}, "fit without steps_per_epoch needs a dataset that ends"),
    ],
)
def test_what_fit_refuses(data: rd.Dataset, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        compiled(small_net()).fit(data, verbose=False, **settings)


def test_no_epoch_is_left_for_fit() -> None:
    assert compiled(small_net()).fit(regression(4, 4), epochs=5, initial_epoch=5, verbose=False).epoch == []


def test_an_error_in_the_step_keeps_its_type_and_fit_can_be_called_again() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = line()
            self.broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise ZeroDivisionError("in forward")
            y: torch.Tensor = self.inner(x)
            return y

    net = Fragile()
    model = compiled(net)
    data = rd.Dataset.from_tensor_slices((column([1]), column([2]))).batch(1)
    with pytest.raises(ZeroDivisionError, match="in forward"):
        model.fit(data, verbose=False)
    net.broken = False
    assert len(model.fit(data, verbose=False).epoch) == 1


def test_arrays_are_trained_on_in_batches_of_32() -> None:
    net, reference = small_net(), small_net()
    x, y = regression_arrays(70)
    losses = bare_loop(reference, batches_of((x, y), 32), epochs=2)
    history = compiled(net).fit(x, torch.from_numpy(y), epochs=2, shuffle=False, verbose=False)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True))


def test_a_number_of_epochs_in_the_place_of_targets_is_named() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"got 5\. Give a number of epochs by its name: epochs=5"):
        compiled(small_net()).fit(regression(4, 4), 5, verbose=False)
    assert len(compiled(small_net()).fit(dataset=regression(4, 4), epochs=2, verbose=False).epoch) == 2


def test_validation_steps_end_a_validation() -> None:
    model = compiled(line())
    held_out = (column([0] * 4), column([1, 1, 3, 3]))
    settings: dict[str, Any] = {"batch_size": 2, "validation_data": held_out, "verbose": False}
    x = column([0, 0])
    assert model.fit(x, x, validation_steps=1, **settings).history["val_loss"] == [1.0]
    assert model.fit(x, x, **settings).history["val_loss"] == [5.0]
    with pytest.warns(UserWarning, match="steps=3, but only 2 were left for epoch 1/1 validation") as caught:
        model.fit(x, x, validation_steps=3, **settings)
    assert [warning.filename for warning in caught] == [__file__]


def test_class_weights_are_weights_of_rows() -> None:
    rng = np.random.default_rng(0)
    x, classes = rng.normal(size=(30, 3)), rng.integers(0, 3, 30)
    weights = np.array([1.0, 4.0, 0.5])[classes]

    def trained(data: Any, **settings: Any) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
        history = compiled(net, loss="cross_entropy").fit(data, epochs=2, verbose=False, **settings)
        return history.history, weights_of(net)

    plain = rd.Dataset.from_tensor_slices((x, classes)).batch(8)
    weighted = rd.Dataset.from_tensor_slices((x, classes, weights)).batch(8)
    (found, parameters), (expected, wanted) = trained(plain, class_weight={1: 4.0, 2: 0.5}), trained(weighted)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for parameter, other in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter, other)
    assert trained(plain)[0]["loss"] != pytest.approx(expected["loss"], rel=1e-3)
    with pytest.raises(rd.InvalidArgumentError, match="by class_weight or by the sample_weight .* got both"):
        trained(weighted, class_weight={1: 2.0})


def test_class_weights_need_a_loss_per_row() -> None:
    data = rd.Dataset.from_tensor_slices((column([1, 2]), column([0, 1]))).batch(2)
    with pytest.raises(rd.InvalidArgumentError, match='must give one value per row.*reduction="none"'):
        compiled(line()).fit(data, class_weight={1: 2.0}, verbose=False)
