"""Decoding of JPEG, PNG and other formats. The codecs are an extra, imported when they are first needed.

Pixels of a JPEG are those of libjpeg's defaults (accurate integer DCT, smooth upsampling of colours), hence equal to
Pillow's.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from raydist.core.optional_packages import optional_module
from raydist.image.arrays import Image
from raydist.image.crop import crop_to_bounding_box, random_window, require_window

_COLOUR_SPACES = {1: "GRAY", 3: "RGB"}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 13
_CHANNELS_OF_COLOUR_TYPE = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)  # of Pillow's PNG plugin
MAX_PIXELS = 1 << 26
"""Pixels that an image may have unless `max_pixels` allows more: 8,192 x 8,192."""


def image_shape(data: Any) -> tuple[int, int, int]:
    """(height, width, channels) that :func:`decode_image` would give, read from the header in some microseconds.

    Args:
        data: The bytes of a JPEG or a PNG; the first kilobytes may be enough of a JPEG.

    Raises:
        SpecError: The data is no bytes.
        FailedPreconditionError: The extra `raydist[images]` is not installed (JPEG only).
        InvalidArgumentError: The data is neither a JPEG nor a PNG.
        DataLossError: The header is corrupt or truncated.

    Source: tf.io.extract_jpeg_shape.

    >>> import numpy as np, simplejpeg
    >>> rd.image.image_shape(simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8)))
    (4, 6, 3)
    """
    data = require_bytes(data)
    return png_shape(data) if _kind(data) == "PNG" else jpeg_shape(data)


def decode_image(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The image in a JPEG or PNG, whichever it is: uint8 of shape (height, width, channels).

    Args:
        data: The file's bytes.
        channels: As for :func:`decode_jpeg` and :func:`decode_png`; 0 for what is stored.
        max_pixels: Most pixels that the header may announce.

    Raises:
        InvalidArgumentError: The data is of another format, has more than `max_pixels` pixels, or cannot be given these
            `channels`.
        DataLossError: The data is corrupt or truncated.
        SpecError: It is no bytes.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_image.

    >>> import numpy as np, simplejpeg
    >>> rd.image.decode_image(simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8)), channels=1).shape
    (4, 6, 1)
    """
    data = require_bytes(data)
    decode = decode_png if _kind(data) == "PNG" else decode_jpeg
    return decode(data, channels, max_pixels=max_pixels)


def decode_and_random_crop(
    data: Any, size: Any, channels: int = 0, *, rng: np.random.Generator, max_pixels: int = MAX_PIXELS
) -> Image:
    """Decode an image and crop a random window, as `decode_image` and `random_crop` do.

    A `size` that does not fit is an error before anything is decoded.

    Args:
        data: The bytes of a JPEG or a PNG.
        size: (height, width) in pixels, or one number for both.
        channels: See :func:`decode_image`, as for `max_pixels` and the errors.
        rng: Draws two integers.
        max_pixels: Of the whole image.

    Raises:
        InvalidArgumentError: As for :func:`decode_image`, or `size` is larger than the image, or below 1.

    Source: tf.io.decode_and_crop_jpeg, tf.image.random_crop.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_and_random_crop(data, (2, 3), rng=np.random.default_rng(0)).shape
    (2, 3, 3)
    """
    height, width, _ = image_shape(data)
    window = random_window(height, width, size, "decode_and_random_crop", rng)
    return crop_to_bounding_box(decode_image(data, channels, max_pixels=max_pixels), *window)


def _kind(data: bytes) -> str:
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    raise InvalidArgumentError(
        f"The data must be a JPEG or a PNG, got {len(data)} bytes that begin with {data[:8]!r}. "
        "Decode other formats with a function of your own, e.g. by Pillow."
    )


def jpeg_shape(data: bytes) -> tuple[int, int, int]:
    """(height, width, channels) from the header: 1 channel if it is grey, else 3."""
    try:
        height, width, colours, _ = codec("simplejpeg").decode_jpeg_header(data)
    except ValueError as error:
        raise corrupt("JPEG", data, error) from error
    return height, width, 1 if colours == "Gray" else 3


