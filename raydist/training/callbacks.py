"""Callbacks: a user's code at the joints of fit, evaluate and predict. Hook names and arguments are Keras's."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.training.hooks import PredictHooks, TestHooks, TrainHooks

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from raydist.context.strategy import Strategy

__all__ = ["Callback", "History", "TrainedModel"]


class TrainedModel(Protocol):
    """What a callback sees of its model, a :class:`raydist.Model`: a protocol, because models know callbacks."""

    stop_training: bool

    @property
    def module(self) -> nn.Module:
        """The trained module."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that trains it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that trains it."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module here, on the driver."""

    def compile(
        self,
        optimizer: torch.optim.Optimizer | str,
        loss: Callable[[Any, Any], torch.Tensor] | str,
        metrics: Any = (),
        steps_per_execution: int = 1,
    ) -> None:
        """Say how to train."""

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        shuffle: bool = True,
        initial_epoch: int = 0,
        validation_freq: int | Container[int] = 1,
        validation_steps: int | None = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> History:
        """Train for some epochs."""

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
    ) -> dict[str, Any]:
        """Loss and metrics over a dataset."""

    def predict(
        self,
        x: Any = None,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
        steps: int | None = None,
    ) -> Any:
        """The module's outputs for a dataset."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of module and optimizer to a file."""


class Callback(TrainHooks, TestHooks, PredictHooks):
    """Code of yours at the joints of `fit`, `evaluate` and `predict`: override the hooks you need.

    Hooks are called on the driver, one callback after the other in the order of the list. Batch hooks are called once
    per execution (`steps_per_execution` steps), after its steps have been *dispatched*: their logs are fetched, which
    waits for the steps, only if a hook looks into them. An error in a hook ends the training and is raised by `fit`.

    Attributes:
        model: The model that calls the hooks. Set `self.model.stop_training = True` to end `fit`.
        params: See :meth:`set_params`.

    >>> import torch
    >>> class StopAt(rd.Callback):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...
    ...     def on_epoch_end(self, epoch, logs):
    ...         self.model.stop_training = logs["loss"] < self.loss
    >>> x = torch.arange(4.0)[:, None].numpy()
    >>> data = rd.Dataset.from_tensor_slices((x, 2 * x)).batch(2)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile(torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss())
    >>> history = model.fit(data, epochs=100, callbacks=[StopAt(0.1)], verbose=False)
    >>> history.history["loss"][-1] < 0.1, len(history.epoch) < 100
    (True, True)

    Source: keras.callbacks.Callback.
    """

    model: TrainedModel
    params: dict[str, Any]

    def set_model(self, model: TrainedModel) -> None:
        """Sets `self.model`. Called first, by `fit`, `evaluate` and `predict`.

        Args:
            model: The model that the callback was given to.

        Source: keras.callbacks.Callback.set_model.

        >>> import torch
        >>> callback = rd.Callback()
        >>> callback.set_model(rd.Model(torch.nn.Identity()))
        >>> callback.model.module
        Identity()
        """
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Sets `self.params`. Called before the first hook.

        Args:
            params: "epochs", and "steps": batches of an epoch. None where they are not known, or there are none.

        Source: keras.callbacks.Callback.set_params.

        >>> callback = rd.Callback()
        >>> callback.set_params({"epochs": 2, "steps": None})
        >>> callback.params["epochs"]
        2
        """
        self.params = params


@final
class History(Callback):
    """The logs of every epoch: what `fit` returns.

    Attributes:
        history: Log name -> one value per epoch, floats for single numbers and CPU tensors for others.
        epoch: Numbers of the epochs that saw data, counted from 0.

    >>> history = rd.History()
    >>> history.on_epoch_end(0, {"loss": 0.5})
    >>> history.history, history.epoch
    ({'loss': [0.5]}, [0])

    Source: keras.callbacks.History.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Appends the logs of an epoch.

        Args:
            epoch: Its number, counted from 0.
            logs: Log name -> value; an epoch without data has none and is passed over.

        Source: keras.callbacks.History.

        >>> history = rd.History()
        >>> history.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
        >>> history.history["val_loss"]
        [0.75]
        """
        if logs:
            self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
