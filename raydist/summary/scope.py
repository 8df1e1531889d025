"""`rd.summary.record_if`, `rd.summary.flush`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from raydist.summaries.destination import destination, only_if
from raydist.summary.recording import require_driver

__all__ = ["flush", "record_if"]


def record_if(condition: bool | Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, functions of `rd.summary` do something only where a condition holds.

    Around `strategy.run` it is asked once for the step; in a step each replica asks for itself. The innermost counts.

    Args:
        condition: A bool, or a function without arguments that is asked at each call.

    Returns:
        A context manager.

    Source: tf.summary.record_if.

    >>> with rd.summary.record_if(False):
    ...     rd.summary.scalar("loss", 0.5, step=0)
    False
    """
    return only_if(condition)


def flush() -> None:
    """Have everything in the file that was recorded for the default writer; does nothing without one.

    Blocks as `SummaryWriter.flush` does.

    Raises:
        Exception: What a dispatched step raised and nobody was told so far.
        FailedPreconditionError: The file cannot be written, or this is a step.

    Source: tf.summary.flush.

    >>> rd.summary.flush()  # there is no writer
    """
    place = destination()
    if place is not None:
        require_driver("rd.summary.flush")
        place.here.flush()
