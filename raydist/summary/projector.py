"""`rd.summary.embedding`: points for TensorBoard's projector, in files next to the event files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.summary.media import encode_png, images_of
from raydist.summary.record import as_array
from raydist.summary.recording import condition, destination, require_driver, step_at

_CONFIG_FILE = "projector_config.pbtxt"
_MAX_PIXELS = 8192  # width and height of the largest image that TensorBoard shows

_Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class Embedding:
    """The points of one embedding at one step, with labels and pictures. All shapes match.

    Attributes:
        name: Name of the points.
        step: Step of the points.
        points: Coordinates, (points, dimensions).
        labels: Lines of the table of labels, with a header if there are several columns; None without labels.
        sprite: One image with a grid of all pictures, (height, width, channels); None without pictures.
        picture_size: Width and height of a picture.
    """

    name: str
    step: int
    points: _Array
    labels: tuple[str, ...] | None
    sprite: _Array | None
    picture_size: tuple[int, int]

    @property
    def title(self) -> str:
        """Title in the projector's list."""
        return f"{self.name}:{self.step:05}"

    @property
    def folder(self) -> str:
        """Folder of the files. The name is quoted, so that the folder is inside the log directory."""
        return f"projector/{quote(self.name, safe='').replace('.', '%2E')}-{self.step:05}"


def embedding_of(name: str, points: _Array, metadata: Any, pictures: _Array | None, step: int) -> Embedding:
    """Check the arguments and return them as an `Embedding`.

    Raises:
        InvalidArgumentError: Shapes or lengths do not match.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"The name of a summary must be a str, got {name!r:.80}. Pass e.g. 'words'.")
    if points.ndim != 2 or 0 in points.shape or points.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            f"embedding {name!r} must be numbers of shape (points, dimensions), got {points.dtype} of shape "
            f"{points.shape}. Reshape it, e.g. by .flatten(1)."
        )
    labels = None if metadata is None else _labels(name, metadata, len(points))
    sprite, size = (None, (0, 0)) if pictures is None else _sprite(name, pictures, len(points))
    return Embedding(name, step, points, labels, sprite, size)


def _labels(name: str, metadata: Any, count: int) -> tuple[str, ...]:
    columns = list(metadata.values()) if isinstance(metadata, Mapping) else [list(metadata)]
    if any(len(column) != count for column in columns):
        lengths = ", ".join(str(len(column)) for column in columns)
        raise InvalidArgumentError(
            f"metadata of embedding {name!r} must have a label for each of the {count} points, got {lengths}."
        )
    rows = ["\t".join(map(_cell, row)) for row in zip(*columns, strict=True)]
    if len(columns) == 1:  # TensorBoard expects no header above a single column
        return tuple(rows)
    return ("\t".join(map(_cell, metadata)), *rows)


def _cell(value: Any) -> str:
    return " ".join(str(value).split())  # a tab or line end would end the cell


def _sprite(name: str, pictures: _Array, count: int) -> tuple[_Array, tuple[int, int]]:
    if len(pictures) != count:
        raise InvalidArgumentError(
            f"images of embedding {name!r} must have a picture for each of the {count} points, got {len(pictures)}."
        )
    tiles = np.stack(images_of(name, pictures, count, "NCHW").images)
    _, height, width, channels = tiles.shape
    side = math.ceil(math.sqrt(count))
    if side * max(height, width) > _MAX_PIXELS:
        raise InvalidArgumentError(
            f"images of embedding {name!r} must fit into {_MAX_PIXELS} x {_MAX_PIXELS} pixels, got {count} of "
            f"{height} x {width}. Make them smaller, or show fewer points."
        )
    padded = np.zeros((side * side, height, width, channels), np.uint8)
    padded[:count] = tiles
    grid = padded.reshape(side, side, height, width, channels).swapaxes(1, 2)
    return grid.reshape(side * height, side * width, channels), (width, height)


def write_embedding(logdir: str, embedding: Embedding) -> None:
    """Write the files of an embedding, then add them to the projector's configuration.

    Raises:
        InvalidArgumentError: The directory cannot be written to.
    """
    folder = Path(logdir) / embedding.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / "tensors.tsv", embedding.points, fmt="%.9g", delimiter="\t")
        if embedding.labels is not None:
            (folder / "metadata.tsv").write_text("".join(f"{line}\n" for line in embedding.labels), encoding="utf-8")
        if embedding.sprite is not None:
            (folder / "sprite.png").write_bytes(encode_png(embedding.sprite))
        _add_to_config(Path(logdir) / _CONFIG_FILE, embedding)
    except OSError as error:
        raise InvalidArgumentError(
            f"The directory of summaries must be one that this program can write, got {logdir!r}: {error}. "
            "Give another logdir."
        ) from error


def _add_to_config(path: Path, embedding: Embedding) -> None:
    entry = _entry(embedding)
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    if entry in content:
        return
    new = path.with_suffix(".new")
    new.write_text(content + entry, encoding="utf-8")
    os.replace(new, path)


def _entry(embedding: Embedding) -> str:
    lines = [f"tensor_name: {_quoted(embedding.title)}", f"tensor_path: {_quoted(embedding.folder + '/tensors.tsv')}"]
    if embedding.labels is not None:
        lines.append(f"metadata_path: {_quoted(embedding.folder + '/metadata.tsv')}")
    if embedding.sprite is not None:
        width, height = embedding.picture_size
        path = _quoted(embedding.folder + "/sprite.png")
        lines.append(f"sprite {{ image_path: {path} single_image_dim: {width} single_image_dim: {height} }}")
    return "embeddings {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def _quoted(text: str) -> str:
    """Quote a text for protobuf's text format, with special bytes as octal numbers."""
    plain = text.encode()
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}" for b in plain) + '"'


def embedding(
    name: str,
    data: Any,
    metadata: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    images: Any = None,
    step: Any = None,
) -> bool:
    """Show points in TensorBoard's projector. For the driver only.

    The call writes the files immediately, into the directory of the current summary writer.

    Shapes: (points, dimensions); images (points, channels, height, width).

    Args:
        name: Name of the points.
        data: Coordinates of the points.
        metadata: A label for each point; or several columns of labels, by name.
        images: A picture for each point: uint8, or float in [0, 1]; together at most 8192 x 8192 pixels.
        step: The step; None: the step of the writer's `as_default`, else the global step. The projector lists each step
            separately.

    Returns:
        True if there is a writer; without one the call does nothing.

    Raises:
        FailedPreconditionError: Called inside a step.
        InvalidArgumentError: Shapes or lengths do not match, or the directory cannot be written to.

    Source: torch.utils.tensorboard.SummaryWriter.add_embedding.

    >>> import torch
    >>> rd.summary.embedding("words", torch.randn(3, 8), metadata=["a", "b", "c"], step=0)  # there is no writer
    False
    """
    require_driver("rd.summary.embedding")
    place = destination()
    if place is None or not condition():
        return False
    pictures = None if images is None else as_array(images)
    points = embedding_of(name, as_array(data), metadata, pictures, step_at(step, place))
    write_embedding(place.here.logdir, points)
    return True
