"""Gradients of a `Push`, checked, and converted for optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.requests import Push
from raydist.parameter_servers.serving.served_slices import ServedSlices
from raydist.parameter_servers.slices import ServedSlice

__all__ = ["PushedRows", "ServerGradients", "read_gradients"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PushedRows:
    """Gradients of some rows; the gradients of a repeated row are added up.

    Attributes:
        rows: int64 row numbers.
        values: A gradient for each row, as large as the row.
    """

    rows: torch.Tensor
    values: torch.Tensor

    def sparse(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the gradients as a sparse tensor, as torch's optimizers take it."""
        return torch.sparse_coo_tensor(self.rows[None], self.values, shape, check_invariants=False)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ServerGradients:
    """The gradients of one `Push` to one server.

    Attributes:
        slices: By slice number a tensor of the slice's shape, or gradients of some rows.
        tables: Gradients of embedding tables, by handle.
    """

    slices: Mapping[int, torch.Tensor | PushedRows]
    tables: Mapping[int, PushedRows]


def read_gradients(push: Push, tensors: Sequence[torch.Tensor], values: ServedSlices) -> ServerGradients:
    """Return the gradients of a push, without copies.

    Raises:
        InvalidArgumentError: The gradients do not fit the slices.
    """
    wanted = sum(1 if form == "dense" else 2 for form in push.forms) + 2 * len(push.tables)
    if len(push.forms) != len(push.slices) or len(tensors) != wanted:
        raise InvalidArgumentError(
            f"A push of {len(push.slices)} slices in {len(push.forms)} forms and {len(push.tables)} tables must bring "
            f"{wanted} tensors, got {len(tensors)}. Give one for a dense gradient, two for rows."
        )
    left = iter(tensors)
    slices: dict[int, torch.Tensor | PushedRows] = {}
    for number, form in zip(push.slices, push.forms, strict=True):
        known = values.slice(number)
        slices[number] = _dense(next(left), known) if form == "dense" else _rows(left, known)
    return ServerGradients(slices, {handle: PushedRows(next(left), next(left)) for handle in push.tables})


def _dense(gradient: torch.Tensor, known: ServedSlice) -> torch.Tensor:
    if gradient.shape != known.shape or gradient.dtype != known.dtype:
        raise InvalidArgumentError(
            f"The gradient of {known.name} must be {known.dtype} of shape {known.shape}, got {gradient.dtype} of shape "
            f"{tuple(gradient.shape)}. Push the slice's own rows."
        )
    return gradient


def _rows(left: Iterator[torch.Tensor], known: ServedSlice) -> PushedRows:
    rows, values = next(left), next(left)
    if values.shape != (len(rows), *known.shape[1:]) or values.dtype != known.dtype or rows.dtype != torch.int64:
        raise InvalidArgumentError(
            f"A gradient of rows of {known.name} must be int64 rows and {known.dtype} values of shape "
            f"(rows, {', '.join(map(str, known.shape[1:]))}), got {rows.dtype} of shape {tuple(rows.shape)} and "
            f"{values.dtype} of shape {tuple(values.shape)}. Push one value for each row."
        )
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= known.shape[0]):
        raise InvalidArgumentError(
            f"Rows of {known.name} must be in [0, {known.shape[0]}), got [{int(rows.min())}, {int(rows.max())}]. Count "
            "them from the slice's first row."
        )
    return PushedRows(rows, values)