def decode_jpeg(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS, strict: bool = True) -> Image:
    """The image in a JPEG: uint8 of shape (height, width, channels). A camera's orientation tag (EXIF) is left alone.

    Args:
        data: The file's bytes.
        channels: 1 for grey, 3 for RGB (CMYK is converted), 0 for what is stored.
        max_pixels: Most pixels that the header may announce.
        strict: False takes what can be decoded of a damaged image, where libjpeg can; the rest is grey.

    Raises:
        DataLossError: The data is corrupt, truncated, or no JPEG.
        InvalidArgumentError: More than `max_pixels` pixels, or `channels` is none of 0, 1, 3.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_jpeg.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_jpeg(data).shape, rd.image.decode_jpeg(data, channels=1).shape
    ((4, 6, 3), (4, 6, 1))
    """
    require_channels(channels, (0, 1, 3), "JPEG")
    data = require_bytes(data)
    height, width, stored = jpeg_shape(data)
    require_pixels(height, width, max_pixels)
    try:
        image: Image = codec("simplejpeg").decode_jpeg(data, _COLOUR_SPACES[channels or stored], strict=strict)
    except ValueError as error:
        raise corrupt("JPEG", data, error) from error
    return image


def decode_and_crop_jpeg(
    data: Any,
    crop_window: tuple[int, int, int, int],
    channels: int = 0,
    *,
    max_pixels: int = MAX_PIXELS,
    strict: bool = True,
) -> Image:
    """Decode a JPEG and crop a window, as `decode_jpeg` and `crop_to_bounding_box` do. The rest is freed at once.

    Args:
        data: The file's bytes.
        crop_window: (top, left, height, width) in pixels.
        channels: See :func:`decode_jpeg`, as for `max_pixels`, `strict` and the errors.
        max_pixels: Of the whole image.
        strict: See :func:`decode_jpeg`.

    Raises:
        InvalidArgumentError: Also if the window is not inside of the image; found before anything is decoded.

    Source: tf.io.decode_and_crop_jpeg.

    >>> import numpy as np, simplejpeg
    >>> data = simplejpeg.encode_jpeg(np.zeros((4, 6, 3), np.uint8))
    >>> rd.image.decode_and_crop_jpeg(data, (1, 2, 3, 4)).shape
    (3, 4, 3)
    """
    data = require_bytes(data)
    height, width, _ = jpeg_shape(data)
    require_window(crop_window, height, width)
    return crop_to_bounding_box(decode_jpeg(data, channels, max_pixels=max_pixels, strict=strict), *crop_window)


def png_shape(data: bytes) -> tuple[int, int, int]:
    """(height, width, channels) from the header; a palette counts as RGB, and a transparent colour adds alpha."""
    if data[:8] != PNG_SIGNATURE or data[12:16] != b"IHDR" or len(data) < 33:
        raise corrupt("PNG", data, "the header is not a PNG's")
    _verify_chunk(data, len(PNG_SIGNATURE), _HEADER_BYTES)
    width, height = struct.unpack_from(">II", data, 16)
    channels = _CHANNELS_OF_COLOUR_TYPE.get(data[25])
    if channels is None or not width or not height:
        raise corrupt("PNG", data, f"its header says {height} x {width} pixels of colour type {data[25]}", 16)
    names = [data[start + 4 : start + 8] for start, _ in _chunks(data)]
    return height, width, channels + (channels in (1, 3) and b"tRNS" in names)


def _chunks(data: bytes) -> list[tuple[int, int]]:
    """(start, length of the content) of every chunk up to the last one. Each ends within the data."""
    found = []
    start = len(PNG_SIGNATURE)
    while start + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, start)
        if start + 12 + length > len(data):
            break
        found.append((start, length))
        if data[start + 4 : start + 8] == b"IEND":
            return found
        start += 12 + length
    raise corrupt("PNG", data, "it is truncated, a chunk is not complete", start)


