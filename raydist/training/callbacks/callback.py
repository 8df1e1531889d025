"""Callbacks: user code that fit, evaluate and predict call at fixed points. Hook names and arguments are Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.training.callbacks.hooks import PredictHooks, TestHooks, TrainHooks

if TYPE_CHECKING:
    from raydist.checkpoints.checkpoint import Checkpoint
    from raydist.distributed_dataset import DistributedDataset


class FitSaver(Protocol):
    """Saves a `fit` while it runs, and restores it; called after all callbacks."""

    def restore(self) -> str | None:
        """Restore the newest checkpoint; return its path, or None if there is none. May be called again."""

    def after_execution(self) -> None:
        """Save if due, after an execution and all callbacks."""

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Save if due, after an epoch and all callbacks."""

    def finish(self) -> None:
        """Clean up after training has ended normally and callbacks were called."""


class Callback(TrainHooks, TestHooks, PredictHooks):
    """User code that `fit`, `evaluate` and `predict` call at fixed points: override the hooks you need.

    Hooks are called on the driver, one callback after the other in the order of the list. Batch hooks are called once
    per execution (`steps_per_execution` steps), after its steps have been *dispatched*: their logs are fetched, which
    blocks until the steps are done, only if a hook reads them. An error in a hook ends the training; `fit` raises it.

    Hooks, logs and histories are those of Keras 3, with these exceptions: losses of weighted rows are divided by the
    sum of the weights, not by the number of rows, so that N replicas and one agree; if the data ends before
    `steps_per_epoch`, training ends instead of restarting the data; the last execution counts the batches that it had;
    NaN is never the best value; and "auto" assumes that smaller is better for names that are no metric's (logs of
    callbacks).

    Attributes:
        model: The :class:`raydist.Model` that calls the hooks. Set `self.model.stop_training = True` to end `fit`.
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

    model: Any  # an rd.Model, whose module imports this one
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        """Set `self.model`. Called first, by `fit`, `evaluate` and `predict`.

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
        """Set `self.params`. Called before the first hook.

        Args:
            params: "epochs", and "steps": the number of batches of an epoch. A value is None if unknown or not
                applicable.

        Source: keras.callbacks.Callback.set_params.

        >>> callback = rd.Callback()
        >>> callback.set_params({"epochs": 2, "steps": None})
        >>> callback.params["epochs"]
        2
        """
        self.params = params

    def _set_data(self, data: DistributedDataset) -> None:
        """Record the dataset that `fit` trains on. Called before the first hook."""

    def _end_epoch(self) -> None:
        """Record the end of an epoch's training, before its iterator is closed."""

    def _saver(self, new_checkpoint: Callable[[], Checkpoint], state: Any) -> FitSaver | None:
        """Return a saver of the `fit`, if this callback needs one; `state` is the `FitState`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for checkpoints: `fit(checkpoint=)` saves it.

        Override together with :meth:`load_state_dict` in a callback that counts or collects.

        Returns:
            Tensors, arrays and JSON values by names of your choice; empty by default.

        Source: raydist's own; Keras's callbacks begin anew.

        >>> rd.Callback().state_dict()
        {}
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`. Called by a `fit` that resumes, after `on_train_begin`.

        Args:
            state: Result of `state_dict`.

        Source: raydist's own.

        >>> class Count(rd.Callback):
        ...     num_epochs = 0
        ...     def on_epoch_end(self, epoch, logs):
        ...         self.num_epochs += 1
        ...     def state_dict(self):
        ...         return {"num_epochs": self.num_epochs}
        ...     def load_state_dict(self, state):
        ...         self.num_epochs = state["num_epochs"]
        >>> count = Count()
        >>> count.load_state_dict({"num_epochs": 3})
        """


@final
class History(Callback):
    """The logs of every epoch, returned by `fit`.

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
        """Append the logs of an epoch."""
        if logs:
            self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the logs of all epochs so far."""
        return {"history": {name: list(values) for name, values in self.history.items()}, "epoch": list(self.epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the logs of earlier epochs."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self.epoch = list(state["epoch"])


@final
class LambdaCallback(Callback):
    """A callback whose hooks are functions.

    Args:
        on_epoch_begin: Called with (epoch, logs).
        on_epoch_end: Called with (epoch, logs).
        on_train_begin: Called with (logs).
        on_train_end: Called with (logs).
        on_train_batch_begin: Called with (batch, logs).
        on_train_batch_end: Called with (batch, logs).
        hooks: Further hooks by name: `on_test_end=...`.

    Raises:
        InvalidArgumentError: A hook does not exist, or a value is not a function.

    >>> import torch
    >>> x = torch.zeros(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1, bias=False))
    ...     model.compile("sgd", "mse")
    >>> show = rd.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs))
    >>> _ = model.fit(x, x, callbacks=[show], verbose=False)
    0 {'loss': 0.0}

    Source: keras.callbacks.LambdaCallback.
    """

    def __init__(
        self,
        on_epoch_begin: Callable[..., Any] | None = None,
        on_epoch_end: Callable[..., Any] | None = None,
        on_train_begin: Callable[..., Any] | None = None,
        on_train_end: Callable[..., Any] | None = None,
        on_train_batch_begin: Callable[..., Any] | None = None,
        on_train_batch_end: Callable[..., Any] | None = None,
        **hooks: Callable[..., Any] | None,
    ) -> None:
        given = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
            **hooks,
        }
        for name, function in given.items():
            _require_hook(name, function)
            if function is not None:
                setattr(self, name, function)


def _require_hook(name: str, function: Any) -> None:
    known = sorted(each for each in dir(Callback) if each.startswith("on_"))
    if name not in known:
        raise InvalidArgumentError(f"A callback has no hook {name!r:.80}. Use one of {', '.join(known)}.")
    if function is not None and not callable(function):
        raise InvalidArgumentError(f"{name} must be a function, got {function!r:.80}.")


@final
class CallbackList:
    """The callbacks of one fit, evaluate or predict, called in order."""

    def __init__(self, callbacks: Sequence[Callback], model: Any, params: dict[str, Any]) -> None:
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
        """Call an end-of-batch hook with logs that call `read` when a hook reads them."""
        logs = BatchLogs(read, batch)
        self.call(hook, batch, logs)
        logs.seal()


@final
class BatchLogs(Mapping[str, Any]):
    """Logs of a batch, fetched at the first read. Reading blocks for the steps, so hooks that do not read cost nothing.

    >>> logs = BatchLogs(lambda: {"loss": 0.5})
    >>> logs["loss"], dict(logs)
    (0.5, {'loss': 0.5})
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], batch: int = 0) -> None:
        self._batch = batch
        self._read: Callable[[], Mapping[str, Any]] | None = read
        self._values: Mapping[str, Any] | None = None

    def seal(self) -> None:
        """Forbid further fetches after the hook: unread values would be those of later batches."""
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
        return True  # `logs or {}` must not block
