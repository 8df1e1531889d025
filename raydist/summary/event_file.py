"""TensorBoard event files: the encoding of records, and the thread that writes a file."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, final

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.summary import hparams

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.core.fork_guard import OwningProcess
from raydist.pipelines.formats.tfrecord import frame
from raydist.summary.histograms import HistogramCounts
from raydist.summary.media import AudioClips, Images, Text, encode_png, encode_wav
from raydist.summary.record import Record
from raydist.summary.runs import GraphData, Hyperparameters
from raydist.summary.scalars import ScalarValue

_MOST_BYTES = 256 << 20  # maximum size of the queued records
_CLOSE_S = 60.0

_numbers = itertools.count()  # numbers of this process's files: file names within one second must differ


def open_event_file(logdir: str, suffix: str = "") -> tuple[str, BinaryIO]:
    """Create an event file, and its directory if missing; return the path and the open file.

    Raises:
        InvalidArgumentError: The directory or the file cannot be created.
    """
    host, second = socket.gethostname(), int(time.time())
    name = f"events.out.tfevents.{second}.{host}.{os.getpid()}.{next(_numbers)}{suffix}"
    try:
        Path(logdir).mkdir(parents=True, exist_ok=True)
        path = str(Path(logdir) / name)
        return path, open(path, "xb")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"The directory of summaries must be one that this program can write, got {logdir!r}: {error}. "
            "Give another logdir."
        ) from error


@final
class EventFile:
    """A writer that encodes and appends records to a file, in a thread that starts with the first record.

    Args:
        path: Path of the file, for messages.
        file: The file, open and empty.
        flush_s: Maximum seconds until a record is in the file.
        purge_step: Step from which TensorBoard drops data of the directory's earlier files; None drops no data.
    """

    def __init__(self, path: str, file: BinaryIO, *, flush_s: float, purge_step: int | None = None) -> None:
        self._path = path
        self._file = file
        self._flush_s = flush_s
        self._purge_step = purge_step
        self._changed = threading.Condition()
        self._queue: list[Record] = []
        self._num_bytes = 0
        self._num_added = 0  # records
        self._num_written = 0
        self._must_flush = False
        self._has_dropped = False
        self._unencodable: set[str] = set()  # names of records that could not be encoded
        self._error: Exception | None = None
        self._remarks: list[str] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process = OwningProcess("A writer of summaries")

    @property
    def closed(self) -> bool:
        """True once the file takes no more records."""
        return self._closed

    def add(self, record: Record) -> None:
        """Queue a record for writing. Does not block.

        Raises:
            FailedPreconditionError: The file is closed.
        """
        self._process.require("used")
        with self._changed:
            if self._closed:
                raise FailedPreconditionError(
                    f"The writer must be open to take summaries, that of {self._path!r} was closed. Create a new one."
                )
            if self._error is None and self._has_room(record):
                self._queue.append(record)
                self._num_bytes += record.data.num_bytes
                self._num_added += 1
                if len(self._queue) == 1:
                    self._wake()

    def _has_room(self, record: Record) -> bool:
        if not self._queue or self._num_bytes + record.data.num_bytes <= _MOST_BYTES:
            return True
        if not self._has_dropped:
            self._has_dropped = True
            self._remarks.append(
                f"Summaries come faster than {self._path!r} can be written: {_MOST_BYTES >> 20} MiB wait, and what "
                "does not fit is left out. Record less, e.g. with rd.summary.record_if(step % 100 == 0)."
            )
        return False

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_file, name="raydist-summaries", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def take_remarks(self) -> list[str]:
        """Return new warnings about lost summaries, each once. Lost summaries do not stop the program."""
        with self._changed:
            remarks, self._remarks = self._remarks, []
        return remarks

    def flush(self, within_s: float = _CLOSE_S, *, to_disk: bool = False) -> None:
        """Block until all records added so far are in the file; with `to_disk`, until they are on disk.

        Raises:
            FailedPreconditionError: The file cannot be written.
            DeadlineExceededError: The limit has passed.
        """
        self._process.require("flushed")
        with self._changed:
            wanted = self._num_added
            self._must_flush = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._error or self._num_written >= wanted, within_s):
                raise DeadlineExceededError(
                    f"Summaries must be in {self._path!r} within {within_s:g} s, but the disk is slower. Check it, or "
                    "give another logdir."
                )
        if self._error is not None:
            raise FailedPreconditionError(
                f"Summaries must be written to {self._path!r}, which failed: {self._error}. Make room there, or give "
                "another logdir; those since then are lost."
            ) from self._error
        if to_disk:
            with contextlib.suppress(OSError, ValueError):  # the file may be closed; some file systems have no fsync
                os.fsync(self._file.fileno())

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Write queued records and end the thread. May be called twice; never raises."""
        if not self._process.is_this:
            return
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
        if self._thread is None and first:
            self._write_file()
        elif self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(within_s)

    # The thread runs the methods below.

    def _write_file(self) -> None:
        try:
            with self._file:
                self._write_first_events()
                while self._write_queue():
                    pass
        except Exception as error:  # the program continues without summaries after any error
            with self._changed:
                self._error = error
                self._remarks.append(f"Summaries are lost from now on: {self._path!r} failed with {error}.")
                self._queue.clear()
                self._changed.notify_all()

    def _write_first_events(self) -> None:
        for event in first_events(time.time(), self._purge_step):
            self._file.write(frame(event))
        self._file.flush()

    def _write_queue(self) -> bool:
        records, is_last = self._await_records()
        for record in records:
            try:
                event = event_of(record)
            except Exception as error:  # for example invalid Unicode; the other records are still written
                self._warn_left_out(record, error)
            else:
                self._file.write(frame(event))
        self._file.flush()
        with self._changed:
            self._num_written += len(records)
            self._changed.notify_all()
        return not is_last

    def _warn_left_out(self, record: Record, error: Exception) -> None:
        if record.name not in self._unencodable:
            self._unencodable.add(record.name)
            with self._changed:
                self._remarks.append(
                    f"What is shown as {record.name!r} must be something that event files hold, but at step "
                    f"{record.step} it is not, and is left out: {error!r:.200}."
                )

    def _await_records(self) -> tuple[list[Record], bool]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(lambda: self._must_flush or self._closed, self._flush_s)
            records, self._queue = self._queue, []
            self._num_bytes, self._must_flush = 0, False
            return records, self._closed


