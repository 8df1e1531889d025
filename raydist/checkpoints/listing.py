"""The checkpoints in a directory: when to save, which to keep, and their list in the order of saves.

Also `rd.latest_checkpoint` and `rd.checkpoints_iterator`, which find checkpoints that another process writes.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from raydist.checkpoints.manifest import SavedCheckpoint, open_checkpoint
from raydist.core.errors import DataLossError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.files import local_path, path_text
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


def seconds_of(hours: float | None) -> float | None:
    """Return the seconds for a value of `keep_checkpoint_every_n_hours`.

    Raises:
        InvalidArgumentError: The value is not a number > 0.
    """
    if hours is None:
        return None
    if isinstance(hours, bool) or not isinstance(hours, int | float) or not hours > 0:
        raise InvalidArgumentError(
            f"keep_checkpoint_every_n_hours must be a number of hours > 0, or None, got {hours!r:.50}."
        )
    return hours * 3600


@final
@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint as seen by the retention policy."""

    name: str  # name of the checkpoint's directory
    number: int  # number in the name
    generation: int  # index of the save among all saves into the directory; clocks and step numbers may go back
    saved_at: float = 0.0  # seconds since 1970, by the clock of the saving process
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics stored with the checkpoint


@final
@dataclass(frozen=True, slots=True)
class Best:
    """The criterion for the best checkpoint."""

    metric: str  # name of the metric
    mode: Literal["min", "max"]  # "min" or "max": the better direction

    @classmethod
    def parse(cls, best: Any) -> Best | None:
        """Parse the argument `best` of `CheckpointManager`.

        >>> Best.parse(("loss", "min"))
        Best(metric='loss', mode='min')
        """
        if best is None:
            return None
        pair = tuple(best) if isinstance(best, tuple | list) else ()
        if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in ("min", "max"):
            raise InvalidArgumentError(
                f'best must be a metric and "min" or "max", such as ("val_loss", "min"), got {best!r:.100}.'
            )
        return cls(*pair)

    def of(self, found: Sequence[KeptCheckpoint]) -> KeptCheckpoint | None:
        """Return the best checkpoint, the oldest of equals. Skip checkpoints without the metric, or with NaN.

        >>> kept = [KeptCheckpoint(f"ckpt-{n}", n, n, metrics={"loss": loss}) for n, loss in enumerate([3, 1, 1, 2])]
        >>> Best("loss", "min").of(kept).name, Best("loss", "max").of(kept).name
        ('ckpt-1', 'ckpt-0')
        """
        sign = 1 if self.mode == "min" else -1
        known = [each for each in _oldest_first(found) if not math.isnan(each.metrics.get(self.metric, math.nan))]
        return min(known, key=lambda each: sign * each.metrics[self.metric], default=None)


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """The retention policy."""

    max_to_keep: int | None = None  # number of newest checkpoints to keep; None for all
    keep_every_s: float | None = None  # keep one checkpoint of each such period for good; None for none
    best: Best | None = None  # also keep the best checkpoint by this criterion

    def __post_init__(self) -> None:
        number = self.max_to_keep
        if number is not None and (type(number) is not int or number < 1):
            raise InvalidArgumentError(
                f"max_to_keep must be a number of checkpoints >= 1, or None to keep all, got {number!r}."
            )

    def newest(self, found: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Return the checkpoints that stay because they are the newest, oldest first."""
        ordered = _oldest_first(found)
        return ordered if self.max_to_keep is None else ordered[-self.max_to_keep :]

    def to_remove(self, found: Sequence[KeptCheckpoint], began: float) -> list[KeptCheckpoint]:
        """Return the checkpoints to remove, oldest first. Periods of `keep_every_s` are counted from `began` on.

        >>> kept = [KeptCheckpoint(f"ckpt-{n}", n, n, saved_at=60.0 * n) for n in range(6)]
        >>> [each.name for each in Retention(max_to_keep=2, keep_every_s=120).to_remove(kept, began=0)]
        ['ckpt-0', 'ckpt-1', 'ckpt-3']
        """
        best = None if self.best is None else self.best.of(found)
        stays = {each.name for each in self.newest(found)} | self._for_good(found, began)
        return [each for each in _oldest_first(found) if each.name not in stays and each is not best]

    def _for_good(self, found: Sequence[KeptCheckpoint], began: float) -> set[str]:
        names: set[str] = set()
        if self.keep_every_s is None:
            return names
        last = began
        for each in _oldest_first(found):
            if each.saved_at - self.keep_every_s >= last:
                names.add(each.name)
                last = each.saved_at
        return names


def _oldest_first(found: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
    return sorted(found, key=lambda each: (each.generation, each.number))


@final
@dataclass(frozen=True, slots=True)
class SaveInterval:
    """Interval between two saves: steps or seconds, whichever passes first. Without either, each call saves.

    >>> every = SaveInterval(steps=500)
    >>> every.is_due(499, since_step=0, seconds=1e9), every.is_due(500, since_step=0, seconds=0)
    (False, True)
    """

    steps: int | None = None  # number of steps, by the step counter
    seconds: float | None = None  # seconds of a monotonic clock

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise InvalidArgumentError(f"checkpoint_interval must be a number of steps >= 1, got {self.steps!r}.")
        if self.seconds is not None and not (isinstance(self.seconds, int | float) and self.seconds > 0):
            raise InvalidArgumentError(f"interval_s must be a number of seconds > 0, got {self.seconds!r}.")

    def is_due(self, step: int, *, since_step: int | None, seconds: float) -> bool:
        """Return True if a checkpoint is due at this step, so many seconds after the save at `since_step`.

        If `since_step` is unknown (None), a checkpoint is due by steps.
        """
        if self.steps is None and self.seconds is None:
            return True
        by_steps = self.steps is not None and (since_step is None or step - since_step >= self.steps)
        return by_steps or (self.seconds is not None and seconds >= self.seconds)


DETAILS = "manager"
"""Key of a manager's own entries in a manifest's details."""

_NAME = re.compile(r"(.+)-([0-9]{1,18})")


@final
@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint found in a directory."""

    kept: KeptCheckpoint  # description for the retention policy
    details: dict[str, Any]  # entries of the manager that saved the checkpoint
    damage: Exception | None = None  # error that restoring would raise, as far as the manifest shows


def checkpoint_path(directory: str, name: str) -> str:
    """Return the path of a checkpoint in a directory.

    >>> checkpoint_path("runs/a", "ckpt-1"), checkpoint_path("s3://bucket/a?x=1", "ckpt-1")
    ('runs/a/ckpt-1', 's3://bucket/a/ckpt-1?x=1')
    """
    if local_path(directory) is not None:
        return os.path.join(directory, name)
    uri, mark, query = directory.partition("?")
    return f"{uri.rstrip('/')}/{name}{mark}{query}"


def find_checkpoints(files: DirectoryFiles, name: str | None = None) -> list[FoundCheckpoint]:
    """Return all checkpoints with this prefix (None: any), in the order of saves, whatever clocks and steps say.

    Checkpoints with a damaged manifest are placed by their number. A directory without a manifest is no checkpoint.
    """
    found = [each for folder, number in _folders(files, name) if (each := _look_at(files, folder, number)) is not None]
    intact = sorted((each for each in found if each.damage is None), key=lambda each: each.kept.generation)
    for each in sorted((each for each in found if each.damage is not None), key=lambda each: each.kept.number):
        behind = next(
            (place for place, other in enumerate(intact) if other.kept.number > each.kept.number), len(intact)
        )
        intact.insert(behind, each)
    return intact


def _folders(files: DirectoryFiles, name: str | None) -> Iterator[tuple[str, int]]:
    """Yield the directories of checkpoints with this prefix, complete or not, and their numbers."""
    for folder in files.folders():
        match = _NAME.fullmatch(folder)
        if match is not None and name in (None, match[1]):
            yield folder, int(match[2])


def _look_at(files: DirectoryFiles, folder: str, number: int) -> FoundCheckpoint | None:
    try:
        return as_found(folder, number, open_checkpoint(files.inside(folder)))
    except NotFoundError:
        return None
    except (DataLossError, InvalidArgumentError) as error:
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=-1), {}, error)


