"""Gradients cut into what each server has of them."""

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
    """What one server is to be pushed.

    Attributes:
        slices: Numbers of the slices.
        forms: Of the gradient of each.
        places: Which of the gradients each is of, and which slice it is; None where that is the whole variable.
    """

    slices: tuple[int, ...]
    forms: tuple[Form, ...]
    places: tuple[tuple[int, ServedSlice | None], ...]

    def tensors(self, gradients: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """The tensors of the push.

        Args:
            gradients: In the order that `places` counts; sparse ones as `rows_and_values`.
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
    """How a gradient travels: sparse ones by rows, where that is what they are."""
    return "rows" if gradient.is_sparse and gradient.sparse_dim() == 1 else "dense"


def rows_and_values(gradient: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A dense gradient itself; of a sparse one its rows, rising, and their values."""
    if gradient.layout is torch.strided:
        return gradient.detach()
    if form_of(gradient) == "dense":
        return gradient.detach().to_dense()
    whole = gradient.detach().coalesce()
    return whole.indices()[0], whole.values()


def cut_gradients(slices: Sequence[Sequence[ServedSlice]], forms: Sequence[Form]) -> dict[int, GradientCut]:
    """By server, which part of which gradient it gets.

    Args:
        slices: Of the variable of each gradient.
        forms: Of each gradient.
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
    """The rows of one slice, counted from its first. There may be none: the push tells that there was a step."""
    edges = torch.tensor([part.begin, part.begin + part.shape[0]])
    begin, end = torch.searchsorted(rows, edges).tolist()
    return rows[begin:end] - part.begin, values[begin:end]
