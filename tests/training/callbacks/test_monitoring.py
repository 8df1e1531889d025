"""Callbacks that watch a logged value: they stop training or change learning rates."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from raydist.training.callbacks.learning_rates import change_rates
from raydist.training.callbacks.monitor import Monitor
from tests.refused import check_refused
from tests.training.toys import Logged, Recorder, column, compiled, history_of, line, regression, small_net, weights_of


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=1.0)


def test_a_rate_is_a_number_and_one_in_a_tensor_stays_there() -> None:
    one = optimizer(torch.tensor(0.5))
    change_rates(one, lambda rate: torch.tensor(2 * rate))
    assert torch.equal(one.param_groups[0]["lr"], torch.tensor(1.0))
    rates: list[Any] = [None, "0.1", True]
    told = "A learning rate must be a number, got"
    check_refused(lambda rate: change_rates(optimizer(0.5), lambda _: rate), [(rate, told) for rate in rates])


def test_the_schedule_sets_the_rate_of_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = rd.LearningRateScheduler(lambda epoch, rate: rate if epoch < 1 else rate / 4, verbose=1)
    assert history_of([0.0] * 3, schedule)["learning_rate"] == [1.0, 0.25, 0.0625]
    assert capsys.readouterr().out.splitlines()[1] == "Epoch 2: LearningRateScheduler setting learning rate to 0.25."


def test_rates(capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[list[float], dict[str, Any], list[float]]] = [
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"patience": 1}, [1, 1, 1, 0.5, 0.25]),
        ([3.0, 2.0, 2.0, 2.0, 1.0], {"patience": 2}, [1, 1, 1, 1, 0.5]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "cooldown": 1}, [1, 1, 0.5, 0.25, 0.125]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.25]),
        ([3.0, 3.0, 3.0, 3.0, 3.0], {"patience": 1, "min_lr": 0.4}, [1, 1, 0.5, 0.4, 0.4]),
        ([1.0, 2.0, 3.0, 3.0, 3.0], {"patience": 1, "mode": "max"}, [1, 1, 1, 1, 0.5]),
        ([3.0, 2.9, 2.8, 2.7, 2.6], {"patience": 1, "min_delta": 0.15}, [1, 1, 0.5, 0.5, 0.25]),
    ]
    for values, settings, expected in cases:
        reduce = rd.ReduceLROnPlateau("score", factor=0.5, **settings)
        assert history_of(values, reduce)["learning_rate"] == expected, settings
    assert capsys.readouterr().out == ""
    history_of([1.0, 2.0], rd.ReduceLROnPlateau("score", patience=1, verbose=1))
    assert capsys.readouterr().out == "Epoch 2: ReduceLROnPlateau reducing learning rate to 0.1.\n"
    with pytest.warns(UserWarning, match=r"ReduceLROnPlateau monitors 'val_loss', which is not among the logs \['lea"):
        history_of([1.0], rd.ReduceLROnPlateau())


def test_bad_settings() -> None:
    cases: list[tuple[Any, str]] = [
        ((rd.ReduceLROnPlateau, {"factor": 1.0}), "factor must be"),
        ((rd.ReduceLROnPlateau, {"cooldown": -1}), "must be >= 0"),
        ((rd.ReduceLROnPlateau, {"mode": "up"}), "mode must be"),
        ((rd.EarlyStopping, {"patience": -1}), "must be >= 0"),
        ((rd.EarlyStopping, {"min_delta": -1}), ">= 0"),
        ((rd.LearningRateScheduler, {"schedule": 0.1}), "schedule must be a function of epoch and rate, got 0.1"),
    ]
    check_refused(lambda case: case[0](**case[1]), cases)


class Script(Logged):
    """Puts the epoch into a weight of the module, too."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        super().on_epoch_end(epoch, logs)
        with torch.no_grad():
            next(self.model.parameters()).fill_(float(epoch))


def epochs_run(values: list[float], **settings: Any) -> tuple[int, float]:
    """Return the number of epochs, and the epoch whose weights the module has in the end."""
    net = small_net()
    stopping = rd.EarlyStopping("score", **settings)
    callbacks = [Script(values), stopping]
    history = compiled(net).fit(regression(4, 4), epochs=len(values), callbacks=callbacks, verbose=False)
    return len(history.epoch), weights_of(net)[0][0, 0].item()