def _verify(data: bytes) -> None:
    for start, length in _chunks(data):
        _verify_chunk(data, start, length)


def _verify_chunk(data: bytes, start: int, length: int) -> None:
    end = start + 8 + length
    (stored,) = struct.unpack_from(">I", data, end)
    if zlib.crc32(memoryview(data)[start + 4 : end]) != stored:
        raise corrupt("PNG", data, f"the checksum of chunk {data[start + 4 : start + 8]!r} is wrong", start)


def decode_png(data: Any, channels: int = 0, *, max_pixels: int = MAX_PIXELS) -> Image:
    """The image in a PNG: uint8 of shape (height, width, channels).

    Args:
        data: The file's bytes.
        channels: 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha, 0 for what is stored (a palette is RGB; a
            transparent colour is alpha). 16 bits a channel become 8, the upper ones.
        max_pixels: Most pixels that the header may announce.

    Raises:
        DataLossError: The data is corrupt (a checksum is wrong, say), truncated, or no PNG.
        InvalidArgumentError: More than `max_pixels` pixels, or `channels` is none of 0 to 4.
        FailedPreconditionError: The extra `raydist[images]` is not installed.

    Source: tf.io.decode_png.

    >>> from io import BytesIO
    >>> import PIL.Image
    >>> file = BytesIO()
    >>> PIL.Image.new("RGB", (2, 1), (1, 2, 3)).save(file, "png")
    >>> rd.image.decode_png(file.getvalue()).tolist()
    [[[1, 2, 3], [1, 2, 3]]]
    """
    require_channels(channels, (0, 1, 2, 3, 4), "PNG")
    data = require_bytes(data)
    height, width, stored = png_shape(data)
    require_pixels(height, width, max_pixels)
    _verify(data)
    channels = channels or stored
    try:
        picture = codec("PIL.PngImagePlugin").PngImageFile(io.BytesIO(data))
        picture.load()
        pixels = _pixels(picture, channels)
    except _DECODING_ERRORS as error:
        raise corrupt("PNG", data, error) from error
    return pixels.reshape(height, width, channels)


def _pixels(picture: Any, channels: int) -> Image:
    if picture.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip where it should scale
        grey = (np.asarray(picture) >> 8).astype(np.uint8)
        picture = codec("PIL.Image").fromarray(grey)
    return np.array(picture.convert(_MODES[channels]))


def require_bytes(data: Any) -> bytes:
    """Return an encoded image as bytes; raise SpecError for anything else."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise SpecError(
        f"An encoded image must be bytes, got {data!r:.80} ({type(data).__name__}). rd.image.read_file reads a path."
    )


def require_channels(channels: int, allowed: tuple[int, ...], kind: str) -> None:
    """Raise InvalidArgumentError unless `channels` is one of `allowed`."""
    if channels not in allowed:
        names = ", ".join(map(str, allowed))
        raise InvalidArgumentError(f"channels of a {kind} must be one of {names} (0: as stored), got {channels!r}.")


def require_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raise InvalidArgumentError for an image that is too large by its header, before anything is allocated."""
    if height * width > max_pixels:
        raise InvalidArgumentError(
            f"An image may have at most max_pixels={max_pixels:,} pixels, but its header says {height} x {width} = "
            f"{height * width:,}. Pass a larger max_pixels if the image is what you expect."
        )


def corrupt(kind: str, data: bytes, problem: object, offset: int | None = None) -> DataLossError:
    """Return the error for an image that cannot be decoded."""
    place = "" if offset is None else f" at byte {offset}"
    return DataLossError(
        f"The data must be a whole {kind} image, got {len(data)} bytes that begin with {data[:8]!r}{place}: {problem}.",
        offset=offset,
    )


def codec(module: str) -> Any:
    """Return the module `module` of the extra `images`.

    Raises:
        FailedPreconditionError: The module is not installed.
    """
    return optional_module(module, "Decoding and resizing images", "'raydist[images]'")
