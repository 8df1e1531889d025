"""`rd.latest_checkpoint` and `rd.checkpoints_iterator`: find checkpoints that another process writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from raydist.checkpoints.saved_ones import checkpoint_path, find_checkpoints
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.stored.directory_files import directory_files

__all__ = ["checkpoints_iterator", "latest_checkpoint"]

_LOOK_S = 1.0  # between two listings of a directory


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint in a directory of a :class:`CheckpointManager`: the one saved last.

    Args:
        checkpoint_dir: A path, or a URI that fsspec supports.

    Returns:
        Path of the checkpoint; None if there is none. Checkpoints with a damaged manifest are skipped.

    Source: tf.train.latest_checkpoint.

    >>> import tempfile
    >>> rd.latest_checkpoint(tempfile.mkdtemp()) is None
    True
    """
    found = _newest(path_text(checkpoint_dir))
    return None if found is None else found[0]


def _newest(directory: str) -> tuple[str, int] | None:
    intact = [each.kept for each in find_checkpoints(directory_files(directory)) if each.damage is None]
    return (checkpoint_path(directory, intact[-1].name), intact[-1].generation) if intact else None


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yield new checkpoints as they appear, for evaluation beside training. Yields the newest only and may skip some.

    Args:
        checkpoint_dir: A path, or a URI that fsspec supports.
        min_interval_secs: Minimum seconds between two checkpoints.
        timeout: Seconds to wait for a checkpoint; None for no limit.
        timeout_fn: Called after each timeout; the iterator ends if it returns True, or if there is no `timeout_fn`.

    Returns:
        An iterator over paths; each checkpoint appears once. Blocks until the next checkpoint.

    Source: tf.train.checkpoints_iterator.

    >>> import tempfile
    >>> list(rd.checkpoints_iterator(tempfile.mkdtemp(), timeout=0))
    []
    """
    directory, seen = path_text(checkpoint_dir), None
    while True:
        found = _await_other(directory, seen, timeout)
        if found is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        seen, began = found, time.monotonic()
        yield found[0]
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - began)))


def _await_other(directory: str, seen: tuple[str, int] | None, timeout: float | None) -> tuple[str, int] | None:
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        found = _newest(directory)
        if found is not None and found != seen:
            return found
        left = _LOOK_S if end is None else end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(_LOOK_S, left))
