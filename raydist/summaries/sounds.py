"""Sounds and their WAV encoding."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.summaries.record import Shown

__all__ = ["Sounds", "encode_wav", "sounds_of"]

_Array = np.ndarray[Any, np.dtype[Any]]
_LARGEST = 32767  # of 16 bits


@final
@dataclass(frozen=True, slots=True)
class Sounds(Shown):
    """The first sounds of a batch.

    Attributes:
        sounds: Arrays of shape (frames, channels), int16.
        sample_rate: Frames per second.
        most: Maximum number of sounds to show.
    """

    sounds: tuple[_Array, ...]
    sample_rate: int
    most: int

    @property
    def num_bytes(self) -> int:
        return 64 + sum(sound.nbytes for sound in self.sounds)

    def joined(self, others: Sequence[Self]) -> Shown:
        every = [sound for each in (self.sounds, *(other.sounds for other in others)) for sound in each]
        return Sounds(tuple(every[: self.most]), self.sample_rate, self.most)


def sounds_of(name: str, data: _Array, sample_rate: int, most: int) -> Sounds:
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
    first = data[:most].astype(np.float64)
    if first.size and not (first.min() >= -1.0 and first.max() <= 1.0):  # also rejects NaN
        raise InvalidArgumentError(
            f"audio {name!r} must be in [-1, 1], got {first.min():g} to {first.max():g}. Divide it by its maximum."
        )
    return Sounds(tuple(np.rint(sound * _LARGEST).astype(np.int16) for sound in first), sample_rate, most)


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
