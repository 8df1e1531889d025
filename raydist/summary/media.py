"""`rd.summary.image`, `rd.summary.audio`, `rd.summary.text`, and their encodings as PNG and WAV."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.summary.record import SummaryData, as_array
from raydist.summary.recording import record


def image(name: str, data: Any, step: Any = None, max_outputs: int = 3, dataformats: str = "NCHW") -> bool:
    """Show the first pictures of a batch at a step.

    In a step on several replicas these are the first rows of the global batch. With `max_outputs=1` the picture is
    shown as `name`, else as `name/0`, `name/1` and so on.

    Shapes: (pictures, channels, height, width), or as in `dataformats`; 1 to 4 channels: grey, grey and alpha, RGB,
    RGBA.

    Args:
        name: Name of the pictures.
        data: uint8, or float in [0, 1].
        step: The step; None: the step of the writer's `as_default`, else the global step.
        max_outputs: Maximum number of pictures, >= 1.
        dataformats: Order of the dimensions: "NCHW", "NHWC", "CHW", "HWC", "HW", ...

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: The shape is different, values are out of range, or `max_outputs` is < 1.

    Source: tf.summary.image; `dataformats` is that of torch's SummaryWriter.

    >>> import torch
    >>> rd.summary.image("digits", torch.rand(8, 1, 28, 28), step=0)  # there is no writer
    False
    """
    _require_at_least_one(max_outputs)
    return record(name, step, lambda weight: images_of(name, as_array(data), max_outputs, dataformats))


def audio(name: str, data: Any, sample_rate: int, step: Any = None, max_outputs: int = 3) -> bool:
    """Play the first sounds of a batch at a step, as WAV files of 16 bits.

    In a step on several replicas these are the first rows of the global batch. With `max_outputs=1` the sound is
    shown as `name`, else as `name/0`, `name/1` and so on.

    Shapes: (sounds, frames, channels).

    Args:
        name: Name of the sounds.
        data: Numbers in [-1, 1].
        sample_rate: Frames per second.
        step: The step; None: the step of the writer's `as_default`, else the global step.
        max_outputs: Maximum number of sounds, >= 1.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: The shape is different, values are out of range, or a number is < 1.

    Source: tf.summary.audio.

    >>> import torch
    >>> rd.summary.audio("voice", torch.zeros(1, 800, 1), sample_rate=8000, step=0)  # there is no writer
    False
    """
    _require_at_least_one(max_outputs)
    return record(name, step, lambda weight: clips_of(name, as_array(data), sample_rate, max_outputs))


def _require_at_least_one(max_outputs: int) -> None:
    if not isinstance(max_outputs, int) or max_outputs < 1:
        raise InvalidArgumentError(f"max_outputs must be a number >= 1, got {max_outputs!r}.")


def text(name: str, data: str | Sequence[Any], step: Any = None) -> bool:
    """Show a text, in Markdown, at a step.

    In a step on several replicas this is the text of the first replica.

    Args:
        name: Name of the text.
        data: A str; a list of str, shown one below the other; or a list of lists of the same length, a table.
        step: The step; None: the step of the writer's `as_default`, else the global step.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: `data` has another type.

    Source: tf.summary.text.

    >>> rd.summary.text("sample", "To be, or not to be", step=0)  # there is no writer
    False
    """
    return record(name, step, lambda weight: _text(name, data))


def _text(name: str, data: Any) -> Text:
    if isinstance(data, str):
        return Text((data,))
    rows = list(data) if isinstance(data, list | tuple) else [data]
    if rows and all(isinstance(row, str) for row in rows):
        return Text(tuple(rows), (len(rows),))
    if rows and all(isinstance(row, list | tuple) and len(row) == len(rows[0]) for row in rows):
        cells = tuple(cell for row in rows for cell in row)
        if cells and all(isinstance(cell, str) for cell in cells):
            return Text(cells, (len(rows), len(rows[0])))
    raise InvalidArgumentError(
        f"text {name!r} must be a str, a list of str, or a list of such lists of one length, got {data!r:.80}. "
        "Convert it with str()."
    )


_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels, as PNG numbers them
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class Images(SummaryData):
    """The first images of a batch.

    Attributes:
        images: Arrays of shape (height, width, channels), uint8.
        max_outputs: Maximum number of pictures to show.
    """

    images: tuple[_Array, ...]
    max_outputs: int

    @property
    def num_bytes(self) -> int:
        return 64 + sum(picture.nbytes for picture in self.images)

    def merged(self, others: Sequence[Self]) -> SummaryData:
        every = [picture for each in (self.images, *(other.images for other in others)) for picture in each]
        return Images(tuple(every[: self.max_outputs]), self.max_outputs)


def images_of(name: str, data: _Array, max_outputs: int, dataformats: str) -> Images:
    """Return the first pictures of `data` after checking them.

    Raises:
        InvalidArgumentError: The shape does not match `dataformats`, or values are out of range.
    """
    if sorted(dataformats) not in (sorted("NCHW"), sorted("CHW"), sorted("NHW"), sorted("HW")):
        raise InvalidArgumentError(
            f"dataformats must say where N, C, H and W are, got {dataformats!r}. Pass 'NCHW', 'NHWC', 'CHW' or 'HW'."
        )
    if data.ndim != len(dataformats):
        raise _wrong_shape(name, data, dataformats)
    first = data if "N" not in dataformats else np.moveaxis(data, dataformats.index("N"), 0)[:max_outputs]
    batch = first if "N" in dataformats else first[None]
    rest = dataformats.replace("N", "")
    ordered = np.moveaxis(batch, [1 + rest.index("H"), 1 + rest.index("W")], [1, 2])
    ordered = ordered if "C" in rest else ordered[..., None]
    if ordered.shape[-1] not in _COLOUR_TYPES or 0 in ordered.shape[1:]:
        raise _wrong_shape(name, data, dataformats)
    return Images(tuple(np.ascontiguousarray(_bytes(name, picture)) for picture in ordered), max_outputs)


def _wrong_shape(name: str, data: _Array, dataformats: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"image {name!r} must have the dimensions {dataformats}, with 1 to 4 channels, got shape {data.shape}. Pass "
        "dataformats= for another order, or reshape it."
    )


def _bytes(name: str, picture: _Array) -> _Array:
    if picture.dtype == np.uint8:
        return picture.copy()
    if picture.dtype.kind != "f":
        raise InvalidArgumentError(
            f"image {name!r} must be uint8, or float in [0, 1], got {picture.dtype}. Convert it."
        )
    if not (picture.min() >= 0.0 and picture.max() <= 1.0):  # also rejects NaN
        raise InvalidArgumentError(
            f"image {name!r} must be uint8, or float in [0, 1], got float from {picture.min():g} to "
            f"{picture.max():g}. Scale it, e.g. (x - x.min()) / (x.max() - x.min()), or pass uint8."
        )
    return (picture.astype(np.float64) * 255.0 + 0.5).astype(np.uint8)


def encode_png(picture: _Array) -> bytes:
    """Encode a picture of shape (height, width, channels), uint8, as a PNG file.

    >>> import numpy as np
    >>> encode_png(np.zeros((2, 3, 1), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = picture.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with the number of its filter: none
    rows[:, 1:] = picture.reshape(height, -1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


_LARGEST = 32767  # of 16 bits


@final
@dataclass(frozen=True, slots=True)
class AudioClips(SummaryData):
    """The first audio clips of a batch.

    Attributes:
        clips: Arrays of shape (frames, channels), int16.
        sample_rate: Frames per second.
        max_outputs: Maximum number of sounds to show.
    """

    clips: tuple[_Array, ...]
    sample_rate: int
    max_outputs: int

    @property
    def num_bytes(self) -> int:
        return 64 + sum(sound.nbytes for sound in self.clips)

    def merged(self, others: Sequence[Self]) -> SummaryData:
        every = [sound for each in (self.clips, *(other.clips for other in others)) for sound in each]
        return AudioClips(tuple(every[: self.max_outputs]), self.sample_rate, self.max_outputs)


def clips_of(name: str, data: _Array, sample_rate: int, max_outputs: int) -> AudioClips:
    """Return the first sounds of `data`, (k, frames, channels), after checking them.

    Raises:
        InvalidArgumentError: The shape is different, or values are out of range.
    """
    if data.ndim != 3 or not data.shape[2] or data.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"audio {name!r} must have the shape (sounds, frames, channels), got {data.dtype} of shape {data.shape}. "
            "Reshape it, e.g. by waves[None, :, None]."
        )
    if not isinstance(sample_rate, int) or isinstance(sample_rate, bool) or sample_rate < 1:
        raise InvalidArgumentError(f"sample_rate must be frames a second, >= 1, got {sample_rate!r}. Pass e.g. 16000.")
    first = data[:max_outputs].astype(np.float64)
    if first.size and not (first.min() >= -1.0 and first.max() <= 1.0):  # also rejects NaN
        raise InvalidArgumentError(
            f"audio {name!r} must be in [-1, 1], got {first.min():g} to {first.max():g}. Divide it by its maximum."
        )
    return AudioClips(tuple(np.rint(sound * _LARGEST).astype(np.int16) for sound in first), sample_rate, max_outputs)


def encode_wav(sound: _Array, sample_rate: int) -> bytes:
    """Encode a sound of shape (frames, channels), int16, as a WAV file.

    >>> import numpy as np
    >>> encode_wav(np.zeros((8, 2), np.int16), 8000)[:4]
    b'RIFF'
    """
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(sound.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(sample_rate)
        writer.writeframes(sound.astype("<i2").tobytes())
    return file.getvalue()


@final
@dataclass(frozen=True, slots=True)
class Text(SummaryData):
    """Lines of Markdown.

    Attributes:
        texts: One text, or the flattened texts of a nest of lists.
        shape: Shape of the nest.
    """

    texts: tuple[str, ...]
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return 64 + sum(map(len, self.texts))
