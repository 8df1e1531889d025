"""What TensorBoard sees of a module's parameters: histograms, pictures and the projector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from raydist.errors import InvalidArgumentError
from raydist.summary.embeddings import embedding
from raydist.summary.media import image
from raydist.summary.scalars import histogram

__all__ = ["ShownParameters"]


@final
@dataclass(frozen=True, slots=True)
class ShownParameters:
    """Which parameters are shown, and after which epochs.

    Attributes:
        histogram_freq: Every so many epochs, histograms of all; 0: never.
        write_images: With them, those of two dimensions as pictures.
        embeddings_freq: Every so many epochs, the weights of embeddings in the projector; 0: never.
        embeddings_metadata: A label for each row: one list for all embeddings, or a dict of them by name.

    Raises:
        InvalidArgumentError: A number is negative.
    """

    histogram_freq: int = 0
    write_images: bool = False
    embeddings_freq: int = 0
    embeddings_metadata: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if min(self.histogram_freq, self.embeddings_freq) < 0:
            raise InvalidArgumentError(
                "histogram_freq and embeddings_freq must be >= 0, got "
                f"{self.histogram_freq!r} and {self.embeddings_freq!r}."
            )

    def show(self, module: nn.Module, epoch: int) -> None:
        """Give the default writer what is due after an epoch, counted from 0."""
        if _is_due(self.histogram_freq, epoch):
            self._show_histograms(module)
        if _is_due(self.embeddings_freq, epoch):
            for name, part in module.named_modules():
                if isinstance(part, nn.Embedding):
                    embedding(name or "embedding", part.weight, metadata=self._labels(name))

    def _show_histograms(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            path = name.replace(".", "/")
            histogram(f"{path}/histogram", value)
            if self.write_images and value.dim() == 2:
                image(f"{path}/image", _as_picture(value), max_outputs=1, dataformats="HW")

    def _labels(self, name: str) -> Sequence[Any] | None:
        given = self.embeddings_metadata
        return given.get(name) if isinstance(given, Mapping) else given


def _is_due(every: int, epoch: int) -> bool:
    return every > 0 and epoch % every == 0


def _as_picture(values: torch.Tensor) -> torch.Tensor:
    """Scaled to [0, 1]; all the same is grey."""
    plain = values.detach().float()
    least, most = plain.min(), plain.max()
    return (plain - least) / (most - least) if most > least else torch.full_like(plain, 0.5)
