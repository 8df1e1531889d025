from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.summaries.sounds import Sounds, encode_wav, sounds_of


def test_a_wav_holds_the_samples() -> None:
    data = np.array([[[0.0, 1.0], [-1.0, 0.5]]])
    with wave.open(io.BytesIO(encode_wav(sounds_of("x", data, 8000, 3).sounds[0], 8000))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth(), file.getnframes()) == (8000, 2, 2, 2)
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, -32767, 16384]


def test_the_first_sounds_of_all_replicas() -> None:
    one, two = np.zeros((1, 1), np.int16), np.ones((1, 1), np.int16)
    joined = Sounds((one,), 8000, 2).joined([Sounds((two, two), 8000, 2)])
    assert joined == Sounds((one, two), 8000, 2)
    assert joined.num_bytes > 0


@pytest.mark.parametrize(
    ("data", "sample_rate", "message"),
    [
        (np.zeros((4, 2)), 8000, r"must have the shape \(sounds, frames, channels\), got float64 of shape \(4, 2\)"),
        (np.zeros((1, 4, 0)), 8000, "must have the shape"),
        (np.full((1, 4, 1), 1.5), 8000, r"must be in \[-1, 1\], got 1.5 to 1.5"),
        (np.full((1, 4, 1), np.nan), 8000, "got nan to nan"),
        (np.zeros((1, 4, 1)), 0, "sample_rate must be frames a second, >= 1, got 0"),
        (np.zeros((1, 4, 1)), 8000.5, "got 8000.5"),
    ],
)
def test_sounds_that_are_none(data: Any, sample_rate: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        sounds_of("x", data, sample_rate, 3)
