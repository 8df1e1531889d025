"""`rd.summary.image`, `rd.summary.audio`, `rd.summary.text`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raydist.errors import InvalidArgumentError
from raydist.summaries.pictures import pictures_of
from raydist.summaries.said_once import Text
from raydist.summaries.sounds import sounds_of
from raydist.summary.numpy_data import as_array
from raydist.summary.recording import record

__all__ = ["audio", "image", "text"]


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
    most = _at_least_one(max_outputs)
    return record(name, step, lambda share: pictures_of(name, as_array(data), most, dataformats))


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
    most = _at_least_one(max_outputs)
    return record(name, step, lambda share: sounds_of(name, as_array(data), sample_rate, most))


def _at_least_one(max_outputs: int) -> int:
    if not isinstance(max_outputs, int) or max_outputs < 1:
        raise InvalidArgumentError(f"max_outputs must be a number >= 1, got {max_outputs!r}.")
    return max_outputs


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
    return record(name, step, lambda share: _text(name, data))


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
