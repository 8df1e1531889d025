"""One server's part of a table's saved rows, read piece by piece from memory or files."""

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
    """A column of a state's rows that is not a tensor in memory, for example in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole column."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Return the rows piece by piece, in order. Raises, at the latest at the end, if the saved data is damaged."""


@final
@dataclass(frozen=True, slots=True)
class OwnRows:
    """One server's part of one state.

    Attributes:
        state: A result of `RowTable.state`; `RowColumn`s may stand for its tensors.
        places: Positions of the server's rows in the state's columns, rising.
        numbers: Row numbers of these rows.
    """

    state: Mapping[str, Any]
    places: torch.Tensor
    numbers: torch.Tensor

    def taken(self, column: torch.Tensor | RowColumn) -> Iterator[torch.Tensor]:
        """Return a column's values of these rows, piece by piece. Reads the whole column, which checks it all."""
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
    """Find a server's part of a state.

    Args:
        state: See `OwnRows`.
        spec: Description of the table.
        server: Number of the server.
        num_servers: Number of servers that have rows of the table now.

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
