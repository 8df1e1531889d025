"""A step that shows something of every kind, records for tests, and event files as TensorBoard reads them."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raydist as rd
from raydist.summary.record import Record, SummaryData
from raydist.summary.scalars import ScalarValue


def show_everything(batch: Any) -> None:
    """The rows of `batch`, (n,), in all forms; NaN where there are none."""
    values = batch.double()
    rd.summary.scalar("mean", values.mean())
    rd.summary.scalar("rows", float(len(values)), reduce_op="sum")
    rd.summary.histogram("values", values)
    rd.summary.image("rows", (values / 20)[:, None, None, None].expand(-1, 3, 2, 4).float())
    rd.summary.image("first", batch.to(torch.uint8)[:, None, None], max_outputs=1, dataformats="NHW")
    rd.summary.audio("rows", (values / 20)[:, None, None].expand(-1, 8, 2), sample_rate=8000, max_outputs=2)
    rd.summary.text("note", "said **once**")


def loop(iterator: Any) -> None:
    for number, batch in enumerate(iterator):
        with rd.summary.record_if(number != 1):
            rd.summary.scalar("in a loop", batch.double().mean(), step=number)


def everything(logdir: Path) -> dict[str, Any]:
    """All that is in the event files of a directory: by name and kind, with steps, decoded."""
    found = curves(logdir).accumulator
    tags = found.Tags()
    return {
        "scalars": {name: [(e.step, e.value) for e in found.Scalars(name)] for name in tags["scalars"]},
        "histograms": {
            name: [(e.step, e.histogram_value) for e in found.Histograms(name)] for name in tags["histograms"]
        },
        "images": {
            name: [(e.step, pixels(e.encoded_image_string)) for e in found.Images(name)] for name in tags["images"]
        },
        "audio": {
            name: [(e.step, frames(e.encoded_audio_string)) for e in found.Audio(name)] for name in tags["audio"]
        },
        "texts": {
            name: [(e.step, list(e.tensor_proto.string_val)) for e in found.Tensors(name)] for name in tags["tensors"]
        },
    }


def pixels(png: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(png))).tolist()


def frames(wav: bytes) -> tuple[int, int, list[int]]:
    with wave.open(io.BytesIO(wav)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return file.getframerate(), file.getnchannels(), samples.tolist()


EVERYTHING = dict.fromkeys(("scalars", "histograms", "images", "audio", "tensors"), 0)


@dataclass(frozen=True)
class Curves:
    """The contents of the event files of a directory."""

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


def record_of(name: str, shown: SummaryData | float, step: int = 0) -> Record:
    return Record("writer", name, step, ScalarValue(shown) if isinstance(shown, float) else shown, wall_time=1.0)
