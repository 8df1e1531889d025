"""What driver and replicas tell each other about a run that draws batches itself. Pure data."""

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
    """A manager, as replicas must know it.

    Attributes:
        key: Which one.
        directory: Where it saves.
        name: What checkpoints are called before their number.
        interval: How often it saves.
        count: Where its counts are.
        seconds: Since the last save.
        counter: Handle of what counts the steps; None where replicas have none.
        counts_calls: Whether calls of `save` are counted instead.
        step: What it said when the run began, where the driver counts alone.
        objects: Handles of what replicas save, by name.
        gradients: Handles of the modules whose pending gradients they save, by the name of these.
        terms: How they share all that.
        metric: Which must be given with a save.
        asynchronous: Whether a save is written behind training.
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
    """What a run must know whose draws are boundaries.

    Attributes:
        managers: All that watch the process.
        limit_s: Until the driver has answered what it is asked: where to stop, or that a save is whole.
    """

    managers: tuple[ManagerOrder, ...]
    limit_s: float


@final
@dataclass(frozen=True, slots=True)
class LoopCount:
    """Where a manager's counts are.

    Attributes:
        calls: Of `save`.
        last_step: Where the counter was at the last save; None where nobody knows.
    """

    calls: int
    last_step: int | None


@final
@dataclass(frozen=True, slots=True)
class IteratorPlace:
    """Where one of the run's iterators is.

    Attributes:
        state: As its `state_dict` gives it.
        ended: Its end was seen.
    """

    state: Mapping[str, Any]
    ended: bool


@final
@dataclass(frozen=True, slots=True)
class WantedSave:
    """A save for which the replicas have copied their shares.

    Attributes:
        token: Tells it from others.
        key: Of the manager.
        number: Of the checkpoint.
        calls: Of `save` so far.
        metrics: That are kept with it.
        places: Of the run's iterators.
        copy_s: How long the replica stood still.
        leaving: The process is left here.
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
    """What a replica tells of the run.

    Attributes:
        wanted: Saves that have not ended.
        counts: Of each manager, by key.
        ended: The run is over.
    """

    wanted: tuple[WantedSave, ...] = ()
    counts: Mapping[str, LoopCount] = field(default_factory=dict)
    ended: bool = False


@final
@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a save.

    Attributes:
        error: Why it failed.
        failures: How many in a row have.
        left: With what the process is left here.
    """

    error: PortableError | None = None
    failures: int = 0
    left: Preempted | None = None
