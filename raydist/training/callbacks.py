"""Callbacks: a user's code at the joints of fit, evaluate and predict. Hook names and arguments are Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

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

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module here, on the driver."""

    def compile(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        metrics: Any = (),
        steps_per_execution: int = 1,
    ) -> None:
        """Say how to train."""

    def fit(
        self,
        dataset: Any,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
        *,
        verbose: bool = True,
    ) -> History:
        """Train for some epochs."""

    def evaluate(self, dataset: Any, callbacks: Sequence[Callback] = (), *, verbose: bool = True) -> dict[str, Any]:
        """Loss and metrics over a dataset."""

    def predict(self, dataset: Any, callbacks: Sequence[Callback] = (), *, verbose: bool = True) -> Any:
        """The module's outputs for a dataset."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of module and optimizer to a file."""


class Callback:
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

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `fit`, before the first epoch.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_begin.

        >>> class Count(rd.Callback):
        ...     def on_train_begin(self, logs):
        ...         self.num_epochs = 0  # a callback may serve several fits
        >>> callback = Count()
        """

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """At the end of `fit`. Not called after an error.

        Args:
            logs: Those of the last epoch: see :meth:`on_epoch_end`.

        Source: keras.callbacks.Callback.on_train_end.

        >>> class Save(rd.Callback):
        ...     def on_train_end(self, logs):
        ...         self.model.save("model.safetensors")
        >>> callback = Save()
        """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Before the first batch of an epoch.

        Args:
            epoch: Its number, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_epoch_begin.

        >>> class WarmUp(rd.Callback):
        ...     def __init__(self, optimizer):
        ...         self.optimizer = optimizer
        ...
        ...     def on_epoch_begin(self, epoch, logs):
        ...         self.optimizer.param_groups[0]["lr"] = min(0.1, 0.02 * (epoch + 1))
        """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """After an epoch and its validation. All steps of the epoch are done.

        Args:
            epoch: Its number, counted from 0.
            logs: "loss", the metrics, and the same of the validation data with "val_" in front; empty for an epoch
                without data. What is added to it is seen by later callbacks and by the history.

        Source: keras.callbacks.Callback.on_epoch_end.

        >>> class Gap(rd.Callback):
        ...     def on_epoch_end(self, epoch, logs):
        ...         logs["gap"] = logs["val_loss"] - logs["loss"]
        >>> logs = {"loss": 0.25, "val_loss": 0.75}
        >>> Gap().on_epoch_end(0, logs)
        >>> logs["gap"]
        0.5
        """

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Before an execution of training steps is dispatched.

        Args:
            batch: Number of its first batch in the epoch, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_train_batch_begin.

        >>> class Halt(rd.Callback):
        ...     def on_train_batch_begin(self, batch, logs):
        ...         self.model.stop_training = batch >= 100  # ends fit after this execution
        """

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After an execution of training steps was dispatched; the steps may still be running.

        Args:
            batch: Number of its last batch in the epoch, counted from 0.
            logs: "loss" and metrics, means over the epoch so far. To look into them waits for the dispatched steps, and
                must be done in the hook: what was not read raises FailedPreconditionError later.

        Source: keras.callbacks.Callback.on_train_batch_end.

        >>> class Every100(rd.Callback):
        ...     def on_train_batch_end(self, batch, logs):
        ...         if batch % 100 == 99:
        ...             print(batch, logs["loss"])
        >>> Every100().on_train_batch_end(99, {"loss": 0.5})
        99 0.5
        """

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `evaluate`, and of each validation in `fit`.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_test_begin.

        >>> class Announce(rd.Callback):
        ...     def on_test_begin(self, logs):
        ...         print("evaluating")
        >>> Announce().on_test_begin({})
        evaluating
        """

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """At the end of `evaluate`, and of each validation in `fit`.

        Args:
            logs: Its results: "loss" and metrics, without "val_".

        Source: keras.callbacks.Callback.on_test_end.

        >>> class Best(rd.Callback):
        ...     best = float("inf")
        ...
        ...     def on_test_end(self, logs):
        ...         self.best = min(self.best, logs["loss"])
        >>> callback = Best()
        >>> callback.on_test_end({"loss": 0.5})
        >>> callback.best
        0.5
        """

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Before an execution of evaluation steps is dispatched.

        Args:
            batch: Number of its first batch in the pass, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_test_batch_begin.

        >>> class First(rd.Callback):
        ...     def on_test_batch_begin(self, batch, logs):
        ...         if batch == 0:
        ...             print("the first batch is on its way")
        >>> First().on_test_batch_begin(0, {})
        the first batch is on its way
        """

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After an execution of evaluation steps was dispatched; the steps may still be running.

        Args:
            batch: Number of its last batch in the pass, counted from 0.
            logs: "loss" and metrics, means over the pass so far; read as in :meth:`on_train_batch_end`.

        Source: keras.callbacks.Callback.on_test_batch_end.

        >>> class Watch(rd.Callback):
        ...     def on_test_batch_end(self, batch, logs):
        ...         if batch % 100 == 99:
        ...             print(batch, logs["loss"])
        >>> Watch().on_test_batch_end(99, {"loss": 0.25})
        99 0.25
        """

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """At the start of `predict`.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_begin.

        >>> import torch
        >>> class Announce(rd.Callback):
        ...     def on_predict_begin(self, logs):
        ...         print("predicting with", self.model.module)
        >>> outputs = rd.Model(torch.nn.Identity()).predict(rd.Dataset.range(2).batch(2), [Announce()], verbose=False)
        predicting with Identity()
        """

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """At the end of `predict`, when all outputs are there.

        Args:
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_end.

        >>> class Done(rd.Callback):
        ...     def on_predict_end(self, logs):
        ...         print("all outputs are there")
        >>> Done().on_predict_end({})
        all outputs are there
        """

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Before a batch is dispatched in `predict`.

        Args:
            batch: Its number, counted from 0.
            logs: Empty.

        Source: keras.callbacks.Callback.on_predict_batch_begin.

        >>> import torch
        >>> class Number(rd.Callback):
        ...     def on_predict_batch_begin(self, batch, logs):
        ...         print("batch", batch)
        >>> outputs = rd.Model(torch.nn.Identity()).predict(rd.Dataset.range(3).batch(2), [Number()], verbose=False)
        batch 0
        batch 1
        """

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After a batch was dispatched in `predict`; it may still be running.

        Args:
            batch: Its number, counted from 0.
            logs: "outputs": its prediction, as `predict` returns it. To look into it waits for the batch.

        Source: keras.callbacks.Callback.on_predict_batch_end.

        >>> import torch
        >>> class Show(rd.Callback):
        ...     def on_predict_batch_end(self, batch, logs):
        ...         print(batch, logs["outputs"].tolist())
        >>> model = rd.Model(torch.nn.Identity())
        >>> outputs = model.predict(rd.Dataset.range(3).batch(2), callbacks=[Show()], verbose=False)
        0 [0, 1]
        1 [2]
        """


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
