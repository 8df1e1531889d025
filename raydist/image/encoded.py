"""What the decoders of all formats check before they decode."""

from __future__ import annotations

from typing import Any

from raydist.errors import DataLossError, InvalidArgumentError, SpecError

__all__ = ["MAX_PIXELS", "corrupt", "require_bytes", "require_channels", "require_pixels"]

MAX_PIXELS = 1 << 26
"""Pixels that an image may have unless `max_pixels` allows more: 8,192 x 8,192."""


def require_bytes(data: Any) -> bytes:
    """`data`, an encoded image; SpecError unless it is bytes."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise SpecError(
        f"An encoded image must be bytes, got {data!r:.80} ({type(data).__name__}). rd.image.read_file reads a path."
    )


def require_channels(channels: int, allowed: tuple[int, ...], kind: str) -> None:
    """InvalidArgumentError unless `channels` is one of `allowed`."""
    if channels not in allowed:
        names = ", ".join(map(str, allowed))
        raise InvalidArgumentError(f"channels of a {kind} must be one of {names} (0: as stored), got {channels!r}.")


def require_pixels(height: int, width: int, max_pixels: int) -> None:
    """Refuse an image by what its header says, before anything of its size is allocated."""
    if height * width > max_pixels:
        raise InvalidArgumentError(
            f"An image may have at most max_pixels={max_pixels:,} pixels, but its header says {height} x {width} = "
            f"{height * width:,}. Pass a larger max_pixels if the image is what you expect."
        )


def corrupt(kind: str, data: bytes, problem: object, offset: int | None = None) -> DataLossError:
    """The error of an image that cannot be decoded."""
    place = "" if offset is None else f" at byte {offset}"
    return DataLossError(
        f"The data must be a whole {kind} image, got {len(data)} bytes that begin with {data[:8]!r}{place}: {problem}.",
        offset=offset,
    )
