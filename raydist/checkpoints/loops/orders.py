"""Messages between driver and replicas about a run that draws batches itself. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from raydist.checkpoints.save_interval import SaveInterval
from raydist.checkpoints.sharing.shares import ShareTerms

if TYPE_CHECKING:
    from raydist.actors.portable_errors import PortableError
    from raydist.errors import Preempted

__all__ = ["IteratorPlace", "LoopCount", "LoopNews", "LoopOrder", "ManagerOrder", "SaveOutcome", "WantedSave"]


@final
@dataclass(frozen=True, slots=True)
class ManagerOrder:
    """The settings of a manager that replicas need.

    Attributes:
        key: Key of the manager.
        directory: Directory of the checkpoints.
        name: Prefix of the checkpoints' names.
        interval: Interval of saves.
        count: Counts at the beginning of the run.
        seconds: Seconds since the last save.
        counter: Handle of the step counter; None if replicas have none.
        counts_calls: Count calls of `save` instead.
        step: Value of the step counter at the beginning of the run, if only the driver has the counter.
        objects: Handles of the objects that replicas save, by name.
        gradients: Handles of the modules whose pending gradients replicas save, by the name of the gradients.
        terms: Division of the objects among the replicas.
        metric: Name of the metric that each save must be given.
        asynchronous: Write saves while training continues.
    """

    key: str
    directory: str
    name: str
    interval: SaveInterval
    count: LoopCount
    seconds: float = 0.0
    counter: int | None = None
    counts_calls: bool = True
    step: int = 0
    objects: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    terms: ShareTerms = ShareTerms()
    metric: str | None = None
    asynchronous: bool = True


@final
@dataclass(frozen=True, slots=True)
class LoopOrder:
    """The orders for a run whose draws are step boundaries.

    Attributes:
        managers: All managers that watch the process.
        limit_s: Seconds in which the driver must answer a replica: where to stop, or that a save is complete.
    """

    managers: tuple[ManagerOrder, ...]
    limit_s: float


@final
@dataclass(frozen=True, slots=True)
class LoopCount:
    """The counts of one manager.

    Attributes:
        calls: Number of calls of `save`.
        last_step: Value of the step counter at the last save; None if unknown.
    """

    calls: int
    last_step: int | None


@final
@dataclass(frozen=True, slots=True)
class IteratorPlace:
    """The position of one of the run's iterators.

    Attributes:
        state: The iterator's `state_dict()`.
        ended: True if the iterator has reached its end.
    """

    state: Mapping[str, Any]
    ended: bool


@final
@dataclass(frozen=True, slots=True)
class WantedSave:
    """A save for which the replicas have copied their shares.

    Attributes:
        token: Unique id of the save.
        key: Key of the manager.
        number: Number of the checkpoint.
        calls: Number of calls of `save` so far.
        metrics: Metrics to store with the checkpoint.
        places: Positions of the run's iterators.
        copy_s: Seconds for which the replica paused.
        leaving: True if the process ends after this save.
    """

    token: str
    key: str
    number: int
    calls: int
    metrics: Mapping[str, float] | None
    places: tuple[IteratorPlace, ...]
    copy_s: float = 0.0
    leaving: bool = False


@final
@dataclass(frozen=True, slots=True)
class LoopNews:
    """A replica's report on the run.

    Attributes:
        wanted: Saves that have not ended.
        counts: Counts of each manager, by key.
        ended: True if the run has ended.
    """

    wanted: tuple[WantedSave, ...] = ()
    counts: Mapping[str, LoopCount] = field(default_factory=dict)
    ended: bool = False


@final
@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a save.

    Attributes:
        error: Error of a failed save.
        failures: Number of consecutive failures.
        left: Exception that ends the process here.
    """

    error: PortableError | None = None
    failures: int = 0
    left: Preempted | None = None
