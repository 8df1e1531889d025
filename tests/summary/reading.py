"""Reading what was written, as TensorBoard does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EVERYTHING = dict.fromkeys(("scalars", "histograms", "images", "audio", "tensors"), 0)


@dataclass(frozen=True)
class Curves:
    """What is in the event files of a directory."""

    accumulator: Any

    def scalars(self, name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self.accumulator.Scalars(name)]

    def histograms(self, name: str) -> list[Any]:
        return [event.histogram_value for event in self.accumulator.Histograms(name)]

    def names(self, kind: str) -> set[str]:
        return set(self.accumulator.Tags()[kind])


def curves(logdir: Path | str) -> Curves:
    accumulator = EventAccumulator(str(logdir), size_guidance=EVERYTHING)
    accumulator.Reload()
    return Curves(accumulator)
