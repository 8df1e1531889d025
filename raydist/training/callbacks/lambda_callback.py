"""Callbacks built from functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from raydist.errors import InvalidArgumentError
from raydist.training.callbacks.callback import Callback

__all__ = ["LambdaCallback"]

Hook = Callable[..., Any]


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
        on_epoch_begin: Hook | None = None,
        on_epoch_end: Hook | None = None,
        on_train_begin: Hook | None = None,
        on_train_end: Hook | None = None,
        on_train_batch_begin: Hook | None = None,
        on_train_batch_end: Hook | None = None,
        **hooks: Hook | None,
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
