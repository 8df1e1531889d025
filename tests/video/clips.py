"""Small videos whose frames tell their numbers. Needs PyAV."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av")

SIDE = 64
KINDS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    # File, codec, pixel format, options. Without a word on B-frames libx264 uses three.
    ("a.mp4", "libx264", "yuv420p", {"g": "12"}),
    ("plain.mp4", "mpeg4", "yuv420p", {"g": "10"}),
    ("open.mp4", "libx264", "yuv420p", {"g": "8", "x264-params": "open-gop=1"}),
    ("a.mkv", "libx264", "yuv420p", {"g": "12"}),
    ("a.webm", "libvpx", "yuv420p", {"g": "12"}),
    ("a.ts", "libx264", "yuv420p", {"g": "12"}),
    ("a.avi", "mjpeg", "yuvj420p", {}),
    ("exact.mkv", "ffv1", "bgr0", {}),
)


def picture(number: int) -> np.ndarray[Any, Any]:
    """Stripes whose brightness is the number in binary: survives compression."""
    bits = [200 if number >> bit & 1 else 40 for bit in range(8)]
    return np.repeat(np.repeat(np.array(bits, np.uint8), SIDE // 8)[None, :, None], SIDE, 0).repeat(3, 2)


def number_of(frame: np.ndarray[Any, Any]) -> int:
    means = frame.astype(float).mean(axis=(0, 2)).reshape(8, -1).mean(axis=1)
    return sum(1 << bit for bit in range(8) if means[bit] > 120)


def write_clip(path: Path, codec: str, pixels: str, options: dict[str, str], count: int, uneven: bool = False) -> None:
    """Write `count` frames; `uneven`: at times that are not equally far apart."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width = stream.height = SIDE
        stream.pix_fmt = pixels
        stream.codec_context.time_base = Fraction(1, 1000)
        time = 0
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            time += 40 * (1 + number % 3) if uneven else 40
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
