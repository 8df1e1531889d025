"""A callback that shows progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO, final

from raydist.training.callbacks.callback import Callback

__all__ = ["ProgressBar", "progress_stream"]


@final
class ProgressBar(Callback):
    """A callback that shows progress on a stream.

    `verbose=True` shows progress on standard output without this callback. With a ProgressBar in the list of callbacks,
    progress is shown once, independent of `verbose`.

    Args:
        stream: Stream to write to; None: standard output. Shows a bar in a terminal, one changing line in a notebook,
            and plain lines elsewhere.

    >>> import sys, torch
    >>> x = torch.zeros(4, 1)
    >>> with rd.OneDeviceStrategy("cpu").scope():
    ...     model = rd.Model(torch.nn.Linear(1, 1, bias=False))
    ...     model.compile("sgd", "mse")
    >>> _ = model.evaluate(x, x, callbacks=[rd.ProgressBar(sys.stdout)], verbose=False)  # doctest: +ELLIPSIS
    Evaluate  1/1 steps  ... examples/s  loss 0.0000  in ... s

    Source: keras.callbacks.ProgbarLogger.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream


def progress_stream(callbacks: Sequence[object], *, verbose: bool) -> tuple[bool, TextIO | None]:
    """Return True if progress is to be shown, and the stream to show it on; None for standard output."""
    bar = next((one for one in callbacks if isinstance(one, ProgressBar)), None)
    return (verbose, None) if bar is None else (True, bar.stream)
