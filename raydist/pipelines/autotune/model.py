"""What the autotuner knows about a pipeline: a model of how long a piece of work takes under given settings.

A pipeline has *knobs*: a stage may run in its consumer's thread, on threads or on actors; a prefetch may work ahead or
not. The model adds up what the consumer's thread does itself, and takes the slowest of all that go on side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.metering.reading import StagePlace

__all__ = ["INLINE", "Knob", "Limits", "Load", "StageSetting", "Settings", "Workload", "predict_s", "workers_of"]


@final
@dataclass(frozen=True, slots=True)
class StageSetting:
    """Where one knob's work is done, and by how many workers."""

    place: StagePlace = "inline"
    workers: int = 0

    def __str__(self) -> str:
        if self.place == "inline":
            return "inline"
        return f"{self.workers} {self.place.removesuffix('s') if self.workers == 1 else self.place}"


INLINE = StageSetting()

# Shares of their work in which sources, batches and shuffles, and the consumer, are taken to hold the GIL.
_REST_SERIAL = 0.5
_CONSUMER_SERIAL = 0.2
Settings = Mapping[str, StageSetting]


@final
@dataclass(frozen=True, slots=True)
class Knob:
    """One thing that can be set.

    Attributes:
        name: Of the stage or prefetch.
        places: Where it may run.
        splits: Whether it is a prefetch: its one worker does what the consumer's thread did upstream of it.
    """

    name: str
    places: tuple[StagePlace, ...] = ("inline", "threads")
    splits: bool = False


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """What all knobs together may use.

    Attributes:
        workers: Threads and actors.
        ram_bytes: Bytes of the blocks under way in stages.
    """

    workers: int
    ram_bytes: float = float("inf")


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """What a stage had to do in a period.

    Attributes:
        name: Of the stage.
        seconds: How long it takes one thread that nothing disturbs.
        serial: The share of it in which a thread keeps all others of its process waiting (it holds the GIL).
        moving_s: What moving the blocks to actors and back adds for the actors, and for the consumer's thread.
        block_bytes: Bytes of one of its blocks.
    """

    name: str
    seconds: float
    serial: float = 0.5
    moving_s: float = 0.0
    block_bytes: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What a pipeline had to do in a period.

    Attributes:
        works: Of the stages.
        rest_s: Seconds of all else in the consumer's thread: sources, batches, shuffles.
        consumer_s: Seconds of the consumer's own work.
        split: Name of the prefetch that can part the consumer from the pipeline; "" for none.
    """

    works: Sequence[Workload]
    rest_s: float
    consumer_s: float
    split: str = ""


def workers_of(settings: Settings) -> int:
    """Threads and actors that `settings` need."""
    return sum(setting.workers for setting in settings.values())


def predict_s(load: Load, settings: Settings) -> float:
    """How long the work of `load` takes under `settings`."""
    own_s, slowest_s = load.rest_s, 0.0
    serial_s = _REST_SERIAL * load.rest_s + _CONSUMER_SERIAL * load.consumer_s
    for work in load.works:
        setting = settings.get(work.name, INLINE)
        if setting.place == "actors":
            own_s += work.moving_s
            slowest_s = max(slowest_s, (work.seconds + work.moving_s) / setting.workers)
            continue
        serial_s += work.serial * work.seconds
        if setting.place == "inline":
            own_s += work.seconds
        else:
            slowest_s = max(slowest_s, work.seconds / setting.workers)
    parted = settings.get(load.split, INLINE).workers > 0
    first_s = max(own_s, load.consumer_s) if parted else own_s + load.consumer_s
    return max(first_s, serial_s, slowest_s)
