"""Gradients cut into the parts of each server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from raydist.parameter_servers.slices import ServedSlice

__all__ = ["GradientCut", "cut_gradients", "form_of", "rows_and_values"]

Form = Literal["dense", "rows"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class GradientCut:
    """The part of a push for one server.

    Attributes:
        slices: Numbers of the slices.
        forms: Form of each slice's gradient.
        places: For each slice the position of its gradient, and the slice; None if it is the whole variable.
    """

    slices: tuple[int, ...]
    forms: tuple[Form, ...]
    places: tuple[tuple[int, ServedSlice | None], ...]

    def tensors(self, gradients: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the tensors of the push.

        Args:
            gradients: Gradients, indexed by `places`; sparse ones as `rows_and_values`.
        """
        found: list[torch.Tensor] = []
        for place, part in self.places:
            gradient = gradients[place]
            if isinstance(gradient, torch.Tensor):
                found.append(gradient if part is None else part.within(gradient))
            else:
                found.extend(gradient if part is None else _rows_within(part, *gradient))
        return found


def form_of(gradient: torch.Tensor) -> Form:
    """Return the form of a gradient in a push: "rows" for sparse gradients of whole rows."""
    return "rows" if gradient.is_sparse and gradient.sparse_dim() == 1 else "dense"


def rows_and_values(gradient: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return a dense gradient as it is; of a gradient of rows, the rows, rising, and their values."""
    if gradient.layout is torch.strided:
        return gradient.detach()
    if form_of(gradient) == "dense":
        return gradient.detach().to_dense()
    whole = gradient.detach().coalesce()
    return whole.indices()[0], whole.values()


def cut_gradients(slices: Sequence[Sequence[ServedSlice]], forms: Sequence[Form]) -> dict[int, GradientCut]:
    """Return, by server, its parts of the gradients.

    Args:
        slices: Slices of the variable of each gradient.
        forms: Form of each gradient.
    """
    found: dict[int, list[tuple[int, ServedSlice]]] = {}
    for place, parts in enumerate(slices):
        for part in parts:
            found.setdefault(part.server, []).append((place, part))
    return {
        server: GradientCut(
            tuple(part.number for _, part in places),
            tuple(forms[place] for place, _ in places),
            tuple((place, None if len(slices[place]) == 1 else part) for place, part in places),
        )
        for server, places in found.items()
    }


def _rows_within(part: ServedSlice, rows: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one slice, counted from its first. An empty result is pushed, too: it counts as a step."""
    edges = torch.tensor([part.begin, part.begin + part.shape[0]])
    begin, end = torch.searchsorted(rows, edges).tolist()
    return rows[begin:end] - part.begin, values[begin:end]
