"""Retention policy: which checkpoints to keep, to remove, and which one is the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from raydist.errors import InvalidArgumentError

__all__ = ["Best", "KeptCheckpoint", "Retention", "seconds_of"]


def seconds_of(hours: float | None) -> float | None:
    """Return the seconds for a value of `keep_checkpoint_every_n_hours`.

    >>> seconds_of(0.5)
    1800.0

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
    """A checkpoint as seen by the retention policy.

    Attributes:
        name: Name of the checkpoint's directory.
        number: Number in the name.
        generation: Index of the save among all saves into the directory; clocks and step numbers may go back.
        saved_at: Seconds since 1970, by the clock of the saving process.
        metrics: Metrics stored with the checkpoint.
    """

    name: str
    number: int
    generation: int
    saved_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Best:
    """The criterion for the best checkpoint.

    Attributes:
        metric: Name of the metric.
        mode: "min" or "max": the better direction.
    """

    metric: str
    mode: Literal["min", "max"]

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
    """The retention policy.

    Attributes:
        max_to_keep: Number of newest checkpoints to keep; None for all.
        keep_every_s: Keep one checkpoint of each such period for good; None for none.
        best: Also keep the best checkpoint by this criterion.
    """

    max_to_keep: int | None = None
    keep_every_s: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        number = self.max_to_keep
        if number is not None and (type(number) is not int or number < 1):
            raise InvalidArgumentError(
                f"max_to_keep must be a number of checkpoints >= 1, or None to keep all, got {number!r}."
            )
        if self.keep_every_s is not None and not self.keep_every_s > 0:
            raise InvalidArgumentError(f"keep_every_s must be a number of seconds > 0, got {self.keep_every_s!r}.")

    def newest(self, found: Sequence[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Return the checkpoints that stay because they are the newest, oldest first."""
        ordered = _oldest_first(found)
        return ordered if self.max_to_keep is None else ordered[-self.max_to_keep :]

    def to_remove(self, found: Sequence[KeptCheckpoint], began: float) -> list[KeptCheckpoint]:
        """Return the checkpoints to remove, oldest first.

        Args:
            found: All checkpoints.
            began: Time of the first save, from which periods of `keep_every_s` are counted.

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
