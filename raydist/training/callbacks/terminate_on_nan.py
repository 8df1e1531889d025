"""Stop training when the loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from raydist.errors import FailedPreconditionError
from raydist.training.callbacks.callback import Callback

__all__ = ["TerminateOnNaN"]


@final
class TerminateOnNaN(Callback):
    """Ends `fit` when the loss is NaN or infinite. A callback.

    It looks after every execution, which waits for its steps: with steps of a few milliseconds give `compile` a
    `steps_per_execution`.

    Args:
        raise_error: Raise an error instead of ending `fit` in order.

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
        """Looks at the loss. Waits for the dispatched steps.

        Args:
            batch: Number of the last batch of the execution in the epoch, counted from 0.
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
