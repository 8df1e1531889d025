"""`rd.summary.embedding`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydist.summaries.destination import condition, destination
from raydist.summaries.projector import embedding_of, write_embedding
from raydist.summary.numpy_data import as_array
from raydist.summary.recording import require_driver, step_at

__all__ = ["embedding"]


def embedding(
    name: str,
    data: Any,
    metadata: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    images: Any = None,
    step: Any = None,
) -> bool:
    """Show points in TensorBoard's projector. For the driver only.

    The files are written at once, into the directory of the writer.

    Shapes: (points, dimensions); images (points, channels, height, width).

    Args:
        name: Name of the points.
        data: Coordinates of the points.
        metadata: A label for each point; or several columns of labels, by name.
        images: A picture for each point: uint8, or float in [0, 1]; together at most 8192 x 8192 pixels.
        step: The step; None: the step of the writer's `as_default`, else the global step. Steps are listed separately.

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
