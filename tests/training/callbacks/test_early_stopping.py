"""Callbacks that stop the training."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from tests.training.toys import Recorder, column, compiled, line, regression, small_net, weights_of


class Script(rd.Callback):
    """Puts the next value of a list into the logs, and the epoch into a weight of the module."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["score"] = self._values[epoch]
        with torch.no_grad():
            next(self.model.parameters()).fill_(float(epoch))


def epochs_run(values: list[float], **settings: Any) -> tuple[int, float]:
    """How many epochs were run, and the epoch whose weights the module has in the end."""
    net = small_net()
    stopping = rd.EarlyStopping("score", **settings)
    callbacks = [Script(values), stopping]
    history = compiled(net).fit(regression(4, 4), epochs=len(values), callbacks=callbacks, verbose=False)
    return len(history.epoch), weights_of(net)[0][0, 0].item()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3),
        ({"patience": 2}, 4),
        ({"mode": "max"}, 2),
        ({"min_delta": 1.5}, 2),
        ({"patience": 9}, 5),
    ],
)
def test_stops_after_patience_epochs_without_improvement(settings: dict[str, Any], expected: int) -> None:
    assert epochs_run([5.0, 4.0, 4.5, 4.0, 6.0], **settings)[0] == expected


def test_weights_that_state_dict_lacks_cannot_be_restored() -> None:
    model = rd.Model(torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2)}))
    for restores in (True, False):
        stopping = rd.EarlyStopping("loss", restore_best_weights=restores)
        stopping.set_model(model)
        told = pytest.raises(rd.InvalidArgumentError, match="the module has 'words'. Leave it out")
        with told if restores else contextlib.nullcontext():
            stopping.on_train_begin({})


def test_restores_the_best_weights() -> None:
    values = [5.0, 4.0, 4.5, 4.6, 6.0]
    assert epochs_run(values, patience=2, restore_best_weights=True) == (4, 1.0)
    assert epochs_run(values, patience=2) == (4, 3.0)


def test_nan_is_never_an_improvement() -> None:
    assert epochs_run([float("nan"), float("nan"), 1.0], patience=2)[0] == 2
    assert epochs_run([float("nan"), float("nan"), 1.0], patience=0)[0] == 2  # not after the first, as Keras


def test_a_missing_value_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"monitors 'val_loss', which is not among the logs \['loss'\]"):
        compiled(small_net()).fit(regression(4, 4), callbacks=[rd.EarlyStopping()], verbose=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mode": "up"}, "mode must be"), ({"patience": -1}, "must be >= 0"), ({"min_delta": -1}, ">= 0")],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.EarlyStopping(**settings)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([5.0, 4.0, 3.0, 2.0], {"baseline": 1.0, "patience": 2}, 4),  # better and better, never good
        ([5.0, 5.0, 3.0, 2.0], {"baseline": 1.0, "patience": 2}, 2),
        ([5.0, 0.5, 0.6, 0.7], {"baseline": 1.0, "patience": 2}, 4),
        ([1.0, 2.0, 3.0, 4.0, 5.0], {"start_from_epoch": 2}, 4),
    ],
)
def test_baseline_and_first_epoch(values: list[float], settings: dict[str, Any], expected: int) -> None:
    assert epochs_run(values, **settings)[0] == expected


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    epochs_run([1.0, 2.0, 3.0], verbose=1, restore_best_weights=True)
    assert capsys.readouterr().out == (
        "Epoch 2: early stopping\nRestoring module state from the end of the best epoch: 1.\n"
    )


def test_its_state_goes_on() -> None:
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


def test_it_ends_in_order_after_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Recorder()
    compiled(line(1.0)).fit(data(), epochs=2, callbacks=[rd.TerminateOnNaN(), seen], verbose=False)
    assert seen.calls[-3:] == ["batch_end 1", "epoch_end 0", "train_end"]
    assert capsys.readouterr().out == "Batch 1: Invalid loss, terminating training\n"


def test_or_it_raises() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="The loss must be a finite number, got inf after batch 1"):
        compiled(line(1.0)).fit(data(), callbacks=[rd.TerminateOnNaN(raise_error=True)], verbose=False)
