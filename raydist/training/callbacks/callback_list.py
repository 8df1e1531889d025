"""Call callbacks, with logs that are fetched only if a hook reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.training.callbacks.callback import Callback, TrainedModel

__all__ = ["BatchLogs", "CallbackList"]


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
