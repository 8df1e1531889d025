"""What of a table's saved rows belongs to one server: found and taken some rows at a time, wherever they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec

__all__ = ["OwnRows", "RowColumn", "own_rows"]


class RowColumn(Protocol):
    """Something of every row of a state that is no tensor in memory: one that lies in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Some rows at a time, in their order. Raises at the end, or before, where they are not as they were saved."""


@final
@dataclass(frozen=True, slots=True)
class OwnRows:
    """One server's part of one state.

    Attributes:
        state: What `RowTable.state` gave; in place of its tensors there may be `RowColumn`s.
        places: Where in the state's columns the rows are, rising.
        numbers: Of these rows.
    """

    state: Mapping[str, Any]
    places: torch.Tensor
    numbers: torch.Tensor

    def taken(self, column: torch.Tensor | RowColumn) -> Iterator[torch.Tensor]:
        """What a column has of these rows, some at a time. Reads all of it: what is not wanted is checked, too."""
        if tuple(column.shape) != tuple(self.state["values"].shape):
            raise InvalidArgumentError(
                f"What is remembered of rows must have the shape of their values, {tuple(self.state['values'].shape)}, "
                f"got {tuple(column.shape)}. Give what export_rows() returned."
            )
        begin = 0
        for piece in _pieces(column):
            first, last = torch.searchsorted(self.places, torch.tensor([begin, begin + len(piece)])).tolist()
            yield piece[self.places[first:last] - begin]
            begin += len(piece)


def own_rows(state: Mapping[str, Any], spec: EmbeddingTableSpec, server: int, num_servers: int) -> OwnRows:
    """What a server has of a state.

    Args:
        state: See `OwnRows`.
        spec: Of the table.
        server: Number of the server.
        num_servers: How many have rows of the table now.

    Raises:
        InvalidArgumentError: The state is of another table.

    >>> state = {"rows": torch.tensor([5, 1, 3]), "values": torch.zeros(3, 4), "optimizers": {}}
    >>> own_rows(state, EmbeddingTableSpec(8, 4), 0, 2).numbers.tolist()
    [5, 3]
    """
    _require_fitting(state, spec)
    places, numbers, begin = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
    for rows in _pieces(state["rows"]):
        _require_in_range(rows, spec)
        own = torch.nonzero(spec.servers_of(rows, num_servers) == server).reshape(-1)
        places.append(own + begin)
        numbers.append(rows[own])
        begin += len(rows)
    return OwnRows(state, torch.cat(places), torch.cat(numbers))


def _pieces(column: torch.Tensor | RowColumn) -> Iterator[torch.Tensor]:
    return iter((column,)) if isinstance(column, torch.Tensor) else column.pieces()


def _require_fitting(state: Mapping[str, Any], spec: EmbeddingTableSpec) -> None:
    rows, values = tuple(state["rows"].shape), tuple(state["values"].shape)
    if len(rows) != 1 or values != (rows[0], spec.dim):
        raise _refusal(spec, f"{math.prod(rows)} rows and values of shape {values}")


def _require_in_range(rows: torch.Tensor, spec: EmbeddingTableSpec) -> None:
    if rows.dtype != torch.int64:
        raise _refusal(spec, f"their numbers as {rows.dtype}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < spec.num_rows:
        raise _refusal(spec, f"{len(rows)} rows up to {int(rows.max())} from {int(rows.min())} on")


def _refusal(spec: EmbeddingTableSpec, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Rows of table {spec.name!r} must be below {spec.num_rows} and have {spec.dim} values each, got {found}. Give "
        "what export_rows() of the same embedding returned."
    )
