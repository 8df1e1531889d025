"""A callback that stops training when the loss is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from raydist.errors import FailedPreconditionError
from raydist.training.callbacks.callback import Callback

__all__ = ["TerminateOnNaN"]


@final
class TerminateOnNaN(Callback):
    """A callback that ends `fit` when the loss is NaN or infinite.

    The callback reads the loss after every execution, which blocks for the steps: for steps of a few milliseconds set
    `steps_per_execution` in `compile`.

    Args:
        raise_error: Raise an error instead of ending `fit` normally.

    Raises:
        FailedPreconditionError: (in `fit`) the loss is NaN or infinite, with `raise_error`.

    >>> import torch
    >>> x = torch.full((4, 1), float("inf"))
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1))
    ...     model.compile("sgd", "mse")
    >>> len(model.fit(x, x, epochs=3, callbacks=[rd.TerminateOnNaN()], verbose=False).epoch)
    Batch 0: Invalid loss, terminating training
    1

    Source: keras.callbacks.TerminateOnNaN.
    """

    def __init__(self, raise_error: bool = False) -> None:
        self._raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Check the loss. Blocks for the dispatched steps.

        Args:
            batch: Number of the execution's last batch in the epoch, counted from 0.
            logs: "loss".

        Source: keras.callbacks.TerminateOnNaN.on_batch_end.
        """
        loss = float(logs["loss"])
        if math.isfinite(loss):
            return
        if self._raise_error:
            raise FailedPreconditionError(
                f"The loss must be a finite number, got {loss} after batch {batch}. Use a smaller learning rate or "
                "clip_norm, and look for such values in the data; RunOptions(on_nonfinite=) names gradients."
            )
        print(f"Batch {batch}: Invalid loss, terminating training")
        self.model.stop_training = True
