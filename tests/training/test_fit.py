"""`fit` trains what a bare loop trains; what it does when data ends, callbacks stop it or steps fail."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raydist as rd
from raydist.training.given_data import distributed
from tests.refused import check_refused
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


def test_equals_a_bare_loop() -> None:
    for num_rows, steps_per_execution in ((1, 1), (7, 3), (8, 1), (21, 3), (21, 1)):
        net, reference = small_net(), small_net()
        losses = bare_loop(reference, batches_of(regression_arrays(num_rows), 4), epochs=3)
        model = compiled(net, steps_per_execution=steps_per_execution)
        history = model.fit(regression(num_rows, 4), epochs=3, verbose=False)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True)), num_rows
        assert history.history["loss"] == pytest.approx(losses, rel=1e-12), num_rows
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


def test_data_that_runs_out_warns_once_and_stops() -> None:
    for steps_per_execution in (1, 2, 5):
        model = compiled(small_net(), steps_per_execution=steps_per_execution)
        recorder = Recorder()
        with pytest.warns(UserWarning, match=r"ran out of batches: steps_per_epoch=3, but only 2 were left") as caught:
            history = model.fit(regression(20, 4), epochs=4, steps_per_epoch=3, callbacks=[recorder], verbose=False)
        assert [warning.filename for warning in caught] == [__file__]
        assert len(history.history["loss"]) == 2
        assert [call for call in recorder.calls if call.startswith("epoch_end")] == ["epoch_end 0", "epoch_end 1"]
    recorder = Recorder(read=("epoch_end",))
    with pytest.warns(UserWarning, match="only 0 were left"):
        history = model.fit(regression(8, 4), epochs=3, steps_per_epoch=2, callbacks=[recorder], verbose=False)
    assert history.epoch == [0]
    assert recorder.logs[1:] == [{}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(regression(8, 4).repeat(), epochs=2, steps_per_epoch=5, verbose=False)
    assert len(history.history["loss"]) == 2


def test_callbacks_stop_before_the_first_batch_and_add_to_the_history() -> None:
    class Hooks(rd.Callback):
        stops = False

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
            self.model.stop_training = self.stops

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            logs.update({} if self.stops else {"lr": 0.1 / (epoch + 1)})

    net, hooks = small_net(), Hooks()
    hooks.stops = True
    assert compiled(net).fit(regression(4, 4), callbacks=[hooks], verbose=False).history == {}
    assert torch.equal(weights_of(net)[0], weights_of(small_net())[0])
    history = compiled(net).fit(regression(4, 4), epochs=2, callbacks=[Hooks()], verbose=False)
    assert history.history["lr"] == pytest.approx([0.1, 0.05])
    assert compiled(net).fit(regression(4, 4), epochs=5, initial_epoch=5, verbose=False).epoch == []


def test_sample_weights_give_the_weighted_mean() -> None:
    # prediction 0: losses 1, 4, 9, 16 with the weights 1, 0, 1, 2
    net = line()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss(reduction="none"))
    arrays = (column([1, 1, 1, 1]), column([1, 2, 3, 4]), np.array([1.0, 0.0, 1.0, 2.0]))
    history = model.fit(rd.Dataset.from_tensor_slices(arrays).batch(4), verbose=False)
    assert history.history["loss"] == [pytest.approx((1 + 9 + 2 * 16) / 4)]
    weight = net.weight.item()
    assert weight == pytest.approx(0.1 * 2 * (1 + 3 + 2 * 4) / 4)
    arrays = (column([1, 1]), column([5, 5]), np.zeros(2))
    for accumulate_steps in (1, 2):
        model = compiled(net, loss=nn.MSELoss(reduction="none"), accumulate_steps=accumulate_steps)
        history = model.fit(rd.Dataset.from_tensor_slices(arrays).batch(1), verbose=False)
        assert (history.history["loss"], net.weight.item()) == ([0.0], weight), "all weights are zero"


class Sum(nn.Module):
    """Of (inputs, scaled)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.scale * (a + b)


def test_several_inputs_are_arguments_and_a_loss_may_have_parameters() -> None:
    data = rd.Dataset.from_tensor_slices(((column([1, 2]), column([3, 4])), column([4, 6]))).batch(2)
    assert compiled(Sum()).fit(data, verbose=False).history["loss"] == [0.0]
    net, loss = line(1.0), Sum()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    data = rd.Dataset.from_tensor_slices((column([1]), column([2]))).batch(1)
    compiled(net, optimizer=optimizer, loss=loss).fit(data, verbose=False)
    assert loss.scale.item() == pytest.approx(1 - 0.1 * (1 + 2))
    assert net.weight.item() == pytest.approx(1 - 0.1)