def first_events(wall_time: float, purge_step: int | None = None) -> Iterator[bytes]:
    """Yield the first events of a file: the version, and the step from which the file replaces earlier files."""
    yield Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString()
    if purge_step is not None:
        start = SessionLog(status=SessionLog.SessionStatus.Value("START"))
        yield Event(wall_time=wall_time, step=purge_step, session_log=start).SerializeToString()


def event_of(record: Record) -> bytes:
    """Return the event of a record."""
    event = Event(wall_time=record.wall_time, step=record.step)
    if isinstance(record.data, GraphData):
        event.graph_def = record.data.graph
    else:
        event.summary.value.extend(_values(record.data, record.name))
    return bytes(event.SerializeToString())


@functools.singledispatch
def _values(data: Any, name: str) -> list[Any]:
    raise TypeError(f"raydist bug: summaries of {type(data).__name__} must be known to event_file.py.")


@_values.register
def _(data: ScalarValue, name: str) -> list[Any]:
    return [Summary.Value(tag=name, simple_value=data.value)]


@_values.register
def _(data: HistogramCounts, name: str) -> list[Any]:
    buckets = data.buckets()
    histogram = HistogramProto(
        min=_finite(data.least),
        max=_finite(data.most),
        num=data.num_values,
        sum=data.total,
        sum_squares=data.squares,
        bucket_limit=[edge for edge, _ in buckets],
        bucket=[count for _, count in buckets],
    )
    return [Summary.Value(tag=name, histo=histogram)]


@_values.register
def _(data: Images, name: str) -> list[Any]:
    names = _numbered(name, len(data.images), data.max_outputs)
    return [Summary.Value(tag=tag, image=_image(picture)) for tag, picture in zip(names, data.images, strict=True)]


def _image(picture: Any) -> Any:
    height, width, channels = picture.shape
    return Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encode_png(picture))


@_values.register
def _(data: AudioClips, name: str) -> list[Any]:
    names = _numbered(name, len(data.clips), data.max_outputs)
    return [
        Summary.Value(tag=tag, audio=_audio(sound, data.sample_rate))
        for tag, sound in zip(names, data.clips, strict=True)
    ]


def _audio(sound: Any, sample_rate: int) -> Any:
    return Summary.Audio(
        sample_rate=sample_rate,
        num_channels=sound.shape[1],
        length_frames=len(sound),
        encoded_audio_string=encode_wav(sound, sample_rate),
        content_type="audio/wav",
    )


def _numbered(name: str, count: int, max_outputs: int) -> list[str]:
    return [name] if max_outputs == 1 and count else [f"{name}/{number}" for number in range(count)]


@_values.register
def _(data: Text, name: str) -> list[Any]:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in data.shape])
    strings = [each.encode() for each in data.texts]
    tensor = TensorProto(dtype="DT_STRING", string_val=strings, tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    return [Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)]


@_values.register
def _(data: Hyperparameters, name: str) -> list[Any]:
    parts = hparams(dict(data.values), dict.fromkeys(data.metrics))
    return [value for part in parts for value in part.value]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0  # the minimum of no values is infinite
