from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

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


def test_history_has_one_entry_an_epoch_for_loss_metrics_and_validation() -> None:
    model = compiled(small_net(), metrics={"mse": MeanSquaredError()})
    history = model.fit(regression(10, 4), epochs=2, validation_data=regression(6, 4), verbose=False)
    assert list(history.history) == ["loss", "mse", "val_loss", "val_mse"]
    assert all(len(values) == 2 for values in history.history.values())
    assert history.epoch == [0, 1]
    assert history.history["mse"] == pytest.approx(history.history["loss"], rel=1e-6)  # torchmetrics counts in float32


def test_the_loss_of_an_uneven_epoch_is_the_true_mean() -> None:
    # weight 0 and learning rate 0: the losses are y ** 2 = 1, 4, 9; batches (1, 4) and (9)
    net = line()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    data = rd.Dataset.from_tensor_slices((column([1, 1, 1]), column([1, 2, 3]))).batch(2)
    history = model.fit(data, verbose=False)
    assert history.history["loss"] == [pytest.approx(14 / 3)]


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


def test_a_module_in_evaluation_mode_is_trained_in_training_mode() -> None:
    net = small_net().eval()
    compiled(net).fit(regression(4, 4), verbose=False)
    assert net.training


def test_steps_per_epoch_goes_on_with_the_same_iterator() -> None:
    # six batches of one row: y = 1 .. 6; the losses y ** 2 tell which batch was seen
    net = line()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    values: list[float] = [1, 2, 3, 4, 5, 6]
    data = rd.Dataset.from_tensor_slices((column([1] * 6), column(values))).batch(1)
    history = model.fit(data, epochs=3, steps_per_epoch=2, verbose=False)
    assert history.history["loss"] == pytest.approx([2.5, 12.5, 30.5])


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


def test_callbacks_are_called_in_order() -> None:
    recorder = Recorder()
    compiled(small_net()).fit(
        regression(8, 4), epochs=2, validation_data=regression(4, 4), callbacks=[recorder], verbose=False
    )
    one_epoch = [
        "epoch_begin {}",
        *("batch_begin 0", "batch_end 0", "batch_begin 1", "batch_end 1"),
        *("test_begin", "test_batch_begin 0", "test_batch_end 0", "test_end"),
        "epoch_end {}",
    ]
    expected = [call.format(epoch) for epoch in (0, 1) for call in one_epoch]
    assert recorder.calls == ["train_begin", *expected, "train_end"]


def test_callbacks_are_called_once_per_execution_with_true_batch_numbers() -> None:
    recorder = Recorder()
    compiled(small_net(), steps_per_execution=3).fit(regression(20, 4), callbacks=[recorder], verbose=False)
    assert [call for call in recorder.calls if call.startswith("batch")] == [
        "batch_begin 0",
        "batch_end 2",
        "batch_begin 3",
        "batch_end 4",
    ]


def test_no_batch_begins_that_does_not_exist() -> None:
    recorder = Recorder()
    compiled(small_net(), steps_per_execution=2).fit(regression(16, 4), callbacks=[recorder], verbose=False)
    assert [call for call in recorder.calls if call.startswith("batch_begin")] == ["batch_begin 0", "batch_begin 2"]


def test_batch_logs_are_means_over_the_epoch_so_far() -> None:
    net = line()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    data = rd.Dataset.from_tensor_slices((column([1] * 5), column([1, 1, 2, 2, 3]))).batch(2)
    recorder = Recorder(read=("batch_end",))
    model.fit(data, epochs=2, callbacks=[recorder], verbose=False)
    assert [logs["loss"] for logs in recorder.logs] == pytest.approx([1, 10 / 4, 19 / 5] * 2)


@pytest.mark.parametrize("at_batch", [True, False])
def test_stop_training_ends_fit(at_batch: bool) -> None:
    class Stop(rd.Callback):
        def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
            self.model.stop_training = at_batch

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            self.model.stop_training = True

    recorder = Recorder()
    model = compiled(small_net())
    history = model.fit(regression(12, 4), epochs=5, callbacks=[Stop(), recorder], verbose=False)
    assert history.epoch == [0]
    assert recorder.calls.count("train_end") == 1
    batches = [call for call in recorder.calls if call.startswith("batch_end")]
    assert len(batches) == (1 if at_batch else 3)
    assert len(model.fit(regression(12, 4), epochs=2, verbose=False).epoch) == 2


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


def test_a_learning_rate_changed_between_epochs_counts() -> None:
    net = line(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    class Warm(rd.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            optimizer.param_groups[0]["lr"] = 0.25

    data = rd.Dataset.from_tensor_slices((column([1]), column([3]))).batch(1)
    compiled(net, optimizer=optimizer).fit(data, epochs=2, callbacks=[Warm()], verbose=False)
    assert net.weight.item() == pytest.approx(2.0)  # one step of 0.25 on the gradient -4


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


def test_an_empty_dataset_is_refused_with_steps_per_epoch_too() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="dataset for fit must have at least one batch"):
        compiled(small_net()).fit(regression(4, 4).take(0), steps_per_epoch=2, verbose=False)


@pytest.mark.parametrize(("name", "value"), [("epochs", 0), ("epochs", -1), ("steps_per_epoch", 0)])
def test_counts_must_be_positive(name: str, value: int) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(rd.InvalidArgumentError, match=rf"{name} must be >= 1, got {value}"):
        compiled(small_net()).fit(regression(4, 4), verbose=False, **settings)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="dataset for fit must have at least one batch"):
        compiled(small_net()).fit(regression(4, 4).take(0), verbose=False)


def test_an_infinite_dataset_without_steps_per_epoch_is_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="fit without steps_per_epoch needs a dataset that ends"):
        compiled(small_net()).fit(regression(4, 4).repeat(), verbose=False)


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


def test_initial_epoch_goes_on_where_an_earlier_fit_stopped() -> None:
    recorder = Recorder()
    model = compiled(small_net())
    history = model.fit(regression(4, 4), epochs=5, initial_epoch=3, callbacks=[recorder], verbose=False)
    assert history.epoch == [3, 4]
    assert [call for call in recorder.calls if call.startswith("epoch_begin")] == ["epoch_begin 3", "epoch_begin 4"]
    assert model.fit(regression(4, 4), epochs=5, initial_epoch=5, verbose=False).epoch == []
    with pytest.raises(rd.InvalidArgumentError, match="initial_epoch must be >= 0, got -1"):
        model.fit(regression(4, 4), initial_epoch=-1, verbose=False)


@pytest.mark.parametrize(("freq", "expected"), [(1, 5), (2, 2), (3, 1), ([1, 5], 2), ({9}, 0)])
def test_validation_freq_says_which_epochs_are_validated(freq: Any, expected: int) -> None:
    data = regression(4, 4)
    history = compiled(small_net()).fit(data, epochs=5, validation_data=data, validation_freq=freq, verbose=False)
    assert len(history.history.get("val_loss", [])) == expected
    assert len(history.history["loss"]) == 5


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
