"""A callback that sets the learning rate of each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from raydist.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.learning_rates import change_rates, rates_of

__all__ = ["LearningRateScheduler"]


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
        """Set the rate of the epoch.

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: Not used.

        Source: keras.callbacks.LearningRateScheduler.on_epoch_begin.
        """
        change_rates(self.model.optimizer, lambda rate: self._schedule(epoch, rate))
        if self._verbose:
            rate = rates_of(self.model.optimizer)[0]
            print(f"Epoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the rate of the first parameter group as "learning_rate".

        Args:
            epoch: Number of the epoch, counted from 0.
            logs: Logs to add the rate to.

        Source: keras.callbacks.LearningRateScheduler.on_epoch_end.

        >>> import torch
        >>> with rd.OneDeviceStrategy("cpu").scope():
        ...     model = rd.Model(torch.nn.Linear(1, 1))
        ...     model.compile("sgd", "mse")
        >>> schedule, logs = rd.LearningRateScheduler(lambda epoch, rate: rate / 2), {}
        >>> schedule.set_model(model)
        >>> schedule.on_epoch_end(0, logs)
        >>> logs
        {'learning_rate': 0.001}
        """
        logs["learning_rate"] = rates_of(self.model.optimizer)[0]
