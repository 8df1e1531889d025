"""Conversion of records to TensorBoard events."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.summary import hparams

from raydist.summaries.histogram_counts import HistogramCounts
from raydist.summaries.pictures import Pictures, encode_png
from raydist.summaries.record import Record
from raydist.summaries.said_once import GraphShown, Hyperparameters, Text
from raydist.summaries.scalar_values import ScalarValue
from raydist.summaries.sounds import Sounds, encode_wav

__all__ = ["event_of", "first_events"]


def first_events(wall_time: float, purge_step: int | None = None) -> Iterator[bytes]:
    """Yield the first events of a file: the version, and the step from which the file replaces earlier files."""
    yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
    if purge_step is not None:
        start = SessionLog(status=SessionLog.SessionStatus.Value("START"))
        yield Event(wall_time=wall_time, step=purge_step, session_log=start).SerializeToString()


def event_of(record: Record) -> bytes:
    """Return the event of a record."""
    event = Event(wall_time=record.wall_time, step=record.step)
    if isinstance(record.shown, GraphShown):
        event.graph_def = record.shown.graph
    else:
        event.summary.value.extend(_values(record.shown, record.name))
    return bytes(event.SerializeToString())


@functools.singledispatch
def _values(shown: Any, name: str) -> list[Any]:
    raise TypeError(f"raydist bug: summaries of {type(shown).__name__} must be known to encoding.py.")


@_values.register
def _(shown: ScalarValue, name: str) -> list[Any]:
    return [Summary.Value(tag=name, simple_value=shown.value)]


@_values.register
def _(shown: HistogramCounts, name: str) -> list[Any]:
    buckets = shown.buckets()
    histogram = HistogramProto(
        min=_finite(shown.least),
        max=_finite(shown.most),
        num=shown.num_values,
        sum=shown.total,
        sum_squares=shown.squares,
        bucket_limit=[edge for edge, _ in buckets],
        bucket=[count for _, count in buckets],
    )
    return [Summary.Value(tag=name, histo=histogram)]


@_values.register
def _(shown: Pictures, name: str) -> list[Any]:
    names = _numbered(name, len(shown.pictures), shown.most)
    return [Summary.Value(tag=tag, image=_image(picture)) for tag, picture in zip(names, shown.pictures, strict=True)]


def _image(picture: Any) -> Any:
    height, width, channels = picture.shape
    return Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encode_png(picture))


@_values.register
def _(shown: Sounds, name: str) -> list[Any]:
    names = _numbered(name, len(shown.sounds), shown.most)
    return [
        Summary.Value(tag=tag, audio=_audio(sound, shown.sample_rate))
        for tag, sound in zip(names, shown.sounds, strict=True)
    ]


def _audio(sound: Any, sample_rate: int) -> Any:
    return Summary.Audio(
        sample_rate=sample_rate,
        num_channels=sound.shape[1],
        length_frames=len(sound),
        encoded_audio_string=encode_wav(sound, sample_rate),
        content_type="audio/wav",
    )


def _numbered(name: str, count: int, most: int) -> list[str]:
    return [name] if most == 1 and count else [f"{name}/{number}" for number in range(count)]


@_values.register
def _(shown: Text, name: str) -> list[Any]:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shown.shape])
    strings = [each.encode() for each in shown.texts]
    tensor = TensorProto(dtype="DT_STRING", string_val=strings, tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    return [Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)]


@_values.register
def _(shown: Hyperparameters, name: str) -> list[Any]:
    parts = hparams(dict(shown.values), dict.fromkeys(shown.metrics))
    return [value for part in parts for value in part.value]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0  # the minimum of no values is infinite
