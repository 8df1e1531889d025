"""Small models, data and callbacks that the tests of training share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import raydist as rd


def regression_arrays(num_rows: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of a linear relation with noise, float64: (n, 3) -> (n, 1)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 3))
    y = x @ np.array([[1.0], [-2.0], [0.5]]) + 0.1 * rng.normal(size=(num_rows, 1))
    return x, y


def regression(num_rows: int, batch_size: int) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(regression_arrays(num_rows)).batch(batch_size)


def small_net() -> nn.Module:
    """The same float64 network at every call."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def line(weight: float = 0.0) -> nn.Linear:
    """y = weight * x in float64: small enough to compute by hand."""
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, weight)
    return net


def column(values: list[float]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float64)[:, None]


def compiled(net: nn.Module, **settings: Any) -> rd.Model:
    """A model over `net` with SGD and a squared error; `settings` replace arguments of `compile`."""
    model = rd.Model(net)  # no scope is open: nothing need have been made in one
    defaults: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": nn.MSELoss(),
    }
    model.compile(**(defaults | settings))
    return model


def bare_loop(net: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], epochs: int) -> list[float]:
    """The same training in plain PyTorch; returns the mean loss over rows of each epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    history = []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            total, rows = total + loss.item() * len(x), rows + len(x)
        history.append(total / rows)
    return history


def batches_of(arrays: tuple[np.ndarray[Any, Any], ...], size: int) -> list[Any]:
    tensors = [torch.from_numpy(array) for array in arrays]
    return [tuple(t[i : i + size] for t in tensors) for i in range(0, len(tensors[0]), size)]


def weights_of(net: nn.Module) -> list[torch.Tensor]:
    return [copy.deepcopy(parameter.detach()) for parameter in net.parameters()]


class Recorder(rd.Callback):
    """Writes down every hook with its number, and the logs of those named in `read`."""

    def __init__(self, read: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.logs: list[dict[str, Any]] = []
        self._read = read

    def _note(self, hook: str, logs: Mapping[str, Any], index: int | None = None) -> None:
        self.calls.append(hook if index is None else f"{hook} {index}")
        if hook in self._read:
            self.logs.append(dict(logs))

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self._note("train_begin", logs)

    def on_train_end(self, logs: dict[str, Any]) -> None:
        self._note("train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        self._note("epoch_begin", logs, epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._note("epoch_end", logs, epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        self._note("batch_begin", logs, batch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self._note("batch_end", logs, batch)

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        self._note("test_begin", logs)

    def on_test_end(self, logs: dict[str, Any]) -> None:
        self._note("test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        self._note("test_batch_begin", logs, batch)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self._note("test_batch_end", logs, batch)

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        self._note("predict_begin", logs)

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        self._note("predict_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        self._note("predict_batch_begin", logs, batch)

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        self._note("predict_batch_end", logs, batch)