def test_what_fit_refuses() -> None:
    cases: list[tuple[Any, str]] = [
        ((regression(4, 4), {"epochs": 0}), "epochs must be >= 1, got 0"),
        ((regression(4, 4), {"steps_per_epoch": 0}), "steps_per_epoch must be >= 1, got 0"),
        ((regression(4, 4), {"initial_epoch": -1}), "initial_epoch must be >= 0, got -1"),
        ((regression(4, 4).take(0), {}), "dataset for fit must have at least one batch"),
        ((regression(4, 4).take(0), {"steps_per_epoch": 2}), "dataset for fit must have at least one batch"),
        ((regression(4, 4).repeat(), {}), "fit without steps_per_epoch needs a dataset that ends"),
        ((regression(4, 4), {"y": 5}), r"got 5\. Give a number of epochs by its name: epochs=5"),
    ]
    check_refused(lambda case: compiled(small_net()).fit(case[0], verbose=False, **case[1]), cases)
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


X, Y = np.arange(70.0)[:, None], np.arange(70)


def one_device() -> rd.OneDeviceStrategy:
    return rd.OneDeviceStrategy("cpu")


def given(*args: Any, **more: Any) -> rd.DistributedDataset:
    return distributed(one_device(), *args, **more)


def rows_of(data: Any) -> list[list[int]]:
    """The targets of each batch; every x must still be beside its y."""
    batches = list(data)
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    return [y.tolist() for _, y in batches]


def test_arrays_tensors_and_loaders_come_in_batches_in_their_order() -> None:
    rows = [[*range(32)], [*range(32, 64)], [*range(64, 70)]]
    tensors = torch.from_numpy(X), torch.from_numpy(Y)
    assert rows_of(given(X, Y)) == rows_of(given(tensors[0].clone().requires_grad_(), tensors[1])) == rows
    assert [len(batch) for batch in rows_of(given(X, Y, batch_size=40))] == [40, 30]
    assert rows_of(given(DataLoader(TensorDataset(*tensors), batch_size=50))) == [[*range(50)], [*range(50, 70)]]


def test_distributed_data_is_taken_as_it_is_by_either_name() -> None:
    data = one_device().distribute_dataset(regression(5, 2))
    assert given(data) is given(None, dataset=data, shuffle=True) is data


def test_a_shuffle_is_new_in_every_epoch_and_follows_torchs_seed() -> None:
    def epochs() -> list[list[list[int]]]:
        torch.manual_seed(7)
        data = given(X, Y, shuffle=True)
        return [[y.tolist() for _, y in data] for _ in range(2)]

    first, second = epochs()
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == [*range(70)]
    assert first != second
    assert first != rows_of(given(X, Y))
    assert epochs() == [first, second]
    assert rows_of(given(X, Y, shuffle=True)) not in (first, second)


def test_arguments_that_do_not_go_together_say_what_to_write() -> None:
    data = regression(4, 2)
    loader: Any = DataLoader([1])  # type: ignore[arg-type]  # a list is a dataset to torch
    cases: list[tuple[Any, str]] = [
        (((data, 5), {}), r"y must be the targets .* got 5\. .*epochs=5"),
        (((data, Y), {}), r"y belongs to arrays, and a Dataset comes without it.* elements are \(x, y\)"),
        (((data,), {"batch_size": 8}), "batch_size belongs to arrays, .*batched already"),
        (((loader, Y), {}), "y belongs to arrays, and a DataLoader comes without it"),
        (((X,), {}), r"fit needs targets beside an array x, got none: fit\(x, y\)"),
        (((X,), {"what": "evaluate"}), r"evaluate needs targets .*evaluate\(x, y\)"),
        (((None,), {}), "fit takes its data once, as x, got None and None"),
        (((X, Y), {"dataset": data}), "fit takes its data once"),
        (((X, Y), {"batch_size": 0}), "batch_size must be a number of rows >= 1, got 0"),
        (((data, [rd.History()]), {}), r"by their name: callbacks=\[...\]"),
        (((X,), {"batch_size": [rd.History()], "what": "predict"}), "predict takes callbacks by their name"),
        (((X, Y[:5]), {}), "70.*5|5.*70"),
    ]
    check_refused(lambda case: given(*case[0], **case[1]), cases)
    told = r"x must be a raydist.Dataset of global batches, .* got (str|list|float64|int)"
    others: list[Any] = ["files", [1.0, 2.0], np.float64(1.0), {"a": X, "b": 3}]
    check_refused(lambda x: given(x, Y), [(x, told) for x in others], rd.SpecError)