def as_found(folder: str, number: int, saved: SavedCheckpoint) -> FoundCheckpoint:
    """Return a checkpoint's description from its manifest. One that no manager wrote counts as the oldest."""
    details = saved.manifest.details.get(DETAILS)
    if not isinstance(details, dict):
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=0), {})
    try:
        metrics = {str(name): float(value) for name, value in dict(details.get("metrics", {})).items()}
        kept = KeptCheckpoint(folder, number, int(details["generation"]), float(details["saved_at"]), metrics)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        damage = saved.loss(f"what its manager kept in it is not what it writes ({error!r:.200})")
        return FoundCheckpoint(KeptCheckpoint(folder, number, generation=-1), {}, damage)
    return FoundCheckpoint(kept, details)


def folders_of(files: DirectoryFiles, name: str) -> list[str]:
    """Return the directories of checkpoints with this name, complete or not."""
    return [folder for folder, _ in _folders(files, name)]


def require_number(number: Any) -> None:
    """Raise InvalidArgumentError unless this can be the number of a checkpoint."""
    if type(number) is not int or not 0 <= number < 10**18:
        raise InvalidArgumentError(f"The number of a checkpoint must be an int >= 0, got {number!r:.50}.")


def as_metrics(metrics: Any, required: str | None = None) -> dict[str, float]:
    """Return metrics as floats, also from tensors. NaN and infinities, which JSON lacks, are dropped.

    Raises:
        InvalidArgumentError: A value is no number, or metrics are given without the required one.

    >>> import torch
    >>> as_metrics({"loss": torch.tensor(0.5), "accuracy": 1, "bad": float("nan")})
    {'loss': 0.5, 'accuracy': 1.0}
    """
    try:
        values = {str(name): float(value) for name, value in dict(metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"metrics must be a dict of names and numbers, got {metrics!r:.200}: {error!s:.200}."
        ) from error
    if required is not None and metrics is not None and required not in values:
        raise InvalidArgumentError(
            f"metrics must have {required!r}, which `best` names, got {', '.join(values) or 'none'}."
        )
    return {name: value for name, value in values.items() if math.isfinite(value)}


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
