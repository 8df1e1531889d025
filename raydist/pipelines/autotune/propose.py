"""Search for the best settings under the model, within the limits.

Under the model a period takes at least T if no stage needs more than T of its workers' time, and the consumer's thread
and the GIL are busy for at most T. So the search tries the few T at which something changes, in ascending order, and
takes for each stage the fewest workers that T needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.autotune.model import (
    INLINE,
    Knob,
    Limits,
    Load,
    Settings,
    StageSetting,
    Workload,
    predict_s,
    workers_of,
)

__all__ = ["BLOCKS_PER_WORKER", "buffer_bytes", "fits", "propose"]

BLOCKS_PER_WORKER = 2  # one in work, one waiting
_SLACK = 1 + 1e-9


def buffer_bytes(works: Sequence[Workload], settings: Settings) -> float:
    """Return the bytes of the blocks that stages may have in flight."""
    return sum(BLOCKS_PER_WORKER * settings.get(work.name, INLINE).workers * work.block_bytes for work in works)


def fits(load: Load, settings: Settings, limits: Limits) -> bool:
    """Return True if `settings` keep within the limits."""
    return workers_of(settings) <= limits.workers and buffer_bytes(load.works, settings) <= limits.ram_bytes


def propose(load: Load, knobs: Sequence[Knob], limits: Limits, most: Mapping[str, int]) -> Settings:
    """Return the settings that finish `load` first, with as few workers as possible.

    Args:
        load: Work to do.
        knobs: Knobs to set.
        limits: Limits for all knobs together.
        most: Largest number of workers per knob; more would exceed what is known.
    """
    problem = _Problem(load, {knob.name: knob for knob in knobs}, limits, most)
    best: Settings = {knob.name: INLINE for knob in knobs}
    best_s = predict_s(load, best)
    for settings in problem.candidates():
        seconds = predict_s(load, settings)
        fewer = workers_of(settings) < workers_of(best)
        if seconds < best_s * 0.999 or (fewer and seconds <= best_s * 1.001):
            best, best_s = settings, min(best_s, seconds)
    return best


@final
@dataclass(frozen=True, slots=True)
class _Problem:
    load: Load
    knobs: Mapping[str, Knob]
    limits: Limits
    most: Mapping[str, int]

    def candidates(self) -> list[Settings]:
        """Return the settings for each T of interest, with and without a prefetch, that keep within the limits."""
        split = self.knobs.get(self.load.split)
        parted = (False, True) if split and "threads" in split.places and self._most(split.name) else (False,)
        found = [self._settings(target_s, split=part) for part in parted for target_s in self._targets()]
        return [settings for settings in found if settings is not None and fits(self.load, settings, self.limits)]

    def _most(self, name: str) -> int:
        return min(self.limits.workers, self.most.get(name, self.limits.workers))

    def _targets(self) -> list[float]:
        """Return the times at which one more worker helps, or at which the consumer's thread becomes the bottleneck."""
        load = self.load
        times = {load.rest_s + load.consumer_s, max(load.rest_s, load.consumer_s)}
        for work in load.works:
            for seconds in (work.seconds, work.seconds + work.moving_s):
                times |= {seconds / count for count in range(1, self._most(work.name) + 1)}
        times |= {load.rest_s + work.seconds + others for work in load.works for others in (0.0, load.consumer_s)}
        return sorted(time for time in times if time > 0)

    def _settings(self, target_s: float, *, split: bool) -> Settings | None:
        """Return settings for `target_s`, if possible: the largest stages leave the consumer's thread."""
        load = self.load
        settings = dict.fromkeys(self.knobs, INLINE)
        if split:
            settings[load.split] = StageSetting("threads", 1)
        own_s = load.rest_s + sum(work.seconds for work in load.works)
        left = self.limits.workers - workers_of(settings)
        room_s = target_s - (0.0 if split else load.consumer_s)
        for work in sorted(load.works, key=lambda work: -work.seconds):
            if own_s <= room_s * _SLACK:
                break
            setting = self._off_thread(work, target_s)
            if setting is not None and setting.workers <= left:
                settings[work.name] = setting
                left -= setting.workers
                own_s -= work.seconds - (work.moving_s if setting.place == "actors" else 0.0)
        return self._off_process(settings, target_s)

    def _off_thread(self, work: Workload, target_s: float) -> StageSetting | None:
        places = self.knobs[work.name].places if work.name in self.knobs else ()
        most = self._most(work.name)
        if "threads" in places and most:
            # One at least: a stage that makes many elements from one piece may have had no work in a period.
            return StageSetting("threads", min(most, max(1, math.ceil(work.seconds / target_s / _SLACK))))
        return self._on_actors(work, target_s) if "actors" in places and most else None

    def _on_actors(self, work: Workload, target_s: float) -> StageSetting:
        needed = math.ceil((work.seconds + work.moving_s) / target_s / _SLACK)
        return StageSetting("actors", min(self._most(work.name), max(1, needed)))

    def _off_process(self, settings: dict[str, StageSetting], target_s: float) -> Settings | None:
        """Move stages to actors until the others leave enough of the GIL; None if no stage can move."""
        serial = {work.name: work.serial * work.seconds for work in self.load.works}
        for work in sorted(self.load.works, key=lambda work: -serial[work.name]):
            here = sum(
                serial[name] for name, setting in settings.items() if name in serial and setting.place != "actors"
            )
            if here <= target_s * _SLACK:
                break
            if work.name in self.knobs and "actors" in self.knobs[work.name].places and self._most(work.name):
                settings[work.name] = self._on_actors(work, target_s)
        return settings
