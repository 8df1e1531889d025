"""Messages between driver and replicas about saves during a run whose step function draws batches itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from raydist.checkpoints.listing import SaveInterval
from raydist.checkpoints.shards import ShardTerms

if TYPE_CHECKING:
    from raydist.actors.portable_errors import PortableError
    from raydist.core.errors import Preempted


@final
@dataclass(frozen=True, slots=True)
class ManagerCommand:
    """The settings of a manager that replicas need."""

    key: str  # key of the manager
    directory: str  # directory of the checkpoints
    name: str  # prefix of the checkpoints' names
    interval: SaveInterval  # interval of saves
    count: LoopCount  # counts at the beginning of the run
    seconds: float = 0.0  # seconds since the last save
    counter: int | None = None  # handle of the step counter; None if replicas have none
    counts_calls: bool = True  # count calls of `save` instead
    step: int = 0  # value of the step counter at the beginning of the run, if only the driver has the counter
    objects: Mapping[str, int] = field(default_factory=dict)  # handles of the objects that replicas save, by name
    # handles of the modules whose pending gradients replicas save, by the name of the gradients
    gradients: Mapping[str, int] = field(default_factory=dict)
    # handles of the modules whose rows of embedding tables replicas save, by the name of the rows
    rows: Mapping[str, int] = field(default_factory=dict)
    terms: ShardTerms = ShardTerms()  # division of the objects among the replicas
    metric: str | None = None  # name of the metric that each save must be given
    asynchronous: bool = True  # write saves while training continues


@final
@dataclass(frozen=True, slots=True)
class LoopCommand:
    """The commands for a run whose draws are step boundaries."""

    managers: tuple[ManagerCommand, ...]  # all managers that watch the process
    limit_s: float  # seconds in which the driver must answer a replica: where to stop, or that a save is complete
    is_repeated: bool = False  # the run has ended before, and its checkpoints are written


@final
@dataclass(frozen=True, slots=True)
class LoopCount:
    """The counts of one manager."""

    calls: int  # number of calls of `save`
    last_step: int | None  # value of the step counter at the last save; None if unknown


@final
@dataclass(frozen=True, slots=True)
class IteratorPosition:
    """The position of one of the run's iterators."""

    state: Mapping[str, Any]  # the iterator's `state_dict()`
    ended: bool  # True if the iterator has reached its end


@final
@dataclass(frozen=True, slots=True)
class RequestedSave:
    """A save for which the replicas have copied their shards."""

    token: str  # unique id of the save
    key: str  # key of the manager
    number: int  # number of the checkpoint
    calls: int  # number of calls of `save` so far
    metrics: Mapping[str, float] | None  # metrics to store with the checkpoint
    positions: tuple[IteratorPosition, ...]  # of the run's iterators
    copy_s: float = 0.0  # seconds for which the replica paused
    is_last: bool = False  # True if the process ends after this save


@final
@dataclass(frozen=True, slots=True)
class LoopReport:
    """A replica's report on the run."""

    requested: tuple[RequestedSave, ...] = ()  # saves that have not ended
    counts: Mapping[str, LoopCount] = field(default_factory=dict)  # counts of each manager, by key
    ended: bool = False  # True if the run has ended


@final
@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a save."""

    error: PortableError | None = None  # error of a failed save
    failures: int = 0  # number of consecutive failures
    preempted: Preempted | None = None  # exception that ends the process, for the last save
