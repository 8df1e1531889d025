"""Small models, data and callbacks that the tests of training share."""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable
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
    defaults: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": nn.MSELoss()}
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
        for name in dir(rd.Callback):
            if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
                setattr(self, name, functools.partial(self._note, name[3:].replace("train_batch", "batch")))

    def _note(self, hook: str, *args: Any) -> None:
        *index, logs = args
        self.calls.append(" ".join([hook, *map(str, index)]))
        if hook in self._read:
            self.logs.append(dict(logs))


class At(rd.Callback):
    """Does something at a hook, the n-th time that it is called."""

    def __init__(self, hook: str, times: int, act: Callable[[], object]) -> None:
        setattr(self, hook, self._count)
        self._left, self._act = times, act

    def _count(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Logged(rd.Callback):
    """Puts the next value of a list into the logs as "score"."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["score"] = self._values[epoch]


def history_of(values: list[float], *callbacks: rd.Callback, rate: float = 1.0) -> dict[str, list[Any]]:
    """The history of a training whose scores are `values`, one an epoch, with learning rate `rate`."""
    net = small_net()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=rate))
    given = [Logged(values), *callbacks]
    return model.fit(regression(4, 4), epochs=len(values), callbacks=given, verbose=False).history
