"""A learning rate for each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from raydist.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback
from raydist.training.callbacks.learning_rates import change_rates, rates_of

__all__ = ["LearningRateScheduler"]


@final
class LearningRateScheduler(Callback):
    """Sets the learning rate at the start of every epoch. A callback.

    torch's schedulers step with the optimizer: give those to `Model.compile(scheduler=...)`.

    Args:
        schedule: Called with the epoch, counted from 0, and the present rate; gives the rate of the epoch. Groups of
            parameters with rates of their own are asked for one by one.
        verbose: 1 prints a line at each epoch.

    Raises:
        InvalidArgumentError: `schedule` is no function; (in `fit`) it gives no number.

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
        """Sets the rate of the epoch.

        Args:
            epoch: Its number, counted from 0.
            logs: Not used.

        Source: keras.callbacks.LearningRateScheduler.on_epoch_begin.
        """
        change_rates(self.model.optimizer, lambda rate: self._schedule(epoch, rate))
        if self._verbose:
            rate = rates_of(self.model.optimizer)[0]
            print(f"Epoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Logs the rate as "learning_rate": that of the first group.

        Args:
            epoch: Its number, counted from 0.
            logs: Where it is put.

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
