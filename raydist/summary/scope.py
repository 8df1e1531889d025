"""`rd.summary.record_if`, `rd.summary.flush`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from raydist.summaries.destination import destination, only_if
from raydist.summary.recording import require_driver

__all__ = ["flush", "record_if"]


def record_if(condition: bool | Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Make functions of `rd.summary` record only if a condition holds, for the `with` block.

    Around `strategy.run` the condition is evaluated once for the step; in a step each replica evaluates its own. The
    innermost condition applies.

    Args:
        condition: A bool, or a function without arguments that is called at each call of `rd.summary`.

    Returns:
        A context manager.

    Source: tf.summary.record_if.

    >>> with rd.summary.record_if(False):
    ...     rd.summary.scalar("loss", 0.5, step=0)
    False
    """
    return only_if(condition)


def flush() -> None:
    """Flush the default writer: block until everything recorded so far is in its file. Do nothing without a writer.

    Blocks as `SummaryWriter.flush` does.

    Raises:
        Exception: An unreported error of a dispatched step.
        FailedPreconditionError: The file cannot be written, or the call is inside a step.

    Source: tf.summary.flush.

    >>> rd.summary.flush()  # there is no writer
    """
    place = destination()
    if place is not None:
        require_driver("rd.summary.flush")
        place.here.flush()
