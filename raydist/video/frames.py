"""Sampling of frames: packets tell the times of all frames, and only what leads to a wanted frame is decoded."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.core.optional_packages import optional_module
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.formats.files import local_path, open_file, path_text, read_file


def sample_frames(path: Any, num_frames: int, stride: int = 1, rng: np.random.Generator | None = None) -> Any:
    """Return frames of a video at equal distances: uint8 of shape (num_frames, height, width, 3).

    The file is read once for the times of its frames. Decoding begins at the last keyframe before the first of the
    frames, and jumps to another keyframe where that is shorter; a file that cannot be entered at its keyframes is
    decoded from its beginning. If the video is too short, its last frame is repeated.
    Frames are as stored: a rotation that a player would apply is not. Of formats without a count of frames (Matroska,
    WebM, MPEG-TS), a file that was cut off is a shorter video.

    Args:
        path: Of the video: text, bytes, a `pathlib.Path`, or a URI that fsspec or pyarrow knows. A remote file is read
            into memory.
        num_frames: Number of frames, >= 1.
        stride: Distance between frames, in frames of the video, >= 1.
        rng: Draws the first frame from all at which the frames fit into the video. None takes the frames from the
            middle of the video.

    Raises:
        DataLossError: The file is damaged, or no video (has `path`).
        InvalidArgumentError: `num_frames` or `stride` is below 1; the file has no video stream.
        NotFoundError: There is no such file.
        FailedPreconditionError: The extra `raydist[video]` is not installed, or the file may not be read.

    Source: decord.VideoReader.get_batch; TensorFlow's tutorial "Load video data" (frames_from_video_file).

    >>> paths = rd.Dataset.list_files("clips/*.mp4", shuffle=False)  # doctest: +SKIP
    >>> clips = paths.map(lambda path, *, rng: rd.video.sample_frames(path, 16, 4, rng))  # doctest: +SKIP
    """
    for name, value in (("num_frames", num_frames), ("stride", stride)):
        if whole_number(name, value) < 1:
            raise InvalidArgumentError(f"{name} must be >= 1, got {value!r}.")
    text = path_text(path)
    with _opened(text) as (container, stream):
        times = _times_of(container, stream, text)
        first = _first(len(times.frames), (num_frames - 1) * stride + 1, rng)
        places = [min(first + number * stride, len(times.frames) - 1) for number in range(num_frames)]
        wanted = [times.frames[place] for place in places]
        found = _decoded(container, stream, times, sorted({*wanted}))
    if not found.keys() >= {*wanted}:  # not every file can be entered at its keyframes
        with _opened(text) as (container, stream):
            found = _decoded_all(container, stream, {*wanted})
    missing = [time for time in wanted if time not in found]
    if missing:
        raise _loss(text, f"frame {times.frames.index(missing[0])} of {len(times.frames)} cannot be decoded")
    return np.stack([found[time] for time in wanted])


def _first(count: int, span: int, rng: np.random.Generator | None) -> int:
    """Return the number of the first frame of `span` consecutive ones, of `count` in all."""
    last = max(0, count - span)
    return last // 2 if rng is None else int(rng.integers(last + 1))


@dataclass(frozen=True)
class _Times:
    """Times of frames, in the order of display, in units of the stream."""

    frames: Sequence[int]
    keyframes: Sequence[int]


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Open a video for decoding. FFmpeg's errors become a DataLossError."""
    av = optional_module("av", "Functions of rd.video", "'raydist[video]'")
    opened = open_file(path)  # raises what is wrong with the path
    opened.file.close()
    local = local_path(path)
    try:
        with av.open(io.BytesIO(read_file(path)) if local is None else local) as container:
            stream = container.streams.best("video")
            if stream is None or stream.codec_context is None:
                raise InvalidArgumentError(
                    f"A video must have a stream that FFmpeg can decode, and {path!r} has none. Give another file."
                )
            stream.thread_type = "NONE"  # a map calls this in several threads, or processes, already
            stream.codec_context.options = {"err_detect": "explode"}  # by default, damage is painted over
            yield container, stream
    except av.FFmpegError as error:
        raise _loss(path, f"FFmpeg says: {error}") from error


def _loss(path: str, problem: str) -> DataLossError:
    return DataLossError(f"The file must be an intact video, but {problem} (file {path!r}).", path=path)


def _times_of(container: Any, stream: Any, path: str) -> _Times:
    """Return the times of all frames, from the headers of packets: nothing is decoded."""
    found: list[tuple[int, bool]] = []
    for packet in container.demux(stream):
        time = _time_of(packet)
        if packet.size and time is not None and not packet.is_discard:
            found.append((time, packet.is_keyframe))
        if packet.is_corrupt:
            raise _loss(path, f"the packet of frame {len(found)} is damaged")
    least = stream.frames if "mp4" in container.format.name else 1  # of which others only have an estimate
    if len(found) < max(1, least):
        raise _loss(path, f"it has {len(found)} frames of at least {max(1, least)}")
    frames = sorted({time for time, _ in found})
    return _Times(frames, sorted(time for time, is_keyframe in found if is_keyframe) or frames[:1])


def _time_of(part: Any) -> int | None:
    """Return the time of a packet or frame. Some formats have no times of display, and keep frames in that order."""
    time: int | None = part.dts if part.pts is None else part.pts
    return time


def _decoded(container: Any, stream: Any, times: _Times, wanted: Sequence[int]) -> dict[int, Any]:
    """Return the frames at the times `wanted`, which ascend, up to the first that cannot be reached by a jump."""
    import av

    found: dict[int, Any] = {}
    reached: int | None = None  # time of the last decoded frame
    frames: Iterator[Any] = iter(())
    try:
        for time in wanted:
            keyframe = times.keyframes[max(0, bisect_right(times.keyframes, time) - 1)]
            if reached is None or keyframe > reached:
                container.seek(keyframe, stream=stream)
                frames, reached = container.decode(stream), None
            while reached is None or reached < time:
                frame = next(frames)
                reached = _time_of(frame)
            if reached != time or frame.is_corrupt:
                break
            found[time] = frame.to_ndarray(format="rgb24")
    except (av.FFmpegError, StopIteration):  # decoding everything tells whether there is damage
        pass
    return found


def _decoded_all(container: Any, stream: Any, wanted: set[int]) -> dict[int, Any]:
    """Return the frames at the times `wanted`, by decoding all frames up to the last of them."""
    found: dict[int, Any] = {}
    for frame in container.decode(stream):
        time = _time_of(frame)
        if time in wanted and not frame.is_corrupt:
            found[time] = frame.to_ndarray(format="rgb24")
        if len(found) == len(wanted):
            break
    return found
