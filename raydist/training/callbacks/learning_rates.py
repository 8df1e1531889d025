"""Learning rates of an optimizer, and the callbacks that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.monitor import Mode, Monitor


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def change_rates(optimizer: torch.optim.Optimizer, change: Callable[[float], Any]) -> bool:
    """Set each group's rate to the result of `change` for its current rate. Return True if any rate changed.

    Raises:
        InvalidArgumentError: `change` did not return a number.
    """
    before = rates_of(optimizer)
    after = [_number(change(rate)) for rate in before]
    for group, rate in zip(optimizer.param_groups, after, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.full_like(group["lr"], rate)
        else:
            group["lr"] = rate
    return after != before


def _number(rate: Any) -> float:
    if isinstance(rate, bool | str | bytes) or not hasattr(rate, "__float__"):
        raise InvalidArgumentError(f"A learning rate must be a number, got {rate!r:.80}. Return one from the schedule.")
    return float(rate)


@final
class LearningRateScheduler(Callback):
    """A callback that sets the learning rate at the start of every epoch.

    torch's schedulers step with the optimizer: pass them to `Model.compile(scheduler=...)`.

    Args:
        schedule: Called with the epoch, counted from 0, and the current rate; returns the rate of the epoch. Called
            once for each parameter group, with the group's rate.
        verbose: 1 prints a line at each epoch.

    Raises:
        InvalidArgumentError: `schedule` is not a function; (in `fit`) it does not return a number.

    >>> import torch
    >>> x = torch.ones(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.5), torch.nn.MSELoss())
    >>> halve = rd.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    >>> model.fit(x, x, epochs=3, callbacks=[halve], verbose=False).history["learning_rate"]
    [0.5, 0.25, 0.125]

    Source: keras.callbacks.LearningRateScheduler.
    """

    def __init__(self, schedule: Callable[[int, float], Any], verbose: int = 0) -> None:
        if not callable(schedule):
            raise InvalidArgumentError(f"schedule must be a function of epoch and rate, got {schedule!r:.80}.")
        self._schedule = schedule
        self._verbose = verbose

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Set the rate of the epoch."""
        change_rates(self.model.optimizer, lambda rate: self._schedule(epoch, rate))
        if self._verbose:
            rate = rates_of(self.model.optimizer)[0]
            print(f"Epoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the rate of the first parameter group as "learning_rate"."""
        logs["learning_rate"] = rates_of(self.model.optimizer)[0]


@final
class ReduceLROnPlateau(Callback):
    """A callback that multiplies the learning rate by `factor` after `patience` epochs without improvement.

    Args:
        monitor: Name of the logged value.
        factor: Factor for the rate, < 1.
        patience: Epochs to wait.
        verbose: 1 prints a line at each reduction.
        mode: "min" or "max": the better direction; "auto" as for :class:`EarlyStopping`.
        min_delta: A change counts as an improvement if it is larger than this, >= 0.
        cooldown: Epochs after a reduction that are not counted.
        min_lr: Lower limit for reduced rates.

    Attributes:
        wait: Epochs since the last improvement.
        cooldown_counter: Remaining epochs of the cooldown.

    Raises:
        InvalidArgumentError: `factor` is not in (0, 1), `mode` is invalid, or a number is negative.

    >>> import torch
    >>> x = torch.ones(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=1e-12), torch.nn.MSELoss())
    >>> reduce = rd.ReduceLROnPlateau("loss", factor=0.5, patience=1)
    >>> model.fit(x, x, epochs=3, callbacks=[reduce], verbose=False).history["learning_rate"]
    [1e-12, 1e-12, 5e-13]

    Source: keras.callbacks.ReduceLROnPlateau.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise InvalidArgumentError(f"factor must be > 0 and < 1, so that the rate becomes smaller, got {factor!r}.")
        if min(patience, cooldown, min_lr) < 0:
            got = f"{patience!r}, {cooldown!r} and {min_lr!r}"
            raise InvalidArgumentError(f"patience, cooldown and min_lr must be >= 0, got {got}.")
        self._monitor = Monitor(monitor, mode, min_delta, owner="ReduceLROnPlateau")
        self._factor = factor
        self._patience = patience
        self._verbose = verbose
        self._cooldown = cooldown
        self._min_lr = min_lr
        self.wait = 0
        self.cooldown_counter = 0

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the state of an earlier `fit`."""
        self._monitor.restart()
        self.wait = self.cooldown_counter = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the rate as "learning_rate", and reduce it for later epochs if due. Warns if the value is not logged."""
        if not logs:
            return
        logs["learning_rate"] = rates_of(self.model.optimizer)[0]
        value = self._monitor.value(logs)
        if value is not None:
            self._judge(epoch, value)

    def _judge(self, epoch: int, value: float) -> None:
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._monitor.update_best(value, lambda: self.model.metrics):
            self.wait = 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self._patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        smaller = change_rates(self.model.optimizer, lambda rate: max(rate * self._factor, min(rate, self._min_lr)))
        if not smaller:
            return
        self.cooldown_counter, self.wait = self._cooldown, 0
        if self._verbose:
            rate = rates_of(self.model.optimizer)[0]
            print(f"Epoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {rate}.")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the wait since then."""
        return {"wait": self.wait, "cooldown_counter": self.cooldown_counter, "best": self._monitor.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another ReduceLROnPlateau."""
        self.wait, self.cooldown_counter = state["wait"], state["cooldown_counter"]
        self._monitor.best = state["best"]