def test_stops_after_patience_epochs_without_improvement(capsys: pytest.CaptureFixture[str]) -> None:
    usual, nan = [5.0, 4.0, 4.5, 4.0, 6.0], [float("nan"), float("nan"), 1.0]
    cases: list[tuple[list[float], dict[str, Any], int]] = [
        (usual, {}, 3),
        (usual, {"patience": 2}, 4),
        (usual, {"mode": "max"}, 2),
        (usual, {"min_delta": 1.5}, 2),
        (usual, {"patience": 9}, 5),
        (nan, {"patience": 2}, 2),
        (nan, {"patience": 0}, 2),  # not after the first, as Keras
        ([5.0, 4.0, 3.0, 2.0], {"baseline": 1.0, "patience": 2}, 4),  # better and better, never good
        ([5.0, 5.0, 3.0, 2.0], {"baseline": 1.0, "patience": 2}, 2),
        ([5.0, 0.5, 0.6, 0.7], {"baseline": 1.0, "patience": 2}, 4),
        ([1.0, 2.0, 3.0, 4.0, 5.0], {"start_from_epoch": 2}, 4),
    ]
    for values, settings, expected in cases:
        assert epochs_run(values, **settings)[0] == expected, (values, settings)
    values = [5.0, 4.0, 4.5, 4.6, 6.0]
    assert epochs_run(values, patience=2) == (4, 3.0)
    assert capsys.readouterr().out == ""
    assert epochs_run(values, patience=2, restore_best_weights=True, verbose=1) == (4, 1.0)
    assert capsys.readouterr().out == (
        "Epoch 4: early stopping\nRestoring module state from the end of the best epoch: 2.\n"
    )


def test_weights_that_state_dict_lacks_cannot_be_restored() -> None:
    model = rd.Model(torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2)}))
    for restores in (True, False):
        stopping = rd.EarlyStopping("loss", restore_best_weights=restores)
        stopping.set_model(model)
        told = pytest.raises(rd.InvalidArgumentError, match="the module has 'words'. Leave it out")
        with told if restores else contextlib.nullcontext():
            stopping.on_train_begin({})


def test_its_state_goes_on_of_early_stopping() -> None:
    first, second = (rd.EarlyStopping("score", patience=2, restore_best_weights=True) for _ in range(2))
    first.set_model(compiled(small_net()))
    first.on_epoch_end(0, {"score": 1.0})
    first.on_epoch_end(1, {"score": 2.0})
    second.load_state_dict(first.state_dict())
    assert (second.wait, second.best, second.best_epoch) == (1, 1.0, 0)
    net = small_net()
    model = compiled(net)
    second.set_model(model)
    with torch.no_grad():
        next(net.parameters()).fill_(9.0)
    second.on_epoch_end(2, {"score": 3.0})
    assert model.stop_training
    second.on_train_end({})
    assert not bool((next(net.parameters()) == 9.0).any())


def data() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices((column([1.0, np.inf, 1.0]), column([0.0, 0.0, 0.0]))).batch(1)


def test_a_loss_that_is_not_finite_ends_training_in_order_or_raises(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Recorder()
    compiled(line(1.0)).fit(data(), epochs=2, callbacks=[rd.TerminateOnNaN(), seen], verbose=False)
    assert seen.calls[-3:] == ["batch_end 1", "epoch_end 0", "train_end"]
    assert capsys.readouterr().out == "Batch 1: Invalid loss, terminating training\n"
    with pytest.raises(rd.FailedPreconditionError, match="The loss must be a finite number, got inf after batch 1"):
        compiled(line(1.0)).fit(data(), callbacks=[rd.TerminateOnNaN(raise_error=True)], verbose=False)


class Undecided(MeanSquaredError):
    higher_is_better: Any = None


METRICS: dict[str, Any] = {"accuracy": MulticlassAccuracy(3), "error": MeanSquaredError(), "odd": Undecided()}


def test_auto_asks_the_metric() -> None:
    directions = {
        "loss": "min",
        "val_loss": "min",
        "val_accuracy": "max",
        "accuracy": "max",
        "error": "min",
        "x": "min",
    }
    for name, expected in directions.items():
        assert Monitor(name).direction(lambda: METRICS) == expected, name
    with pytest.raises(rd.InvalidArgumentError, match=r"which direction of 'val_odd' is better.*Give mode="):
        Monitor("val_odd", owner="EarlyStopping").improves(1.0, lambda: METRICS, 2.0)
    assert Monitor("val_odd", "max").direction(lambda: METRICS) == "max"


def test_a_value_must_be_one_number() -> None:
    monitor = Monitor("map", owner="EarlyStopping")
    assert monitor.value({"map": torch.tensor([2.5])}) == 2.5
    with pytest.warns(UserWarning, match="not among the logs"):
        assert monitor.value({}) is None
    with pytest.raises(rd.InvalidArgumentError, match="EarlyStopping must monitor a single number"):
        monitor.value({"map": torch.ones(2)})
