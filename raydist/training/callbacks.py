"""Callbacks: a user's code at the joints of fit, evaluate and predict. Hook names and arguments are Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import os

    from torch import nn

    from raydist.context.strategy import Strategy

__all__ = ["BatchLogs", "Callback", "CallbackList", "History", "TrainedModel"]


class TrainedModel(Protocol):
    """The model of a callback, as far as one needs it: :class:`raydist.Model`."""

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

    def evaluate(self, dataset: Any, callbacks: Sequence[Callback] = (), *, verbose: bool = True) -> dict[str, Any]:
        """Loss and metrics over a dataset."""

    def predict(self, dataset: Any, callbacks: Sequence[Callback] = (), *, verbose: bool = True) -> Any:
        """The module's outputs for a dataset."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of module and optimizer to a file."""


class Callback:
    """Base class; override the hooks you need (keras.callbacks.Callback).

    Everything runs on the driver. Batch hooks are called once per execution (`steps_per_execution` steps), after its
    steps have been *dispatched*: their logs are fetched, which waits for the steps, only if a hook looks into them.
    Set `self.model.stop_training = True` to end `fit`.

    >>> class Stop(Callback):
    ...     def on_epoch_end(self, epoch, logs):
    ...         self.model.stop_training = logs["loss"] < 0.1
    """

    model: TrainedModel
    params: dict[str, Any]

    def set_model(self, model: TrainedModel) -> None:
        """Called first; sets `self.model`."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Called before the first hook; sets `self.params`: "epochs" and "steps" (None where they are not known)."""
        self.params = params

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """At the start of fit."""

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """At the end of fit, with the logs of the last epoch. Not called after an error."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Before the first batch of epoch `epoch`, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """After an epoch and its validation. `logs`: loss, metrics, and the same with "val_"; empty without data.

        What is added to `logs` is seen by later callbacks and by the history.
        """

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Before an execution that starts with batch `batch` of the epoch, counted from 0."""

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After an execution whose last batch was `batch`. `logs`: means over the epoch so far, read in the hook."""

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """At the start of evaluate, and of the validation in fit."""

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """At the end of evaluate, and of the validation in fit, with its results."""

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """As on_train_batch_begin."""

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """As on_train_batch_end."""

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """At the start of predict."""

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """At the end of predict."""

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Before batch `batch`, counted from 0."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """After batch `batch`; `logs["outputs"]` is its prediction."""


@final
class CallbackList:
    """The callbacks of one fit, evaluate or predict, called in order."""

    def __init__(self, callbacks: Sequence[Callback], model: TrainedModel, params: dict[str, Any]) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise InvalidArgumentError(
                    f"callbacks must be instances of raydist.Callback, got {callback!r}. Was a class passed?"
                )
        self._callbacks = tuple(callbacks)
        self.call("set_model", model)
        self.call("set_params", params)

    def call(self, hook: str, *args: Any) -> None:
        """Call `hook` of every callback."""
        for callback in self._callbacks:
            getattr(callback, hook)(*args)

    def batch_end(self, hook: str, batch: int, read: Callable[[], Mapping[str, Any]]) -> None:
        """Call a batch's end hook with logs that `read()` gives when they are looked at."""
        logs = BatchLogs(read, batch)
        self.call(hook, batch, logs)
        logs.seal()


@final
class BatchLogs(Mapping[str, Any]):
    """Logs of a batch, read at first use: looking at them waits for the steps, so nobody pays who does not look.

    >>> logs = BatchLogs(lambda: {"loss": 0.5})
    >>> logs["loss"], dict(logs)
    (0.5, {'loss': 0.5})
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], batch: int = 0) -> None:
        self._batch = batch
        self._read: Callable[[], Mapping[str, Any]] | None = read
        self._values: Mapping[str, Any] | None = None

    def seal(self) -> None:
        """The hook is over: training goes on, and what was not read belongs to later batches from now on."""
        self._read = None

    def _fetched(self) -> Mapping[str, Any]:
        if self._values is None:
            if self._read is None:
                raise FailedPreconditionError(
                    f"The logs of batch {self._batch} must be read in its hook, because later they belong to later "
                    "batches. Copy them there: dict(logs)."
                )
            self._values = self._read()
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())

    def __bool__(self) -> bool:
        return True  # `logs or {}` must not wait


@final
class History(Callback):
    """What `fit` returns: the logs of every epoch (keras.callbacks.History).

    Attributes:
        history: Log name -> one value per epoch.
        epoch: The epochs that saw data.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epoch: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if logs:
            self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
