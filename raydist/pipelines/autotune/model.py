"""The autotuner's model of a pipeline, which predicts the duration of work under given settings.

A pipeline has *knobs*: a stage may run in its consumer's thread, on threads or on actors; a prefetch may be on or off.
The model adds up the work of the consumer's thread, and takes the maximum over everything that runs in parallel.
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
    """The place and the number of workers of one knob."""

    place: StagePlace = "inline"
    workers: int = 0

    def __str__(self) -> str:
        if self.place == "inline":
            return "inline"
        return f"{self.workers} {self.place.removesuffix('s') if self.workers == 1 else self.place}"


INLINE = StageSetting()

# Assumed shares of work with the GIL held, of sources, batches and shuffles, and of the consumer.
_REST_SERIAL = 0.5
_CONSUMER_SERIAL = 0.2
Settings = Mapping[str, StageSetting]


@final
@dataclass(frozen=True, slots=True)
class Knob:
    """One setting that the autotuner can change.

    Attributes:
        name: Name of the stage or prefetch.
        places: Possible places.
        splits: True for a prefetch: its worker takes over the upstream work of the consumer's thread.
    """

    name: str
    places: tuple[StagePlace, ...] = ("inline", "threads")
    splits: bool = False


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for all knobs together.

    Attributes:
        workers: Number of threads and actors.
        ram_bytes: Bytes of the blocks in flight in stages.
    """

    workers: int
    ram_bytes: float = float("inf")


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a stage in a period.

    Attributes:
        name: Name of the stage.
        seconds: Seconds of work for one undisturbed thread.
        serial: Share of that work that blocks all other threads of the process (with the GIL held).
        moving_s: Additional seconds, for the actors and for the consumer's thread, to move blocks to actors and back.
        block_bytes: Bytes of one block.
    """

    name: str
    seconds: float
    serial: float = 0.5
    moving_s: float = 0.0
    block_bytes: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Load:
    """The work of a pipeline in a period.

    Attributes:
        works: Workloads of the stages.
        rest_s: Seconds of other work in the consumer's thread: sources, batches, shuffles.
        consumer_s: Seconds of the consumer's own work.
        split: Name of the prefetch that can separate the consumer from the pipeline; "" for none.
    """

    works: Sequence[Workload]
    rest_s: float
    consumer_s: float
    split: str = ""


def workers_of(settings: Settings) -> int:
    """Return the number of threads and actors in `settings`."""
    return sum(setting.workers for setting in settings.values())


def predict_s(load: Load, settings: Settings) -> float:
    """Return the predicted seconds for `load` under `settings`."""
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
